"""The row of the products with an NF4 weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from entrenar.errors import ShapeMismatchError
from entrenar.optable.nf4 import baseline_dense, weight
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

FUNCTIONS = (
    Function("nf4_gemm_forward", "nf4_gemm", results=("x",), mutates=("out",)),
    Function("nf4_gemm_backward", "nf4_gemm", results=("grad_y",), mutates=("out",)),
)


def _sample(
    rows: int,
    n_in: int,
    n_out: int,
    block_size: int = 64,
    double: bool = False,
    bias: bool = False,
    small: bool = True,
) -> Sample:
    def make(rng: np.random.Generator) -> Arguments:
        return {
            "x": rng.standard_normal((rows, n_in)),
            "w": weight(rng, (n_out, n_in), block_size, double),
            "bias": rng.standard_normal(n_out) if bias else None,
        }

    name = f"T{rows}_in{n_in}_out{n_out}"
    name += f"_block{block_size}" * (block_size != 64) + "_double" * double + "_bias" * bias
    return Sample(name, make, small=small)


def _wrong_x(rng: np.random.Generator) -> Arguments:
    return {"x": rng.standard_normal((3, 63)), "w": weight(rng, (5, 64)), "bias": None}


def _wrong_w(rng: np.random.Generator) -> Arguments:
    return {"x": rng.standard_normal((3, 64)), "w": weight(rng, (64,)), "bias": None}


def _wrong_grad(rng: np.random.Generator) -> Arguments:
    return {"grad_y": rng.standard_normal((3, 4)), "w": weight(rng, (5, 64))}


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> Mapping[str, Any]:
    return {"x": call("nf4_gemm_backward", grad_y=grads[0], w=inputs["w"])}


def _bytes(a: Arguments, itemsize: int) -> int:
    rows, n_in = a["x"].shape
    n_out = a["w"].shape[0]
    bias = 0 if a["bias"] is None else n_out
    return (rows * (n_in + n_out) + bias) * itemsize + a["w"].nbytes


def _baseline(x: Any, w: Any, bias: Any = None, out: Any = None) -> Any:
    import torch

    y = torch.nn.functional.linear(x, baseline_dense(w, x.dtype), bias)
    return y if out is None else out.copy_(y)


OPS = (
    Op(
        name="nf4_gemm",
        family="nf4_gemm",
        forward=FUNCTIONS[0],
        backward=(FUNCTIONS[1],),
        samples=(
            _sample(1, 64, 5),
            _sample(7, 37, 11),
            _sample(3, 65, 2, double=True),
            _sample(0, 64, 8),
            _sample(5, 1, 3),
            _sample(17, 96, 40, block_size=32, bias=True),
            _sample(33, 256, 130, block_size=128, double=True),
            _sample(300, 192, 80, bias=True, small=False),
        ),
        errors=(
            ErrorCase(
                "x_features", "nf4_gemm_forward", _wrong_x, ShapeMismatchError, "x has shape"
            ),
            ErrorCase("w_1d", "nf4_gemm_forward", _wrong_w, ShapeMismatchError, "w has shape"),
            ErrorCase(
                "grad_features", "nf4_gemm_backward", _wrong_grad, ShapeMismatchError, "grad_y has"
            ),
        ),
        floats=("x", "w", "bias"),
        differentiable=("x",),
        vjp=_vjp,
        reduction=lambda a: max(a["w"].shape),
        b=4.0,
        rounds_inside=True,
        bytes_moved=_bytes,
        flops=lambda a: 2 * a["x"].shape[0] * a["w"].shape[0] * a["w"].shape[1],
        has_dot=True,
        traffic_reason="none is meant: a product reads an operand once per tile of the other",
        torch_baseline=_baseline,
        tolerance_reason="the decoded weight is rounded to x's dtype before the product, as in bnb",
        source="Dettmers et al., QLoRA, equation 5",
    ),
)
