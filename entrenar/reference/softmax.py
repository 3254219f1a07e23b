"""Softmax over the last axis, scaled, with an optional causal mask."""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_alike
from entrenar.errors import ShapeMismatchError
from entrenar.reference._results import store

__all__ = ["softmax_backward", "softmax_forward"]


def softmax_forward(
    x: np.ndarray, scale: float = 1.0, causal: bool = False, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``softmax(scale * x)`` over the last axis.

    Args:
        x: [..., n], any floating dtype; at least two axes with ``causal``.
        scale: Factor applied before the exponential.
        causal: Row i of each [rows, n] block sees columns ``j <= i + n - rows``.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.

    Returns:
        ``out``, or a new array. A row that is masked or minus infinity throughout is zeros.

    Raises:
        ShapeMismatchError: ``x`` has too few axes, or ``out`` another shape.
        DTypeError: Dtypes differ or are not floating.

    Numerics: The row maximum is subtracted first, so no finite input overflows. A NaN, or an
        infinity of positive sign after scaling, makes its row NaN unless masked.
    """
    check_alike("softmax_forward", x=x, out=out)
    if x.ndim < 1 + causal:
        raise ShapeMismatchError(
            f"softmax_forward: x has {x.ndim} dimensions, wanted at least {1 + causal}", ""
        )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = x * x.dtype.type(scale)
        if causal:
            scaled = np.where(_visible(*x.shape[-2:]), scaled, x.dtype.type(-np.inf))
        peak = np.max(scaled, axis=-1, keepdims=True, initial=-np.inf)
        exponential = np.exp(scaled - np.where(peak == -np.inf, x.dtype.type(0), peak))
        total = np.sum(exponential, axis=-1, keepdims=True)
        y = exponential / np.where(total == 0, x.dtype.type(1), total)
    return store(y, out)


def softmax_backward(
    grad_y: np.ndarray, y: np.ndarray, scale: float = 1.0, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the gradient of ``x``: ``scale * y * (grad_y - sum(grad_y * y))``.

    Args:
        grad_y: [..., n].
        y: What the forward pass returned; masked entries are zero, so no mask is needed.
        scale: As in the forward pass.
        out: Shape and dtype of ``y`` to write to, or None; may be ``grad_y`` or ``y``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ or are not floating.
    """
    check_alike("softmax_backward", y=y, grad_y=grad_y, out=out)
    inner = np.sum(grad_y * y, axis=-1, keepdims=True)
    return store(y.dtype.type(scale) * y * (grad_y - inner), out)


def _visible(rows: int, n: int) -> np.ndarray:
    return np.arange(n) <= np.arange(rows)[:, None] + (n - rows)
