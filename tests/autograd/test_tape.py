"""The tape itself: order, accumulation, what is kept and freed, and what is refused."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from entrenar.autograd import (
    Node,
    Tape,
    Tensor,
    no_grad,
    ops,
    record,
    recording,
    run,
)
from entrenar.errors import AutogradError, DTypeError, ShapeMismatchError


def leaf(*values: float, name: str = "") -> Tensor:
    return Tensor(np.array(values, dtype=np.float64), requires_grad=True, name=name)


def grad_of(tensor: Tensor) -> list[float]:
    assert tensor.grad is not None
    return tensor.grad.flatten().tolist()


def total(x: Tensor) -> Tensor:
    """Sum to one element, as a product with a column of ones."""
    n = x.data.numel()
    ones = Tensor(torch.ones((n, 1), dtype=x.dtype))
    return ops.reshape(ops.matmul(ops.reshape(x, (1, n)), ones), ())


def test_diamond_waits_for_all_consumers() -> None:
    """https://github.com/karpathy/micrograd/issues/2."""
    x = leaf(2.0)
    with Tape() as tape:
        y = ops.scale(x, 3.0)
        c = ops.add(ops.scale(y, 2.0), ops.scale(y, 5.0))
    tape.backward(c)
    assert grad_of(x) == [21.0]


def test_three_levels_of_diamonds() -> None:
    x = leaf(1.0, -2.0)
    with Tape() as tape:
        y = x
        for _ in range(3):
            y = ops.add(ops.multiply(y, y), ops.scale(y, 0.5))
        loss = total(y)
    tape.backward(loss)
    t = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    z = t
    for _ in range(3):
        z = z * z + 0.5 * z
    z.sum().backward()
    np.testing.assert_allclose(grad_of(x), t.grad.tolist(), rtol=1e-14)


def test_a_tensor_used_twice_gets_both_gradients() -> None:
    """https://github.com/karpathy/micrograd/issues/64."""
    a = leaf(1.0)
    with Tape() as tape:
        b = ops.add(a, a)
        c = ops.add(b, b)
    tape.backward(c)
    assert grad_of(a) == [4.0]
    x = leaf(3.0)
    with Tape() as tape:
        y = ops.multiply(x, x)
    tape.backward(y)
    assert grad_of(x) == [6.0]


def test_second_backward_needs_retain_graph() -> None:
    """https://github.com/karpathy/micrograd/issues/53, https://github.com/tinygrad/tinygrad/issues/5701."""
    a, b, d = leaf(3.0), leaf(2.0), leaf(1.0)
    with Tape() as tape:
        e = ops.multiply(ops.add(a, b), d)
    tape.backward(e, retain_graph=True)
    assert (grad_of(a), grad_of(b), grad_of(d)) == ([1.0], [1.0], [5.0])
    tape.backward(e)
    assert (grad_of(a), grad_of(b), grad_of(d)) == ([2.0], [2.0], [10.0])
    with pytest.raises(AutogradError, match=r"multiply was already freed .*retain_graph=True"):
        tape.backward(e)
    assert grad_of(a) == [2.0]


def test_two_losses_that_share_a_graph() -> None:
    """https://github.com/tinygrad/tinygrad/issues/5701."""
    x = leaf(2.0)
    with Tape() as tape:
        y = ops.multiply(x, x)
        one, two = ops.scale(y, 3.0), ops.scale(y, 5.0)
    tape.backward(one)
    assert grad_of(x) == [12.0]
    with pytest.raises(AutogradError, match="multiply was already freed"):
        tape.backward(two)
    assert grad_of(x) == [12.0]

    x = leaf(2.0)
    with Tape() as tape:
        y = ops.multiply(x, x)
        one, two = ops.scale(y, 3.0), ops.scale(y, 5.0)
    tape.backward(one, retain_graph=True)
    tape.backward(two)
    assert grad_of(x) == [32.0]


def test_several_losses_at_once() -> None:
    x = leaf(2.0)
    with Tape() as tape:
        y = ops.multiply(x, x)
        one, two = ops.scale(y, 3.0), ops.scale(y, 5.0)
    tape.backward([one, two], [np.array([1.0]), np.array([10.0])])
    assert grad_of(x) == [4.0 * (3 + 50)]
    with pytest.raises(AutogradError, match="1 gradients for 2 tensors"):
        tape.backward([one, two], [np.array([1.0])])


def test_chain_of_ten_thousand() -> None:
    """https://github.com/karpathy/micrograd/issues/90."""
    assert sys.getrecursionlimit() < 10_000
    x, one = leaf(0.0), Tensor(np.ones(1))
    with Tape() as tape:
        y = x
        for _ in range(10_000):
            y = ops.add(y, one)
    assert len(tape) == 10_000
    tape.backward(y)
    assert grad_of(x) == [1.0]
    assert len(tape) == 0


