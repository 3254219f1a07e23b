"""Rows of the matrix products: plain, transposed or batched, and with a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.elementwise import BIAS_BACKWARD
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function("gemm_forward", "gemm", results=("a",), mutates=("out",), alike=("a", "b"))
_BACKWARD_A = Function(
    "gemm_backward_a", "gemm", results=("grad_c",), mutates=("out",), alike=("grad_c", "b")
)
_BACKWARD_B = Function(
    "gemm_backward_b", "gemm", results=("a",), mutates=("out",), alike=("a", "grad_c")
)
_MATMUL = Function("matmul", "gemm", results=("a",), mutates=("out",), alike=("a", "b", "bias"))
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD_A, _BACKWARD_B, _MATMUL)


def _pair(m: int, n: int, k: int) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"a": rng.standard_normal((m, k)), "b": rng.standard_normal((k, n))}


def _gemm_sample(m: int, n: int, k: int, note: str = "", small: bool = True) -> Sample:
    return Sample(f"{m}x{n}x{k}{note}", _pair(m, n, k), small=small)


def _stored(
    a: tuple[int, ...], b: tuple[int, ...], **settings: Any
) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"a": rng.standard_normal(a), "b": rng.standard_normal(b), **settings}


def _linear(t: int, n_in: int, n_out: int) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {
        "a": rng.standard_normal((t, n_in)),
        "b": rng.standard_normal((n_out, n_in)),
        "trans_b": True,
        "bias": rng.standard_normal(n_out),
    }


def _gemm_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    return {
        "a": call("gemm_backward_a", grad_c=grad_outputs[0], b=inputs["b"]),
        "b": call("gemm_backward_b", a=inputs["a"], grad_c=grad_outputs[0]),
    }


def _matmul_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    """Gradients of ``scale * op(a) @ op(b) + bias`` as products with other transposes."""
    a, b, grad = inputs["a"], inputs["b"], grad_outputs[0]
    trans_a, trans_b = inputs.get("trans_a", False), inputs.get("trans_b", False)
    factor = {"scale": inputs.get("scale", 1.0)}
    if trans_a:
        grad_a = call("matmul", a=b, b=grad, trans_a=trans_b, trans_b=True, **factor)
    else:
        grad_a = call("matmul", a=grad, b=b, trans_b=not trans_b, **factor)
    if len(a.shape) == 3 and len(b.shape) == 2:  # shared by the batch: one product over all rows
        a, grad = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if trans_b:
        grad_b = call("matmul", a=grad, b=a, trans_a=True, trans_b=trans_a, **factor)
    else:
        grad_b = call("matmul", a=a, b=grad, trans_a=not trans_a, **factor)
    gradients = {"a": grad_a, "b": grad_b}
    if inputs.get("bias") is not None:
        gradients["bias"] = call("bias_backward", grad_y=grad_outputs[0])
    return gradients


def _sizes(inputs: Arguments) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) once transposed."""
    a, b = inputs["a"].shape, inputs["b"].shape
    m, k = (a[-1], a[-2]) if inputs.get("trans_a") else (a[-2], a[-1])
    n = b[-2] if inputs.get("trans_b") else b[-1]
    return (a[0] if len(a) == 3 else 1), m, n, k


def _bytes(inputs: Arguments, itemsize: int) -> int:
    batch, m, n, _ = _sizes(inputs)
    bias = 0 if inputs.get("bias") is None else n
    return itemsize * (inputs["a"].size + inputs["b"].size + bias + batch * m * n)


def _flops(inputs: Arguments) -> int:
    batch, m, n, k = _sizes(inputs)
    return 2 * batch * m * n * k


def _reduction(inputs: Arguments) -> int:
    batch, m, n, k = _sizes(inputs)
    return max(batch * m, n, k)


def _terms(inputs: Arguments) -> float:
    """Magnitude of what a result sums up, which may cancel."""
    if not inputs["a"].size or not inputs["b"].size:
        return 0.0
    bias = inputs.get("bias")
    product = float(np.abs(inputs["a"]).max() * np.abs(inputs["b"]).max())
    return product if bias is None else product + float(np.abs(bias).max())


