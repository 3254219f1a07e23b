"""What a training run reserves of a GPU's memory before it loads anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from entrenar import runtime
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.instruct_pipeline.memory import adapted_shapes, estimate_memory
from entrenar.gpu import VramGuard, VramLedger, card_in_use
from entrenar.transformer.checkpoint import open_checkpoint

__all__ = ["guard_for"]


def guard_for(
    config: InstructConfig,
    model: str | Path,
    device: str,
    *,
    task: str,
    wait_s: float = 0.0,
    on_wait: Callable[[str], None] = lambda text: None,
) -> VramGuard | None:
    """Return a guard over the memory that a run is estimated to take.

    Args:
        config: The run's settings.
        model: The model's folder or file; its config alone is read.
        device: Where the run computes.
        task: What other processes are told the memory is for.
        wait_s: How long to wait for others.
        on_wait: Called with a sentence before each wait.

    Returns:
        The guard, not yet entered; None on the CPU and where no tool lists the machine's GPUs.

    Raises:
        VramError: The card's memory cannot be read.
    """
    card = card_in_use(device)
    if card is None:
        return None
    if card.total_bytes is None:  # a part of a card, of which the driver's tool gives no size
        card = dataclasses.replace(card, total_bytes=runtime.total_memory_bytes(device))
    found = open_checkpoint(model).config
    targets = adapted_shapes(config, found)
    needed = sum(estimate_memory(config, found, targets, device).values())
    free = functools.partial(runtime.available_memory_bytes, device)
    return VramGuard(
        VramLedger(card, free_bytes=free), needed, task, wait_s=wait_s, on_wait=on_wait
    )
