"""Sums, products, bias, scaling, casts and fills, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np

from entrenar.checks import check_alike, check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import DTypeError
from entrenar.reference._results import store

__all__ = [
    "add",
    "add_",
    "bias_add",
    "bias_backward",
    "cast",
    "fill_",
    "multiply",
    "scale",
]

_CASTS = ("float32", "float16", "bfloat16", "float64")


def add(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``a + b``.

    Args:
        a: Any shape, any floating dtype.
        b: Shape and dtype of ``a``.
        out: Shape and dtype of ``a`` to write to, or None; may be ``a`` or ``b``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ or are not floating.
    """
    check_alike("add", a=a, b=b, out=out)
    return store(a + b, out)


def add_(dst: np.ndarray, src: np.ndarray) -> np.ndarray:
    """Add ``src`` to ``dst`` in place and return ``dst``.

    Args:
        dst: Any shape, any floating dtype.
        src: Shape of ``dst``, any floating dtype: a 16-bit gradient may go into fp32 storage.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: A dtype is not floating.
    """
    check_dtype("add_", "dst", dst)
    check_dtype("add_", "src", src)
    check_shape("add_", "src", src, dst.shape)
    return store(dst + src, dst)


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``a * b``.

    Args:
        a: Any shape, any floating dtype.
        b: Shape and dtype of ``a``.
        out: Shape and dtype of ``a`` to write to, or None; may be ``a`` or ``b``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ or are not floating.
    """
    check_alike("multiply", a=a, b=b, out=out)
    return store(a * b, out)


def scale(x: np.ndarray, s: float, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``s * x``.

    Args:
        x: Any shape, any floating dtype.
        s: The factor, rounded to the dtype the product is computed in.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.

    Raises:
        ShapeMismatchError: ``out`` has another shape.
        DTypeError: Dtypes differ or are not floating.
    """
    check_alike("scale", x=x, out=out)
    return store(x * x.dtype.type(s), out)


def bias_add(x: np.ndarray, bias: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``x + bias``, the same bias for every row.

    Args:
        x: [T, n], any floating dtype.
        bias: [n], dtype of ``x``.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ or are not floating.
    """
    check_ndim("bias_add", "x", x, 2)
    check_alike("bias_add", x=x, out=out)
    check_same_dtype("bias_add", x=x, bias=bias)
    check_shape("bias_add", "bias", bias, (x.shape[1],), "one bias per column")
    return store(x + bias, out)


def bias_backward(grad_y: np.ndarray) -> np.ndarray:
    """Return the gradient of a bias: the sum over rows.

    Args:
        grad_y: [T, n], any floating dtype.

    Returns:
        [n], dtype of ``grad_y``; zeros where T is 0.

    Raises:
        ShapeMismatchError: ``grad_y`` is not 2-D.
        DTypeError: ``grad_y`` is not floating.
    """
    check_ndim("bias_backward", "grad_y", grad_y, 2)
    check_dtype("bias_backward", "grad_y", grad_y)
    return np.sum(grad_y, axis=0)


def cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return ``x`` rounded to another dtype, to nearest and ties to even.

    Args:
        x: Any shape, any floating dtype.
        dtype: The dtype or its name. NumPy has no bfloat16: the rounded values come as float32.

    Raises:
        DTypeError: ``x`` is not floating, or ``dtype`` is none of float32, float16, bfloat16, float64.

    Numerics: NaN stays NaN, infinities and signed zeros stay; what is past the largest finite value
        rounds to infinity, subnormals are kept.
    """
    check_dtype("cast", "x", x)
    name = dtype if isinstance(dtype, str) else str(np.dtype(dtype) if _is_numpy(dtype) else dtype)
    name = name.removeprefix("torch.")
    if name not in _CASTS:
        raise DTypeError(f"cast: dtype is {name}, wanted {', '.join(_CASTS)}", "")
    with np.errstate(over="ignore", under="ignore"):
        if name == "bfloat16":
            return _round_bfloat16(x.astype(np.float32))
        return x.astype(name)


def fill_(x: np.ndarray, value: float) -> np.ndarray:
    """Set every element of ``x`` to ``value`` and return ``x``.

    Args:
        x: Any shape, any floating dtype.
        value: Rounded once to the dtype of ``x``.

    Raises:
        DTypeError: ``x`` is not floating.
    """
    check_dtype("fill_", "x", x)
    with np.errstate(over="ignore"):
        x[...] = value
    return x


def _is_numpy(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) or (
        isinstance(dtype, type) and issubclass(dtype, np.generic)
    )


def _round_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    # half of the kept unit, less one where the kept part is even: ties go to even
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    # a NaN must not be carried over into infinity
    rounded = np.where(np.isnan(x), (bits | 0x00400000) & np.uint32(0xFFFF0000), rounded)
    return rounded.astype(np.uint32).view(np.float32).reshape(x.shape)
