"""Graphs drawn at random, on several streams: values and gradients are torch's, and no ordering is missing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from entrenar.autograd import Stream, Tape, Tensor, checkpoint, ops
from entrenar.autograd.hazards import detect_hazards

SIDE = 4  # every value is [SIDE, SIDE], so that any op takes any value


class Pair:
    """One value as ours and as torch's."""

    def __init__(self, ours: Tensor, theirs: torch.Tensor) -> None:
        self.ours, self.theirs = ours, theirs


def halves(x: Tensor) -> Tensor:
    left, right = ops.split(x, (1, SIDE - 1), 1)
    return ops.concat([right, left], 1)


def window(x: Tensor) -> Tensor:
    return ops.concat([ops.narrow(x, 0, 1, SIDE - 1), ops.narrow(x, 0, 0, 1)], 0)


def twisted(x: Tensor) -> Tensor:
    return ops.reshape(ops.reshape(ops.transpose(x), (2, -1)), (SIDE, SIDE))


def lopsided(x: Tensor, y: Tensor) -> Tensor:
    return ops.add(ops.narrow(x, 0, 0, 1), y)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    """Write into storage that nothing else reads, where the tape follows it."""
    made = ops.scale(x, 2.0)
    return ops.add_(made, y) if made.requires_grad else ops.add(made, y)


ONE: list[tuple[Callable[[Tensor], Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
    (ops.silu, F.silu),
    (lambda x: ops.scale(x, -0.7), lambda x: x * -0.7),
    (ops.softmax, lambda x: x.softmax(-1)),
    (ops.transpose, lambda x: x.T),
    (halves, lambda x: x.roll(-1, 1)),
    (window, lambda x: x.roll(-1, 0)),
    (twisted, lambda x: x.T.reshape(SIDE, SIDE)),
    (lambda x: x.detach(), lambda x: x.detach()),
    (lambda x: checkpoint(lambda a: ops.multiply(ops.silu(a), a), x), lambda x: F.silu(x) * x),
]
TWO: list[tuple[Callable[..., Tensor], Callable[..., torch.Tensor]]] = [
    (ops.add, torch.add),
    (ops.multiply, torch.mul),
    (lambda x, y: ops.matmul(x, y, trans_a=True, scale=0.3), lambda x, y: x.T @ y * 0.3),
    (ops.swiglu, lambda x, y: F.silu(x) * y),
    (lopsided, lambda x, y: x[:1] + y),
    (in_place, lambda x, y: 2 * x + y),
    (lambda x, y: checkpoint(ops.swiglu, y, x), lambda x, y: F.silu(y) * x),
]


def leaves(rng: np.random.Generator) -> list[Pair]:
    values = [0.5 * rng.standard_normal((SIDE, SIDE)) for _ in range(3)]
    trains = [True, True, bool(rng.integers(2))]
    return [
        Pair(Tensor(v.copy(), requires_grad=t), torch.tensor(v, requires_grad=t))
        for v, t in zip(values, trains, strict=True)
    ]


def grow(rng: np.random.Generator, values: list[Pair], streams: list[Stream], size: int) -> None:
    for _ in range(size):
        stream = streams[int(rng.integers(len(streams)))]
        a, b = (values[int(rng.integers(max(len(values) - 5, 0), len(values)))] for _ in range(2))
        with stream.entered():  # so that nothing but the ops' own waits orders them
            if rng.random() < 0.5:
                ours, theirs = ONE[int(rng.integers(len(ONE)))]
                values.append(Pair(ours(a.ours), theirs(a.theirs)))
            else:
                mine, other = TWO[int(rng.integers(len(TWO)))]
                values.append(Pair(mine(a.ours, b.ours), other(a.theirs, b.theirs)))


def check(seed: int) -> bool:
    """Compare one graph; False where its end depends on no leaf that trains."""
    rng = np.random.default_rng(seed)
    streams = [Stream("cpu") for _ in range(int(rng.integers(1, 4)))]
    values = leaves(rng)
    start = values[:]
    with detect_hazards():
        with Tape(streams[0], overwrite_activations=bool(rng.integers(2))) as tape:
            grow(rng, values, streams, size=int(rng.integers(3, 25)))
        end = values[-1]
        np.testing.assert_allclose(
            end.ours.numpy(), end.theirs.detach().numpy(), rtol=1e-9, atol=1e-12
        )
        assert end.ours.requires_grad == end.theirs.requires_grad
        if not end.ours.requires_grad:
            return False
        weight = rng.standard_normal((SIDE, SIDE))
        tape.backward(end.ours, weight)
    end.theirs.backward(torch.from_numpy(weight))
    for leaf in start:
        mine, wanted = leaf.ours.grad, leaf.theirs.grad
        assert (mine is None) == (wanted is None)
        if mine is not None and wanted is not None:
            scale = float(wanted.abs().max()) + 1.0
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11 * scale)
    return True


def test_random_graphs(counts: Callable[[int, int], int]) -> None:
    compared = sum(check(seed) for seed in range(counts(150, 5000)))
    assert compared > counts(100, 3000)
