"""Training checkpoints: everything a run needs to continue to the bit, one folder a step.

``checkpoints/step-000050/`` holds ``state.safetensors`` (the adapter arena: parameters, both
moments, the step counter), ``state.json`` (where the run stood, and the digest of the former) and
``adapter/`` in PEFT's format. The folder takes its name by a rename when all of it is on disk, so
one that was cut short is never taken for a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from entrenar.errors import CheckpointError
from entrenar.finetune.files import appearing_folder

__all__ = [
    "Checkpoint",
    "keep_last",
    "latest_checkpoint",
    "read_checkpoint",
    "write_checkpoint",
]

_NAME = re.compile(r"step-(\d{6,})")
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk.

    Attributes:
        path: Its folder.
        arrays: The arena by name: ``params``, ``m``, ``v`` (float32) and ``step`` (int64 [1]).
        state: Where the run stood.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Completed optimiser steps."""
        return int(self.state["step"])


def write_checkpoint(
    folder: Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    write_adapter: Callable[[Path], None],
) -> Path:
    """Write ``folder/step-NNNNNN``, which appears once complete.

    Args:
        folder: The run's ``checkpoints`` folder; made where missing.
        step: Completed steps.
        arrays: The arena by name.
        state: Where the run stands, for JSON.
        write_adapter: Writes an adapter folder at the path it is given.

    Raises:
        CheckpointError: The disk refuses; older checkpoints are untouched.
    """
    path = folder / f"step-{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with appearing_folder(path) as temporary:
            data = temporary / "state.safetensors"
            save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, data)
            write_adapter(temporary / "adapter")
            full = {**state, "step": step, "format": _FORMAT, "sha256": _digest(data)}
            text = json.dumps(full, indent=2, sort_keys=True)
            (temporary / "state.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror or error}",
            "free some disk space and start again with --resume",
        ) from error
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CheckpointError: A file is missing, cut short, or not the one that was written.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        data = path / "state.safetensors"
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{path} has the format {state['format']}, wanted {_FORMAT}", "")
        if _digest(data) != state["sha256"]:
            raise CheckpointError(f"{data} is not the file that was written", "it is damaged")
        arrays = load_file(data)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is incomplete or damaged: {error}", "remove it") from error
    return Checkpoint(path, arrays, state)


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints but the last ``count``; 0 keeps all.

    Called when the newest is whole on disk. A folder is renamed before it is emptied, so that one that is
    half removed is never taken for a checkpoint.
    """
    if not count:
        return
    found = sorted((int(m[1]), p) for p in _entries(folder) if (m := _NAME.fullmatch(p.name)))
    for _, path in found[:-count]:
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the last complete checkpoint of a folder, and the names of those passed over."""
    found = [(int(m[1]), p) for p in _entries(folder) if (m := _NAME.fullmatch(p.name))]
    passed = [p.name for p in _entries(folder) if re.fullmatch(r"\.step-\d+\.tmp", p.name)]
    for _, path in sorted(found, reverse=True):
        try:
            return read_checkpoint(path), passed
        except CheckpointError:
            passed.append(path.name)
    return None, passed


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
