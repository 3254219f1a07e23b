"""Rows of ``perf static`` kept between runs, one file each, so that only what changed compiles again.

A row is found by everything that decides it: the kernel's source with all it calls, its constants,
options and signature, the target, triton's version, and the code that reads the compiler's result.
``ENTRENAR_STATIC_CACHE`` names the folder; ``~/.cache/entrenar/static`` otherwise. A damaged file is as
good as none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["RowCache", "cache_folder"]

Row = dict[str, Any]
# What a kept row must have; one without is compiled again.
_FIELDS = ("registers", "spill_bytes", "shared_bytes", "matrix_instructions", "fp64", "has_dot")


def cache_folder() -> Path:
    """Return where rows are kept."""
    named = os.environ.get("ENTRENAR_STATIC_CACHE")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "entrenar" / "static"


@functools.cache
def _reader() -> str:
    """Return what stands for the code that makes rows and for the compiler."""
    sources = (Path(__file__).with_name(name) for name in ("static.py", "static_rows.py"))
    text = "\0".join(path.read_text(encoding="utf-8") for path in sources)
    return text + importlib.metadata.version("triton")


class RowCache:
    """Rows by the identity of what was compiled.

    Args:
        folder: Where they lie; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def _path(self, identity: str) -> Path | None:
        if self.folder is None:
            return None
        digest = hashlib.sha256(f"{_reader()}\0{identity}".encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:34]}.json"

    def get(self, identity: str) -> Row | None:
        """Return the row that was kept for ``identity``, or None."""
        path = self._path(identity)
        if path is None:
            return None
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        good = isinstance(row, dict) and all(field in row for field in _FIELDS)
        return row if good else None

    def put(self, identity: str, row: Row) -> None:
        """Keep a row; one that failed to compile is not kept."""
        path = self._path(identity)
        if path is None or "error" in row:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(row), encoding="utf-8")
        part.replace(path)