def test_freeing_a_long_chain_without_backward_does_not_recurse() -> None:
    x = leaf(0.0)
    with Tape() as tape:
        y = x
        for _ in range(10_000):
            y = ops.reshape(y, (1,))
    alive = weakref.ref(y)
    del tape, y
    gc.collect()
    assert alive() is None


def test_gradient_buffers_are_not_shared() -> None:
    """https://github.com/Oneflow-Inc/oneflow/issues/9497."""
    x, y = leaf(1.0, 1.0), leaf(2.0, 2.0)
    with Tape() as tape:
        z = ops.add(x, y)
        loss = total(ops.add(z, ops.scale(x, 3.0)))
    tape.backward(loss)
    assert grad_of(x) == [4.0, 4.0]
    assert grad_of(y) == [1.0, 1.0]
    assert x.grad is not None
    x.grad.zero_()
    assert grad_of(y) == [1.0, 1.0]


def test_gradients_accumulate_over_backwards() -> None:
    x = leaf(2.0)
    for _ in range(3):
        with Tape() as tape:
            y = ops.multiply(x, x)
        tape.backward(y)
    assert grad_of(x) == [12.0]


def test_gradients_go_into_preset_storage() -> None:
    arena = torch.full((10,), 0.5, dtype=torch.float32)
    w = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    b = Tensor(np.ones(2, np.float32), requires_grad=True)
    w.grad, b.grad = arena[:6].view(2, 3), arena[6:8]
    x = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    with Tape() as tape:
        y = ops.linear(x, w, b)
    tape.backward(y, torch.ones(2, 2))
    np.testing.assert_array_equal(
        arena.numpy(), np.float32([3.5, 5.5, 7.5, 3.5, 5.5, 7.5, 2.5, 2.5, 0.5, 0.5])
    )


def test_half_gradients_go_into_float32_storage() -> None:
    x = Tensor(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), requires_grad=True)
    x.grad = torch.zeros(2, dtype=torch.float32)
    for _ in range(2):
        with Tape() as tape:
            y = ops.scale(x, 1.5)
        tape.backward(y, torch.ones(2, dtype=torch.bfloat16))
    assert x.grad.dtype == torch.float32
    assert grad_of(x) == [3.0, 3.0]


