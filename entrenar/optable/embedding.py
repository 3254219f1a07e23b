"""The row of the embedding gather and its scatter-add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import DataError, DTypeError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_FORWARD = Function("embedding_forward", "embedding", results=("weight",), mutates=("status",))
_BACKWARD = Function("embedding_backward", "embedding", results=("grad_y",))
FUNCTIONS: tuple[Function, ...] = (_FORWARD, _BACKWARD)


def _make(
    tokens: int, n_rows: int, width: int, same: bool = False, index: str = "int64"
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        ids = rng.integers(0, n_rows, tokens) if not same else np.full(tokens, n_rows - 1)
        return {"ids": ids.astype(index), "weight": rng.standard_normal((n_rows, width))}

    return make


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    n_rows = inputs["weight"].shape[0]
    grad = call("embedding_backward", grad_y=grad_outputs[0], ids=inputs["ids"], n_rows=n_rows)
    return {"weight": grad}


def _bytes(inputs: Arguments, itemsize: int) -> int:
    ids, width = np.asarray(inputs["ids"]), inputs["weight"].shape[1]
    # a row of the table that several ids name is read once at best
    return (len(np.unique(ids)) + ids.size) * width * itemsize + ids.nbytes


def _baseline(
    ids: torch.Tensor, weight: torch.Tensor, status: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, weight)


def _id_too_large(rng: np.random.Generator) -> Arguments:
    return {"ids": np.array([0, 5]), "weight": rng.standard_normal((5, 4))}


def _id_negative(rng: np.random.Generator) -> Arguments:
    return {"ids": np.array([0, -1]), "weight": rng.standard_normal((5, 4))}


def _float_ids(rng: np.random.Generator) -> Arguments:
    return {"ids": np.array([0.0, 1.0]), "weight": rng.standard_normal((5, 4))}


def _rows_differ(rng: np.random.Generator) -> Arguments:
    return {"grad_y": rng.standard_normal((3, 4)), "ids": np.array([0, 1]), "n_rows": 5}


def _backward_id_too_large(rng: np.random.Generator) -> Arguments:
    return {"grad_y": rng.standard_normal((2, 4)), "ids": np.array([0, 5]), "n_rows": 5}


OPS: tuple[Op, ...] = (
    Op(
        name="embedding",
        family="embedding",
        forward=_FORWARD,
        backward=(_BACKWARD,),
        samples=(
            Sample("T7_V11_H37", _make(7, 11, 37)),
            Sample("T23_V3_H16_repeated", _make(23, 3, 16)),
            Sample("T5_V9_H8_int32", _make(5, 9, 8, index="int32")),
            Sample("T1_V1_H1", _make(1, 1, 1)),
            Sample("T0_V4_H8", _make(0, 4, 8)),
            Sample("T40_V5_H20_all_the_same", _make(40, 5, 20, same=True)),
            Sample("T9_V20_H1100_several_blocks", _make(9, 20, 1100), small=False),
            Sample("T150_V40_H33", _make(150, 40, 33), small=False),
        ),
        errors=(
            ErrorCase("id_past_the_table", "embedding_forward", _id_too_large,
                      DataError, "ids run from 0 to 5"),
            ErrorCase("negative_id", "embedding_forward", _id_negative,
                      DataError, "ids run from -1 to 0"),
            ErrorCase("floating_ids", "embedding_forward", _float_ids, DTypeError, "ids is float"),
            ErrorCase("rows_differ", "embedding_backward", _rows_differ,
                      ShapeMismatchError, "grad_y has shape"),
            ErrorCase("backward_id_past_the_table", "embedding_backward", _backward_id_too_large,
                      DataError, "ids run from 0 to 5"),
        ),
        floats=("weight",),
        differentiable=("weight",),
        vjp=_vjp,
        reduction=lambda inputs: max(int(inputs["ids"].size), 1),
        tolerance_reason="the gather is exact; a row's gradient is a sum over the tokens that "
        "name it, in float32, rounded once",
        bytes_moved=_bytes,
        flops=lambda inputs: 0,
        traffic_bound=None,
        traffic_reason="a row that several ids name is read once for each by a gather; caches, "
        "which the count leaves out, catch it",
        torch_baseline=_baseline,
        source="a gather and its transpose; torch.nn.functional.embedding",
    ),
)  # fmt: skip
