"""The Triton kernels of :mod:`entrenar.kernels.layer_norm`, which launches them.

Rows within a block stay in registers, ROWS of them a program. Longer rows are read block by block: their
mean and variance lane by lane in one reading (Welford; Chan, Golub and LeVeque joined at the end),
then once more.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    sum_ptr,
    n_rows,
    n_cols,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_ptr + offsets, x, mask=mask)
    mean = tl.sum(x, axis=1) / n_cols
    # about the mean, not sum of squares less its square: that cancels where the mean is large
    centred = tl.where(col_mask[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / n_cols + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _layer_norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    sum_ptr,
    n_cols,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    lane_mean = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_m2 = tl.zeros((BLOCK,), dtype=tl.float32)
    seen = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        mask = cols < n_cols
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(mask, x - lane_mean, 0.0)
        lane_mean += delta / seen
        # a masked lane has delta 0, and adds nothing
        lane_m2 += delta * (x - lane_mean)
    count = ((n_cols - lanes + BLOCK - 1) // BLOCK).to(tl.float32)
    mean = tl.sum(lane_mean * count, axis=0) / n_cols
    apart = lane_mean - mean
    rstd = 1.0 / tl.sqrt_rn(tl.sum(lane_m2 + count * apart * apart, axis=0) / n_cols + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        mask = cols < n_cols
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            # added again rather than read back: what was stored is rounded
            x += tl.load(residual_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(sum_ptr + row * n_cols + cols, x, mask=mask)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _layer_norm_backward_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    partial_ptr,
    n_rows,
    n_cols,
    n_tiles,
    HAS_RESIDUAL: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    of_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(n_tiles):
        rows = (pid * n_tiles + tile) * ROWS + tl.arange(0, ROWS)
        offsets = rows[:, None] * n_cols + cols[None, :]
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        grad = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        # past the row it is finite and meets a gradient of zero
        normalised = (x - mean) * rstd
        if NEED_WEIGHT:
            of_weight += grad * normalised
        if NEED_BIAS:
            of_bias += grad
        weighted = grad * weight
        shift = tl.sum(weighted, axis=1)[:, None] / n_cols
        slope = tl.sum(weighted * normalised, axis=1)[:, None] / n_cols
        grad_x = rstd * (weighted - shift - normalised * slope)
        if HAS_RESIDUAL:
            grad_x += tl.load(grad_residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
    # partial sums [kind, program, column], the weight's before the bias's
    if NEED_WEIGHT:
        tl.store(partial_ptr + pid * n_cols + cols, tl.sum(of_weight, axis=0), mask=col_mask)
        partial_ptr += tl.num_programs(0).to(tl.int64) * n_cols
    if NEED_BIAS:
        tl.store(partial_ptr + pid * n_cols + cols, tl.sum(of_bias, axis=0), mask=col_mask)


@triton.jit
def _layer_norm_backward_wide_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    n_cols,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        grad = tl.load(grad_y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        weighted = grad * tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        sums += weighted
        products += weighted * ((x - mean) * rstd)
    shift = tl.sum(sums, axis=0) / n_cols
    slope = tl.sum(products, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        offsets = row * n_cols + cols
        grad = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        weighted = grad * tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        grad_x = rstd * (weighted - shift - (x - mean) * rstd * slope)
        if HAS_RESIDUAL:
            grad_x += tl.load(grad_residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_each"])
def _layer_norm_partial_wide_kernel(
    grad_y_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    partial_ptr,
    n_rows,
    n_cols,
    rows_each,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the parameters' gradients over this program's rows, for one block of columns of long rows."""
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(pid * rows_each, tl.minimum((pid + 1) * rows_each, n_rows)):
        grad = tl.load(grad_y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if NEED_WEIGHT:
            x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
            of_weight += grad * ((x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row))
        if NEED_BIAS:
            of_bias += grad
    if NEED_WEIGHT:
        tl.store(partial_ptr + pid * n_cols + cols, of_weight, mask=mask)
        partial_ptr += tl.num_programs(0).to(tl.int64) * n_cols
    if NEED_BIAS:
        tl.store(partial_ptr + pid * n_cols + cols, of_bias, mask=mask)


@triton.jit(do_not_specialize=["n_partials"])
def _layer_norm_reduce_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    n_partials,
    n_cols,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the programs' partial gradients [KINDS, n_partials, n_cols], in order."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for kind in tl.static_range(KINDS):
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, n_partials, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
            offsets = (rows.to(tl.int64)[:, None] + kind * n_partials) * n_cols + cols[None, :]
            total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
        out_ptr = first_ptr if kind == 0 else second_ptr
        tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)
