"""Rows of layer normalisation: alone, and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function(
    "layer_norm_forward", "layer_norm", results=("x", "float32", "float32", "x"),
    alike=("x", "weight", "bias", "residual"),
)  # fmt: skip
_BACKWARD = Function(
    "layer_norm_backward", "layer_norm", results=("x", "(weight)", "(weight)"),
    alike=("grad_y", "x", "weight", "grad_residual"),
)  # fmt: skip
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD)


def _make(
    shape: tuple[int, ...],
    residual: bool = False,
    eps: float = 1e-5,
    size: float = 1.0,
    centre: float = 0.0,
    bias: bool = True,
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        arguments: Arguments = {
            "x": centre + size * rng.standard_normal(shape),
            "weight": 1 + 0.3 * rng.standard_normal(shape[-1]),
            "bias": 0.3 * rng.standard_normal(shape[-1]) if bias else None,
            "eps": eps,
        }
        if residual:
            arguments["residual"] = size * rng.standard_normal(shape)
        return arguments

    return make


def _samples(residual: bool) -> tuple[Sample, ...]:
    def sample(name: str, *shape: int, small: bool = True, **kwargs: Any) -> Sample:
        return Sample(name, _make(shape, residual, **kwargs), small=small)

    if residual:  # the same kernels: what the sum adds, alone
        return (
            sample("T7_D123", 7, 123),
            sample("T0_D8", 0, 8),
            sample("T33_D64_no_bias", 33, 64, bias=False),
            sample("T2_D20011_beyond_a_block", 2, 20011, small=False, centre=2.0),
        )
    return (
        sample("T7_D123", 7, 123),
        # a row of one number is its mean: without a large eps its gradient is nothing but cancellation
        sample("T1_D1", 1, 1, eps=0.5),
        sample("T0_D8", 0, 8),
        sample("T33_D64_no_bias", 33, 64, bias=False),
        sample("T5_heads3_D64", 5, 3, 64),
        sample("T70_D16_many_rows", 70, 16),
        sample("T3_D96_eps_dominates", 3, 96, eps=1e-2, size=1e-4),
        sample("T4_D768_off_centre", 4, 768, centre=8.0),
        sample("T3_D4100", 3, 4100, small=False),
        sample("T2_D20011_beyond_a_block", 2, 20011, small=False, centre=2.0),
        sample("T300_D576", 300, 576, small=False),
    )


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    fused = inputs.get("residual") is not None
    grad_x, grad_weight, grad_bias = call(
        "layer_norm_backward",
        grad_y=grad_outputs[0],
        x=outputs[3] if fused else inputs["x"],
        weight=inputs["weight"],
        mean=outputs[1],
        rstd=outputs[2],
        grad_residual=grad_outputs[1] if fused else None,
        need_grad_bias=inputs["bias"] is not None,
    )
    gradients = {"x": grad_x, "weight": grad_weight, "bias": grad_bias}
    return {**gradients, "residual": grad_x} if fused else gradients


def _rows(inputs: Arguments) -> int:
    return inputs["x"].size // max(inputs["x"].shape[-1], 1)


def _reduction(inputs: Arguments) -> int:
    return max(_rows(inputs), inputs["x"].shape[-1])


def _scale(inputs: Arguments) -> float:
    """Size of what is subtracted: x itself, over the deviation that it is divided by."""
    x = np.asarray(inputs["x"], np.float64)
    if inputs.get("residual") is not None:
        x = x + np.asarray(inputs["residual"], np.float64)
    if not x.size:
        return 1.0
    deviation = np.sqrt(np.var(x, axis=-1) + inputs["eps"])
    return float(1 + np.max(np.abs(x) / deviation[..., None]))


def _bytes(inputs: Arguments, itemsize: int) -> int:
    passes = 2 if inputs.get("residual") is None else 4
    parameters = inputs["weight"].size * (1 if inputs.get("bias") is None else 2)
    return (passes * inputs["x"].size + parameters) * itemsize + 8 * _rows(inputs)


def _flops(inputs: Arguments) -> int:
    return (7 if inputs.get("residual") is None else 8) * inputs["x"].size


def _baseline(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> Any:
    total = x if residual is None else x + residual
    y = torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)
    wide = total if total.dtype == torch.float64 else total.float()
    mean = wide.mean(-1).reshape(-1)
    variance = (wide - wide.mean(-1, keepdim=True)).square().mean(-1)
    rstd = torch.rsqrt(variance + eps).reshape(-1)
    return (y, mean, rstd) if residual is None else (y, mean, rstd, total)


def _wrong_weight(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "weight": np.ones(4)}


def _wrong_bias(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "bias": np.ones(4)}


def _wrong_residual(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "residual": rng.standard_normal((2, 8))}


def _negative_eps(rng: np.random.Generator) -> Arguments:
    return {**_make((3, 8))(rng), "eps": -1e-6}


def _wrong_mean(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal((3, 8))
    return {"grad_y": x, "x": x, "weight": np.ones(8), "mean": np.ones(8), "rstd": np.ones(3)}


_SOURCE = "Ba, Kiros and Hinton, arXiv:1607.06450, equation 4; torch.nn.functional.layer_norm"
_REASON = (
    "one rounding of y and of grad_x; sums are over D, or over rows for the parameters; x - mean "
    "keeps the rounding of x, so the scale of its terms is |x| over the deviation"
)
_TRAFFIC = "each row is read once and kept in registers; a row past a block is read twice"


def _errors(name: str) -> tuple[ErrorCase, ...]:
    if name == "layer_norm_residual":
        return (
            ErrorCase("residual_of_another_size", "layer_norm_forward", _wrong_residual,
                      ShapeMismatchError, "residual has shape"),
        )  # fmt: skip
    return (
        ErrorCase("weight_of_another_size", "layer_norm_forward", _wrong_weight,
                  ShapeMismatchError, "weight has shape"),
        ErrorCase("bias_of_another_size", "layer_norm_forward", _wrong_bias,
                  ShapeMismatchError, "bias has shape"),
        ErrorCase("negative_eps", "layer_norm_forward", _negative_eps, ConfigError, "eps is"),
        ErrorCase("mean_of_another_size", "layer_norm_backward", _wrong_mean,
                  ShapeMismatchError, "mean has shape"),
    )  # fmt: skip


def _row(name: str, residual: bool) -> Op:
    floats = ("x", "weight", "bias", "residual") if residual else ("x", "weight", "bias")
    return Op(
        name=name,
        family="layer_norm",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=_samples(residual),
        errors=_errors(name),
        floats=floats,
        differentiable=floats,
        vjp=_vjp,
        reduction=_reduction,
        scale=_scale,
        a=2.0 if residual else 1.0,
        b=2.0,
        tolerance_reason=_REASON + ("; residual_sum is rounded too" if residual else ""),
        rounds_inside=residual,
        bytes_moved=_bytes,
        flops=_flops,
        traffic_bound=1.05,
        traffic_reason=_TRAFFIC,
        torch_baseline=_baseline,
        source=_SOURCE,
        grad_outputs=(0, 3) if residual else (0,),
    )


OPS: tuple[Op, ...] = (_row("layer_norm", False), _row("layer_norm_residual", True))
