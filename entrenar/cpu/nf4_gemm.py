"""Products with an NF4 weight on a CPU: decode a few thousand rows into scratch, multiply by BLAS.

The weight is never kept decoded: the scratch, at most 4 MiB in float32 and one a thread, is
overwritten by the next weight.
"""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.cpu.nf4 import check_storage, decode_rows, rows_per_piece, scratch
from entrenar.reference.nf4 import NF4Weight

__all__ = ["add_product", "nf4_gemm_backward", "nf4_gemm_forward", "times_weight", "times_weight_t"]

# Values of a product held before they are added; smaller pieces cost more calls than misses.
PRODUCT_VALUES = 1 << 20


def add_product(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Add ``a @ b`` to ``out`` in place, a few rows at a time: NumPy's product cannot accumulate."""
    rows = max(PRODUCT_VALUES // max(out.shape[1], 1), 16)
    for start in range(0, out.shape[0], rows):
        target = out[start : start + rows]
        product = scratch("product", target.shape, target.dtype)
        np.matmul(a[start : start + rows], b, out=product)
        target += product


def times_weight_t(x: np.ndarray, w: NF4Weight, out: np.ndarray) -> None:
    """Write ``x @ W.T`` to ``out`` [T, out]."""
    n_out, step = w.shape[0], rows_per_piece(w)
    for start in range(0, n_out, step):
        stop = min(start + step, n_out)
        np.matmul(x, decode_rows(w, start, stop, x.dtype).T, out=out[:, start:stop])


def times_weight(grad_y: np.ndarray, w: NF4Weight, out: np.ndarray, accumulate: bool) -> None:
    """Write ``grad_y @ W`` to ``out`` [T, in], or add it."""
    n_out, step = w.shape[0], rows_per_piece(w)
    if n_out == 0 and not accumulate:
        out[...] = 0
    for start in range(0, n_out, step):
        stop = min(start + step, n_out)
        rows = decode_rows(w, start, stop, grad_y.dtype)
        if start or accumulate:
            add_product(out, grad_y[:, start:stop], rows)
        else:
            np.matmul(grad_y[:, start:stop], rows, out=out)


def nf4_gemm_forward(
    x: np.ndarray,
    w: NF4Weight,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``x @ W.T + bias``; see ``entrenar.reference.nf4_gemm.nf4_gemm_forward``.

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
    """
    op = "nf4_gemm_forward"
    check_dtype(op, "x", x)
    check_same_dtype(op, x=x, bias=bias)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "x", x, (-1, n_in), f"w is {tuple(w.shape)}")
    check_storage(op, w)
    if bias is not None:
        check_shape(op, "bias", bias, (n_out,))
    if out is None:
        out = np.empty((x.shape[0], n_out), x.dtype)
    check_shape(op, "out", out, (x.shape[0], n_out))
    times_weight_t(x, w, out)
    if bias is not None:
        out += bias
    return out


def nf4_gemm_backward(
    grad_y: np.ndarray,
    w: NF4Weight,
    out: np.ndarray | None = None,
    accumulate: bool = False,
) -> np.ndarray:
    """Return ``grad_y @ W``; see ``entrenar.reference.nf4_gemm.nf4_gemm_backward``.

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
    n_out, n_in = w.shape
    check_shape(op, "grad_y", grad_y, (-1, n_out), f"w is {tuple(w.shape)}")
    check_storage(op, w)
    if out is None:
        out, accumulate = np.empty((grad_y.shape[0], n_in), grad_y.dtype), False
    check_shape(op, "out", out, (grad_y.shape[0], n_in))
    times_weight(grad_y, w, out, accumulate)
    return out
