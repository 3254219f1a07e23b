"""Matrix products on a CPU, cut over the threads and written where the result goes."""

from __future__ import annotations

import numpy as np

from entrenar.cpu import threads
from entrenar.reference import gemm as plain

__all__ = ["matmul"]


def matmul(
    a: np.ndarray,
    b: np.ndarray,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    out: np.ndarray | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
) -> np.ndarray:
    """Return ``scale * (op(a) @ op(b)) + bias``; as ``entrenar.reference.gemm.matmul``."""
    left = a.swapaxes(-1, -2) if trans_a and a.ndim == 2 else a
    right = b.swapaxes(-1, -2) if trans_b and b.ndim == 2 else b
    if accumulate or not _fits(left, right, bias, out) or precision not in plain.PRECISIONS:
        return plain.matmul(a, b, trans_a, trans_b, bias, scale, out, accumulate, precision)
    if out is None:
        out = np.empty((left.shape[0], right.shape[1]), a.dtype)
    threads.product(left, right, out)
    if scale != 1.0:
        out *= out.dtype.type(scale)
    if bias is not None:
        out += bias
    return out


def _fits(
    left: np.ndarray, right: np.ndarray, bias: np.ndarray | None, out: np.ndarray | None
) -> bool:
    """Whether these are one product; what is not, the plain form computes or refuses."""
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        return False
    if left.dtype not in (np.float32, np.float64):
        return False
    if any(x is not None and x.dtype != left.dtype for x in (right, bias, out)):
        return False
    if bias is not None and bias.shape != right.shape[1:]:
        return False
    if out is None:
        return True
    return out.shape == (left.shape[0], right.shape[1]) and not any(
        x is not None and np.may_share_memory(out, x) for x in (left, right, bias)
    )
