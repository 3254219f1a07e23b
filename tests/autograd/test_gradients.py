"""Every differentiable op, through the tape in float64, against central finite differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from entrenar.autograd import Tape, Tensor, checkpoint, gradcheck, ops
from entrenar.errors import AutogradError, DTypeError
from entrenar.optable import call

Case = tuple[Callable[..., Any], list[np.ndarray]]

T = 5
POSITIONS = torch.tensor([0, 3, 1, 7, 2])
IDS = torch.tensor([1, 1, 3, 1, 0])
TARGETS = torch.tensor([1, -100, 0, 3, 2])
SEGMENTS = torch.tensor([0, 2, 5], dtype=torch.int32)
RNG = np.random.default_rng(11)
ANGLES = RNG.standard_normal((10, 2))
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
DENSE = RNG.standard_normal((6, 8))
NF4 = call("nf4_quantize", torch.from_numpy(DENSE.copy()))
NF4_DOUBLE = call("nf4_quantize", torch.from_numpy(DENSE.copy()), double_quant=True)


def r(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


# Keyed by op; the part after the dash tells cases of one op apart.
CASES: dict[str, Case] = {
    "matmul": (lambda a, b, c: ops.matmul(a, b, bias=c, scale=1.5), [r(3, 4), r(4, 5), r(5)]),
    "matmul-transposed": (lambda a, b: ops.matmul(a, b, True, True, scale=0.5), [r(4, 3), r(5, 4)]),
    "matmul-batched": (lambda a, b: ops.matmul(a, b, True), [r(2, 4, 3), r(2, 4, 5)]),
    "matmul-shared": (lambda a, b: ops.matmul(a, b, True, True), [r(2, 4, 3), r(5, 4)]),
    "matmul-views": (
        lambda a, b: ops.matmul(ops.transpose(a), ops.transpose(b)), [r(4, 3), r(5, 4)],
    ),
    "matmul-same": (lambda a: ops.matmul(a, a), [r(3, 3)]),
    "linear": (ops.linear, [r(3, 4), r(5, 4), r(5)]),
    "linear-3d": (ops.linear, [r(2, 3, 4), r(5, 4), r(5)]),
    "nf4_linear": (lambda x, b: ops.nf4_linear(x, NF4, b), [r(3, 8), r(6)]),
    "nf4_linear-double": (lambda x: ops.nf4_linear(x, NF4_DOUBLE), [r(2, 3, 8)]),
    "lora_linear": (
        lambda x, a, b: ops.lora_linear(x, Tensor(DENSE), a, b, 2.0), [r(3, 8), r(2, 8), r(6, 2)],
    ),
    "lora_linear-nf4": (
        lambda x, a, b, c: ops.lora_linear(x, NF4, a, b, 2.0, c, 0.3, 7),
        [r(2, 2, 8), r(2, 8), r(6, 2), r(6)],
    ),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), [r(3, 6), r(6)]),
    "rms_norm-heads": (lambda x, w: ops.rms_norm(x, w, 1e-5), [r(3, 2, 6), r(6)]),
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), [r(3, 6), r(6), r(6)]),
    "layer_norm-no_bias": (lambda x, w: ops.layer_norm(x, w, None, 1e-5), [r(3, 2, 6), r(6)]),
    "layer_norm_residual": (
        lambda x, y, w, b: ops.layer_norm_residual(x, y, w, b, 1e-5),
        [r(3, 6), r(3, 6), r(6), r(6)],
    ),
    "layer_norm_residual-sum": (
        lambda x, y, w, b: ops.layer_norm_residual(x, y, w, b, 1e-5)[1],
        [r(3, 6), r(3, 6), r(6), r(6)],
    ),
    "rms_norm_residual": (
        lambda x, y, w: ops.rms_norm_residual(x, y, w, 1e-5), [r(3, 6), r(3, 6), r(6)],
    ),
    "rms_norm_residual-sum": (
        lambda x, y, w: ops.rms_norm_residual(x, y, w, 1e-5)[1], [r(3, 6), r(3, 6), r(6)],
    ),
    "rms_norm_residual-norm": (
        lambda x, y, w: ops.rms_norm_residual(x, y, w, 1e-5)[0], [r(3, 6), r(3, 6), r(6)],
    ),
    "rope": (lambda q, k: ops.rope(q, k, COS, SIN, POSITIONS), [r(T, 2, 4), r(T, 1, 4)]),
    "rope-queries": (lambda q, k: ops.rope(q, k, COS, SIN, POSITIONS)[0], [r(T, 2, 4), r(T, 1, 4)]),
    "rope-inplace": (
        lambda q, k: ops.rope(ops.scale(q, 2.0), ops.scale(k, 1.0), COS, SIN, POSITIONS, inplace=True),
        [r(T, 2, 6), r(T, 1, 6)],
    ),
    "swiglu": (ops.swiglu, [r(3, 4), r(3, 4)]),
    "silu": (ops.silu, [r(3, 4)]),
    "gelu": (ops.gelu, [r(3, 4)]),
    "gelu-tanh": (lambda x: ops.gelu(x, "tanh"), [r(3, 4)]),
    "relu": (ops.relu, [r(3, 4)]),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, SEGMENTS), [r(T, 2, 4), r(T, 1, 4), r(T, 1, 4)],
    ),
    "attention-window": (
        lambda q, k, v: ops.attention(q, k, v, window=2, scale=0.3),
        [r(T, 2, 4), r(T, 1, 4), r(T, 1, 4)],
    ),
    "attention-full": (
        lambda q, k, v: ops.attention(q, k, v, causal=False),
        [r(2, 4, 4), r(T, 2, 4), r(T, 2, 4)],
    ),
    "attention-self": (lambda x: ops.attention(x, x, x), [r(T, 2, 4)]),
    "embedding": (lambda w: ops.embedding(IDS, w), [r(5, 3)]),
    "take_rows": (lambda x: ops.take_rows(x, IDS), [r(5, 3)]),
    "softmax": (lambda x: ops.softmax(x, 2.0), [r(3, 4)]),
    "softmax-causal": (lambda x: ops.softmax(x, 2.0, True), [r(2, 3, 4)]),
    "cross_entropy": (lambda x: ops.cross_entropy(x, TARGETS)[0], [r(5, 6)]),
    "cross_entropy-scaled": (
        lambda x: ops.scale(ops.cross_entropy(x, TARGETS)[0], 0.25), [r(5, 6)],
    ),
    "causal_cross_entropy": (lambda x: ops.causal_cross_entropy(x, IDS, 1, 4)[0], [r(5, 6)]),
    "linear_cross_entropy": (
        lambda x: ops.linear_cross_entropy(x, Tensor(DENSE), TARGETS, chunk_rows=2)[0], [r(5, 8)],
    ),
    "linear_cross_entropy-used-twice": (
        lambda x: ops.add(*[ops.linear_cross_entropy(x, Tensor(DENSE), TARGETS)[0]] * 2), [r(5, 8)],
    ),
    "add": (ops.add, [r(2, 3), r(2, 3)]),
    "add-broadcast": (ops.add, [r(2, 1, 3), r(5, 1)]),
    "multiply": (ops.multiply, [r(3, 4), r(3, 4)]),
    "multiply-same": (lambda a: ops.multiply(a, a), [r(3)]),
    "multiply-broadcast": (ops.multiply, [r(3, 4), r(1, 4)]),
    "multiply-scalar": (ops.multiply, [np.array(1.3), r(2)]),
    "scale": (lambda x: ops.scale(x, -3.0), [r(2, 3)]),
    "bias_add": (ops.bias_add, [r(4, 3), r(3)]),
    "cast": (lambda x: ops.cast(x, torch.float64), [r(2, 3)]),
    "reshape": (lambda x: ops.multiply(ops.reshape(x, (3, -1)), Tensor(DENSE[:3, :2])), [r(2, 3)]),
    "transpose": (
        lambda x: ops.multiply(ops.reshape(ops.transpose(x), (6,)), Tensor(np.arange(6.0))), [r(2, 3)],
    ),
    "narrow": (lambda x: ops.silu(ops.narrow(x, -1, 1, 2)), [r(2, 4)]),
    "narrow-overlapping": (
        lambda x: ops.multiply(ops.narrow(x, 0, 0, 3), ops.narrow(x, 0, 1, 3)), [r(4, 2)],
    ),
    "split": (
        lambda x: ops.multiply(*(ops.split(x, (3, 1, 3), 1)[i] for i in (0, 2))), [r(2, 7, 2)],
    ),
    "split-all": (lambda x: ops.split(ops.silu(x), (2, 0, 1)), [r(4, 3)]),
    "concat": (lambda x, y: ops.silu(ops.concat([x, y], 1)), [r(2, 3, 2), r(2, 1, 2)]),
    "concat-same": (lambda x: ops.silu(ops.concat([x, x, ops.transpose(x)], 0)), [r(3, 3)]),
    "concat-split": (
        lambda x, y: ops.add(*ops.split(ops.concat([x, y]), (2, 2))), [r(3, 1), r(3, 3)],
    ),
    "add_": (lambda x, y: ops.add_(ops.scale(x, 2.0), y), [r(2, 3), r(2, 3)]),
    "add_-strided": (
        lambda x, y: ops.silu(ops.add_(ops.transpose(ops.scale(x, 2.0)), y)), [r(2, 3), r(3, 2)],
    ),
    "transpose-axes": (lambda x: ops.silu(ops.transpose(x, 0, 2)), [r(2, 3, 4)]),
    "checkpoint": (
        lambda x, w: checkpoint(lambda a: ops.silu(ops.linear(a, w)), x), [r(3, 4), r(4, 4)],
    ),
    "checkpoint-pair": (
        lambda x, y, w: checkpoint(lambda a, b: ops.rms_norm_residual(a, b, w, 1e-5), x, y),
        [r(3, 4), r(3, 4), r(4)],
    ),
    "checkpoint-nested": (
        lambda x, w: checkpoint(
            lambda a: ops.add(a, checkpoint(lambda b: ops.swiglu(ops.linear(b, w), b), a)), x
        ),
        [r(3, 4), r(4, 4)],
    ),
    "checkpoint-unchanged": (lambda x, y: checkpoint(lambda a, b: (b, ops.silu(a)), x, y), [r(3), r(3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tape_gradient_equals_finite_differences(case: str) -> None:
    fn, inputs = CASES[case]
    assert gradcheck(fn, inputs)


def test_every_public_op_has_a_gradient_case() -> None:
    """No op is exposed without a gradient: https://github.com/TrenTorch/TrenTorch/issues/58."""
    public = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert public - {case.partition("-")[0] for case in CASES} == set()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1,), (5, 4)), ((4, 1), (1, 4)), ((3, 4), (1, 4)), ((3, 4), (4,)), ((), (2,)),
        ((2, 1, 3), (5, 1)), ((0, 3), (3,)), ((1, 1), ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["add", "multiply"])
