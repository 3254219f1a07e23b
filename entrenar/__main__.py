"""`python -m entrenar` is the `entrenar` command."""

import sys

from entrenar.cli import main

if __name__ == "__main__":
    sys.exit(main())
