"""Write train.jsonl and heldout.jsonl: pairs from the docstrings of Python's standard library.

python examples/build_docstring_pairs.py --output data/docstrings
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from entrenar.finetune.docstring_corpus import build_docstring_pairs, split_pairs, write_pairs


def main() -> None:
    """Build the pairs of the running Python and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("data/docstrings"), help="folder")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    train, heldout = split_pairs(build_docstring_pairs())
    for name, pairs in (("train", train), ("heldout", heldout)):
        path = args.output / f"{name}.jsonl"
        print(f"{path}: {write_pairs(path, pairs)} pairs of Python {platform.python_version()}")


if __name__ == "__main__":
    main()
