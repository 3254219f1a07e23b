"""Writing files and folders so that a crash never leaves half of one under its final name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["appearing_file", "appearing_folder", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file: all of it or, after a crash, the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def appearing_file(path: Path) -> Iterator[Path]:
    """Give a temporary file, of the same suffix, that takes the name ``path`` when the block ends well."""
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def appearing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the name ``path`` when the block ends without an error.

    An older folder of that name is replaced. Files written inside are flushed to disk first, and
    may be read by whom a new file may; safetensors writes them for their owner alone.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    mode = temporary.stat().st_mode & 0o666
    for file in temporary.rglob("*"):
        if file.is_file():
            file.chmod(mode)
            _flush(file)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(temporary, path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
