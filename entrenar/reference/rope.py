"""Rotary position embedding of queries and keys, in place, half rotation.

Dimension ``i`` is paired with ``i + R/2`` (``rotate_half``), as in the weights of Llama, Mistral and
Qwen on the Hugging Face hub; adjacent pairs would be another layout of the same weights.
"""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import DataError, ShapeMismatchError

__all__ = ["rope_backward", "rope_forward"]


def rope_forward(
    q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate ``q`` and ``k`` by the angles of their positions, in place.

    For ``i < R/2``: ``(x[i], x[i + R/2]) <- (x[i] c - x[i + R/2] s, x[i + R/2] c + x[i] s)`` with
    ``c = cos[position, i]``; dimensions from ``R`` on are left alone.

    Args:
        q: [T, Hq, D], any floating dtype; written.
        k: [T, Hkv, D], dtype of ``q``; written.
        cos: float32 [P, R/2], R even and at most D, one row a position.
        sin: As ``cos``.
        positions: int32 or int64 [T], rows of the table.

    Returns:
        ``(q, k)``, the same storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: ``q`` and ``k`` differ, or a dtype is none of the above.
        DataError: A position lies outside the table.

    Source: Su et al., arXiv:2104.09864, equation 34; transformers' apply_rotary_pos_emb.
    """
    return _rotate("rope_forward", q, k, cos, sin, positions, 1)


def rope_backward(
    grad_q: np.ndarray,
    grad_k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate the gradients back by the same angles, in place: the transpose of the forward pass.

    Args:
        grad_q: [T, Hq, D]; written.
        grad_k: [T, Hkv, D]; written.
        cos: As in the forward pass.
        sin: As in the forward pass.
        positions: As in the forward pass.

    Returns:
        ``(grad_q, grad_k)``, the same storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ or are not the forward pass's.
        DataError: A position lies outside the table.
    """
    return _rotate("rope_backward", grad_q, grad_k, cos, sin, positions, -1)


def _rotate(
    op: str,
    q: np.ndarray,
    k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    sign: int,
) -> tuple[np.ndarray, np.ndarray]:
    check_rope(op, q, k, cos, sin, positions)
    half = cos.shape[1]
    c = cos[positions].astype(q.dtype)[:, None, :]
    s = sign * sin[positions].astype(q.dtype)[:, None, :]
    for x in (q, k):
        first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
        x[..., :half] = first * c - second * s
        x[..., half : 2 * half] = second * c + first * s
    return q, k


def check_rope(
    op: str,
    q: np.ndarray,
    k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
) -> None:
    """Refuse arguments that do not fit together, as :func:`rope_forward` says."""
    check_dtype(op, "q", q)
    check_ndim(op, "q", q, 3)
    check_shape(op, "k", k, (q.shape[0], -1, q.shape[2]))
    check_same_dtype(op, q=q, k=k)
    check_dtype(op, "cos", cos, "float32", "float64")
    check_ndim(op, "cos", cos, 2)
    check_shape(op, "sin", sin, cos.shape)
    check_same_dtype(op, cos=cos, sin=sin)
    check_dtype(op, "positions", positions, "int32", "int64")
    check_shape(op, "positions", positions, (q.shape[0],))
    if 2 * cos.shape[1] > q.shape[2]:
        raise ShapeMismatchError(
            f"{op}: cos has {cos.shape[1]} angles but a head has {q.shape[2]} dimensions",
            "an angle turns two dimensions: build the table for at most head_dim / 2",
        )
    if positions.size and not 0 <= positions.min() <= positions.max() < cos.shape[0]:
        raise DataError(
            f"{op}: positions run from {positions.min()} to {positions.max()}, the table has "
            f"{cos.shape[0]} rows",
            "build the table for the longest sequence",
        )
