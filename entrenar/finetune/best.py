"""The adapter with the least held-out loss so far, and when to stop for want of a better one.

It lies in ``checkpoints/best-000120/adapter``, in PEFT's format, and appears by rename. The one before is
removed only when a checkpoint that knows of the new one is on disk: a run that is killed in between and
resumed from an older checkpoint still finds the adapter that was the best then.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrenar.errors import CheckpointError
from entrenar.finetune.files import appearing_folder

__all__ = ["BestAdapter"]

_NAME = re.compile(r"best-(\d{6,})")


class BestAdapter:
    """Follows the held-out loss of a run.

    Args:
        folder: The run's ``checkpoints`` folder.
        patience: Evaluations in a row without a lower loss after which to stop; 0 never stops.

    Attributes:
        step: Step of the least loss; None before the first evaluation.
        loss: That loss.
        without: Evaluations since.
    """

    def __init__(self, folder: Path, patience: int = 0) -> None:
        self.folder = folder
        self.patience = patience
        self.step: int | None = None
        self.loss: float | None = None
        self.without = 0

    @property
    def path(self) -> Path | None:
        """Its adapter's folder; None where none was written."""
        if self.step is None:
            return None
        return self.folder / f"best-{self.step:06d}" / "adapter"

    @property
    def is_exhausted(self) -> bool:
        """Whether so many evaluations in a row were no better that the run should stop."""
        return self.step is not None and 0 < self.patience <= self.without

    def see(self, step: int, loss: float) -> bool:
        """Note an evaluation; return whether it is the best so far. one that is not finite never is."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.step, self.loss, self.without = step, loss, 0
            return True
        self.without += 1
        return False

    def write(self, save_adapter: Callable[[Path], None]) -> None:
        """Write the adapter as it is now under the best step's name.

        Raises:
            CheckpointError: The disk refuses.
        """
        path = self.folder / f"best-{self.step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with appearing_folder(path) as temporary:
                save_adapter(temporary / "adapter")
                text = json.dumps({"step": self.step, "eval_loss": self.loss}) + "\n"
                (temporary / "best.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"cannot write the best adapter {path}: {error.strerror or error}",
                "free some disk space and start again with --resume",
            ) from error

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"step": self.step, "loss": self.loss, "without": self.without}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what a checkpoint kept."""
        self.step, self.loss = state["step"], state["loss"]
        self.without = state["without"]

    def forget(self, but: int | None) -> None:
        """Remove the best adapters of all steps but one; those of later steps are made again."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) != but:
                shutil.rmtree(path, ignore_errors=True)
