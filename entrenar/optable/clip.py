"""Rows of the gradient norm, the clip factor, and clipping in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.row import Arguments, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_NORM = Function("grad_norm", "clip", results=("float32",))
_FACTOR = Function("clip_factor", "clip", results=("float32", "float32", "int32"))
_CLIP = Function("clip_grad_norm", "clip", results=("float32",), mutates=("flat",))
Settings = dict[str, float | None]
FUNCTIONS: tuple[Function, ...] = (_NORM, _FACTOR, _CLIP)


def _make(
    n: int, settings: Settings | None = None, size: float = 1.0
) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"flat": size * rng.standard_normal(n), **(settings or {})}


def _zeros(settings: Settings) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"flat": np.zeros(4), **settings}


def _bad(value: float, settings: Settings) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"flat": np.array([1.0, value, 2.0]), **settings}


def _samples(settings: Settings) -> tuple[Sample, ...]:
    return (
        Sample("n37", _make(37, settings)),
        Sample("n1", _make(1, settings)),
        Sample("n0", _make(0, settings)),
        Sample("zeros", _zeros(settings)),
        Sample("n50_below_the_limit", _make(50, settings, size=1e-3)),
        Sample("n20011_several_blocks", _make(20_011, settings), small=False),
        Sample("n150001_many_programs", _make(150_001, settings, size=3.0), small=False),
    )


def _limited(limit: float | None) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {"flat": rng.standard_normal(5), "max_norm": limit}


def _matrix(rng: np.random.Generator) -> Arguments:
    return {"flat": rng.standard_normal((3, 4))}


def _norm_baseline(flat: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(flat.dtype, torch.float32)
    return torch.linalg.vector_norm(flat, dtype=wide).reshape(1)


def _factor_baseline(
    flat: torch.Tensor, max_norm: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norm = _norm_baseline(flat)
    limit = float("inf") if max_norm is None else max_norm
    finite = torch.isfinite(norm)
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    return norm, torch.where(finite, factor, torch.zeros_like(norm)), (~finite).to(torch.int32)


def _clip_baseline(flat: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    norm, factor, skip = _factor_baseline(flat, max_norm)
    flat.copy_(torch.where(skip.bool(), flat, flat * factor))
    return norm


def _length(inputs: Arguments) -> int:
    return max(int(inputs["flat"].size), 1)


_NORM_REASON = "a sum of n squares in float32 in a fixed order, and its root"
_LIMIT_ERRORS = tuple(
    ErrorCase(f"max_norm_{name}", function, _limited(value), ConfigError, "max_norm is")
    for function in ("clip_factor", "clip_grad_norm")
    for name, value in {f"{function}_negative": -1.0, f"{function}_0": 0.0,
                        f"{function}_nan": float("nan")}.items()
)  # fmt: skip

OPS: tuple[Op, ...] = (
    Op(
        name="grad_norm",
        family="clip",
        forward=_NORM,
        samples=_samples({}),
        errors=(
            ErrorCase("two_dimensions", "grad_norm", _matrix, ShapeMismatchError, "flat has shape"),
        ),
        floats=("flat",),
        reduction=_length,
        tolerance_reason=_NORM_REASON,
        bytes_moved=lambda inputs, itemsize: inputs["flat"].size * itemsize + 4,
        flops=lambda inputs: 2 * inputs["flat"].size,
        traffic_bound=1.05,
        traffic_reason="one pass; partial sums are three floats a program",
        torch_baseline=_norm_baseline,
        source="Blue, doi:10.1145/355769.355771, one pass with three accumulators",
    ),
    Op(
        name="clip_factor",
        family="clip",
        forward=_FACTOR,
        samples=(
            *_samples({"max_norm": 1.0}),
            Sample("no_limit", _make(9, {"max_norm": None})),
            Sample("infinite", _bad(float("inf"), {"max_norm": 1.0})),
            Sample("nan", _bad(float("nan"), {"max_norm": 1.0})),
        ),
        errors=_LIMIT_ERRORS[:3],
        floats=("flat",),
        reduction=_length,
        tolerance_reason=_NORM_REASON,
        bytes_moved=lambda inputs, itemsize: inputs["flat"].size * itemsize + 12,
        flops=lambda inputs: 2 * inputs["flat"].size,
        traffic_bound=1.05,
        traffic_reason="one pass; partial sums are three floats a program",
        torch_baseline=_factor_baseline,
        source="Pascanu et al., arXiv:1211.5063, algorithm 1; norm as in Blue's",
    ),
    Op(
        name="clip_grad_norm",
        family="clip",
        forward=_CLIP,
        samples=(*_samples({"max_norm": 1.0}), Sample("no_limit", _make(9, {"max_norm": None}))),
        errors=_LIMIT_ERRORS[3:],
        floats=("flat",),
        reduction=_length,
        tolerance_reason=_NORM_REASON + "; a product with the factor, rounded once",
        bytes_moved=lambda inputs, itemsize: 2 * inputs["flat"].size * itemsize + 4,
        flops=lambda inputs: 3 * inputs["flat"].size,
        traffic_bound=1.5,
        traffic_reason="the norm must be known before the first element is scaled: two reads and "
        "one write; no second pass where the factor is 1",
        torch_baseline=_clip_baseline,
        source="Pascanu et al., arXiv:1211.5063, algorithm 1; torch.nn.utils.clip_grad_norm_",
    ),
)
