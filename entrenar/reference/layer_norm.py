"""Layer normalisation over the last axis, plain.

``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var(x) + eps)`` and the biased variance,
a row at a time.
"""

from __future__ import annotations

import math

import numpy as np

from entrenar.checks import check_dtype, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError

__all__ = ["layer_norm_backward", "layer_norm_forward"]


def layer_norm_forward(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    eps: float,
    residual: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """Normalise each row, after adding ``residual`` where there is one.

    Args:
        x: [..., D], any floating dtype.
        weight: [D], dtype of ``x``.
        bias: [D], dtype of ``x``, or None.
        eps: Added to the variance, at least 0.
        residual: Shape and dtype of ``x``, or None.

    Returns:
        ``(y, mean, rstd)``, or ``(y, mean, rstd, residual_sum)`` with ``residual_sum = x +
        residual``, which is then what was normalised. ``y`` has the shape of ``x``; ``mean`` and
        ``rstd`` are [rows].

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ, or are not floating.
        ConfigError: ``eps`` is negative or not a number.

    Numerics: in the precision of the inputs, float32 for float16; ``y`` is rounded once.
    Source: Ba, Kiros and Hinton, arXiv:1607.06450, equation 4; torch.nn.functional.layer_norm.
    """
    op = "layer_norm_forward"
    _check(op, x, weight, bias, residual=residual)
    if not eps >= 0:
        raise ConfigError(f"{op}: eps is {eps}, wanted at least 0", "")
    wide = np.promote_types(x.dtype, np.float32)
    total = x.astype(wide) if residual is None else x.astype(wide) + residual
    columns = max(x.shape[-1], 1)
    mean = np.sum(total, axis=-1) / columns
    centred = total - mean[..., None]
    rstd = 1 / np.sqrt(np.sum(np.square(centred), axis=-1) / columns + wide.type(eps))
    y = centred * rstd[..., None] * weight
    if bias is not None:
        y = y + bias
    results = (y.astype(x.dtype), mean.reshape(-1), rstd.reshape(-1))
    return results if residual is None else (*results, total.astype(x.dtype))


def layer_norm_backward(
    grad_y: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    grad_residual: np.ndarray | None = None,
    need_grad_weight: bool = True,
    need_grad_bias: bool = True,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return the gradients of the normalised input, of the weight and of the bias.

    With ``h = (x - mean) * rstd`` and ``g = grad_y * weight``:
    ``grad_x = rstd * (g - mean(g) - h * mean(g * h)) + grad_residual``,
    ``grad_weight = sum(grad_y * h)``, ``grad_bias = sum(grad_y)``.

    Args:
        grad_y: [..., D].
        x: [..., D], what was normalised: ``residual_sum`` where there was one.
        weight: [D].
        mean: [rows], from the forward pass.
        rstd: [rows], from the forward pass.
        grad_residual: Gradient that reaches ``x`` past the norm, or None.
        need_grad_weight: False for a frozen weight.
        need_grad_bias: False for a frozen bias or none.

    Returns:
        ``(grad_x, grad_weight, grad_bias)``; a gradient that was not asked for is None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ, or are not floating.
    """
    op = "layer_norm_backward"
    _check(op, x, weight, None, grad_y=grad_y, grad_residual=grad_residual)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_shape(op, name, statistic, (math.prod(x.shape[:-1]),))
    wide = np.promote_types(x.dtype, np.float32)
    shape = (*x.shape[:-1], 1)
    scale = rstd.astype(wide).reshape(shape)
    normalised = (x - mean.astype(wide).reshape(shape)) * scale
    weighted = grad_y.astype(wide) * weight
    columns = max(x.shape[-1], 1)
    shift = np.sum(weighted, axis=-1, keepdims=True) / columns
    slope = np.sum(weighted * normalised, axis=-1, keepdims=True) / columns
    grad_x = scale * (weighted - shift - normalised * slope)
    if grad_residual is not None:
        grad_x = grad_x + grad_residual
    rows = tuple(range(x.ndim - 1))
    of_weight = np.sum(grad_y * normalised, axis=rows) if need_grad_weight else None
    of_bias = np.sum(grad_y.astype(wide), axis=rows) if need_grad_bias else None
    return (
        grad_x.astype(x.dtype),
        None if of_weight is None else of_weight.astype(weight.dtype),
        None if of_bias is None else of_bias.astype(weight.dtype),
    )


def _check(
    op: str,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    **like_x: np.ndarray | None,
) -> None:
    check_dtype(op, "x", x)
    if x.ndim < 1:
        raise ShapeMismatchError(f"{op}: x has no dimensions, wanted at least 1", "reshape x")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            hint = f"pass the {name} of the same layer"
            check_shape(op, name, parameter, (x.shape[-1],), hint)
    for name, array in like_x.items():
        if array is not None:
            check_shape(op, name, array, x.shape)
    check_same_dtype(op, x=x, weight=weight, bias=bias, **like_x)
