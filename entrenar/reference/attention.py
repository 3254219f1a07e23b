"""Causal grouped-query attention over packed segments, in plain NumPy.

For each segment with Lq queries and Lk keys, and each query head h reading key/value head
h // (Hq / Hkv):

    s[i, j] = scale * q[i] . k[j]      where key j is visible to query i, else -inf
              or softcap * tanh(that / softcap)
    lse[i]  = log sum_j exp(s[i, j])
    out[i]  = sum_j exp(s[i, j] - lse[i]) v[j]

Causal visibility is aligned at the bottom right, j <= i + Lk - Lq, so that new queries see all
cached keys; a window w > 0 also wants j > i + Lk - Lq - w.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691), section 3.1, equations of the standard
attention forward and backward passes; grouped heads as in Hugging Face ``repeat_kv``.
"""

from __future__ import annotations

import math

import numpy as np

from entrenar import checks
from entrenar.errors import ConfigError, DataError, ShapeMismatchError

__all__ = ["attention_backward", "attention_forward"]

Segment = tuple[int, int, int, int]


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention of each query over the visible keys of its own segment.

    Args:
        q: [T, Hq, D] queries of all segments, one after another.
        k: [Tk, Hkv, D] keys; Hkv divides Hq.
        v: [Tk, Hkv, D] values.
        cu_seqlens_q: int32 [B+1], where each segment's queries start, and T; None is one segment.
        cu_seqlens_k: The same of the keys; None takes ``cu_seqlens_q``.
        scale: Factor of the scores; None is 1/sqrt(D).
        causal: Key j is visible to query i only if j <= i + Lk - Lq.
        window: If above 0, only keys with j > i + Lk - Lq - window are visible.
        softcap: If above 0, scores s become ``softcap * tanh(s / softcap)`` before the mask.

    Returns:
        out [T, Hq, D] of q's dtype and lse [Hq, T]. A query that sees no key gets zeros and -inf.

    Raises:
        ShapeMismatchError: Sizes do not fit together.
        DTypeError: Arrays are not floating or not of one dtype.
        DataError: ``cu_seqlens`` do not rise from 0 to the number of rows.
        ConfigError: The window or the soft cap is negative.
    """
    segments, scale = check_attention(
        "attention_forward", q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window, softcap
    )
    out = np.zeros(q.shape, q.dtype)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, q.dtype)
    group = q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in segments:
        visible = _visible(q1 - q0, k1 - k0, causal, window)
        for head in range(q.shape[1]):
            keys, values = k[k0:k1, head // group], v[k0:k1, head // group]
            scores, _ = _capped((q[q0:q1, head] @ keys.T) * q.dtype.type(scale), softcap)
            scores = np.where(visible, scores, -np.inf)
            row_lse = _logsumexp(scores)
            lse[head, q0:q1] = row_lse
            out[q0:q1, head] = _probabilities(scores, row_lse) @ values
    return out, lse


def attention_backward(
    grad_out: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of attention from its saved output and logsumexp.

        p = exp(s - lse);  dV = pᵀ dO;  dP = dO Vᵀ;  dS = p (dP - rowsum(dO * O))
        dQ = scale dS K;  dK = scale dSᵀ Q

    Args:
        grad_out: [T, Hq, D] gradient arriving at ``out``.
        q: [T, Hq, D] queries of the forward pass.
        k: [Tk, Hkv, D] keys.
        v: [Tk, Hkv, D] values.
        out: [T, Hq, D] output of the forward pass.
        lse: [Hq, T] logsumexp of the forward pass.
        cu_seqlens_q: As in the forward pass.
        cu_seqlens_k: As in the forward pass.
        scale: As in the forward pass.
        causal: As in the forward pass.
        window: As in the forward pass.
        softcap: As in the forward pass.

    Returns:
        grad_q [T, Hq, D], grad_k [Tk, Hkv, D], grad_v [Tk, Hkv, D]; the gradients of a key/value
        head sum over the query heads that read it. A query that saw no key gives zeros.

    Raises:
        ShapeMismatchError: Sizes do not fit together.
        DTypeError: Arrays are not floating or not of one dtype.
        DataError: ``cu_seqlens`` do not rise from 0 to the number of rows.
        ConfigError: The window or the soft cap is negative.
    """
    op = "attention_backward"
    segments, scale = check_attention(
        op, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window, softcap
    )
    check_saved(op, grad_out, q, out, lse)
    grad_q, grad_k, grad_v = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in segments:
        visible = _visible(q1 - q0, k1 - k0, causal, window)
        for head in range(q.shape[1]):
            shared = head // group
            queries, keys, values = q[q0:q1, head], k[k0:k1, shared], v[k0:k1, shared]
            grad = grad_out[q0:q1, head]
            scores, slope = _capped((queries @ keys.T) * q.dtype.type(scale), softcap)
            scores = np.where(visible, scores, -np.inf)
            p = _probabilities(scores, lse[head, q0:q1])
            delta = (grad * out[q0:q1, head]).sum(axis=1, keepdims=True)
            grad_scores = p * (grad @ values.T - delta) * slope * q.dtype.type(scale)
            grad_q[q0:q1, head] = grad_scores @ keys
            grad_k[k0:k1, shared] += grad_scores.T @ queries
            grad_v[k0:k1, shared] += p.T @ grad
    return grad_q, grad_k, grad_v


