"""Gather rows of a table by id, and add gradients back to the rows they came from.

Also selects the rows of a packed batch that carry loss, and scatters their gradient.
"""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_shape
from entrenar.errors import DataError, ShapeMismatchError

__all__ = ["embedding_backward", "embedding_forward"]


def embedding_forward(
    ids: np.ndarray, weight: np.ndarray, status: np.ndarray | None = None
) -> np.ndarray:
    """Return ``weight[ids]``.

    Args:
        ids: int64 or int32 [T], each at least 0 and below V.
        weight: [V, H], any floating dtype.
        status: int32 [1], or None. With it an id out of range does not raise: its row of the result
            is NaN and ``status[0]`` becomes 1. It is never set to 0.

    Returns:
        [T, H], dtype of ``weight``.

    Raises:
        ShapeMismatchError: Numbers of dimensions do not fit.
        DTypeError: A dtype is none of the above.
        DataError: An id is out of range and there is no ``status``.
    """
    op = "embedding_forward"
    _check_ids(op, ids)
    check_ndim(op, "weight", weight, 2)
    check_dtype(op, "weight", weight)
    if status is None:
        _check_range(op, ids, weight.shape[0])
        return weight[ids]
    check_dtype(op, "status", status, "int32")
    check_shape(op, "status", status, (1,))
    inside = (ids >= 0) & (ids < weight.shape[0])
    y = np.full((ids.size, weight.shape[1]), np.nan, dtype=weight.dtype)
    y[inside] = weight[ids[inside]]
    if not inside.all():
        status[0] = 1
    return y


def embedding_backward(grad_y: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """Add each row of ``grad_y`` to the row of its id, in order of position.

    Args:
        grad_y: [T, H], any floating dtype.
        ids: int64 or int32 [T], each at least 0 and below ``n_rows``.
        n_rows: Rows of the table, V.

    Returns:
        [V, H], dtype of ``grad_y``; rows whose id does not occur are 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype is none of the above.
        DataError: An id is out of range.
    """
    op = "embedding_backward"
    _check_ids(op, ids)
    check_dtype(op, "grad_y", grad_y)
    check_shape(op, "grad_y", grad_y, (ids.shape[0], -1))
    if n_rows < 0:
        raise ShapeMismatchError(f"{op}: n_rows is {n_rows}, wanted at least 0", "")
    _check_range(op, ids, n_rows)
    grad_weight = np.zeros((n_rows, grad_y.shape[1]), dtype=grad_y.dtype)
    np.add.at(grad_weight, ids, grad_y)
    return grad_weight


def _check_ids(op: str, ids: np.ndarray) -> None:
    check_dtype(op, "ids", ids, "int64", "int32")
    check_ndim(op, "ids", ids, 1)


def _check_range(op: str, ids: np.ndarray, n_rows: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < n_rows:
        raise DataError(
            f"{op}: ids run from {ids.min()} to {ids.max()}, the table has {n_rows} rows",
            "tokenise with the tokenizer of the same checkpoint",
        )