def test_gradients_go_into_strided_storage() -> None:
    arena = torch.zeros(2, 3, dtype=torch.float64)
    x = Tensor(np.ones((3, 2)), requires_grad=True)
    x.grad = arena.t()
    with Tape() as tape:
        y = ops.scale(x, 2.0)
    tape.backward(y, np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(arena.numpy(), 2 * np.arange(6.0).reshape(3, 2).T)


def test_an_unused_parameter_keeps_its_gradient() -> None:
    """https://github.com/tinygrad/tinygrad/issues/4325."""
    u, w = leaf(2.0), leaf(3.0)
    with Tape() as tape:
        y = ops.scale(u, 2.0)
    tape.backward(y)
    assert w.grad is None
    w.grad = torch.zeros(1, dtype=torch.float64)
    with Tape() as tape:
        y = ops.scale(u, 2.0)
    tape.backward(y)
    assert grad_of(w) == [0.0]


def test_detach_stops_the_gradient() -> None:
    """https://github.com/pytorch/pytorch/issues/92586."""
    x = leaf(3.0)
    with Tape() as tape:
        z = ops.multiply(x.detach(), x)
    tape.backward(z)
    assert grad_of(x) == [3.0]
    assert not x.detach().requires_grad


def test_numpy_cannot_be_written() -> None:
    x = leaf(3.0)
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[0] = 5.0


def test_no_grad_nests_recurses_and_survives_errors() -> None:
    """https://github.com/pytorch/pytorch/issues/10858."""
    seen = []

    @no_grad()
    def descend(depth: int) -> None:
        seen.append(recording())
        if depth:
            descend(depth - 1)
            seen.append(recording())

    shared = no_grad()
    with Tape():
        assert recording()
        with no_grad():
            descend(3)
            assert not recording()
        with shared, shared:
            assert not recording()
        assert recording()
        with pytest.raises(KeyError), no_grad():
            raise KeyError
        assert recording()
    assert not recording()
    assert seen == [False] * 7


def test_tape_is_left_when_its_block_raises() -> None:
    with pytest.raises(KeyError), Tape():
        raise KeyError
    assert not recording()


def test_without_a_tape_ops_just_compute() -> None:
    x = leaf(2.0)
    y = ops.multiply(x, x)
    assert y.item() == 4.0
    assert not y.requires_grad


def test_an_op_without_gradients_is_not_recorded() -> None:
    with Tape() as tape:
        ops.scale(Tensor(np.ones(1)), 2.0)
    assert len(tape) == 0


def test_a_loss_that_is_not_on_the_tape_is_refused() -> None:
    x = leaf(1.0)
    with Tape() as tape:
        y = ops.scale(x, 2.0)
        with no_grad():
            constant = ops.scale(x, 2.0)
    with Tape() as other:
        z = ops.scale(x, 2.0)
    for loss, why in ((x, "is a leaf"), (constant, "needs no gradient"), (z, "on another tape")):
        with pytest.raises(AutogradError, match=f"not made on this tape.*{why}"):
            tape.backward(loss)
    with pytest.raises(AutogradError, match="made by scale on another tape"), other:
        ops.add(y, z)
    with pytest.raises(AutogradError, match="the loss is a float"):
        tape.backward([1.0])  # type: ignore[list-item]


def test_a_loss_that_is_not_a_scalar_needs_a_gradient() -> None:
    x = leaf(1.0, 2.0)
    with Tape() as tape:
        y = ops.scale(x, 2.0)
    with pytest.raises(AutogradError, match=r"the loss has shape \(2,\), wanted a scalar"):
        tape.backward(y)
    with pytest.raises(AutogradError, match=r"grad is torch.float64 \(1,\)"):
        tape.backward(y, np.ones(1))
    with pytest.raises(AutogradError, match=r"grad is torch.float32 \(2,\)"):
        tape.backward(y, np.ones(2, np.float32))
    tape.backward(y, Tensor(np.array([1.0, 10.0])))
    assert grad_of(x) == [2.0, 20.0]


def test_the_callers_gradient_is_not_written_to() -> None:
    x, seed = leaf(1.0, 2.0), np.ones(2)
    with Tape() as tape:
        y = ops.scale(ops.reshape(x, (2,)), 3.0)
    tape.backward(y, seed)
    np.testing.assert_array_equal(seed, np.ones(2))
    with Tape() as tape:
        y = ops.reshape(x, (2,))
    tape.backward(y, seed)
    assert x.grad is not None
    assert not np.shares_memory(x.grad.numpy(), seed)


def test_zero_size_tensors() -> None:
    w = Tensor(np.ones((2, 3)), requires_grad=True)
    x = Tensor(np.ones((0, 3)), requires_grad=True)
    with Tape() as tape:
        y = ops.silu(ops.linear(x, w))
    tape.backward(y, np.ones((0, 2)))
    assert grad_of(w) == [0.0] * 6
    assert x.grad is not None
    assert tuple(x.grad.shape) == (0, 3)


def test_bias_keeps_its_shape_over_two_steps() -> None:
    """https://github.com/dlsyscourse/hw2/issues/8."""
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((4, 3)))
    w = Tensor(rng.standard_normal((2, 3)), requires_grad=True)
    b = Tensor(rng.standard_normal(2), requires_grad=True)
    for _ in range(2):
        w.grad = b.grad = None
        with Tape() as tape:
            y = ops.linear(x, w, b)
        upstream = rng.standard_normal((4, 2))
        tape.backward(y, upstream)
        np.testing.assert_allclose(b.grad.numpy(), upstream.sum(0), rtol=1e-12)  # type: ignore[attr-defined]
        b.data.sub_(0.1 * b.grad)  # type: ignore[operator]
        assert b.shape == (2,)


def test_repeated_ids_add_up() -> None:
    """https://github.com/HIPS/autograd/issues/39."""
    table = Tensor(np.zeros((5, 2)), requires_grad=True)
    with Tape() as tape:
        rows = ops.embedding(np.array([1, 1, 3, 1]), table)
    tape.backward(rows, np.repeat([[1.0], [10.0], [100.0], [1000.0]], 2, axis=1))
    assert table.grad is not None
    assert table.grad.tolist() == [[0, 0], [1011, 1011], [0, 0], [100, 100], [0, 0]]


def test_activations_and_their_gradients_are_freed_as_they_are_consumed() -> None:
    """While an early node runs, no later activation or gradient is alive."""
    alive: list[weakref.ref] = []
    seen = []

    def spy(x: Tensor) -> Tensor:
        y = run("scale", x, 1.0)

        def backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
            seen.append(sum(ref() is not None for ref in alive))
            out = torch.ones_like(grad)
            alive.append(weakref.ref(out))
            return out

        record("spy", (x,), y, backward)
        return y

    x = leaf(1.0)
    with Tape() as tape:
        y = x
        for _ in range(6):
            y = spy(y)
            alive.append(weakref.ref(y.data))
    del y
    # no backward reads an activation, so none is kept but for the loss
    y = None
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    with Tape() as tape:
        y = x
        for _ in range(6):
            y = spy(y)
    tape.backward(y)
    # one gradient at a time: the one just arriving
    assert seen == [0, 1, 1, 1, 1, 1]