def test_gradients_of_broadcast_operands_have_their_shape(
    op: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    """https://github.com/pytorch/pytorch/issues/1787."""
    rng = np.random.default_rng(0)
    x, y = np.asarray(rng.standard_normal(a)), np.asarray(rng.standard_normal(b))
    gradcheck(getattr(ops, op), [x, y])
    left, right = Tensor(x, requires_grad=True), Tensor(y, requires_grad=True)
    with Tape() as tape:
        z = getattr(ops, op)(left, right)
    tape.backward(z, np.ones(z.shape))
    assert left.grad is not None
    assert right.grad is not None
    assert tuple(left.grad.shape) == a
    assert tuple(right.grad.shape) == b


def test_gradcheck_names_the_position_of_a_wrong_gradient() -> None:
    kink = np.array([[1.0, 2.0], [0.0, -1.0]])  # relu at 0 has no derivative: 0 against 1/2
    with pytest.raises(AutogradError, match=r"input 0 at \(1, 0\): the tape's gradient is 0, "):
        gradcheck(ops.relu, [kink])


def test_gradcheck_finds_a_gradient_that_never_arrives() -> None:
    with pytest.raises(AutogradError, match="finite differences give"):
        gradcheck(lambda x: ops.multiply(x.detach(), x), [np.array([3.0])])


def test_gradcheck_wants_float64_and_something_to_check() -> None:
    with pytest.raises(DTypeError, match="input 0 is float32"):
        gradcheck(ops.silu, [np.ones(2, np.float32)])
    with pytest.raises(AutogradError, match="no input"):
        gradcheck(lambda n: Tensor(np.ones(n)), [3])
