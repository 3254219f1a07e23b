"""Rows of RMS normalisation: alone, and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function(
    "rms_norm_forward",
    "rms_norm",
    results=("x", "float32", "x"),
    alike=("x", "weight", "residual"),
    or_float32=("weight",),
)
_BACKWARD = Function(
    "rms_norm_backward",
    "rms_norm",
    results=("x", "(weight)"),
    alike=("grad_y", "x", "weight", "grad_residual"),
    or_float32=("weight",),
)
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD)


def _make(
    shape: tuple[int, ...], residual: bool = False, eps: float = 1e-6, size: float = 1.0
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        arguments: Arguments = {
            "x": size * rng.standard_normal(shape),
            "weight": 1 + 0.3 * rng.standard_normal(shape[-1]),
            "eps": eps,
        }
        if residual:
            arguments["residual"] = size * rng.standard_normal(shape)
        return arguments

    return make


def _samples(residual: bool) -> tuple[Sample, ...]:
    def sample(name: str, *shape: int, small: bool = True, **kwargs: float) -> Sample:
        return Sample(name, _make(shape, residual, **kwargs), small=small)

    return (
        sample("T7_D123", 7, 123),
        # a row of one number: without a large eps its gradient is nothing but cancellation
        sample("T1_D1", 1, 1, eps=0.5),
        sample("T0_D8", 0, 8),
        sample("T33_D64", 33, 64),
        sample("T5_heads3_D64", 5, 3, 64),
        sample("T70_D16_many_rows", 70, 16),
        sample("T3_D96_eps_dominates", 3, 96, eps=1e-2, size=1e-4),
        sample("T5_D576", 5, 576),
        sample("T3_D4100", 3, 4100, small=False),
        sample("T2_D20011_beyond_a_block", 2, 20011, small=False),
        sample("T300_D576", 300, 576, small=False),
    )


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    x = inputs["x"] if inputs.get("residual") is None else outputs[2]
    grad_residual = None if inputs.get("residual") is None else grad_outputs[1]
    grad_x, grad_weight = call(
        "rms_norm_backward",
        grad_y=grad_outputs[0],
        x=x,
        weight=inputs["weight"],
        rstd=outputs[1],
        grad_residual=grad_residual,
    )
    gradients = {"x": grad_x, "weight": grad_weight}
    return gradients if grad_residual is None else {**gradients, "residual": grad_x}


def _rows(inputs: Arguments) -> int:
    return inputs["x"].size // max(inputs["x"].shape[-1], 1)


def _reduction(inputs: Arguments) -> int:
    return max(_rows(inputs), inputs["x"].shape[-1])


def _bytes(inputs: Arguments, itemsize: int) -> int:
    passes = 2 if inputs.get("residual") is None else 4
    elements = passes * inputs["x"].size + inputs["weight"].size
    return elements * itemsize + 4 * _rows(inputs)


def _flops(inputs: Arguments) -> int:
    return (4 if inputs.get("residual") is None else 5) * inputs["x"].size


def _baseline(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> Any:
    total = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps)
    rstd = torch.rsqrt(total.float().square().mean(-1) + eps).reshape(-1)
    return (y, rstd) if residual is None else (y, rstd, total)


def _wrong_weight(rng: np.random.Generator) -> Arguments:
    return {"x": rng.standard_normal((3, 8)), "weight": np.ones(4), "eps": 1e-6}


def _wrong_residual(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "residual": rng.standard_normal((2, 8))}


def _negative_eps(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "eps": -1e-6}


def _wrong_rstd(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal((3, 8))
    return {"grad_y": x, "x": x, "weight": np.ones(8), "rstd": np.ones(8)}


_SOURCE = "Zhang and Sennrich, arXiv:1910.07467, equation 4; transformers' LlamaRMSNorm"
_REASON = (
    "one rounding of y and of grad_x; the sums of squares and products are over D, the weight's "
    "gradient over rows; rounding residual_sum adds one more in the backward pass"
)
_TRAFFIC = "each row is read once and kept in registers; a row past a block is read twice"

OPS: tuple[Op, ...] = (
    Op(
        name="rms_norm",
        family="rms_norm",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=_samples(residual=False),
        errors=(
            ErrorCase(
                "weight_of_another_size",
                "rms_norm_forward",
                _wrong_weight,
                ShapeMismatchError,
                "weight has shape",
            ),
            ErrorCase("negative_eps", "rms_norm_forward", _negative_eps, ConfigError, "eps is"),
            ErrorCase(
                "rstd_of_another_size",
                "rms_norm_backward",
                _wrong_rstd,
                ShapeMismatchError,
                "rstd has shape",
            ),
        ),
        floats=("x", "weight"),
        differentiable=("x", "weight"),
        vjp=_vjp,
        reduction=_reduction,
        a=1.0,
        b=2.0,
        tolerance_reason=_REASON,
        bytes_moved=_bytes,
        flops=_flops,
        traffic_bound=1.05,
        traffic_reason=_TRAFFIC,
        torch_baseline=_baseline,
        source=_SOURCE,
    ),
    Op(
        name="rms_norm_residual",
        family="rms_norm",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=_samples(residual=True),
        errors=(
            ErrorCase(
                "residual_of_another_size",
                "rms_norm_forward",
                _wrong_residual,
                ShapeMismatchError,
                "residual has shape",
            ),
        ),
        floats=("x", "weight", "residual"),
        differentiable=("x", "weight", "residual"),
        vjp=_vjp,
        reduction=_reduction,
        a=2.0,
        b=2.0,
        tolerance_reason=_REASON,
        rounds_inside=True,
        bytes_moved=_bytes,
        flops=_flops,
        traffic_bound=1.05,
        traffic_reason=_TRAFFIC,
        torch_baseline=_baseline,
        source=_SOURCE,
        grad_outputs=(0, 2),
    ),
)
