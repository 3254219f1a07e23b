"""Softmax over the last axis, scaled, with an optional causal mask.

``y_j = exp(s x_j - m) / sum_k exp(s x_k - m)`` with ``m = max_k s x_k``, k over the visible columns;
a row with none is zeros. ``grad_x = s y (grad_y - sum(grad_y y))``. Arithmetic in float32, one
rounding at the store. A row within one block is read once and kept in registers, several short rows
a program; a longer one is read twice: each lane keeps a running maximum and sum (Milakov and
Gimelshein, arXiv:1805.02867, algorithm 3), joined at the end of the first pass. Bytes moved: 2 an
element forward and 3 backward, times the item size; 3 and 5 for a row past a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_alike
from entrenar.errors import ShapeMismatchError
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    check_storage,
    empty,
    launch,
    next_power_of_2,
    prepare,
    require_contiguous,
)

__all__ = ["softmax_backward", "softmax_forward"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _finite_peak(peak):
    # the difference of two minus infinities is NaN; with 0 in the peak's place exp() gives 0
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _whole_vectors(n):
    # a mask that changes inside a 128-bit access would make it element by element
    return (tl.maximum(n, 0) + 15) // 16 * 16


@triton.jit
def _softmax_rows_kernel(
    x_ptr,
    y_ptr,
    n_rows,
    n_cols,
    rows_per_block,
    scale,
    CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows within one block: BLOCK_R of them, read once."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    visible = inside
    wanted = inside
    if CAUSAL:
        seen = (rows % rows_per_block).to(tl.int32) + (n_cols - rows_per_block + 1)
        visible = inside & (cols[None, :] < seen[:, None])
        wanted = inside & (cols[None, :] < _whole_vectors(seen)[:, None])
    if POSITIVE:  # the scale, above 0, moves no maximum: it joins the exponential's own factor
        x = tl.load(x_ptr + offsets, mask=wanted, other=float("-inf")).to(tl.float32)
        if CAUSAL:
            x = tl.where(visible, x, float("-inf"))
        peak = _finite_peak(tl.max(x, axis=1))  # [BLOCK_R]
        exponential = tl.exp2((x - peak[:, None]) * (scale * _LOG2E))
    else:
        x = tl.load(x_ptr + offsets, mask=wanted, other=0.0).to(tl.float32) * scale
        x = tl.where(visible, x, float("-inf"))
        peak = _finite_peak(tl.max(x, axis=1))
        exponential = tl.exp(x - peak[:, None])
    total = tl.sum(exponential, axis=1)
    y = exponential / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_long_row_kernel(
    x_ptr,
    y_ptr,
    n_cols,
    rows_per_block,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A row past one block: a maximum and sum a lane, then a second reading."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    seen = n_cols
    if CAUSAL:
        seen = (row % rows_per_block).to(tl.int32) + (n_cols - rows_per_block + 1)
    wanted = n_cols
    if CAUSAL:
        wanted = tl.minimum(_whole_vectors(seen), n_cols)
    peaks = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    totals = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, seen, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        x = tl.load(x_ptr + cols, mask=cols < wanted, other=0.0).to(tl.float32) * scale
        x = tl.where(cols < seen, x, float("-inf"))
        higher = tl.maximum(peaks, x)
        base = _finite_peak(higher)
        totals = totals * tl.exp(peaks - base) + tl.exp(x - base)
        peaks = higher
    peak = _finite_peak(tl.max(peaks, axis=0))
    total = tl.sum(totals * tl.exp(peaks - peak), axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < wanted, other=0.0).to(tl.float32) * scale
        y = tl.where(cols < seen, tl.exp(x - peak) / total, 0.0)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _softmax_rows_backward_kernel(
    grad_y_ptr,
    y_ptr,
    grad_x_ptr,
    n_rows,
    n_cols,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    y = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    inner = tl.sum(grad_y * y, axis=1)  # [BLOCK_R]
    grad_x = scale * y * (grad_y - inner[:, None])
    tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_long_row_backward_kernel(
    grad_y_ptr, y_ptr, grad_x_ptr, n_cols, scale, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    grad_y_ptr += row * n_cols
    y_ptr += row * n_cols
    grad_x_ptr += row * n_cols
    products = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        products += grad_y * y
    inner = tl.sum(products, axis=0)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        grad_x = scale * y * (grad_y - inner)
        tl.store(grad_x_ptr + cols, grad_x.to(grad_x_ptr.dtype.element_ty), mask=cols < n_cols)


def softmax_forward(
    x: torch.Tensor,
    scale: float = 1.0,
    causal: bool = False,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Return ``softmax(scale * x)`` over the last axis.

    Args:
        x: [..., n]; fp32, fp16 or bf16, contiguous; at least two axes with ``causal``.
        scale: Factor applied before the exponential.
        causal: Row i of each [rows, n] block sees columns ``j <= i + n - rows``.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or new storage. A row that is masked or minus infinity throughout is zeros.

    Raises:
        ShapeMismatchError: ``x`` has too few axes, or ``out`` another shape.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.

    Numerics: The row maximum is subtracted first, so no finite input overflows. A NaN, or an
        infinity of positive sign after scaling, makes its row NaN unless masked.
    """
    _check("softmax_forward", x=x, out=out)
    if x.ndim < 1 + causal:
        raise ShapeMismatchError(
            f"softmax_forward: x has {x.ndim} dimensions, wanted at least {1 + causal}", ""
        )
    y = empty(x.shape, x.dtype, like=x) if out is None else out
    if x.numel() == 0:
        return y
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    settings: dict[str, Any] = {
        "x_ptr": x,
        "y_ptr": y,
        "n_cols": n_cols,
        "rows_per_block": x.shape[-2] if causal else 1,
        "scale": float(scale),
        "CAUSAL": causal,
    }
    order: dict[str, Any] = {
        "op": "softmax_forward",
        "stream": stream,
        "reads": (x,),
        "writes": (y,),
    }
    if n_cols > (_FORWARD_BLOCK if n_cols % 16 == 0 and not causal else _BACKWARD_BLOCK):
        launch(_softmax_long_row_kernel, (n_rows,), **order, **settings, **_long_row_tile(16))
    else:
        tile = _row_tile(n_rows, n_cols)
        grid = (cdiv(n_rows, tile["BLOCK_R"]),)
        settings |= {"n_rows": n_rows, "POSITIVE": 0 < scale < _MOST_SCALE}
        launch(_softmax_rows_kernel, grid, **order, **settings, **tile)
    return y


