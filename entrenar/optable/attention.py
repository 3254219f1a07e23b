"""Rows of the attention family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, DataError, DTypeError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

ATTENTION_FORWARD = Function(
    "attention_forward", "attention", ("q", "float32"), alike=("q", "k", "v")
)
ATTENTION_BACKWARD = Function(
    "attention_backward", "attention", ("q", "k", "v"), alike=("grad_out", "q", "k", "v", "out")
)

FUNCTIONS: tuple[Function, ...] = (ATTENTION_FORWARD, ATTENTION_BACKWARD)


def _arguments(
    rng: np.random.Generator,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    dim: int,
    lengths_k: tuple[int, ...] | None = None,
    **options: Any,
) -> Arguments:
    """Make q, k, v of the given segment lengths; several lengths also make ``cu_seqlens``."""
    keys = lengths if lengths_k is None else lengths_k
    made: Arguments = {
        "q": rng.standard_normal((sum(lengths), heads[0], dim)),
        "k": rng.standard_normal((sum(keys), heads[1], dim)),
        "v": rng.standard_normal((sum(keys), heads[1], dim)),
    }
    if len(lengths) > 1:
        made["cu_seqlens_q"] = np.cumsum((0, *lengths), dtype=np.int32)
        if lengths_k is not None:
            made["cu_seqlens_k"] = np.cumsum((0, *keys), dtype=np.int32)
    return {**made, **options}


def _sample(
    name: str, *shape: Any, small: bool = True, grid: bool = True, **options: Any
) -> Sample:
    def make(rng: np.random.Generator) -> Arguments:
        return _arguments(rng, *shape, **options)

    return Sample(name, make, small, grid)


_SAMPLES = (
    _sample("S7_H1_D8", (7,), (1, 1), 8),
    _sample("S1_H2_kv1_D16", (1,), (2, 1), 16),
    _sample("S17_H4_kv2_D20", (17,), (4, 2), 20),
    _sample("segments_3_0_5_1_H3_kv1_D16", (3, 0, 5, 1), (3, 1), 16),
    _sample("decode_segments_H4_kv2_D16", (1, 1, 1), (4, 2), 16, (9, 4, 1)),
    _sample("more_queries_than_keys", (5,), (2, 2), 16, (2,)),
    _sample("segment_without_keys", (2, 3), (2, 1), 16, (0, 4)),
    _sample("no_rows", (0,), (2, 1), 16),
    _sample("not_causal_S9_Tk13", (9,), (2, 1), 16, (13,), causal=False),
    _sample("window4_S19", (19,), (2, 1), 16, window=4),
    _sample("window3_not_causal", (6,), (1, 1), 16, (8,), causal=False, window=3),
    _sample("scale_0.3_segments", (5, 6), (2, 1), 16, scale=0.3),
    _sample("capped_S13_H2_D16", (13,), (2, 1), 16, softcap=1.5),
    _sample("capped_window_segments", (9, 20), (2, 2), 16, softcap=30.0, window=5, scale=0.4),
    _sample("S65_H2_kv1_D64", (65,), (2, 1), 64, small=False),
    _sample("S129_H2_kv1_D32", (129,), (2, 1), 32, small=False),
    _sample("segments_33_70_D80", (33, 70), (2, 1), 80, small=False),
    _sample("prefill_after_cache_D96", (40,), (2, 2), 96, (103,), small=False),
    _sample("S40_D128", (40,), (2, 1), 128, small=False),
    _sample("S34_D256", (34,), (1, 1), 256, small=False),
    _sample("window50_S150_D64", (150,), (1, 1), 64, window=50, small=False),
    _sample("capped_S70_D256", (70,), (2, 1), 256, softcap=50.0, small=False),
    _sample("S300_H6_kv2_D64", (300,), (6, 2), 64, small=False, grid=False),
)


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> Mapping[str, Any]:
    out, lse = outputs
    grads = call("attention_backward", grad_out=grad_outputs[0], out=out, lse=lse, **inputs)
    return dict(zip(("q", "k", "v"), grads, strict=True))


def _term_scale(inputs: Arguments) -> float:
    """Return the usual size of a score gradient's terms, dP and delta, which cancel for one key."""
    if not inputs["q"].size or not inputs["k"].size:
        return 0.0
    size = {name: float(np.sqrt(np.mean(inputs[name] ** 2))) for name in ("q", "k", "v")}
    dim = inputs["q"].shape[2]
    factor = inputs.get("scale") or 1 / math.sqrt(dim)
    return factor * math.sqrt(dim) * size["v"] * max(size["q"], size["k"])


def _bytes_moved(inputs: Arguments, itemsize: int) -> int:
    q, k = inputs["q"], inputs["k"]
    lse = 4 * q.shape[0] * q.shape[1]
    return int(itemsize * (2 * q.size + 2 * k.size) + lse)


def _segments(inputs: Mapping[str, Any]) -> list[tuple[int, int, int, int]]:
    cu_q = inputs.get("cu_seqlens_q")
    if cu_q is None:
        return [(0, len(inputs["q"]), 0, len(inputs["k"]))]
    cu_k = inputs.get("cu_seqlens_k")
    q, k = cu_q.tolist(), (cu_q if cu_k is None else cu_k).tolist()
    return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))


def _flops(inputs: Arguments) -> int:
    """Count 4 D for each pair of a query and a key it sees, over the query heads."""
    causal, window = inputs.get("causal", True), inputs.get("window", 0)
    pairs = 0
    for q0, q1, k0, k1 in _segments(inputs):
        last = np.arange(q1 - q0) + (k1 - k0) - (q1 - q0)
        stop = np.clip(last + 1, 0, k1 - k0) if causal else np.full(q1 - q0, k1 - k0)
        start = np.clip(last - window + 1, 0, None) if window else 0
        pairs += int(np.clip(stop - start, 0, None).sum())
    return int(4 * pairs * inputs["q"].shape[1] * inputs["q"].shape[2])


