"""Matrix products, plain and batched, with the transposes, bias and accumulation of training."""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError

__all__ = ["gemm_backward_a", "gemm_backward_b", "gemm_forward", "matmul"]

PRECISIONS = ("ieee", "tf32")


def gemm_forward(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
) -> np.ndarray:
    """Return ``a @ b``.

    Args:
        a: [m, k], any floating dtype.
        b: [k, n], dtype of ``a``.
        out: [m, n] to write to, or None for new storage.
        accumulate: Add to what ``out`` holds.
        precision: ``"ieee"`` or ``"tf32"``; this function computes as ``"ieee"`` for both.

    Returns:
        ``out``, or a new [m, n]; zeros where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ or are not floating.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    _check_pair("gemm_forward", "a", a, "b", b)
    check_shape("gemm_forward", "b", b, (a.shape[1], -1), "the inner sizes of a and b must agree")
    return _store("gemm_forward", a @ b, out, accumulate, precision)


def gemm_backward_a(
    grad_c: np.ndarray,
    b: np.ndarray,
    out: np.ndarray | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
) -> np.ndarray:
    """Return the gradient of ``a`` in ``c = a @ b``: ``grad_c @ b.T``.

    Args:
        grad_c: [m, n].
        b: [k, n].
        out: [m, k] to write to, or None for new storage.
        accumulate: Add to what ``out`` holds.
        precision: ``"ieee"`` or ``"tf32"``.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ or are not floating.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    _check_pair("gemm_backward_a", "grad_c", grad_c, "b", b)
    check_shape(
        "gemm_backward_a", "b", b, (-1, grad_c.shape[1]), "grad_c and b share their columns"
    )
    return _store("gemm_backward_a", grad_c @ b.T, out, accumulate, precision)


def gemm_backward_b(
    a: np.ndarray,
    grad_c: np.ndarray,
    out: np.ndarray | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
) -> np.ndarray:
    """Return the gradient of ``b`` in ``c = a @ b``: ``a.T @ grad_c``.

    Args:
        a: [m, k].
        grad_c: [m, n].
        out: [k, n] to write to, or None for new storage.
        accumulate: Add to what ``out`` holds.
        precision: ``"ieee"`` or ``"tf32"``.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ or are not floating.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    _check_pair("gemm_backward_b", "a", a, "grad_c", grad_c)
    check_shape(
        "gemm_backward_b", "grad_c", grad_c, (a.shape[0], -1), "a and grad_c share their rows"
    )
    return _store("gemm_backward_b", a.T @ grad_c, out, accumulate, precision)


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
    """Return ``scale * (op(a) @ op(b)) + bias``, ``op`` transposing the last two axes where asked.

    Args:
        a: [m, k] or [B, m, k] after ``op``; any strides.
        b: [k, n] after ``op``, shared by the batch, or [B, k, n]; any strides.
        trans_a: ``a`` is stored [k, m].
        trans_b: ``b`` is stored [n, k].
        bias: [n] in the dtype of ``a``, or None.
        scale: Factor of the product, not of the bias.
        out: [m, n] or [B, m, n] of any floating dtype to write to, or None for new storage.
        accumulate: Add to what ``out`` holds.
        precision: ``"ieee"`` or ``"tf32"``; this function computes as ``"ieee"`` for both.

    Returns:
        ``out``, or new storage; the bias alone, or zeros, where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ or are not floating.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    check_ndim("matmul", "a", a, 2, 3)
    check_ndim("matmul", "b", b, *((2,) if a.ndim == 2 else (2, 3)))
    check_dtype("matmul", "a", a)
    check_same_dtype("matmul", a=a, b=b, bias=bias)
    left = a.swapaxes(-1, -2) if trans_a else a
    right = b.swapaxes(-1, -2) if trans_b else b
    if left.shape[-1] != right.shape[-2]:
        raise ShapeMismatchError(
            f"matmul: a has {left.shape[-1]} columns and b {right.shape[-2]} rows once transposed, "
            "wanted the same",
            "check trans_a and trans_b",
        )
    if right.ndim == 3:
        check_shape("matmul", "b", b, (a.shape[0], -1, -1), "a and b share the batch")
    product = left @ right
    if scale != 1.0:
        product = product * product.dtype.type(scale)
    if bias is not None:
        check_shape("matmul", "bias", bias, (right.shape[-1],), "one bias per column of b")
        product = product + bias
    return _store("matmul", product, out, accumulate, precision)


def _check_pair(op: str, name_x: str, x: np.ndarray, name_y: str, y: np.ndarray) -> None:
    check_ndim(op, name_x, x, 2)
    check_ndim(op, name_y, y, 2)
    check_dtype(op, name_x, x)
    check_same_dtype(op, **{name_x: x, name_y: y})


def _store(
    op: str, product: np.ndarray, out: np.ndarray | None, accumulate: bool, precision: str
) -> np.ndarray:
    if precision not in PRECISIONS:
        raise ConfigError(f"{op}: precision is {precision!r}, wanted 'ieee' or 'tf32'", "")
    if out is None:
        if accumulate:
            raise ConfigError(f"{op}: accumulate without out, wanted storage to add to", "pass out")
        return product
    check_dtype(op, "out", out)
    check_shape(op, "out", out, product.shape)
    out[...] = out + product if accumulate else product
    return out
