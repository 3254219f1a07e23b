"""The `entrenar` command.

``main`` parses the arguments, runs one command, and turns errors into one sentence on standard
error and an exit code: 0 ok, 1 the run failed, 2 usage, config or data, 3 environment, 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from entrenar.errors import EntrenarError

__all__ = ["main"]

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process where None.

    Returns:
        The exit code.
    """
    from entrenar.cli.parser import parse

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding
    try:
        command, arguments = parse(argv)
        return command(arguments)
    except EntrenarError as error:
        print(f"entrenar: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("entrenar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away; keep Python from failing again as it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"entrenar: error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