def softmax_backward(
    grad_y: torch.Tensor,
    y: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of ``x``: ``scale * y * (grad_y - sum(grad_y * y))``.

    Args:
        grad_y: [..., n]; fp32, fp16 or bf16, contiguous.
        y: What the forward pass returned; masked entries are zero, so no mask is needed.
        scale: As in the forward pass.
        out: Shape and dtype of ``y`` to write to, or None; may be ``grad_y`` or ``y``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    _check("softmax_backward", y=y, grad_y=grad_y, out=out)
    grad_x = empty(y.shape, y.dtype, like=y) if out is None else out
    if y.numel() == 0:
        return grad_x
    n_cols = y.shape[-1]
    n_rows = y.numel() // n_cols
    settings: dict[str, Any] = {
        "grad_y_ptr": grad_y,
        "y_ptr": y,
        "grad_x_ptr": grad_x,
        "n_cols": n_cols,
        "scale": float(scale),
    }
    order: dict[str, Any] = {
        "op": "softmax_backward",
        "stream": stream,
        "reads": (grad_y, y),
        "writes": (grad_x,),
    }
    if n_cols > _BACKWARD_BLOCK:
        launch(
            _softmax_long_row_backward_kernel, (n_rows,), **order, **settings, **_long_row_tile(8)
        )
    else:
        tile = _row_tile(n_rows, n_cols)
        grid = (cdiv(n_rows, tile["BLOCK_R"]),)
        launch(_softmax_rows_backward_kernel, grid, **order, **settings, n_rows=n_rows, **tile)
    return grad_x


def _check(op: str, **arrays: torch.Tensor | None) -> None:
    check_storage(op, **{name: array for name, array in arrays.items() if name != "out"})
    check_alike(op, **arrays)
    given = {name: array for name, array in arrays.items() if array is not None}
    check_floating(op, **given)
    require_contiguous(op, **given)
    prepare(op, *given.values())


# Not measured on a GPU. The longest row that stays in registers without spilling: 32 elements a thread
# forward; 16 where masks cost registers too, and backward, which holds two arrays; then steps of 4096.
_FORWARD_BLOCK = 32768
_BACKWARD_BLOCK = 16384
_LONG_ROW_BLOCK = 4096
_ELEMENTS_PER_PROGRAM = 2048
# A scale past it overflows when 1/log(2) joins it.
_MOST_SCALE = 2e38


def _row_tile(n_rows: int, n_cols: int) -> dict[str, Any]:
    """Return a tile of whole rows: 16 elements a thread, 32 where the row is longest."""
    block_n = next_power_of_2(n_cols)
    block_r = min(max(_ELEMENTS_PER_PROGRAM // block_n, 1), next_power_of_2(n_rows))
    warps = min(max(block_n * block_r // 512, 1), 32)
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": warps}


def _long_row_tile(warps: int) -> dict[str, Any]:
    """Return a tile of part of a row; forward spills with 8 warps on sm_100, backward with 16 on sm_80."""
    return {"BLOCK_N": _LONG_ROW_BLOCK, "num_warps": warps}
