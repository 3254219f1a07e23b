"""The Triton kernels of :mod:`entrenar.kernels.lora`, and what NF4 products share with them.

Sums that several programs contribute to go to float32 parts that a last launch adds in order, so two
runs agree to the bit. Factors may be float32 beside 16-bit activations: they are rounded to the
activations' dtype on load, since the matrix units want one dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from call to call and align no address: a new value compiles nothing.
_UNSPECIALISED = ["M", "seed", "n_parts", "blocks_per_part"]


@triton.jit
def dropped(x, index, seed, dropout_p, keep_scale):
    """Zero the elements of float32 ``x`` that dropout removes and scale the others.

    The numbers are those of ``tl.rand(seed, index)``: Philox 4x32-10 with the 64-bit index as counter.
    ``seed`` is a number, or points to one, which a replayed graph reads anew.
    """
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    word = word.to(tl.int32, bitcast=True)
    uniform = tl.where(word < 0, -word - 1, word).to(tl.float32) * 4.6566127342e-10
    return tl.where(uniform > dropout_p, x * keep_scale, 0.0)


@triton.jit
def product(a, b, acc, UPCAST_DOT: tl.constexpr):
    """Return ``acc + a @ b`` in IEEE float32; the interpreter multiplies no 16-bit operands."""
    if UPCAST_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def adapter_tile(
    u_ptr,
    v_ptr,
    rows,
    in_rows,
    cols,
    in_cols,
    rank,
    stride_vr,
    stride_vn,
    scale,
    BLOCK_R: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Return ``scale * u @ v`` of a tile, u [M, rank] in rows, v [rank, N] by strides."""
    r = tl.arange(0, BLOCK_R)
    in_rank = r < rank
    u = tl.load(
        u_ptr + rows[:, None] * rank + r[None, :],
        mask=in_rows[:, None] & in_rank[None, :],
        other=0.0,
    )
    v = tl.load(
        v_ptr + r[:, None] * stride_vr + cols[None, :] * stride_vn,
        mask=in_rank[:, None] & in_cols[None, :],
        other=0.0,
    )
    zeros = tl.zeros((u.shape[0], v.shape[1]), dtype=tl.float32)
    return product(u, v.to(u.dtype), zeros, UPCAST_DOT) * scale


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _seeded_product_kernel(
    a_ptr,
    b_ptr,
    u_ptr,
    v_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    rank,
    stride_bk,
    stride_bn,
    stride_vr,
    stride_vn,
    scale,
    seed,
    dropout_p,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """``out = drop(scale * u @ v) + a @ b + bias``: the adapter's product seeds the accumulator."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    per_group = GROUP_M * tiles_n
    first_m = (pid // per_group) * GROUP_M
    group = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % per_group) % group
    pid_n = (pid % per_group) // group
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_rows = rows < M
    in_cols = cols < N
    acc = adapter_tile(
        u_ptr,
        v_ptr,
        rows,
        in_rows,
        cols,
        in_cols,
        rank,
        stride_vr,
        stride_vn,
        scale,
        BLOCK_R=BLOCK_R,
        UPCAST_DOT=UPCAST_DOT,
    )
    if DROPOUT:
        acc = dropped(acc, rows[:, None] * N + cols[None, :], seed, dropout_p, keep_scale)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :] * stride_bn
    step_b = tl.full((), BLOCK_K, tl.int64) * stride_bk
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_rows[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=in_cols[None, :], other=0.0)
        else:
            in_k = ks < K - start
            a = tl.load(a_ptrs, mask=in_rows[:, None] & in_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=in_k[:, None] & in_cols[None, :], other=0.0)
        acc = product(a, b, acc, UPCAST_DOT)
        a_ptrs += BLOCK_K
        b_ptrs += step_b
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * N + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _down_kernel(
    x_ptr,
    a_ptr,
    s_ptr,
    M,
    K,
    rank,
    seed,
    dropout_p,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN_K: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """``s = drop(x) @ a.T``: x [M, K] is read once, a [rank, K] once a program."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    ks = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    in_rows = rows < M
    in_rank = r < rank
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    a_ptrs = a_ptr + ks[:, None] + r[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=in_rows[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=in_rank[None, :], other=0.0)
        else:
            in_k = ks < K - start
            x = tl.load(x_ptrs, mask=in_rows[:, None] & in_k[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=in_k[:, None] & in_rank[None, :], other=0.0)
        if DROPOUT:
            index = rows[:, None] * K + (start + ks)[None, :]
            kept = dropped(x.to(tl.float32), index, seed, dropout_p, keep_scale)
            x = kept.to(x_ptr.dtype.element_ty)
        acc = product(x, a.to(x_ptr.dtype.element_ty), acc, UPCAST_DOT)
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    out_ptrs = s_ptr + rows[:, None] * rank + r[None, :]
    tl.store(out_ptrs, acc.to(s_ptr.dtype.element_ty), mask=in_rows[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _grad_s_b_kernel(
    grad_y_ptr,
    b_ptr,
    s_ptr,
    grad_s_parts_ptr,
    grad_b_parts_ptr,
    M,
    N,
    rank,
    blocks_per_part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """One read of grad_y: parts of ``grad_y @ b`` and of ``grad_y.T @ s``.

    A part of the first is a slab of columns, a part of the second a block of rows.
    """
    pid_m = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    r = tl.arange(0, BLOCK_R)
    in_rows = rows < M
    in_rank = r < rank
    row_mask = in_rows[:, None] & in_rank[None, :]
    s = tl.load(s_ptr + rows[:, None] * rank + r[None, :], mask=row_mask, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for block in range(blocks_per_part):
        # whole blocks, so that the compiler sees aligned columns
        cols = (part * blocks_per_part + block) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        in_cols = cols < N
        grad_y = tl.load(
            grad_y_ptr + rows[:, None] * N + cols[None, :],
            mask=in_rows[:, None] & in_cols[None, :],
            other=0.0,
        )
        col_at = cols[:, None] * rank + r[None, :]
        col_mask = in_cols[:, None] & in_rank[None, :]
        b = tl.load(b_ptr + col_at, mask=col_mask, other=0.0).to(grad_y.dtype)
        acc = product(grad_y, b, acc, UPCAST_DOT)
        zeros = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
        grad_b = product(tl.trans(grad_y), s, zeros, UPCAST_DOT)
        tl.store(grad_b_parts_ptr + pid_m * N * rank + col_at, grad_b, mask=col_mask)
    row_at = rows[:, None] * rank + r[None, :]
    tl.store(grad_s_parts_ptr + part * M * rank + row_at, acc, mask=row_mask)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _grad_a_kernel(
    x_ptr,
    grad_s_ptr,
    parts_ptr,
    M,
    K,
    rank,
    blocks_per_part,
    seed,
    dropout_p,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """A part of ``grad_s.T @ drop(x)``: [rank, BLOCK_K] from ``blocks_per_part`` blocks of rows."""
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    part = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    in_cols = cols < K
    in_rank = r < rank
    acc = tl.zeros((BLOCK_K, BLOCK_R), dtype=tl.float32)
    for block in range(blocks_per_part):
        rows = (part * blocks_per_part + block) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        in_rows = rows < M
        index = rows[:, None] * K + cols[None, :]
        x = tl.load(x_ptr + index, mask=in_rows[:, None] & in_cols[None, :], other=0.0)
        if DROPOUT:
            kept = dropped(x.to(tl.float32), index, seed, dropout_p, keep_scale)
            x = kept.to(x_ptr.dtype.element_ty)
        grad_s = tl.load(
            grad_s_ptr + rows[:, None] * rank + r[None, :],
            mask=in_rows[:, None] & in_rank[None, :],
            other=0.0,
        )
        acc = product(tl.trans(x), grad_s, acc, UPCAST_DOT)
    out_ptrs = parts_ptr + (part * rank + r[None, :]) * K + cols[:, None]
    tl.store(out_ptrs, acc, mask=in_cols[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _add_parts_kernel(
    parts_ptr,
    out_ptr,
    n,
    n_parts,
    scale,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out (+)= scale * sum of parts``, in the order of the parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    part_ptrs = parts_ptr + at
    step = tl.full((), 1, tl.int64) * n
    for _ in range(n_parts):
        acc += tl.load(part_ptrs, mask=inside, other=0.0)
        part_ptrs += step
    acc = acc * scale
    if ACCUMULATE:
        acc += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
