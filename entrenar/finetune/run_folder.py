"""The folder of a run: what lies where, and who may write into it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig, read_toml
from entrenar.finetune.files import write_text

__all__ = ["RunFolder"]

_CONTENTS = (
    "config.toml",
    "metrics.jsonl",
    "environment.json",
    "loss.png",
    "profile.json",
    "profile.png",
    "trace.json",
    "checkpoints",
    "adapter",
)


class RunFolder:
    """Names the files of one run.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.environment = self.path / "environment.json"
        self.plot = self.path / "loss.png"
        self.profile = self.path / "profile.json"
        self.profile_plot = self.path / "profile.png"
        self.trace = self.path / "trace.json"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.data = self.path / "data"  # written by the demo alone, and left by clear()

    @property
    def is_empty(self) -> bool:
        """Whether the folder is missing or has nothing in it."""
        return not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))

    @property
    def is_run(self) -> bool:
        """Whether an earlier run wrote it."""
        return self.config.is_file()

    def check(self, resume: bool = False, overwrite: bool = False) -> None:
        """Refuse a folder that this run may not write into; changes nothing.

        Raises:
            ConfigError: It is a file, is not empty and neither resuming nor overwriting was asked
                for, is not the folder of a run, or is to be resumed and complete.
        """
        if resume and overwrite:
            raise ConfigError(
                "--resume and --overwrite exclude each other", "continue the run or replace it"
            )
        parents = [self.path, *self.path.parents]
        existing = next(parent for parent in parents if parent.exists())
        if not existing.is_dir():
            raise ConfigError(f"{existing} is a file, wanted a folder", "choose another --output")
        if self.is_empty:
            return
        if not self.is_run:
            raise ConfigError(
                f"the output folder {self.path} is not empty and holds no earlier run",
                "choose an empty or new folder",
            )
        if not resume and not overwrite:
            raise ConfigError(
                f"the output folder {self.path} is not empty: it holds an earlier run",
                "continue it with --resume, replace it with --overwrite, or choose another folder",
            )
        if resume and self.adapter.exists():
            raise ConfigError(
                f"the run in {self.path} is complete, there is nothing to resume",
                "replace it with --overwrite, or choose another folder",
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Make the folder and keep other processes' runs out of it inside the block.

        Raises:
            ConfigError: Another run is writing into it, or it cannot be made.
        """
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"cannot write into {self.path}: {error.strerror}", "choose another --output"
            ) from error
        try:
            with contextlib.suppress(OSError):  # of a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"another run is writing into {self.path}",
                        "wait for its end, or choose another --output",
                    ) from None
            yield
        finally:
            os.close(descriptor)

    def run_settings(self) -> dict[str, Any]:
        """Return the table ``[run]`` of the earlier run; empty where there is none."""
        with contextlib.suppress(ConfigError):
            table = read_toml(self.config).get("run", {})
            if isinstance(table, dict):
                return table
        return {}

    def clear(self) -> None:
        """Remove what an earlier run wrote, and nothing else."""
        for name in _CONTENTS:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Move checkpoints and metrics into a folder of their own, so that nothing is lost.

        Returns:
            That folder: ``set-aside-1`` or the next number that is free.
        """
        number = 1
        while (kept := self.path / f"set-aside-{number}").exists():
            number += 1
        kept.mkdir()
        for path in (self.checkpoints, self.metrics):
            if path.exists():
                path.rename(kept / path.name)
        return kept

    def begin(self, config: InstructConfig, settings: dict[str, Any]) -> None:
        """Make the folder and write ``config.toml``.

        Raises:
            ConfigError: The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.config, config.to_toml(settings))
        except OSError as error:
            raise ConfigError(
                f"cannot write into {self.path}: {error.strerror}", "choose another --output"
            ) from error
