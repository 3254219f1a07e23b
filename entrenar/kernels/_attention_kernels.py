"""The Triton kernels of :mod:`entrenar.kernels.attention`, which launches them.

Rows are loaded relative to the start of their segment; bases are 64-bit, offsets inside a tile are
32-bit. Loops run over the blocks that a program's block can see: first those that a mask cuts at
one end, then the wholly visible ones without a mask, then those cut at the other end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from entrenar.kernels._soft_cap import soft_cap

_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Numbers that differ from call to call and align no address: a new value compiles nothing.
UNSPECIALISED = ["n_rows_q", "n_rows_k", "n_segments", "group", "window"]


@triton.jit
def find_block(cu_ptr, n_segments, block, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the segment that holds the ``block``-th block of rows, and the block's number in it.

    Each segment takes ceil(length / BLOCK) blocks. Past the last one the segment is at least
    ``n_segments``.
    """
    index = tl.arange(0, SEGMENTS)
    mask = index < n_segments
    start = tl.load(cu_ptr + index, mask=mask, other=0)
    stop = tl.load(cu_ptr + index + 1, mask=mask, other=0)
    ends = tl.cumsum((stop - start + BLOCK - 1) // BLOCK, 0)
    before = ends <= block
    return tl.sum(before.to(tl.int32), 0), block - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def bounds(cu_ptr, segment, n_rows):
    """Return start and length of a segment, kept inside the array whatever ``cu_ptr`` holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + segment), 0), n_rows)
    stop = tl.minimum(tl.maximum(tl.load(cu_ptr + segment + 1), start), n_rows)
    return start.to(tl.int64), stop - start


@triton.jit
def load_rows(
    ptr,
    stride,
    rows,
    n_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Load [rows, BLOCK_D], zeros past ``n_rows`` and past HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = ptr + rows[:, None] * stride + dims[None, :]
    if MASKED:
        tile = tl.load(ptrs, mask=(rows[:, None] < n_rows) & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(ptrs, mask=dims[None, :] < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(ptrs)
    if UPCAST_DOT:  # the interpreter's dot of 16-bit operands is wrong
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def row_products(
    a_ptr,
    stride_a,
    a_rows,
    n_a,
    b_ptr,
    stride_b,
    b_rows,
    n_b,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Return the product of each row of a with each of b, reading CHUNK_D features of both at a time.

    For GPUs on which an operand of all features does not fit the registers; caches serve the repeats.
    """
    products = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    a_ptrs = a_ptr + a_rows[:, None] * stride_a
    b_ptrs = b_ptr + b_rows[:, None] * stride_b
    # Grids have two axes, so the third is 1; the compiler, which does not know, cannot unroll the loop
    # and hold all parts at once.
    for start in tl.range(0, BLOCK_D * tl.num_programs(2), CHUNK_D, disable_licm=True):
        dims = start + tl.arange(0, CHUNK_D)
        inside = dims[None, :] < HEAD_DIM
        a = tl.load(a_ptrs + dims[None, :], mask=(a_rows[:, None] < n_a) & inside, other=0.0)
        b = tl.load(b_ptrs + dims[None, :], mask=(b_rows[:, None] < n_b) & inside, other=0.0)
        if UPCAST_DOT:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
    return products


@triton.jit
def store_rows(ptr, stride, rows, n_rows, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < n_rows) & (dims[None, :] < HEAD_DIM)
    ptrs = ptr + rows[:, None] * stride + dims[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def is_visible(queries, keys, n_keys, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether query i sees key j, over two index tiles that broadcast against each other."""
    last = queries + offset
    visible = (keys < n_keys) & (queries >= 0)
    if CAUSAL:
        visible = visible & (keys <= last)
    if WINDOWED:
        visible = visible & (keys > last - window)
    return visible


@triton.jit
def key_range(
    first,
    n_queries,
    n_keys,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the ends of the three loops over keys, for the block of queries from ``first`` on.

    Keys [low, full_low) and [full_high, high) need a mask, [full_low, full_high) do not.
    """
    offset = n_keys - n_queries
    last = tl.minimum(first + BLOCK_M, n_queries) - 1
    low = 0
    full_low = 0
    high = n_keys
    full_high = n_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.maximum(tl.minimum(last + offset + 1, n_keys), 0)
        full_high = tl.maximum(tl.minimum(first + offset + 1, n_keys), 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        low = tl.minimum(tl.maximum(first + offset - window + 1, 0), high) // BLOCK_N * BLOCK_N
        full_low = tl.maximum(last + offset - window + 1, 0)
        full_low = tl.minimum((full_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, high)
        full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@triton.jit
def _forward_loop(
    accumulator,
    total,
    top,
    q,
    q_ptr,
    k_ptr,
    v_ptr,
    stride_qt,
    stride_kt,
    stride_vt,
    queries,
    start,
    stop,
    n_queries,
    n_keys,
    offset,
    window,
    scale_log2,
    softcap_log2,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Fold keys [start, stop) into the running output, sum and maximum of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        if CHUNK_D:
            scores = row_products(
                q_ptr, stride_qt, queries, n_queries, k_ptr, stride_kt, keys, n_keys,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, CHUNK_D, UPCAST_DOT,
            )  # fmt: skip
        else:
            k = load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores *= scale_log2
        if CAPPED:  # both in base-2 units, which the cap takes as any other
            scores = soft_cap(scores, softcap_log2)
        if MASKED:
            visible = is_visible(
                queries[:, None], keys[None, :], n_keys, offset, window, CAUSAL, WINDOWED
            )
            scores = tl.where(visible, scores, -float("inf"))
        old = top
        top = tl.maximum(top, tl.max(scores, 1))
        shift = top
        if MASKED:  # a row that has seen no key yet must not form -inf - -inf
            shift = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(old - shift)
        total = total * decay + tl.sum(p, 1)
        accumulator = accumulator * decay[:, None]
        v = load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator, input_precision="ieee")
    return accumulator, total, top


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    n_rows_q,
    n_rows_k,
    n_segments,
    group,
    window,
    scale_log2,
    softcap_log2,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute BLOCK_M rows of the output of one head, and their logsumexp."""
    # The last blocks of a causal segment see the most keys: start them first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if WIDE:  # a segment of more than 2^31 elements; otherwise registers are better spent
        stride_qt = tl.cast(stride_qt, tl.int64)
        stride_kt = tl.cast(stride_kt, tl.int64)
        stride_vt = tl.cast(stride_vt, tl.int64)
        stride_ot = tl.cast(stride_ot, tl.int64)
    segment, q0, k0, n_queries, n_keys = 0, 0, 0, n_rows_q, n_rows_k
    if SEGMENTS:
        segment, block = find_block(cu_q_ptr, n_segments, block, SEGMENTS, BLOCK_M)
        if segment >= n_segments:
            return
        q0, n_queries = bounds(cu_q_ptr, segment, n_rows_q)
        k0, n_keys = bounds(cu_k_ptr, segment, n_rows_k)
    first = block * BLOCK_M
    if first >= n_queries:
        return
    offset = n_keys - n_queries
    queries = first + tl.arange(0, BLOCK_M)
    q_ptr += q0 * stride_qt + head * stride_qh
    k_ptr += k0 * stride_kt + head // group * stride_kh
    v_ptr += k0 * stride_vt + head // group * stride_vh
    q = 0
    if not CHUNK_D:
        q = load_rows(q_ptr, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    low, full_low, full_high, high = key_range(
        first, n_queries, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
    )
    if WINDOWED:
        accumulator, total, top = _forward_loop(
            accumulator, total, top, q, q_ptr, k_ptr, v_ptr, stride_qt, stride_kt, stride_vt, queries,
            low, full_low, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
            CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
        )  # fmt: skip
    accumulator, total, top = _forward_loop(
        accumulator, total, top, q, q_ptr, k_ptr, v_ptr, stride_qt, stride_kt, stride_vt, queries,
        full_low, full_high, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, False, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    accumulator, total, top = _forward_loop(
        accumulator, total, top, q, q_ptr, k_ptr, v_ptr, stride_qt, stride_kt, stride_vt, queries,
        full_high, high, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (top + tl.log2(total)) * _LN2, -float("inf"))
    out = accumulator / total[:, None]
    lse_ptr += head * n_rows_q + q0
    tl.store(lse_ptr + queries, lse, mask=queries < n_queries)
    out_ptr += q0 * stride_ot + head * stride_oh
    store_rows(out_ptr, stride_ot, queries, n_queries, out, HEAD_DIM, BLOCK_D)
