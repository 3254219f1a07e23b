"""Which samples each optimiser step reads: a function of the seed and the epoch alone.

Nothing here keeps state, so a run resumed in the middle of an epoch continues with the same
samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from entrenar.finetune.config import InstructConfig

__all__ = ["Step", "plan_epoch", "plan_steps", "split_heldout", "total_steps"]

Step = list[list[int]]  # micro-batches of sample indices
_OPEN_ROWS = 64


def plan_epoch(lengths: Sequence[int], config: InstructConfig, epoch: int) -> list[Step]:
    """Return the steps of one epoch; every sample is in exactly one of them.

    Args:
        lengths: Tokens of each sample.
        config: Gives seed, batch size, accumulation and packing. The last micro-batch and the
            last step may be smaller than the others.
        epoch: Which pass over the data, from 0.
    """
    order = np.random.default_rng([config.seed, epoch]).permutation(len(lengths)).tolist()
    rows = [[i] for i in order]
    if config.packing:
        rows = _pack(order, lengths, config.max_seq_len)
    batches = [
        [i for row in rows[at : at + config.batch_size] for i in row]
        for at in range(0, len(rows), config.batch_size)
    ]
    count = config.grad_accum_steps
    return [batches[at : at + count] for at in range(0, len(batches), count)]


def _pack(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill rows of ``capacity`` tokens: each sample goes to the open row it fits best.

    At most ``_OPEN_ROWS`` rows stay open, so the shuffled order is roughly kept and the work is
    linear in the number of samples.
    """
    done: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # free tokens, samples
    for index in order:
        fitting = [k for k, (free, _) in enumerate(rows) if free >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda k: rows[k][0])
            free, row = rows[best]
            row.append(index)
            rows[best] = (free - lengths[index], row)
            continue
        if len(rows) == _OPEN_ROWS:
            done.append(rows.pop(min(range(len(rows)), key=lambda k: rows[k][0]))[1])
        rows.append((capacity - lengths[index], [index]))
    return done + [row for _, row in rows]


def total_steps(lengths: Sequence[int], config: InstructConfig) -> int:
    """Return the optimiser steps of a whole run."""
    if config.max_steps is not None:
        return config.max_steps
    return sum(len(plan_epoch(lengths, config, epoch)) for epoch in range(config.epochs))


def plan_steps(
    lengths: Sequence[int], config: InstructConfig, start: int = 0
) -> Iterator[tuple[float, Step]]:
    """Yield the steps of a run from ``start`` on, epoch after epoch without end.

    Yields:
        The epochs completed after the step, as a fraction, and its micro-batches.
    """
    seen, epoch = 0, 0
    while True:
        steps = plan_epoch(lengths, config, epoch)
        for number, step in enumerate(steps, start=1):
            if seen >= start:
                yield epoch + number / len(steps), step
            seen += 1
        epoch += 1


def split_heldout(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split sample indices into training and held-out ones, each in its old order.

    Args:
        count: Samples in all.
        fraction: Share held out, rounded down; at least one sample stays for training.
        seed: Seed of the choice.
    """
    held = min(int(count * fraction), count - 1)
    order = np.random.default_rng([seed, 0x5E1D]).permutation(count)
    chosen = {int(i) for i in order[: max(held, 0)]}
    return [i for i in range(count) if i not in chosen], sorted(chosen)
