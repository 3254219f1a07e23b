"""Products with an NF4 weight on a CPU: decode a few thousand rows into scratch, multiply by BLAS.

The weight is never kept decoded: the scratch, at most 4 MiB in float32 a thread, is overwritten by
the next weight. Forward, each thread decodes the rows whose outputs it computes; backward, all rows
are decoded together before each thread multiplies rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.cpu import threads
from entrenar.cpu.nf4 import (
    DECODE_FLOPS,
    check_storage,
    decode_rows,
    row_step,
    rows_per_piece,
)
from entrenar.cpu.threads import scratch
from entrenar.reference.nf4 import NF4Weight

__all__ = ["add_product", "nf4_gemm_backward", "nf4_gemm_forward", "times_weight", "times_weight_t"]

# Values of a product held before they are added; smaller pieces cost more calls than misses.
PRODUCT_VALUES = 1 << 17


def add_product(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Add ``a @ b`` to ``out`` in place, a few rows at a time: NumPy's product cannot accumulate."""
    step = max(PRODUCT_VALUES // max(out.shape[1], 1), 16)

    def some(part: slice) -> None:
        for start in range(part.start, part.stop, step):
            rows = slice(start, min(start + step, part.stop))
            made = scratch("product", out[rows].shape, out.dtype)
            np.matmul(a[rows], b, out=made)
            out[rows] += made

    flops = 2 * a.shape[1] * b.shape[1]
    threads.spread(some, out.shape[0], -(-threads.LEAST_FLOPS // max(flops, 1)), 16)


def times_weight_t(
    x: np.ndarray,
    w: np.ndarray | NF4Weight,
    out: np.ndarray,
    finish: Callable[[slice], Any] | None = None,
) -> None:
    """Write ``x @ W.T`` to ``out`` [T, out], each thread some of its columns.

    Args:
        x: [T, in].
        w: [out, in], dense or NF4.
        out: [T, out].
        finish: Called with each range of columns once it is written, on the thread that wrote it.
    """
    n_out, n_in = w.shape
    quantised = isinstance(w, NF4Weight)
    flops = n_in * (2 * x.shape[0] + (DECODE_FLOPS if quantised else 0))

    def some(part: slice) -> None:
        step = rows_per_piece(w) if isinstance(w, NF4Weight) else n_out
        for start in range(part.start, part.stop, max(step, 1)):
            rows = slice(start, min(start + step, part.stop))
            if isinstance(w, NF4Weight):
                values = scratch("nf4", (rows.stop - start, n_in), x.dtype)
                decode_rows(w, rows, values)
            else:
                values = w[rows]
            np.matmul(x, values.T, out=out[:, rows])
            if finish is not None:
                finish(rows)

    step = row_step(w) if isinstance(w, NF4Weight) else 1
    threads.spread(some, n_out, -(-threads.LEAST_FLOPS // max(flops, 1)), step)


def times_weight(grad_y: np.ndarray, w: NF4Weight, out: np.ndarray, accumulate: bool) -> None:
    """Write ``grad_y @ W`` to ``out`` [T, in], or add it."""
    (n_out, n_in), step = w.shape, rows_per_piece(w)
    if n_out == 0 and not accumulate:
        out[...] = 0
    for start in range(0, n_out, step):
        stop = min(start + step, n_out)
        values = scratch("nf4", (stop - start, n_in), grad_y.dtype)

        def decode(part: slice, start: int = start, values: np.ndarray = values) -> None:
            decode_rows(w, slice(start + part.start, start + part.stop), values[part])

        least = -(-threads.LEAST_FLOPS // max(n_in * DECODE_FLOPS, 1))
        threads.spread(decode, stop - start, least, row_step(w))
        if start or accumulate:
            add_product(out, grad_y[:, start:stop], values)
        else:
            threads.product(grad_y[:, start:stop], values, out)


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
