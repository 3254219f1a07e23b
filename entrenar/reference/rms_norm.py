"""Root-mean-square normalisation over the last axis, plain.

``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)``, a row at a time. A row is the
last axis: ``[T, D]`` normalises tokens, ``[T, heads, D]`` each head of the queries or keys.
"""

from __future__ import annotations

import math

import numpy as np

from entrenar.checks import check_dtype, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError

__all__ = ["rms_norm_backward", "rms_norm_forward"]


def rms_norm_forward(
    x: np.ndarray, weight: np.ndarray, eps: float, residual: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Normalise each row, after adding ``residual`` where there is one.

    Args:
        x: [..., D], any floating dtype.
        weight: [D], dtype of ``x``, or float32 beside float16.
        eps: Added to the mean square, at least 0.
        residual: Shape and dtype of ``x``, or None.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, residual_sum)`` with ``residual_sum = x + residual``, which is
        then what was normalised. ``y`` has the shape of ``x``; ``rstd`` is [rows].

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ, or are not floating.
        ConfigError: ``eps`` is negative or not a number.

    Numerics: in the precision of the inputs, float32 for float16; ``y`` is rounded once, after the
    product with ``weight``.
    Source: Zhang and Sennrich, arXiv:1910.07467, equation 4; transformers' LlamaRMSNorm.
    """
    _check("rms_norm_forward", x, weight, residual=residual)
    if not eps >= 0:
        raise ConfigError(f"rms_norm_forward: eps is {eps}, wanted at least 0", "")
    wide = np.promote_types(x.dtype, np.float32)
    total = x.astype(wide) if residual is None else x.astype(wide) + residual
    mean_square = np.sum(np.square(total), axis=-1) / max(x.shape[-1], 1)
    rstd = 1 / np.sqrt(mean_square + wide.type(eps))
    y = (total * rstd[..., None] * weight).astype(x.dtype)
    statistics = rstd.reshape(-1)
    return (y, statistics) if residual is None else (y, statistics, total.astype(x.dtype))


def rms_norm_backward(
    grad_y: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    grad_residual: np.ndarray | None = None,
    need_grad_weight: bool = True,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of the normalised input and of the weight.

    With ``h = x * rstd`` and ``g = grad_y * weight``:
    ``grad_x = rstd * (g - h * mean(g * h)) + grad_residual``, ``grad_weight = sum(grad_y * h)``.

    Args:
        grad_y: [..., D].
        x: [..., D], what was normalised: ``residual_sum`` where there was one.
        weight: [D].
        rstd: [rows], from the forward pass.
        grad_residual: Gradient that reaches ``x`` past the norm, or None.
        need_grad_weight: False for a frozen weight.

    Returns:
        ``(grad_x, grad_weight)``; the second is None where it was not asked for.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ, or are not floating.
    """
    _check("rms_norm_backward", x, weight, grad_y=grad_y, grad_residual=grad_residual)
    check_shape("rms_norm_backward", "rstd", rstd, (math.prod(x.shape[:-1]),))
    wide = np.promote_types(x.dtype, np.float32)
    scale = rstd.astype(wide).reshape(*x.shape[:-1], 1)
    normalised = x * scale
    weighted = grad_y.astype(wide) * weight
    mean = np.sum(weighted * normalised, axis=-1, keepdims=True) / max(x.shape[-1], 1)
    grad_x = scale * (weighted - normalised * mean)
    if grad_residual is not None:
        grad_x = grad_x + grad_residual
    if not need_grad_weight:
        return grad_x.astype(x.dtype), None
    grad_weight = np.sum(grad_y * normalised, axis=tuple(range(x.ndim - 1)))
    return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


def _check(op: str, x: np.ndarray, weight: np.ndarray, **like_x: np.ndarray | None) -> None:
    check_dtype(op, "x", x)
    if x.ndim < 1:
        raise ShapeMismatchError(f"{op}: x has no dimensions, wanted at least 1", "reshape x")
    check_shape(op, "weight", weight, (x.shape[-1],), "pass the weight of the same layer")
    for name, array in like_x.items():
        if array is not None:
            check_shape(op, name, array, x.shape)
    wide = x.dtype == np.float16 and weight.dtype == np.float32
    check_same_dtype(op, x=x, weight=x if wide else weight, **like_x)
