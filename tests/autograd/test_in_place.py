"""Writing in place: what is noticed, what a tape allows, and what it overwrites by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.autograd import Tape, Tensor, current_stream, gradcheck, no_grad, ops
from entrenar.errors import AutogradError
from entrenar.optable import call


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


def test_writing_in_place_to_a_saved_tensor_is_noticed() -> None:
    """https://github.com/karpathy/nanoGPT/issues/72."""
    x = leaf(1.0, 2.0, name="x")
    with Tape() as tape:
        h = total(ops.multiply(x, x))
    with no_grad():
        ops.add_(x, Tensor(np.ones(2)))
    with pytest.raises(AutogradError, match=r"multiply: saved tensor 0 \('x'\).*modified in place"):
        tape.backward(h)
    assert x.grad is None


@pytest.mark.parametrize("write", ["torch", "torch view", "detached", "view"])
def test_writing_through_any_view_is_noticed(write: str) -> None:
    """https://github.com/karpathy/nanoGPT/issues/72, https://github.com/pytorch/pytorch/issues/92586."""
    x = leaf(1.0, 2.0)
    with Tape() as tape:
        h = total(ops.multiply(x, x))
    one = Tensor(np.ones(2))
    with no_grad():
        if write == "torch":
            x.data.add_(1.0)
        elif write == "torch view":
            x.data[0:1].add_(1.0)
        elif write == "detached":
            ops.add_(x.detach(), one)
        else:
            ops.add_(ops.reshape(x, (1, 2)), ops.reshape(one, (1, 2)))
    with pytest.raises(AutogradError, match="modified in place"):
        tape.backward(h)


def test_writing_to_what_no_backward_reads_is_fine() -> None:
    x = leaf(1.0, 2.0)
    with Tape() as tape:
        h = ops.scale(x, 2.0)
        with no_grad():
            ops.add_(h, Tensor(np.ones(2)))
        loss = total(h)
    tape.backward(loss)
    assert grad_of(x) == [2.0, 2.0]


def test_in_place_sum_on_a_tape_equals_the_sum() -> None:
    a, b = np.array([1.0, -2.0]), np.array([0.5, 3.0])

    def fn(x: Tensor, y: Tensor) -> Tensor:
        h = ops.scale(x, 3.0)
        before = ops.scale(h, 5.0)  # reads the old value, whose backward does not
        assert ops.add_(h, y) is h
        return ops.add(ops.multiply(h, h), before)

    gradcheck(fn, [a, b])
    x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    np.testing.assert_array_equal(fn(x, y).numpy(), (3 * a + b) ** 2 + 15 * a)


def test_in_place_sum_is_refused_where_the_tape_cannot_allow_it() -> None:
    x, one = leaf(1.0, 2.0), Tensor(np.ones(2))
    constant = Tensor(np.zeros(2))
    with Tape():
        outside = r"add_: a tensor of shape \(2,\) that this tape did not make"
        for target, other in ((x, one), (constant, x)):
            with pytest.raises(AutogradError, match=outside):
                ops.add_(target, other)
        h = ops.scale(x, 2.0)
        ops.multiply(h, h)
        with pytest.raises(
            AutogradError, match=r"shape \(2,\) is saved for the backward of multiply"
        ):
            ops.add_(h, one)
        of_leaf = ops.reshape(x, (1, 2))
        with pytest.raises(AutogradError, match="views storage that reshape did not allocate"):
            ops.add_(of_leaf, ops.reshape(one, (1, 2)))
    assert values(x, h, constant) == [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]


def values(*tensors: Tensor) -> list[list[float]]:
    return [t.numpy().flatten().tolist() for t in tensors]


def test_a_view_made_before_an_in_place_write_is_refused_afterwards() -> None:
    x, one = leaf(1.0, 2.0), Tensor(np.ones(2))
    with Tape() as tape:
        h = ops.scale(x, 2.0)
        view = ops.reshape(h, (2,))
        ops.add_(view, one)
        with pytest.raises(
            AutogradError, match=r"scale: an input of shape \(2,\), made by scale, was over"
        ):
            ops.scale(h, 1.0)
        loss = total(view)
    tape.backward(loss)
    assert grad_of(x) == [2.0, 2.0]


def test_rotating_what_another_backward_reads_is_refused() -> None:
    table = np.ones((1, 1), np.float32)
    x = Tensor(np.ones((1, 1, 2)), requires_grad=True)
    with Tape():
        q, k = ops.scale(x, 2.0), ops.scale(x, 3.0)
        ops.silu(k)
        with pytest.raises(AutogradError, match=r"rope: .* is saved for the backward of silu"):
            ops.rope(q, k, table, table, np.array([0]), inplace=True)
    assert q.numpy().tolist() == [[[2.0, 2.0]]]


