"""Rotary position embedding on a CPU: both halves of a head in one pass of four products, in pieces."""

from __future__ import annotations

import numpy as np

from entrenar.cpu import threads
from entrenar.reference import rope as plain

__all__ = ["rope_backward", "rope_forward"]

# values of a piece: what is read and the scratch fit a second-level cache of 1 MiB
_PIECE = 32_768


def rope_forward(
    q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate in place; as ``entrenar.reference.rope.rope_forward``."""
    return _rotate("rope_forward", q, k, cos, sin, positions, 1)


def rope_backward(
    grad_q: np.ndarray,
    grad_k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate back in place; as ``entrenar.reference.rope.rope_backward``."""
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
    plain.check_rope(op, q, k, cos, sin, positions)
    width = q.shape[1] * q.shape[2]
    step = max(_PIECE // max(width, 1), 1)

    def some(part: slice) -> None:
        for start in range(part.start, part.stop, step):
            rows = slice(start, min(start + step, part.stop))
            c = cos[positions[rows]].astype(q.dtype, copy=False)[:, None, :]
            s = sin[positions[rows]].astype(q.dtype, copy=False)[:, None, :]
            for x in (q, k):
                _turn(x[rows], c, s if sign > 0 else -s)

    threads.spread(some, q.shape[0], -(-threads.LEAST_VALUES // max(width, 1)), step)
    return q, k


def _turn(x: np.ndarray, c: np.ndarray, s: np.ndarray) -> None:
    half = c.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    across = threads.scratch("rope", (2, *first.shape), x.dtype)
    np.multiply(second, s, out=across[0])
    np.multiply(first, s, out=across[1])
    x[..., : 2 * half] *= np.concatenate([c, c], axis=-1)
    first -= across[0]
    second += across[1]
