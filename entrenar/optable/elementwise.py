"""Rows of the elementwise functions: sums, products, bias, scaling, casts, fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import DTypeError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["BIAS_BACKWARD", "FUNCTIONS", "OPS"]

_ADD = Function("add", "elementwise", results=("a",), mutates=("out",), alike=("a", "b", "out"))
_ADD_IN_PLACE = Function("add_", "elementwise", results=("dst",), mutates=("dst",))
_SCALE = Function("scale", "elementwise", results=("x",), mutates=("out",), alike=("x", "out"))
_BIAS_ADD = Function(
    "bias_add", "elementwise", results=("x",), mutates=("out",), alike=("x", "bias", "out")
)
BIAS_BACKWARD = Function("bias_backward", "elementwise", results=("grad_y",))
_MULTIPLY = Function(
    "multiply", "elementwise", results=("a",), mutates=("out",), alike=("a", "b", "out")
)
_CAST = Function("cast", "elementwise", results=("x",), override="dtype")
_FILL = Function("fill_", "elementwise", results=("x",), mutates=("x",))
FUNCTIONS: tuple[Function, ...] = (
    _ADD, _ADD_IN_PLACE, _SCALE, _BIAS_ADD, BIAS_BACKWARD, _MULTIPLY, _CAST, _FILL,
)  # fmt: skip

Make = Callable[[np.random.Generator], Arguments]
_SHAPES: tuple[tuple[str, tuple[int, ...], bool], ...] = (
    ("3x37", (3, 37), True),
    ("one", (1,), True),
    ("scalar", (), True),
    ("empty", (0, 5), True),
    ("2x3x1429_several_blocks", (2, 3, 1429), True),
    ("100003_many_blocks", (100_003,), False),
)


def _normals(shape: tuple[int, ...], *names: str, **settings: Any) -> Make:
    def make(rng: np.random.Generator) -> Arguments:
        # standard_normal(()) is a float, and storage has to be an array
        return {**{n: np.asarray(rng.standard_normal(shape)) for n in names}, **settings}

    return make


def _samples(*names: str, **settings: Any) -> tuple[Sample, ...]:
    return tuple(
        Sample(name, _normals(shape, *names, **settings), small=small)
        for name, shape, small in _SHAPES
    )


def _biased(t: int, n: int) -> Make:
    return lambda rng: {"x": rng.standard_normal((t, n)), "bias": rng.standard_normal(n)}


def _shapes(name_a: str, a: tuple[int, ...], name_b: str, b: tuple[int, ...]) -> Make:
    return lambda rng: {name_a: rng.standard_normal(a), name_b: rng.standard_normal(b)}


def _integers(name: str, **settings: Any) -> Make:
    return lambda rng: {name: np.arange(4), **settings}


def _add_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    return {"a": grad_outputs[0], "b": grad_outputs[0]}


def _multiply_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    return {
        "a": call("multiply", a=grad_outputs[0], b=inputs["b"]),
        "b": call("multiply", a=grad_outputs[0], b=inputs["a"]),
    }


def _scale_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    return {"x": call("scale", x=grad_outputs[0], s=inputs["s"])}


def _bias_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    return {"x": grad_outputs[0], "bias": call("bias_backward", grad_y=grad_outputs[0])}


def _binary_bytes(first: str) -> Callable[[Arguments, int], int]:
    return lambda inputs, itemsize: 3 * inputs[first].size * itemsize


def _cast_bytes(inputs: Arguments, itemsize: int) -> int:
    return inputs["x"].size * (itemsize + inputs["dtype"].itemsize)


def _bias_bytes(inputs: Arguments, itemsize: int) -> int:
    return (2 * inputs["x"].size + inputs["bias"].size) * itemsize


def _add_baseline(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def _add_in_place_baseline(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return dst.add_(src)


def _multiply_baseline(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def _scale_baseline(x: torch.Tensor, s: float) -> torch.Tensor:
    return x * s


def _bias_baseline(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + bias


def _cast_baseline(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def _fill_baseline(x: torch.Tensor, value: float) -> torch.Tensor:
    return x.fill_(value)


_ONE_PASS = "one pass: each operand is read once, the result written once"
_ONE_ROUNDING = "one operation in float32 and one rounding at the store"

OPS: tuple[Op, ...] = (
    Op(
        name="add",
        family="elementwise",
        forward=_ADD,
        samples=_samples("a", "b"),
        errors=(
            ErrorCase("shapes_differ", "add", _shapes("a", (3, 8), "b", (8, 3)),
                      ShapeMismatchError, "b has shape"),
            ErrorCase("integers", "add", lambda rng: {"a": np.arange(4), "b": np.arange(4)},
                      DTypeError, "a is int64"),
        ),
        floats=("a", "b"),
        differentiable=("a", "b"),
        vjp=_add_vjp,
        reduction=lambda inputs: 2,
        tolerance_reason=_ONE_ROUNDING,
        bytes_moved=_binary_bytes("a"),
        flops=lambda inputs: inputs["a"].size,
        traffic_bound=1.05,
        traffic_reason=_ONE_PASS,
        torch_baseline=_add_baseline,
        source="a + b",
    ),
    Op(
        name="add_",
        family="elementwise",
        forward=_ADD_IN_PLACE,
        samples=_samples("dst", "src"),
        errors=(
            ErrorCase("shapes_differ", "add_", _shapes("dst", (3, 8), "src", (3, 7)),
                      ShapeMismatchError, "src has shape"),
        ),
        floats=("dst", "src"),
        reduction=lambda inputs: 2,
        tolerance_reason=_ONE_ROUNDING,
        bytes_moved=_binary_bytes("dst"),
        flops=lambda inputs: inputs["dst"].size,
        traffic_bound=1.05,
        traffic_reason=_ONE_PASS,
        torch_baseline=_add_in_place_baseline,
        source="dst += src",
    ),
    Op(
        name="multiply",
        family="elementwise",
        forward=_MULTIPLY,
        backward=(_MULTIPLY,),
        samples=_samples("a", "b"),
        errors=(
            ErrorCase("shapes_differ", "multiply", _shapes("a", (4,), "b", (5,)),
                      ShapeMismatchError, "b has shape"),
        ),
        floats=("a", "b"),
        differentiable=("a", "b"),
        vjp=_multiply_vjp,
        reduction=lambda inputs: 1,
        tolerance_reason=_ONE_ROUNDING,
        bytes_moved=_binary_bytes("a"),
        flops=lambda inputs: inputs["a"].size,
        traffic_bound=1.05,
        traffic_reason=_ONE_PASS,
        torch_baseline=_multiply_baseline,
        source="a * b",
    ),
    Op(
        name="scale",
        family="elementwise",
        forward=_SCALE,
        backward=(_SCALE,),
        samples=_samples("x", s=-0.37),
        errors=(
            ErrorCase("integers", "scale", _integers("x", s=2.0), DTypeError, "x is int64"),
        ),
        floats=("x",),
        differentiable=("x",),
        vjp=_scale_vjp,
        reduction=lambda inputs: 1,
        tolerance_reason="the factor is rounded to float32, the product once at the store",
        bytes_moved=lambda inputs, itemsize: 2 * inputs["x"].size * itemsize,
        flops=lambda inputs: inputs["x"].size,
        traffic_bound=1.05,
        traffic_reason=_ONE_PASS,
        torch_baseline=_scale_baseline,
        source="s * x",
    ),
    Op(
        name="bias_add",
        family="elementwise",
        forward=_BIAS_ADD,
        backward=(BIAS_BACKWARD,),
        samples=(
            Sample("T7_N37", _biased(7, 37)),
            Sample("T1_N1", _biased(1, 1)),
            Sample("T0_N5", _biased(0, 5)),
            Sample("T3_N0", _biased(3, 0)),
            Sample("T9_N1029_several_blocks", _biased(9, 1029)),
            Sample("T300_N65_several_row_blocks", _biased(300, 65)),
            Sample("T1100_N131", _biased(1100, 131), small=False),
        ),
        errors=(
            ErrorCase("bias_of_another_size", "bias_add", _shapes("x", (3, 8), "bias", (3,)),
                      ShapeMismatchError, "bias has shape"),
            ErrorCase("one_dimension", "bias_backward",
                      lambda rng: {"grad_y": rng.standard_normal(8)},
                      ShapeMismatchError, "grad_y has shape"),
        ),
        floats=("x", "bias"),
        differentiable=("x", "bias"),
        vjp=_bias_vjp,
        reduction=lambda inputs: max(inputs["x"].shape[0], 2),
        tolerance_reason="one rounding at the store; the bias's gradient is summed over rows in "
        "float32 in fixed order",
        bytes_moved=_bias_bytes,
        flops=lambda inputs: inputs["x"].size,
        traffic_bound=1.05,
        traffic_reason="one pass; the bias row stays in the cache",
        torch_baseline=_bias_baseline,
        source="x + bias over rows; gradient summed over rows",
    ),
    Op(
        name="cast",
        family="elementwise",
        # A rounding has no useful derivative: gradients are cast back, which autograd does.
        forward=_CAST,
        samples=(
            *(
                Sample(f"{name}_to_{str(dtype).removeprefix('torch.')}",
                       _normals(shape, "x", dtype=dtype), small=small)
                for name, shape, small in _SHAPES[:2] + _SHAPES[4:]
                for dtype in (torch.float32, torch.float16, torch.bfloat16)
            ),
            Sample("empty_to_float16", _normals((0, 5), "x", dtype=torch.float16)),
        ),
        errors=(
            ErrorCase("to_integers", "cast", lambda rng: {"x": np.zeros(3), "dtype": torch.int32},
                      DTypeError, "dtype is int32"),
            ErrorCase("of_integers", "cast", _integers("x", dtype=torch.float16),
                      DTypeError, "x is int64"),
        ),
        floats=("x",),
        reduction=lambda inputs: 1,
        tolerance_reason="exact: both sides round the same value to nearest even",
        bytes_moved=_cast_bytes,
        flops=lambda inputs: inputs["x"].size,
        traffic_bound=1.05,
        traffic_reason=_ONE_PASS,
        torch_baseline=_cast_baseline,
        source="IEEE 754-2019, 4.3.1, roundTiesToEven",
    ),
    Op(
        name="fill_",
        family="elementwise",
        forward=_FILL,
        samples=_samples("x", value=0.1),
        errors=(
            ErrorCase("integers", "fill_", _integers("x", value=0.0), DTypeError, "x is int64"),
        ),
        floats=("x",),
        reduction=lambda inputs: 1,
        tolerance_reason="the value is rounded once",
        bytes_moved=lambda inputs, itemsize: inputs["x"].size * itemsize,
        flops=lambda inputs: 0,
        traffic_bound=1.05,
        traffic_reason="one write an element",
        torch_baseline=_fill_baseline,
        source="x[...] = value",
    ),
)  # fmt: skip
