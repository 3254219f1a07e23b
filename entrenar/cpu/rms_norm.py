"""RMS normalisation on a CPU: a few rows at a time, in place in the result."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from entrenar.cpu import threads
from entrenar.reference import rms_norm as plain

__all__ = ["rms_norm_backward", "rms_norm_forward"]

# elements a piece: a handful of float32 arrays of it fit a second-level cache of 1 MiB
_PIECE = 32_768


def rms_norm_forward(
    x: np.ndarray, weight: np.ndarray, eps: float, residual: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Normalise each row; as ``entrenar.reference.rms_norm.rms_norm_forward``."""
    given = [x] if residual is None else [x, residual]
    if not eps >= 0 or not _rows_fit(weight, given):
        return plain.rms_norm_forward(x, weight, eps, residual)
    columns = x.shape[-1]
    y = np.empty(x.shape, x.dtype)
    rstd = np.empty(x.size // columns, x.dtype)
    total = x if residual is None else np.empty(x.shape, x.dtype)

    def some(rows: slice) -> None:
        source, target = _rows(total)[rows], _rows(y)[rows]
        if residual is not None:
            np.add(_rows(x)[rows], _rows(residual)[rows], out=source)
        scale = np.vecdot(source, source)
        scale /= columns
        scale += eps
        np.sqrt(scale, out=scale)
        np.reciprocal(scale, out=scale)
        rstd[rows] = scale
        np.multiply(source, scale[:, None], out=target)
        target *= weight

    _each_rows(some, rstd.size, columns)
    return (y, rstd) if residual is None else (y, rstd, total)


def rms_norm_backward(
    grad_y: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    grad_residual: np.ndarray | None = None,
    need_grad_weight: bool = True,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients; as ``entrenar.reference.rms_norm.rms_norm_backward``."""
    given = [x, grad_y] if grad_residual is None else [x, grad_y, grad_residual]
    if not _rows_fit(weight, given) or rstd.shape != (math.prod(x.shape[:-1]),):
        return plain.rms_norm_backward(grad_y, x, weight, rstd, grad_residual, need_grad_weight)
    columns = x.shape[-1]
    grad_x = np.empty(x.shape, x.dtype)
    starts = range(0, rstd.size, _rows_per_piece(columns))
    # sums of each piece, added in order whichever thread made them
    sums = np.empty((len(starts), columns), x.dtype) if need_grad_weight else None

    def some(rows: slice) -> None:
        dy, h, target = _rows(grad_y)[rows], _rows(x)[rows], _rows(grad_x)[rows]
        scale = rstd[rows].astype(x.dtype, copy=False)[:, None]
        normalised = threads.scratch("normalised", h.shape, h.dtype)
        np.multiply(h, scale, out=normalised)
        if sums is not None:
            np.einsum("ij,ij->j", dy, normalised, out=sums[rows.start // starts.step])
        np.multiply(dy, weight, out=target)
        mean = np.vecdot(target, normalised)
        mean /= columns
        normalised *= mean[:, None]
        target -= normalised
        target *= scale
        if grad_residual is not None:
            target += _rows(grad_residual)[rows]

    _each_rows(some, rstd.size, columns)
    return grad_x, None if sums is None else sums.sum(axis=0)


def _rows_fit(weight: np.ndarray, arrays: list[np.ndarray]) -> bool:
    """Whether all are alike and contiguous; what is not, the plain form computes or refuses."""
    first = arrays[0]
    return (
        first.ndim >= 1
        and first.size > 0
        and first.dtype in (np.float32, np.float64)
        and weight.dtype == first.dtype
        and weight.shape == first.shape[-1:]
        and all(
            a.shape == first.shape and a.dtype == first.dtype and a.flags.c_contiguous
            for a in arrays
        )
    )


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _rows_per_piece(columns: int) -> int:
    return max(_PIECE // columns, 1)


def _each_rows(work: Callable[[slice], None], n_rows: int, columns: int) -> None:
    step = _rows_per_piece(columns)

    def some(part: slice) -> None:
        for start in range(part.start, part.stop, step):
            work(slice(start, min(start + step, part.stop)))

    threads.spread(some, n_rows, -(-threads.LEAST_VALUES // columns), step)
