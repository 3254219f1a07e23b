"""What a tape holds, in bytes as they are allocated: it grows in forward and falls through backward."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from entrenar.autograd import Tape, Tensor, checkpoint, ops

LAYERS = 12
SIZE = 1 << 18  # elements of an activation
ONE = 8 * SIZE  # its bytes


@pytest.fixture
def traced() -> Iterator[Callable[[], float]]:
    """Returns allocated bytes as multiples of one activation; NumPy tells tracemalloc of its own."""
    chain(leaf())  # a thread's scratch is allocated once and kept
    gc.collect()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    yield lambda: (tracemalloc.get_traced_memory()[0] - start) / ONE
    tracemalloc.stop()


def chain(x: Tensor, at_each: Callable[[], object] | None = None) -> Tensor:
    """silu saves its input, so each layer keeps one activation alive."""
    for _ in range(LAYERS):
        x = ops.silu(x)
        if at_each is not None and x.requires_grad:
            x.register_hook(lambda grad: at_each())
    return x


def leaf() -> Tensor:
    return Tensor(np.linspace(-1, 1, SIZE), requires_grad=True)


@pytest.mark.parametrize("retain", [False, True])
def test_saved_tensors_are_freed_while_backward_runs(
    traced: Callable[[], float], retain: bool
) -> None:
    x, seed = leaf(), np.ones(SIZE)
    base = traced()
    held: list[float] = []
    with Tape() as tape:
        y = chain(x, lambda: held.append(traced() - base))
    # the inputs of all layers but the first, which is x, and the last result
    assert traced() - base == pytest.approx(LAYERS, abs=0.1)
    loss, y = y, None
    tape.backward(loss, seed, retain_graph=retain)
    assert len(held) == LAYERS
    steps = [later - earlier for earlier, later in itertools.pairwise(held[1:])]
    if retain:
        assert max(abs(step) for step in steps) < 0.1
    else:
        # layer by layer one activation fewer, and never more than one gradient beside them
        assert steps == pytest.approx([-1.0] * len(steps), abs=0.1)
    del loss
    # the gradient of x, and the inputs of all layers but the first where they are kept
    assert traced() - base == pytest.approx(1 + (LAYERS - 1 if retain else 0), abs=0.1)


def test_a_checkpoint_saves_its_input_only(traced: Callable[[], float]) -> None:
    x, seed = leaf(), np.ones(SIZE)
    base = traced()
    with Tape() as tape:
        y = checkpoint(chain, checkpoint(chain, x))
        held = traced() - base
        # the result of each; the input of the second is the result of the first
        assert held == pytest.approx(2, abs=0.1)
        tracemalloc.reset_peak()
        tape.backward(y, seed)
    peak = tracemalloc.get_traced_memory()[1] / ONE
    assert traced() - base == pytest.approx(2, abs=0.1)  # y and the gradient of x
    # one block's activations at a time, its gradients, and what NumPy needs within a layer
    assert LAYERS < peak - base < LAYERS + 6
    assert x.grad is not None


def test_no_grad_keeps_nothing(traced: Callable[[], float]) -> None:
    x = Tensor(np.linspace(-1, 1, SIZE))
    base = traced()
    with Tape():
        y = chain(x)
    assert traced() - base == pytest.approx(1, abs=0.1)
    assert not y.requires_grad


def test_a_gradient_that_is_overwritten_in_place_needs_no_second(
    traced: Callable[[], float],
) -> None:
    """Scaling writes over a gradient that is its own: a chain of any length holds one."""
    x, seed = leaf(), np.ones(SIZE)
    with Tape() as tape:
        y = x
        for _ in range(LAYERS):
            y = ops.scale(y, 0.5)
    base = traced()
    tracemalloc.reset_peak()
    tape.backward(y, seed)
    peak = tracemalloc.get_traced_memory()[1] / ONE
    assert peak - base < 2.1
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((SIZE,), 0.5**LAYERS, dtype=torch.float64))