def _capped(scores: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scores capped softly, and the derivative of that; 0 caps nothing."""
    if not cap:
        return scores, np.ones_like(scores)
    bent = np.tanh(scores / cap)
    return cap * bent, 1 - np.square(bent)


def _visible(n_queries: int, n_keys: int, causal: bool, window: int) -> np.ndarray:
    last = np.arange(n_queries)[:, None] + n_keys - n_queries
    key = np.arange(n_keys)[None, :]
    visible = np.ones((n_queries, n_keys), bool)
    if causal:
        visible &= key <= last
    if window:
        visible &= key > last - window
    return visible


def _logsumexp(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=1, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0, top)
    with np.errstate(all="ignore"):  # log(0) is the -inf of a row without keys
        return shift + np.log(np.exp(scores - shift[:, None]).sum(axis=1))


def _probabilities(scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    with np.errstate(under="ignore"):
        return np.exp(scores - np.where(np.isneginf(lse), 0, lse)[:, None])


def check_attention(
    op: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray | None,
    cu_seqlens_k: np.ndarray | None,
    scale: float | None,
    window: int,
    softcap: float,
) -> tuple[list[Segment], float]:
    """Check the arguments; return (q start, q stop, k start, k stop) per segment, and the scale."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        checks.check_ndim(op, name, array, 3)
        checks.check_dtype(op, name, array)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    heads, head_dim = q.shape[1:]
    checks.check_shape(op, "k", k, (-1, -1, head_dim), "q, k and v share one head dimension")
    checks.check_shape(op, "v", v, k.shape, "v has the shape of k")
    if head_dim == 0 or k.shape[1] == 0 or heads % k.shape[1]:
        raise ShapeMismatchError(
            f"{op}: q has {heads} heads of {head_dim} and k has {k.shape[1]}, "
            "wanted a multiple of the key/value heads, of at least one feature",
            "each key/value head serves a whole number of query heads",
        )
    if window < 0:
        raise ConfigError(f"{op}: window is {window}, wanted 0 (no window) or more", "")
    checks.check_softcap(op, softcap)
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return [(0, q.shape[0], 0, k.shape[0])], scale
    if cu_seqlens_q is None:
        raise ShapeMismatchError(
            f"{op}: got cu_seqlens_k without cu_seqlens_q", "pass both, or neither for one segment"
        )
    bounds_q = _bounds(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    bounds_k = bounds_q
    if cu_seqlens_k is not None or q.shape[0] != k.shape[0]:
        given = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        bounds_k = _bounds(op, "cu_seqlens_k", given, k.shape[0])
    if len(bounds_q) != len(bounds_k):
        raise ShapeMismatchError(
            f"{op}: cu_seqlens_q has {len(bounds_q)} entries and cu_seqlens_k {len(bounds_k)}, "
            "wanted as many of each",
            "a segment without keys has two equal entries",
        )
    pairs = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    return list(pairs), scale


def _bounds(op: str, name: str, cu_seqlens: np.ndarray, n_rows: int) -> list[int]:
    checks.check_ndim(op, name, cu_seqlens, 1)
    checks.check_dtype(op, name, cu_seqlens, "int32")
    bounds = [int(bound) for bound in cu_seqlens]
    if not bounds or bounds[0] != 0 or bounds[-1] != n_rows or sorted(bounds) != bounds:
        raise DataError(
            f"{op}: {name} is {bounds[:8]}{' …' if len(bounds) > 8 else ''}, "
            f"wanted boundaries that rise from 0 to the {n_rows} rows",
            "each entry is where a segment starts, the last is the number of rows",
        )
    return bounds


def check_saved(
    op: str, grad_out: np.ndarray, q: np.ndarray, out: np.ndarray, lse: np.ndarray
) -> None:
    """Check what the backward pass gets beside the arguments of the forward pass."""
    checks.check_shape(op, "grad_out", grad_out, q.shape, "it has the shape of q")
    checks.check_shape(op, "out", out, q.shape, "it has the shape of q")
    checks.check_shape(op, "lse", lse, (q.shape[1], q.shape[0]), "lse is [heads, tokens]")
    checks.check_same_dtype(op, grad_out=grad_out, q=q, out=out)
