"""Row of softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function(
    "softmax_forward", "softmax", results=("x",), mutates=("out",), alike=("x", "out")
)
_BACKWARD = Function(
    "softmax_backward", "softmax", results=("y",), mutates=("out",), alike=("grad_y", "y", "out")
)
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD)


def _make(
    *shape: int, size: float = 1.0, **settings: Any
) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"x": size * rng.standard_normal(shape), **settings}


def _equal(rng: np.random.Generator) -> Arguments:
    return {"x": np.full((3, 65), 7.5)}


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    scale = inputs.get("scale", 1.0)
    return {
        "x": call("softmax_backward", grad_y=grad_outputs[0], y=outputs[0], scale=scale),
    }


def _baseline(x: torch.Tensor, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
    scaled = x if scale == 1.0 else x * scale
    if causal:
        rows, n = x.shape[-2:]
        hidden = torch.ones(rows, n, dtype=torch.bool, device=x.device).triu(n - rows + 1)
        scaled = scaled.masked_fill(hidden, float("-inf"))
    y = torch.softmax(scaled, dim=-1)
    return y.nan_to_num(0.0) if causal else y


def _short_y(rng: np.random.Generator) -> Arguments:
    return {"grad_y": rng.standard_normal((3, 8)), "y": rng.standard_normal((3, 7))}


def _short_out(rng: np.random.Generator) -> Arguments:
    return {"x": rng.standard_normal((3, 8)), "out": np.zeros((2, 8))}


OPS: tuple[Op, ...] = (
    Op(
        name="softmax",
        family="softmax",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=(
            Sample("5x37", _make(5, 37)),
            Sample("1x1", _make(1, 1)),
            Sample("0x8", _make(0, 8)),
            Sample("4x0", _make(4, 0)),
            Sample("all_equal", _equal),
            Sample("7x129_scaled", _make(7, 129, size=4.0, scale=0.125)),
            Sample("2x9x9_causal", _make(2, 9, 9, causal=True)),
            Sample("5x12_causal_with_a_prefix", _make(5, 12, causal=True)),
            Sample("9x4_causal_rows_all_masked", _make(9, 4, causal=True, scale=2.0)),
            Sample("large_logits", _make(3, 100, size=300.0)),
            Sample("70x33_several_blocks", _make(70, 33)),
            Sample("2x4099", _make(2, 4099), small=False),
            Sample("2x33000_past_a_block", _make(2, 33000), small=False),
            Sample("3x40001_past_a_block_causal", _make(3, 40001, causal=True), small=False),
        ),
        errors=(
            ErrorCase("y_of_another_size", "softmax_backward", _short_y,
                      ShapeMismatchError, "grad_y has shape"),
            ErrorCase("out_of_another_size", "softmax_forward", _short_out,
                      ShapeMismatchError, "out has shape"),
            ErrorCase("causal_needs_two_axes", "softmax_forward", _make(8, causal=True),
                      ShapeMismatchError, "wanted at least 2"),
        ),
        floats=("x",),
        differentiable=("x",),
        vjp=_vjp,
        reduction=lambda inputs: max(inputs["x"].shape[-1], 1),
        a=1.0,
        b=4.0,
        tolerance_reason="one rounding at the store; the exponential's argument is rounded in "
        "float32, which adds its size in units of the last place, and the backward pass reads y "
        "as it was rounded",
        rounds_inside=True,
        bytes_moved=lambda inputs, itemsize: 2 * inputs["x"].size * itemsize,
        flops=lambda inputs: 5 * inputs["x"].size,
        traffic_bound=1.5,
        traffic_reason="a row within one block is read once (1.0); a longer one twice, once for "
        "its maximum and sum and once to be written",
        torch_baseline=_baseline,
        source="y_j = exp(x_j - max x) / sum_k exp(x_k - max x); the one-pass maximum and sum of "
        "Milakov and Gimelshein, arXiv:1805.02867, algorithm 3",
    ),
)  # fmt: skip