def test_saved_tensors_are_freed_by_backward() -> None:
    x = leaf(1.0, 2.0)
    with Tape() as tape:
        hidden = ops.silu(x)
        ref = weakref.ref(hidden.data)
        y = total(ops.multiply(hidden, hidden))
        del hidden
    assert ref() is not None
    tape.backward(y, retain_graph=True)
    assert ref() is not None
    tape.backward(y)
    assert ref() is None


def test_a_backward_of_the_wrong_form_is_named() -> None:
    x = leaf(1.0, 2.0)
    for backward, message in (
        (lambda node, g: (g, g), "odd: backward returned 2 gradients for 1 inputs"),
        (lambda node, g: g[:1], r"odd: backward returned a gradient of shape \(1,\)"),
    ):
        with Tape() as tape:
            y = run("scale", x, 1.0)
            record("odd", (x,), y, backward)
        with pytest.raises(AutogradError, match=message):
            tape.backward(y, np.ones(2))


def test_backward_does_not_record() -> None:
    x = leaf(1.0)
    with Tape() as tape:
        y = ops.multiply(x, x)
        tape.backward(y, retain_graph=True)
        assert len(tape) == 1
        assert recording()


def test_tensor_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(DTypeError, match="cannot require a gradient"):
        Tensor(np.arange(3), requires_grad=True)
    with pytest.raises(DTypeError, match="Tensor data is a list"):
        Tensor([1.0])  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatchError, match=r"grad of tensor 'w' has shape \(2,\)"):
        leaf(1.0, name="w").grad = torch.zeros(2)
    with pytest.raises(ShapeMismatchError, match="wanted one element"):
        leaf(1.0, 2.0).item()
    with pytest.raises(AutogradError, match="truth"):
        bool(leaf(1.0))
    with pytest.raises(ShapeMismatchError, match="do not broadcast"):
        ops.add(Tensor(np.ones((2, 3))), Tensor(np.ones(2)))
    with pytest.raises(ShapeMismatchError, match="does not fit"):
        ops.reshape(Tensor(np.ones(6)), (4, -1))
    assert "requires_grad=True" in repr(leaf(1.0))


def ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape))


TABLE = np.ones((2, 2), np.float32)
MISFITS: list[tuple[str, Callable[[], object], list[str]]] = [
    ("matmul", lambda: ops.matmul(ones(2, 3), ones(4, 5)), ["3 columns", "4 rows"]),
    ("linear", lambda: ops.linear(ones(7, 2, 3), ones(4, 5)), ["(7, 2, 3)", "(4, 5)"]),
    ("add", lambda: ops.add(ones(2, 3), ones(4)), ["(2, 3)", "(4,)"]),
    ("multiply", lambda: ops.multiply(ones(2, 3), ones(4)), ["(2, 3)", "(4,)"]),
    ("add_", lambda: ops.add_(ones(2, 3), ones(3, 2)), ["(3, 2)", "(2, 3)"]),
    ("bias_add", lambda: ops.bias_add(ones(2, 3), ones(4)), ["(4,)", "(3)"]),
    ("rms_norm", lambda: ops.rms_norm(ones(2, 3), ones(4), 1e-5), ["(4,)", "(3)"]),
    ("swiglu", lambda: ops.swiglu(ones(2, 3), ones(2, 4)), ["(2, 4)", "(2, 3)"]),
    ("attention", lambda: ops.attention(ones(2, 3, 4), *[ones(2, 2, 4)] * 2), ["3 heads", "has 2"]),
    ("cross_entropy", lambda: ops.cross_entropy(ones(2, 3), np.arange(4)), ["(4,)", "(2)"]),
    (
        "rope",
        lambda: ops.rope(ones(2, 1, 4), ones(3, 1, 4), TABLE, TABLE, np.arange(2)),
        ["(3, 1, 4)"],
    ),
    (
        "lora",
        lambda: ops.lora_linear(ones(2, 3), ones(4, 3), ones(1, 3), ones(5, 1), 1.0),
        ["(5, 1)"],
    ),
    ("reshape", lambda: ops.reshape(ones(2, 3), (4,)), ["(2, 3)", "(4,)"]),
]


@pytest.mark.parametrize(("op", "run_it", "sizes"), MISFITS, ids=[m[0] for m in MISFITS])
def test_an_error_names_the_op_and_the_shapes(
    op: str, run_it: Callable[[], object], sizes: list[str]
) -> None:
    with Tape() as tape, pytest.raises(ShapeMismatchError) as caught:
        run_it()
    assert caught.value.message.startswith(op)
    for size in sizes:
        assert size in caught.value.message
    assert len(tape) == 0
