"""Where a command's rows go: standard output, or a file that appears whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(value: Any, where: str | os.PathLike[str], indent: int | None = 1) -> None:
    """Write a value as JSON.

    Args:
        value: What json can write.
        where: A path, written under a temporary name and then renamed, or ``"-"`` for standard output.
        indent: As in ``json.dumps``.
    """
    text = json.dumps(value, indent=indent)
    if where == "-":
        print(text)
        return
    part = Path(f"{os.fspath(where)}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(where)
