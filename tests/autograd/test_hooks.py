"""Hooks on gradients: when they run, in which order, and what they may do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.autograd import Stream, Tape, Tensor, checkpoint, current_stream, ops
from entrenar.errors import AutogradError


def leaf(*values: float, name: str = "") -> Tensor:
    return Tensor(np.array(values), requires_grad=True, name=name)


def test_a_hook_sees_the_complete_gradient_once() -> None:
    x = leaf(2.0)
    seen: list[tuple[str, float]] = []
    x.register_hook(lambda g: seen.append(("x", float(g))))
    with Tape() as tape:
        y = ops.multiply(x, x)
        y.register_hook(lambda g: seen.append(("y", float(g))))
        loss = ops.add(ops.scale(y, 3.0), ops.add(ops.scale(y, 5.0), x))
        loss.register_hook(lambda g: seen.append(("loss", float(g))))
    tape.backward(loss)
    assert seen == [("loss", 1.0), ("y", 8.0), ("x", 8.0 * 4.0 + 1.0)]
    assert x.grad is not None
    assert x.grad.tolist() == [33.0]


def test_a_leaf_hook_sees_one_backward_and_its_result_is_added() -> None:
    x = leaf(1.0)
    seen = []
    x.register_hook(lambda g: seen.append(g.tolist()))
    x.register_hook(lambda g: torch.full_like(g, 10.0))
    x.register_hook(lambda g: seen.append(g.tolist()))
    for _ in range(2):
        with Tape() as tape:
            y = ops.scale(x, 3.0)
        tape.backward(y)
    assert seen == [[3.0], [10.0], [3.0], [10.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [20.0]


def test_hooks_equal_those_of_torch() -> None:
    values = np.array([[0.5, -1.0], [2.0, 0.25]])
    theirs = torch.tensor(values, requires_grad=True)
    h = theirs @ theirs
    h.register_hook(lambda g: g * 2)
    theirs.register_hook(lambda g: g.clamp(-3, 3))
    (h * theirs).sum().backward()

    ours = Tensor(values.copy(), requires_grad=True)
    ours.register_hook(lambda g: g.clamp(-3, 3))
    with Tape() as tape:
        m = ops.matmul(ours, ours)
        m.register_hook(lambda g: g * 2)
        y = ops.multiply(m, ours)
    tape.backward(y, np.ones((2, 2)))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-14, atol=0)


def test_a_hooked_leaf_in_an_arena_gets_its_gradient_through_the_hook() -> None:
    """Kernels add to preset storage directly; with a hook they must not."""
    w, x = Tensor(np.ones((2, 3)), requires_grad=True), Tensor(np.ones((4, 3)))
    w.grad = torch.full((2, 3), 0.5, dtype=torch.float64)
    kept = w.grad
    handle = w.register_hook(lambda g: g * 0.5)
    with Tape() as tape:
        y = ops.linear(x, w)
    tape.backward(y, np.ones((4, 2)), retain_graph=True)
    assert w.grad is kept
    assert set(kept.flatten().tolist()) == {2.5}
    handle.remove()
    handle.remove()
    tape.backward(y, np.ones((4, 2)))
    assert set(kept.flatten().tolist()) == {6.5}


def test_a_parameter_used_inside_and_outside_of_a_checkpoint_is_complete() -> None:
    x, w = leaf(2.0), leaf(3.0)
    seen = []
    w.register_hook(lambda g: seen.append(float(g)))
    with Tape() as tape:
        y = ops.multiply(checkpoint(lambda a: ops.multiply(a, w), x), w)
        y = ops.multiply(checkpoint(lambda a: checkpoint(lambda b: ops.multiply(b, w), a), y), w)
    tape.backward(y)
    assert seen == [2.0 * 4 * 27.0]  # d(x w^4)/dw
    assert w.grad is not None
    assert w.grad.tolist() == seen


def test_leaf_hooks_run_in_the_order_gradients_appear() -> None:
    first, second = leaf(1.0), leaf(1.0)
    order: list[str] = []
    second.register_hook(lambda g: order.append("second"))
    first.register_hook(lambda g: order.append("first"))
    with Tape() as tape:
        y = ops.multiply(ops.scale(first, 2.0), ops.scale(second, 2.0))
    tape.backward(y)
    assert order == ["second", "first"]  # backward reaches the later op first


def test_hooks_run_on_the_stream_of_the_gradient() -> None:
    main, side = Stream("cpu"), Stream("cpu")
    streams: dict[str, Stream] = {}
    x = leaf(1.0)
    x.register_hook(lambda g: streams.__setitem__("x", current_stream("cpu")))
    with Tape(main) as tape:
        with side:
            y = ops.scale(x, 2.0)
            y.register_hook(lambda g: streams.__setitem__("y", current_stream("cpu")))
        z = ops.scale(y, 2.0)
    tape.backward(z)
    assert streams == {"y": side, "x": main}


def test_what_a_hook_keeps_is_not_written_to() -> None:
    kept = []
    x = leaf(1.0, 2.0)

    def keep(grad: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones_like(grad))
        return kept[-1]

    with Tape() as tape:
        y = ops.scale(x, 1.0)
        y.register_hook(keep)
        z = ops.add(ops.scale(y, 2.0), ops.scale(y, 3.0))
    tape.backward(z, np.ones(2))
    assert kept[0].tolist() == [1.0, 1.0]
    assert x.grad is not None
    x.grad.zero_()
    assert kept[0].tolist() == [1.0, 1.0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(AutogradError, match=r"register_hook: a tensor of shape \(1,\) requires no"):
        Tensor(np.ones(1)).register_hook(lambda g: None)
    x = leaf(1.0, name="w")
    with Tape() as tape:
        y = ops.scale(x, 2.0)
        handle = y.register_hook(lambda g: torch.ones(3))
    message = (
        r"a result of scale returned \(3,\) torch.float32 cpu, wanted \(1,\) torch.float64 cpu"
    )
    with pytest.raises(AutogradError, match=message):
        tape.backward(y, retain_graph=True)
    handle.remove()
    x.register_hook(lambda g: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(AutogradError, match="leaf w returned float, wanted"):
        tape.backward(y)
    assert x.grad is None


def test_an_error_in_a_hook_leaves_leaves_with_hooks_alone() -> None:
    x = leaf(1.0)
    x.register_hook(lambda g: None)
    with Tape() as tape:
        y = ops.scale(x, 2.0)
        z = ops.scale(y, 2.0)
        handle = y.register_hook(lambda g: [][0])
    with pytest.raises(IndexError):
        tape.backward(z, retain_graph=True)
    assert x.grad is None
    handle.remove()
    tape.backward(z)
    assert x.grad is not None
    assert x.grad.tolist() == [4.0]
