"""Kernels of matrix products that read their operands through pointers, whatever the strides."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_parts_kernel", "grouped_tile", "matmul_kernel"]


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Walk GROUP_M rows of tiles column by column, so that neighbours share what they read."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    k_per_split,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_os,
    stride_ob,
    stride_om,
    stride_on,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """One tile of one part of one product; parts (SPLIT_K > 1) are stored raw, to be added later."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    part = pid // (tiles_m * tiles_n)
    split = (part % SPLIT_K).to(tl.int64)
    batch = (part // SPLIT_K).to(tl.int64)
    pid_m, pid_n = grouped_tile(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)

    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    ks = tl.arange(0, BLOCK_K).to(tl.int64)  # [BLOCK_K]
    first_k = split * k_per_split
    left = tl.minimum(K - first_k, k_per_split).to(tl.int32)
    a_ptrs = a_ptr + batch * stride_ab + first_k * stride_ak
    a_ptrs = a_ptrs + (rows[:, None] * stride_am + ks[None, :] * stride_ak)
    b_ptrs = b_ptr + batch * stride_bb + first_k * stride_bk
    b_ptrs = b_ptrs + (ks[:, None] * stride_bk + cols[None, :] * stride_bn)
    step = tl.full((), BLOCK_K, tl.int64)
    in_rows = (rows < M)[:, None]
    in_cols = (cols < N)[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, left, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_rows, other=0.0)
            b = tl.load(b_ptrs, mask=in_cols, other=0.0)
        else:
            in_k = tl.arange(0, BLOCK_K) < left - start
            a = tl.load(a_ptrs, mask=in_rows & in_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=in_k[:, None] & in_cols, other=0.0)
        if UPCAST_DOT:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk

    inside = in_rows & in_cols
    out_ptrs = out_ptr + split * stride_os + batch * stride_ob
    out_ptrs = out_ptrs + (rows[:, None] * stride_om + cols[None, :] * stride_on)
    if SPLIT_K == 1:
        acc = acc * scale
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            acc += bias[None, :]
        if ACCUMULATE:
            acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    n_parts,
    stride_part,
    stride_ob,
    stride_om,
    stride_on,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Add the parts of a product in order, then finish it as the unsplit kernel does."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile = pid % (tiles_m * tiles_n)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    rows = (tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    part_ptrs = parts_ptr + (batch * M + rows)[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(n_parts):
        acc += tl.load(part_ptrs, mask=inside, other=0.0)
        part_ptrs += stride_part
    acc = acc * scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + batch * stride_ob
    out_ptrs = out_ptrs + (rows[:, None] * stride_om + cols[None, :].to(tl.int64) * stride_on)
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
