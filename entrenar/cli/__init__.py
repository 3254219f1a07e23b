"""The `entrenar` command.

``main`` parses the arguments, runs one command, and turns errors into one sentence on standard
error and an exit code: 0 ok, 1 the run failed, 2 usage, config or data, 3 environment, 130
interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from entrenar.errors import DeviceError, EntrenarError

__all__ = ["main"]

INTERRUPTED = 130
OLDEST_TORCH = (2, 11)  # as pyproject.toml states it


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
        # An error of a stream, such as standard output on a full disk, has no file name.
        where = "" if error.filename is None else f": {error.filename}"
        print(f"entrenar: error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except (ImportError, AttributeError) as error:
        problem = _missing_package(error) or _torch_problem()
        if problem is None:
            raise
        print(f"entrenar: error: {problem}", file=sys.stderr)
        return DeviceError.exit_code


def _missing_package(error: Exception) -> str | None:
    """Return a sentence where a package that entrenar needs, triton on a GPU, is absent, or None."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if name not in ("numpy", "safetensors", "triton"):
        return None
    return f"the package {name!r} cannot be imported: {error}; install it with pip install {name}"


def _torch_problem() -> str | None:
    """Return why nothing that needs torch can run here, or None; asked only after a failed import."""
    wanted = ".".join(map(str, OLDEST_TORCH))
    hint = f"install it with pip install 'torch>={wanted}'"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}; {hint}"
    found = str(torch.__version__)
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    return f"torch is {found}, wanted at least {wanted}; {hint}" if numbers < OLDEST_TORCH else None