def _gemm_baseline(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _matmul_baseline(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    product = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
    product = product if scale == 1.0 else product * scale
    return product if bias is None else product + bias


def _grad_and(name: str, *shape: int) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"grad_c": rng.standard_normal((3, 4)), name: rng.standard_normal(shape)}


def _with(
    make: Callable[[np.random.Generator], Arguments], **more: Any
) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {**make(rng), **more}


def _out_of_another_size(rng: np.random.Generator) -> Arguments:
    return {**_pair(3, 4, 5)(rng), "out": np.zeros((4, 3))}


_SOURCE = "c[i, j] = sum_k a[i, k] b[k, j]; tiles and order as in Triton's tutorial 03"
_REASON = (
    "products of 16-bit values are exact in float32, so one rounding at the store and the sum over "
    "k in float32 (split in fixed order) are all there is"
)

OPS: tuple[Op, ...] = (
    Op(
        name="gemm",
        family="gemm",
        forward=_FORWARD,
        backward=(_BACKWARD_A, _BACKWARD_B),
        samples=(
            _gemm_sample(17, 19, 23),
            _gemm_sample(1, 1, 1),
            _gemm_sample(16, 16, 17),
            _gemm_sample(33, 1, 5),
            _gemm_sample(3, 5, 0, "_nothing_to_sum"),
            _gemm_sample(0, 4, 3, "_no_rows"),
            _gemm_sample(4, 0, 3, "_no_columns"),
            _gemm_sample(65, 130, 71, "_several_blocks"),
            _gemm_sample(2, 70, 1031, "_split_over_k"),
            _gemm_sample(257, 300, 515, "_many_blocks", small=False),
        ),
        errors=(
            ErrorCase("inner_sizes_differ", "gemm_forward", _stored((3, 4), (5, 6)),
                      ShapeMismatchError, "b has shape"),
            ErrorCase("three_dimensions", "gemm_forward", _stored((2, 3, 4), (4, 5)),
                      ShapeMismatchError, "a has shape"),
            ErrorCase("out_of_another_size", "gemm_forward", _out_of_another_size,
                      ShapeMismatchError, "out has shape"),
            ErrorCase("accumulate_into_nothing", "gemm_forward",
                      _with(_pair(3, 4, 5), accumulate=True), ConfigError, "accumulate without out"),
            ErrorCase("unknown_precision", "gemm_forward",
                      _with(_pair(3, 4, 5), precision="bf16x3"), ConfigError, "precision is"),
            ErrorCase("columns_differ", "gemm_backward_a", _grad_and("b", 6, 5),
                      ShapeMismatchError, "b has shape"),
            ErrorCase("rows_differ", "gemm_backward_b", _grad_and("a", 2, 6),
                      ShapeMismatchError, "grad_c has shape"),
        ),
        floats=("a", "b"),
        differentiable=("a", "b"),
        vjp=_gemm_vjp,
        reduction=_reduction,
        scale=_terms,
        tolerance_reason=_REASON,
        bytes_moved=_bytes,
        flops=_flops,
        traffic_reason="a product reads its operands once per tile of the other side",
        has_dot=True,
        torch_baseline=_gemm_baseline,
        source=_SOURCE,
    ),
    Op(
        name="matmul",
        family="gemm",
        forward=_MATMUL,
        backward=(_MATMUL,),
        samples=(
            Sample("nn_7x9x11", _stored((7, 11), (11, 9))),
            Sample("tn_7x9x11", _stored((11, 7), (11, 9), trans_a=True)),
            Sample("nt_7x9x11_scaled", _stored((7, 11), (9, 11), trans_b=True, scale=0.25)),
            Sample("tt_35x66x37", _stored((37, 35), (66, 37), trans_a=True, trans_b=True)),
            Sample("B3_5x7x9", _stored((3, 5, 9), (3, 9, 7))),
            Sample("B2_tt_5x7x9",
                   _stored((2, 9, 5), (2, 7, 9), trans_a=True, trans_b=True, scale=-1.5)),
            Sample("B3_shared_b_5x7x9", _stored((3, 5, 9), (9, 7))),
            Sample("B3_shared_bt_5x7x9", _stored((3, 5, 9), (7, 9), trans_b=True)),
            Sample("B2_nothing_to_sum", _stored((2, 3, 0), (2, 0, 4))),
            Sample("B0", _stored((0, 3, 4), (0, 4, 5))),
            Sample("nt_130x140x200_several_blocks",
                   _stored((130, 200), (140, 200), trans_b=True), small=False),
        ),
        errors=(
            ErrorCase("inner_sizes_differ", "matmul", _stored((3, 4), (4, 5), trans_b=True),
                      ShapeMismatchError, "a has 4 columns and b 5 rows"),
            ErrorCase("batches_differ", "matmul", _stored((2, 3, 4), (3, 4, 5)),
                      ShapeMismatchError, "b has shape"),
            ErrorCase("one_dimension", "matmul", _stored((4,), (4, 5)),
                      ShapeMismatchError, "a has shape"),
        ),
        floats=("a", "b"),
        differentiable=("a", "b"),
        vjp=_matmul_vjp,
        reduction=_reduction,
        scale=_terms,
        tolerance_reason=_REASON,
        bytes_moved=_bytes,
        flops=_flops,
        traffic_reason="a product reads its operands once per tile of the other side",
        has_dot=True,
        torch_baseline=_matmul_baseline,
        source=_SOURCE,
    ),
    Op(
        name="linear",
        family="gemm",
        forward=_MATMUL,
        backward=(_MATMUL, BIAS_BACKWARD),
        samples=(
            Sample("T7_13_to_11", _linear(7, 13, 11)),
            Sample("T1_1_to_1", _linear(1, 1, 1)),
            Sample("T0_3_to_4", _linear(0, 3, 4)),
            Sample("T3_0_to_5_bias_alone", _linear(3, 0, 5)),
            Sample("T67_70_to_129_several_blocks", _linear(67, 70, 129)),
            Sample("T2_1031_to_66_split_over_k", _linear(2, 1031, 66)),
        ),
        errors=(
            ErrorCase("bias_of_another_size", "matmul",
                      lambda rng: {**_linear(3, 4, 5)(rng), "bias": np.zeros(4)},
                      ShapeMismatchError, "bias has shape"),
        ),
        floats=("a", "b", "bias"),
        differentiable=("a", "b", "bias"),
        vjp=_matmul_vjp,
        reduction=_reduction,
        scale=_terms,
        tolerance_reason=_REASON + "; the bias is added before that rounding",
        bytes_moved=_bytes,
        flops=_flops,
        traffic_reason="a product reads its operands once per tile of the other side",
        has_dot=True,
        torch_baseline=_matmul_baseline,
        source="y = x W^T + bias, as torch.nn.functional.linear",
    ),
)  # fmt: skip
