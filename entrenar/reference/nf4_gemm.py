"""Products with a weight stored as NF4: ``x @ W.T`` and ``grad_y @ W``."""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.reference.nf4 import NF4Weight, nf4_dequantize

__all__ = ["nf4_gemm_backward", "nf4_gemm_forward"]


def nf4_gemm_forward(
    x: np.ndarray,
    w: NF4Weight,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``x @ W.T + bias``.

    Args:
        x: [T, in], floating.
        w: [out, in] weight.
        bias: [out], or None.
        out: [T, out] to write to, or None.

    Returns:
        [T, out] of ``x``'s dtype, or ``out``.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: ``x`` is not floating, or ``bias`` has another dtype.

    Numerics:
        The weight decodes to ``x``'s dtype; the sum is BLAS's in that dtype.
    """
    op = "nf4_gemm_forward"
    check_dtype(op, "x", x)
    check_same_dtype(op, x=x, bias=bias)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "x", x, (-1, n_in), f"w is {tuple(w.shape)}")
    y = x @ nf4_dequantize(w, x.dtype).T
    if bias is not None:
        check_shape(op, "bias", bias, (n_out,))
        y = y + bias
    if out is None:
        return y
    check_shape(op, "out", out, y.shape)
    out[...] = y
    return out


def nf4_gemm_backward(
    grad_y: np.ndarray,
    w: NF4Weight,
    out: np.ndarray | None = None,
    accumulate: bool = False,
) -> np.ndarray:
    """Return the gradient of the input, ``grad_y @ W``; the weight is frozen.

    Args:
        grad_y: [T, out], floating.
        w: [out, in] weight.
        out: [T, in] to write to, or None.
        accumulate: Add to ``out`` instead of overwriting it.

    Returns:
        [T, in] of ``grad_y``'s dtype, or ``out``.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: ``grad_y`` is not floating.
    """
    op = "nf4_gemm_backward"
    check_dtype(op, "grad_y", grad_y)
    check_ndim(op, "w", w, 2)
    n_out = w.shape[0]
    check_shape(op, "grad_y", grad_y, (-1, n_out), f"w is {tuple(w.shape)}")
    grad_x = grad_y @ nf4_dequantize(w, grad_y.dtype)
    if out is None:
        return grad_x
    check_shape(op, "out", out, grad_x.shape)
    out[...] = out + grad_x if accumulate else grad_x
    return out
