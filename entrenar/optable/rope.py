"""The row of rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import DataError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function(
    "rope_forward", "rope", results=("q", "k"), mutates=("q", "k"), alike=("q", "k")
)
_BACKWARD = Function(
    "rope_backward",
    "rope",
    results=("grad_q", "grad_k"),
    mutates=("grad_q", "grad_k"),
    alike=("grad_q", "grad_k"),
)
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD)


def _tables(n_positions: int, half: int) -> dict[str, np.ndarray]:
    angles = np.arange(n_positions)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    # rounded to float32, which is what a kernel reads
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    return {name: t.astype(np.float32).astype(np.float64) for name, t in tables.items()}


def _make(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    index: str = "int64",
    n_positions: int = 50,
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        return {
            "q": rng.standard_normal((tokens, heads, head_dim)),
            "k": rng.standard_normal((tokens, kv_heads, head_dim)),
            **_tables(n_positions, (rotary_dim or head_dim) // 2),
            "positions": rng.integers(0, n_positions, tokens).astype(index),
        }

    return make


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    tables = {name: inputs[name] for name in ("cos", "sin", "positions")}
    grad_q, grad_k = call("rope_backward", grad_q=grad_outputs[0], grad_k=grad_outputs[1], **tables)
    return {"q": grad_q, "k": grad_k}


def _bytes(inputs: Arguments, itemsize: int) -> int:
    half, heads = inputs["cos"].shape[1], inputs["q"].shape[1] + inputs["k"].shape[1]
    tokens, index = inputs["positions"].size, inputs["positions"].itemsize
    # the rows of the tables in use count once
    rows = len(np.unique(np.asarray(inputs["positions"])))
    return 2 * tokens * heads * 2 * half * itemsize + 8 * rows * half + tokens * index


def _flops(inputs: Arguments) -> int:
    heads = inputs["q"].shape[1] + inputs["k"].shape[1]
    return 6 * inputs["positions"].size * heads * inputs["cos"].shape[1]


def _baseline(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    c, s = (table[positions.long()][:, None].to(q.dtype) for table in (cos, sin))
    half = cos.shape[1]
    turned = []
    for x in (q, k):
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned.append(torch.cat((first * c - second * s, second * c + first * s, rest), -1))
    return q.copy_(turned[0]), k.copy_(turned[1])


def _head_dims_differ(rng: np.random.Generator) -> Arguments:
    return {**_make(3, 2, 1, 8)(rng), "k": rng.standard_normal((3, 1, 6))}


def _table_too_wide(rng: np.random.Generator) -> Arguments:
    return {**_make(3, 2, 1, 8)(rng), **_tables(50, 5)}


def _position_outside(rng: np.random.Generator) -> Arguments:
    return {**_make(3, 2, 1, 8)(rng), "positions": np.array([0, 50, 1])}


OPS: tuple[Op, ...] = (
    Op(
        name="rope",
        family="rope",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=(
            Sample("T5_H3_1_D32", _make(5, 3, 1, 32)),
            Sample("T7_H14_2_D64", _make(7, 14, 2, 64)),
            Sample("T3_H2_1_D128_int32", _make(3, 2, 1, 128, index="int32")),
            Sample("T4_H3_3_D20_partial12", _make(4, 3, 3, 20, rotary_dim=12)),
            Sample("T1_H1_1_D2", _make(1, 1, 1, 2)),
            Sample("T0_H4_2_D16", _make(0, 4, 2, 16)),
            Sample("T67_H9_3_D64_several_blocks", _make(67, 9, 3, 64), small=False),
        ),
        errors=(
            ErrorCase("head_dims_differ", "rope_forward", _head_dims_differ,
                      ShapeMismatchError, "k has shape"),
            ErrorCase("table_wider_than_a_head", "rope_forward", _table_too_wide,
                      ShapeMismatchError, "cos has 5 angles"),
            ErrorCase("position_outside_the_table", "rope_forward", _position_outside,
                      DataError, "positions run from 0 to 50"),
        ),
        floats=("q", "k"),
        differentiable=("q", "k"),
        vjp=_vjp,
        reduction=lambda inputs: 2,
        tolerance_reason="two products and their sum in float32, one rounding at the store",
        bytes_moved=_bytes,
        flops=_flops,
        traffic_bound=1.05,
        traffic_reason="one pass in place; the tables' rows in use count once",
        torch_baseline=_baseline,
        source="Su et al., arXiv:2104.09864, equation 34; transformers' apply_rotary_pos_emb",
        grad_outputs=(0, 1),
    ),
)  # fmt: skip