def test_an_optimiser_step_between_forward_and_backward_is_noticed() -> None:
    """https://github.com/karpathy/nanoGPT/issues/72: kernels and NumPy leave no trace in torch's count."""
    arena = torch.ones(6)
    w = Tensor(arena[:4].view(2, 2), requires_grad=True, name="w")
    x = Tensor(torch.ones(3, 2), requires_grad=True)
    with Tape() as tape:
        y = ops.linear(x, w)
    moments = [torch.zeros(6) for _ in range(3)]
    step = torch.zeros(1, dtype=torch.int64)
    before = arena._version
    call(
        "adamw_step", arena, moments[0], moments[1], moments[2], step, torch.ones(1),
        stream=current_stream("cpu"),
    )  # fmt: skip
    assert arena._version == before
    with pytest.raises(
        AutogradError, match=r"linear: saved tensor 1 \('w'\) of shape \(2, 2\) was mod"
    ):
        tape.backward(y, torch.ones(3, 2))
    assert x.grad is None


def test_in_place_sum_writes_through_strides() -> None:
    base = Tensor(np.zeros((2, 3)))
    ops.add_(ops.transpose(base), Tensor(np.arange(6.0).reshape(3, 2)))
    np.testing.assert_array_equal(base.numpy(), np.arange(6.0).reshape(3, 2).T)


def test_rotating_a_trainable_leaf_in_place_is_refused() -> None:
    q = Tensor(np.ones((1, 1, 2)), requires_grad=True)
    k = Tensor(np.ones((1, 1, 2)))
    table = np.ones((1, 1), np.float32)
    with pytest.raises(AutogradError, match="q is a leaf"):
        ops.rope(q, k, table, table, np.array([0]), inplace=True)


def test_rope_leaves_its_inputs_alone_unless_told() -> None:
    q, k = Tensor(np.ones((1, 1, 2))), Tensor(np.ones((1, 1, 2)))
    cos, sin = np.zeros((1, 1)), np.ones((1, 1))
    turned, _ = ops.rope(q, k, cos, sin, np.array([0]))
    assert q.numpy().tolist() == [[[1, 1]]]
    assert turned.numpy().tolist() == [[[-1, 1]]]
    ops.rope(q, k, cos, sin, np.array([0]), inplace=True)
    assert q.numpy().tolist() == [[[-1, 1]]]


def test_overwriting_activations_changes_no_gradient() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 6))
    w = rng.standard_normal((12, 6))
    targets = np.array([0, 3, -100, 11])
    grads = []
    for overwrite in (False, True):
        a = Tensor(x.copy(), requires_grad=True)
        with Tape(overwrite_activations=overwrite) as tape:
            gate, up = ops.scale(a, 2.0), ops.multiply(a, a)
            logits = ops.linear(ops.swiglu(gate, up), Tensor(w))
            loss, counted = ops.cross_entropy(logits, targets)
            before = logits.numpy().copy(), gate.numpy().copy()
        assert counted == 3
        tape.backward(loss)
        grads.append(a.grad)
        written = [
            not np.array_equal(b, t.numpy()) for b, t in zip(before, (logits, gate), strict=True)
        ]
        assert written == [overwrite, overwrite]
    assert torch.equal(*grads)


def test_an_activation_that_another_op_saved_is_not_overwritten() -> None:
    rng = np.random.default_rng(3)
    results = []
    for overwrite in (False, True):
        a = Tensor(np.linspace(-1, 1, 4), requires_grad=True)
        with Tape(overwrite_activations=overwrite) as tape:
            gate = ops.scale(a, 2.0)
            kept = ops.multiply(gate, Tensor(rng.standard_normal(4) * 0 + 2.0))
            other = ops.silu(gate)  # runs before swiglu, so its backward comes after
            loss = total(ops.add(ops.add(kept, other), ops.swiglu(gate, a)))
        tape.backward(loss)
        results.append(a.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_loss_does_not_write_over_what_another_op_saved(overwrite: bool) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/272: softmax's output became a gradient."""
    start = np.sin(np.arange(64.0)).reshape(8, 8)

    def value(at: np.ndarray) -> float:
        y = np.exp(at) / np.exp(at).sum(1, keepdims=True)
        return float((np.log(np.exp(y).sum(1)) - np.diag(y)).sum() + (y * y).sum())

    x = Tensor(start.copy(), requires_grad=True)
    with Tape(overwrite_activations=overwrite) as tape:
        y = ops.softmax(x)
        before = y.numpy().copy()
        loss, _ = ops.cross_entropy(y, np.arange(8))
        both = ops.add(loss, total(ops.multiply(y, y)))
    assert both.item() == pytest.approx(value(start), rel=1e-12)
    tape.backward(both)
    steps = 1e-3 * np.eye(64).reshape(64, 8, 8)
    wanted = np.array([(value(start + h) - value(start - h)) / 2e-3 for h in steps]).reshape(8, 8)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=0, atol=1e-5)
    if not overwrite:
        np.testing.assert_array_equal(y.numpy(), before)