def _mask_of_baseline(n_queries: int, n_keys: int, causal: bool, window: int, like: Any) -> Any:
    last = torch.arange(n_queries, device=like.device)[:, None] + n_keys - n_queries
    key = torch.arange(n_keys, device=like.device)[None, :]
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=like.device)
    if causal:
        visible &= key <= last
    if window:
        visible &= key > last - window
    return visible


def _torch_baseline(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention segment by segment, uncapped with torch's scaled_dot_product_attention."""
    group = q.shape[1] // k.shape[1]
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -math.inf)
    given = {"q": q, "k": k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for q0, q1, k0, k1 in _segments(given):
        if q1 == q0 or k1 == k0:
            continue
        queries = q[q0:q1].transpose(0, 1)
        keys, values = (x[k0:k1].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        plain = causal and not window and q1 - q0 == k1 - k0
        mask = None if plain else _mask_of_baseline(q1 - q0, k1 - k0, causal, window, q)
        seen = _mask_of_baseline(q1 - q0, k1 - k0, causal, window, q)
        scores = queries @ keys.transpose(1, 2) * factor
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~seen, -math.inf)
        if softcap:
            segment = (torch.softmax(scores, 2) @ values).transpose(0, 1)
        else:
            segment = torch.nn.functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], mask, is_causal=plain, scale=factor
            )[0].transpose(0, 1)
        lse[:, q0:q1] = torch.logsumexp(scores, dim=2)
        out[q0:q1] = segment.masked_fill(~seen.any(dim=1)[:, None, None], 0)
    return out, lse


def _error(
    name: str, error: type[Exception], match: str, change: Callable[[Arguments], Arguments]
) -> ErrorCase:
    def make(rng: np.random.Generator) -> Arguments:
        made = _arguments(rng, (4,), (2, 1), 8)
        return {**made, **change(made)}

    return ErrorCase(name, "attention_forward", make, error, match)


def _bounds(*values: int) -> Arguments:
    return {"cu_seqlens_q": np.array(values, np.int32)}


def _backward_case(rng: np.random.Generator) -> Arguments:
    made = _arguments(rng, (4,), (2, 1), 8)
    return {"grad_out": made["q"][:3], "out": made["q"], "lse": np.zeros((2, 4)), **made}


_ERRORS = (
    _error(
        "heads_do_not_divide",
        ShapeMismatchError,
        r"q has 3 heads .* k has 2",
        lambda a: {"q": np.ones((4, 3, 8)), "k": np.ones((4, 2, 8)), "v": np.ones((4, 2, 8))},
    ),
    _error(
        "v_unlike_k", ShapeMismatchError, r"v has shape \(3, 1, 8\)", lambda a: {"v": a["v"][:3]}
    ),
    _error("head_dims_differ", ShapeMismatchError, "k has shape", lambda a: {"k": a["k"][..., :4]}),
    _error("q_2d", ShapeMismatchError, "wanted 3 dimensions", lambda a: {"q": a["q"][:, 0]}),
    _error("integers", DTypeError, "q is int64", lambda a: {"q": np.ones((4, 2, 8), np.int64)}),
    _error("negative_window", ConfigError, "window is -1", lambda a: {"window": -1}),
    _error("negative_softcap", ConfigError, "softcap is -2.0", lambda a: {"softcap": -2.0}),
    _error("bounds_int64", DTypeError, "int64", lambda a: {"cu_seqlens_q": np.array([0, 4])}),
    _error("bounds_short", DataError, r"\[0, 3\].*4 rows", lambda a: _bounds(0, 3)),
    _error("bounds_fall", DataError, "wanted boundaries that rise", lambda a: _bounds(0, 3, 2, 4)),
    _error(
        "bounds_of_keys_alone",
        ShapeMismatchError,
        "without cu_seqlens_q",
        lambda a: {"cu_seqlens_k": np.array([0, 4], np.int32)},
    ),
    _error(
        "bounds_count",
        ShapeMismatchError,
        "as many of each",
        lambda a: {**_bounds(0, 2, 4), "cu_seqlens_k": np.array([0, 4], np.int32)},
    ),
    ErrorCase(
        "grad_out_short",
        "attention_backward",
        _backward_case,
        ShapeMismatchError,
        r"grad_out has shape \(3, 2, 8\)",
    ),
)

ATTENTION = Op(
    name="attention",
    family="attention",
    forward=ATTENTION_FORWARD,
    backward=(ATTENTION_BACKWARD,),
    samples=_SAMPLES,
    errors=_ERRORS,
    floats=("q", "k", "v"),
    differentiable=("q", "k", "v"),
    vjp=_vjp,
    reduction=lambda inputs: inputs["q"].shape[2],
    scale=_term_scale,
    a=2.0,
    b=4.0,
    rounds_inside=True,
    tolerance_reason=(
        "K is the head dimension: weights that sum to 1 average the errors of other terms, while "
        "exp turns the absolute error of a score, u * sqrt(D) * |s|, into a relative one; b: |s| up "
        "to about 4, and 16-bit storage rounds p and dS; a: delta is formed from the stored output"
    ),
    bytes_moved=_bytes_moved,
    flops=_flops,
    traffic_bound=None,
    traffic_reason="a product: each block of queries reads the keys again, through the cache",
    has_dot=True,
    torch_baseline=_torch_baseline,
    source='Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and 2',
)

OPS: tuple[Op, ...] = (ATTENTION,)
