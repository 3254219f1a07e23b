"""Root-mean-square normalisation over the last axis, with the residual addition fused both ways.

Forward: ``y = x * rstd * weight``, ``rstd = 1 / sqrt(mean(x**2) + eps)``; with a residual, ``x`` is
first replaced by ``x + residual``, which is stored too. Backward, with ``h = x * rstd`` and
``g = grad_y * weight``: ``grad_x = rstd * (g - h * mean(g * h)) + grad_residual`` and
``grad_weight = sum over rows of grad_y * h``.

A row is the last axis: ``[T, D]`` normalises tokens, ``[T, heads, D]`` each head. Rows that fit a
block are read once and kept in registers, several to a program where they are narrow. Longer rows
are read twice, block by block.

Numerics: 16-bit storage is up-cast at the load, statistics and sums are float32, each result is
rounded once. ``grad_weight`` is reduced in two stages in an order fixed by the sizes alone, with no
atomics: a program sums its rows, a second launch sums the programs. Two runs agree to the bit.
Bytes moved: forward 2 elements (4 with a residual), backward 3 (4 with its gradient), plus a float
a row; ``grad_weight`` adds ``8 * D`` for each program of the first stage.
Source: Zhang and Sennrich, arXiv:1910.07467, equation 4; transformers' LlamaRMSNorm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_dtype, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.kernels import _launch

__all__ = ["rms_norm_backward", "rms_norm_forward"]


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    sum_ptr,
    n_rows,
    n_cols,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_ptr + offsets, x, mask=mask)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / n_cols + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, x * rstd[:, None] * weight[None, :], mask=mask)


@triton.jit
def _rms_norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    sum_ptr,
    n_cols,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            # added again rather than read back: what was stored is rounded
            x += tl.load(residual_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(sum_ptr + row * n_cols + cols, x, mask=mask)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, x * rstd * weight, mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    partial_ptr,
    n_rows,
    n_cols,
    n_tiles,
    HAS_RESIDUAL: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(n_tiles):
        rows = (pid * n_tiles + tile) * ROWS + tl.arange(0, ROWS)
        offsets = rows[:, None] * n_cols + cols[None, :]
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        grad = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        normalised = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        if NEED_WEIGHT:
            total += grad * normalised
        weighted = grad * weight
        # the sign on the row's number, not on each element's product
        lean = -tl.sum(weighted * normalised, axis=1)[:, None] / n_cols
        grad_x = rstd * (weighted + normalised * lean)
        if HAS_RESIDUAL:
            grad_x += tl.load(grad_residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
    if NEED_WEIGHT:
        tl.store(partial_ptr + pid * n_cols + cols, tl.sum(total, axis=0), mask=col_mask)


@triton.jit
def _rms_norm_backward_wide_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    n_cols,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        grad = tl.load(grad_y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        products += grad * weight * (x * rstd)
    mean = tl.sum(products, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        offsets = row * n_cols + cols
        grad = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        grad_x = rstd * (grad * weight - (x * rstd) * mean)
        if HAS_RESIDUAL:
            grad_x += tl.load(grad_residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)


@triton.jit
def _rms_norm_partial_wide_kernel(
    grad_y_ptr,
    x_ptr,
    rstd_ptr,
    partial_ptr,
    n_rows,
    n_cols,
    rows_each,
    BLOCK: tl.constexpr,
):
    """Sum ``grad_y * h`` over this program's rows, for one block of columns of long rows."""
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(pid * rows_each, tl.minimum((pid + 1) * rows_each, n_rows)):
        grad = tl.load(grad_y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        total += grad * (x * tl.load(rstd_ptr + row))
    tl.store(partial_ptr + pid * n_cols + cols, total, mask=mask)


@triton.jit
def _rms_norm_reduce_kernel(
    partial_ptr, grad_weight_ptr, n_partials, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the programs' partial gradients of the weight, in order."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
        offsets = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(grad_weight_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def rms_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Normalise each row, after adding ``residual`` where there is one.

    Args:
        x: [..., D] contiguous, float32, float16 or bfloat16.
        weight: [D], dtype of ``x`` or float32.
        eps: Added to the mean square, at least 0.
        residual: Shape and dtype of ``x``, or None.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, residual_sum)`` with ``residual_sum = x + residual``, which is
        then what was normalised, before its own rounding. ``y`` has the shape of ``x``; ``rstd`` is
        float32 [rows].

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are none of the above.
        LayoutError: A tensor is not contiguous.
        ConfigError: ``eps`` is negative or not a number.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Source: Zhang and Sennrich, arXiv:1910.07467, equation 4; transformers' LlamaRMSNorm.
    """
    op = "rms_norm_forward"
    _check(op, x, weight, residual=residual)
    if not eps >= 0:
        raise ConfigError(f"{op}: eps is {eps}, wanted at least 0", "")
    n_rows, n_cols = math.prod(x.shape[:-1]), x.shape[-1]
    y = _launch.empty(tuple(x.shape), x.dtype, x)
    rstd = _launch.empty((n_rows,), torch.float32, x)
    total = None if residual is None else _launch.empty(tuple(x.shape), x.dtype, x)
    results = (y, rstd) if total is None else (y, rstd, total)
    if x.numel() == 0:
        return results
    wide = n_cols > _MAX_BLOCK_FORWARD
    rows, block, warps = _tile(n_cols, _MAX_BLOCK_FORWARD)
    _launch.launch(
        _rms_norm_forward_wide_kernel if wide else _rms_norm_forward_kernel,
        (n_rows if wide else _launch.cdiv(n_rows, rows),),
        op=op,
        stream=stream,
        reads=[t for t in (x, residual, weight) if t is not None],
        writes=list(results),
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        y_ptr=y,
        rstd_ptr=rstd,
        sum_ptr=total,
        n_cols=n_cols,
        eps=float(eps),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=warps,
        **({} if wide else {"n_rows": n_rows, "ROWS": rows}),
    )
    return results


def rms_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    grad_residual: torch.Tensor | None = None,
    need_grad_weight: bool = True,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the normalised input and of the weight.

    Args:
        grad_y: [..., D].
        x: [..., D], what was normalised: ``residual_sum`` where there was one.
        weight: [D].
        rstd: float32 [rows], from the forward pass.
        grad_residual: Gradient that reaches ``x`` past the norm, added in the same pass, or None.
        need_grad_weight: False for a frozen weight: its sums are then not computed at all.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(grad_x, grad_weight)``, dtypes of ``x`` and ``weight``; the second is None where it was
        not asked for.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are none of the above.
        LayoutError: A tensor is not contiguous.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Numerics: ``grad_weight`` is summed in float32 in an order that depends on the sizes alone.
    """
    op = "rms_norm_backward"
    _launch.check_storage(op, grad_y=grad_y, rstd=rstd)
    _check(op, x, weight, rstd, grad_y=grad_y, grad_residual=grad_residual)
    grad_x = _launch.empty(tuple(x.shape), x.dtype, x)
    wide = x.shape[-1] > _MAX_BLOCK_BACKWARD
    launcher = _backward_wide if wide else _backward_tiles
    n_rows = math.prod(x.shape[:-1])
    reads = [t for t in (grad_y, x, weight, rstd, grad_residual) if t is not None]
    arguments = {
        "grad_y_ptr": grad_y,
        "x_ptr": x,
        "rstd_ptr": rstd,
        "n_cols": x.shape[-1],
    }
    partial = None
    if x.numel():
        partial = launcher(
            op, stream, n_rows, reads, grad_x, weight, grad_residual, need_grad_weight, arguments
        )
    grad_weight = _reduce(op, stream, partial, weight) if need_grad_weight else None
    return grad_x, grad_weight


def _backward_tiles(
    op: str,
    stream: Any,
    n_rows: int,
    reads: list[torch.Tensor],
    grad_x: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    need_grad_weight: bool,
    arguments: dict[str, Any],
) -> torch.Tensor | None:
    """Launch over tiles of whole rows; return the partial sums [programs, D] if asked for."""
    n_cols = arguments["n_cols"]
    rows, block, warps = _tile(n_cols, _MAX_BLOCK_BACKWARD)
    n_tiles = _launch.cdiv(n_rows, rows)
    each = _rows_each(n_tiles) if need_grad_weight else _frozen_rows_each(n_tiles)
    programs = _launch.cdiv(n_tiles, each)
    partial = None
    if need_grad_weight:
        partial = _launch.empty((programs, n_cols), torch.float32, grad_x)
    _launch.launch(
        _rms_norm_backward_kernel,
        (programs,),
        op=op,
        stream=stream,
        reads=reads,
        writes=[grad_x] if partial is None else [grad_x, partial],
        **arguments,
        weight_ptr=weight,
        grad_residual_ptr=grad_residual,
        grad_x_ptr=grad_x,
        partial_ptr=partial,
        n_rows=n_rows,
        n_tiles=each,
        HAS_RESIDUAL=grad_residual is not None,
        NEED_WEIGHT=need_grad_weight,
        ROWS=rows,
        BLOCK=block,
        # a sum of each element besides: half as many elements a thread
        num_warps=min(2 * warps, 16) if need_grad_weight else warps,
    )
    return partial


def _backward_wide(
    op: str,
    stream: Any,
    n_rows: int,
    reads: list[torch.Tensor],
    grad_x: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    need_grad_weight: bool,
    arguments: dict[str, Any],
) -> torch.Tensor | None:
    """Launch for rows past a block; return the partial sums [programs, D] if asked for."""
    _launch.launch(
        _rms_norm_backward_wide_kernel,
        (n_rows,),
        op=op,
        stream=stream,
        reads=reads,
        writes=[grad_x],
        **arguments,
        weight_ptr=weight,
        grad_residual_ptr=grad_residual,
        grad_x_ptr=grad_x,
        HAS_RESIDUAL=grad_residual is not None,
        BLOCK=_WIDE_BLOCK,
        num_warps=_WIDE_WARPS,
    )
    if not need_grad_weight:
        return None
    each = _rows_each(n_rows)
    programs = _launch.cdiv(n_rows, each)
    partial = _launch.empty((programs, arguments["n_cols"]), torch.float32, grad_x)
    _launch.launch(
        _rms_norm_partial_wide_kernel,
        (programs, _launch.cdiv(arguments["n_cols"], _PARTIAL_BLOCK)),
        op=op,
        stream=stream,
        reads=reads,
        writes=[partial],
        **arguments,
        partial_ptr=partial,
        n_rows=n_rows,
        rows_each=each,
        BLOCK=_PARTIAL_BLOCK,
        num_warps=4,
    )
    return partial


def _reduce(
    op: str, stream: Any, partial: torch.Tensor | None, weight: torch.Tensor
) -> torch.Tensor:
    """Sum partial gradients [programs, D] into the weight's; zeros where there were no rows."""
    grad_weight = _launch.empty(tuple(weight.shape), weight.dtype, weight)
    n_cols = weight.shape[0]
    if n_cols == 0:
        return grad_weight
    _launch.launch(
        _rms_norm_reduce_kernel,
        (_launch.cdiv(n_cols, _REDUCE_BLOCK),),
        op=op,
        stream=stream,
        reads=[] if partial is None else [partial],
        writes=[grad_weight],
        partial_ptr=grad_weight if partial is None else partial,
        grad_weight_ptr=grad_weight,
        n_partials=0 if partial is None else partial.shape[0],
        n_cols=n_cols,
        ROWS=_REDUCE_ROWS,
        BLOCK=_REDUCE_BLOCK,
        num_warps=4,
    )
    return grad_weight


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor | None = None,
    **like_x: torch.Tensor | None,
) -> None:
    _launch.check_storage(op, x=x, weight=weight)
    if x.dim() < 1:
        raise ShapeMismatchError(f"{op}: x has no dimensions, wanted at least 1", "reshape x")
    check_shape(op, "weight", weight, (x.shape[-1],), "pass the weight of the same layer")
    given = {name: t for name, t in like_x.items() if t is not None}
    _launch.check_storage(op, **given)
    for name, tensor in given.items():
        check_shape(op, name, tensor, tuple(x.shape))
    floats = {"x": x, "weight": weight, **given}
    wide = weight.dtype == torch.float32
    check_same_dtype(op, **{name: t for name, t in floats.items() if name != "weight" or not wide})
    _launch.check_floating(op, **floats)
    if rstd is not None:
        check_shape(op, "rstd", rstd, (math.prod(x.shape[:-1]),))
        check_dtype(op, "rstd", rstd, "float32")
        floats["rstd"] = rstd
    _launch.prepare(op, *floats.values())
    _launch.require_contiguous(op, **floats)


def _tile(n_cols: int, max_block: int) -> tuple[int, int, int]:
    """Return rows a program, columns a block and warps: about ``_TILE`` elements, 16 a thread."""
    if n_cols > max_block:
        return 1, _WIDE_BLOCK, _WIDE_WARPS
    block = _launch.next_power_of_2(n_cols)
    rows = max(_TILE // block, 1)
    return min(rows, 32), block, min(max(rows * block // 512, 1), 16)


def _rows_each(n_tiles: int) -> int:
    """Return tiles a program, so that there are few partial sums and still enough programs."""
    return max(_launch.cdiv(n_tiles, _MAX_PARTIALS), min(_MIN_TILES, n_tiles), 1)


def _frozen_rows_each(n_tiles: int) -> int:
    """Return tiles a program that needs no sums: a few, to read the weight once for them."""
    return min(max(n_tiles // (4 * _MAX_PARTIALS), 1), _MIN_TILES)


# Chosen from register counts of the sm_90 code (no spill; 16 elements a thread, so that a backward
# thread holds x, grad_y, weight and a sum of each), not timed.
_MAX_BLOCK_FORWARD = 16_384
_MAX_BLOCK_BACKWARD = 8_192
_WIDE_BLOCK, _WIDE_WARPS = 4_096, 8
_TILE = 2_048
# Two programs for each of the 132 multiprocessors of an H100 or H200, but at least four tiles each:
# the partial sums stay near a tenth of the traffic.
_MAX_PARTIALS, _MIN_TILES = 264, 4
_PARTIAL_BLOCK = 1_024
_REDUCE_ROWS, _REDUCE_BLOCK = 32, 64
