"""The learning rate of each step: linear warm-up, then cosine, linear or constant.

With a peak of ``lr``, ``w`` warm-up steps and ``n`` steps in all, step ``t`` (from 0) uses::

    t < w            lr · (t + 1) / w
    t >= w, cosine   lr · (1 + cos(π p)) / 2
    t >= w, linear   lr · (1 − p)            p = (t − s) / (n − s),  s = max(w − 1, 0)

so the first step is never wasted at 0, the peak is reached exactly once, and the last step, too,
is above 0. Without a total the rate stays at its peak after warm-up.
"""

from __future__ import annotations

import dataclasses
import math

from entrenar.errors import ConfigError
from entrenar.finetune.config import SCHEDULES, InstructConfig

__all__ = ["LearningRate"]


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """A learning rate as a function of the step alone, so that a resumed run continues it.

    Attributes:
        peak: Largest learning rate.
        kind: ``"cosine"``, ``"linear"`` or ``"constant"``.
        warmup_steps: Steps of linear warm-up.
        total_steps: Steps in all; None where unknown.
    """

    peak: float
    kind: str
    warmup_steps: int
    total_steps: int | None

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigError(
                f"schedule is {self.kind!r}, wanted one of {', '.join(SCHEDULES)}", "choose one"
            )

    @classmethod
    def from_config(cls, config: InstructConfig, total_steps: int | None) -> LearningRate:
        """Return the schedule of a configuration.

        Args:
            config: Gives peak, kind and warm-up. A warm-up ratio needs a total and is rounded up.
            total_steps: Steps in all; None where unknown.
        """
        warmup = config.warmup_steps
        if config.warmup_ratio and total_steps is not None:
            warmup = math.ceil(config.warmup_ratio * total_steps)
        return cls(config.learning_rate, config.schedule, warmup, total_steps)

    def at(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.total_steps is None or self.kind == "constant":
            return self.peak
        start = max(self.warmup_steps - 1, 0)
        progress = min((step - start) / max(self.total_steps - start, 1), 1.0)
        if self.kind == "linear":
            return self.peak * (1.0 - progress)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
