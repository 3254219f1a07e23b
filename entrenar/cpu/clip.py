"""Gradient norm and clipping on a CPU: a plain sum of squares where that is safe."""

from __future__ import annotations

import numpy as np

from entrenar.reference import clip as plain

__all__ = ["clip_factor", "clip_grad_norm", "grad_norm"]

_PIECE = 8_192
# between these a sum of squares has neither overflowed nor lost a part that shows in float32
_SAFE = (1e-20, 1e37)


def grad_norm(flat: np.ndarray) -> np.ndarray:
    """Return the Euclidean norm; as ``entrenar.reference.clip.grad_norm``.

    Numerics: squares are summed in float32 within pieces of 8192, the pieces in float64.
    """
    if flat.ndim != 1 or flat.dtype not in (np.float32, np.float64):
        return plain.grad_norm(flat)
    whole = flat.size - flat.size % _PIECE
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        pieces = flat[:whole].reshape(-1, _PIECE)
        total = float(np.sum(np.vecdot(pieces, pieces), dtype=np.float64))
        total += float(np.vecdot(flat[whole:], flat[whole:]))
    if not _SAFE[0] < total < _SAFE[1]:
        return plain.grad_norm(flat)
    return np.array([total**0.5], dtype=flat.dtype)


def clip_factor(
    flat: np.ndarray, max_norm: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return norm, factor and skip flag; as ``entrenar.reference.clip.clip_factor``."""
    return plain.factor_of(grad_norm(flat), plain.check_max_norm("clip_factor", max_norm))


def clip_grad_norm(flat: np.ndarray, max_norm: float | None) -> np.ndarray:
    """Scale in place and return the norm; as ``entrenar.reference.clip.clip_grad_norm``."""
    limit = plain.check_max_norm("clip_grad_norm", max_norm)
    norm, factor, skip = plain.factor_of(grad_norm(flat), limit)
    if not skip[0] and factor[0] != 1:
        flat *= factor[0]
    return norm
