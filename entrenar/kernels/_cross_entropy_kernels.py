"""The kernels of :mod:`entrenar.kernels.cross_entropy`: row losses, their gradient, and their sum."""

from __future__ import annotations

import triton
import triton.language as tl

from entrenar.kernels._soft_cap import soft_cap

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_offset(row, stride_row):
    """Return where a row starts, in 64 bits: 16384 rows of 256000 columns are past 2^31."""
    return row.to(tl.int64) * stride_row


@triton.jit
def _logits(row_ptr, cols, mask, softcap, HAS_CAP: tl.constexpr):
    """Return logits of a row in float32, capped if asked; -inf where masked."""
    x = tl.load(row_ptr + cols, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        x = tl.where(mask, soft_cap(x, softcap), -float("inf"))
    return x


@triton.jit
def _row_maximum_and_sum(row_ptr, n_cols, softcap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce a row to its shift m and sum_c exp(x[c] - m); the sum is NaN for a row of -inf."""
    cols = tl.arange(0, BLOCK)
    top = -float("inf")
    shift = 0.0
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        x = _logits(row_ptr, start + cols, start + cols < n_cols, softcap, HAS_CAP)
        old = top
        top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(top == -float("inf"), 0.0, top)
        totals = totals * tl.exp2((old - shift) * _LOG2E) + tl.exp2((x - shift) * _LOG2E)
    total = tl.sum(totals, 0)
    return shift, tl.where(total == 0.0, float("nan"), total)


@triton.jit
def _row_loss(shift, total, at_target, in_range):
    # The difference first: 427 - -431 keeps its bits where adding log(total) to 427 would not.
    loss = (shift - at_target) + tl.log2(total) * _LN2
    return tl.where(in_range, loss, float("nan"))


@triton.jit
def _cross_entropy_loss_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    stride_row,
    n_cols,
    ignore_index,
    softcap,
    HAS_IGNORE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    counted = True
    if HAS_IGNORE:
        counted = target != ignore_index
    loss = 0.0
    if counted:
        row_ptr = logits_ptr + _row_offset(row, stride_row)
        in_range = (target >= 0) & (target < n_cols)
        at_target = _logits(row_ptr, target, in_range, softcap, HAS_CAP)
        shift, total = _row_maximum_and_sum(row_ptr, n_cols, softcap, HAS_CAP, BLOCK)
        loss = _row_loss(shift, total, at_target, in_range)
    tl.store(losses_ptr + row, loss)


@triton.jit
def _cross_entropy_gradient_kernel(
    logits_ptr,
    targets_ptr,
    grad_ptr,
    losses_ptr,
    scale_ptr,
    stride_row,
    stride_grad_row,
    stride_scale,
    n_cols,
    first_row,
    end_row,
    ignore_index,
    scale,
    softcap,
    HAS_IGNORE: tl.constexpr,
    HAS_SCALE_PTR: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's gradient, which may be onto its logits, and its loss if asked."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + _row_offset(row, stride_row)
    out_ptr = grad_ptr + _row_offset(row, stride_grad_row)
    cols = tl.arange(0, BLOCK)
    counted = (row >= first_row) & (row < end_row)
    # Targets are read in the window alone: a causal row's target may lie past the last token.
    target = tl.load(targets_ptr + row, mask=counted, other=0)
    if HAS_IGNORE:
        counted = counted & (target != ignore_index)
    loss = 0.0
    if counted:
        in_range = (target >= 0) & (target < n_cols)
        # Before the reduction, whose barrier keeps it ahead of every store of this row.
        at_target = _logits(row_ptr, target, in_range, softcap, HAS_CAP)
        shift, total = _row_maximum_and_sum(row_ptr, n_cols, softcap, HAS_CAP, BLOCK)
        loss = _row_loss(shift, total, at_target, in_range)
        if HAS_SCALE_PTR:
            scale = tl.load(scale_ptr + row * stride_scale).to(tl.float32)
        scale = tl.where(in_range, scale, float("nan"))
        inverse = 1.0 / total
        column = target.to(tl.int32)  # out of range, its row is NaN whatever column it hits
        for start in range(0, n_cols, BLOCK):
            mask = start + cols < n_cols
            x = _logits(row_ptr, start + cols, mask, softcap, HAS_CAP)
            p = tl.exp2((x - shift) * _LOG2E) * inverse
            grad = (p - tl.where(start + cols == column, 1.0, 0.0)) * scale
            if HAS_CAP:
                grad *= tl.where(mask, 1.0 - (x / softcap) * (x / softcap), 0.0)
            tl.store(out_ptr + start + cols, grad.to(grad_ptr.dtype.element_ty), mask=mask)
    else:
        zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
        for start in range(0, n_cols, BLOCK):
            tl.store(out_ptr + start + cols, zeros, mask=start + cols < n_cols)
    if WITH_LOSS:
        tl.store(losses_ptr + row, loss)


@triton.jit
def _loss_sum_kernel(
    losses_ptr,
    targets_ptr,
    loss_sum_ptr,
    counted_ptr,
    n_rows,
    ignore_index,
    HAS_IGNORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum row losses and count rows, in one program and a fixed order."""
    rows = tl.arange(0, BLOCK)
    losses = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_rows, BLOCK):
        mask = start + rows < n_rows
        losses += tl.load(losses_ptr + start + rows, mask=mask, other=0.0)
        counted = mask
        if HAS_IGNORE:
            target = tl.load(targets_ptr + start + rows, mask=mask, other=0)
            counted = mask & (target != ignore_index)
        counts += counted.to(tl.int32)
    tl.store(loss_sum_ptr, tl.sum(losses, 0))
    tl.store(counted_ptr, tl.sum(counts, 0).to(tl.int64))
