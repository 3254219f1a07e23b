"""The Triton kernels of :mod:`entrenar.kernels.attention`, which launches them.

Rows are loaded relative to the start of their segment; bases are 64-bit, offsets inside a tile are
32-bit. Loops run over the blocks that a program's block can see: first those that a mask cuts at
one end, then the wholly visible ones without a mask, then those cut at the other end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from entrenar.kernels._soft_cap import soft_cap

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Numbers that differ from call to call and align no address: a new value compiles nothing.
_UNSPECIALISED = ["n_rows_q", "n_rows_k", "n_segments", "group", "window"]


@triton.jit
def _find_block(cu_ptr, n_segments, block, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
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
def _bounds(cu_ptr, segment, n_rows):
    """Return start and length of a segment, kept inside the array whatever ``cu_ptr`` holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + segment), 0), n_rows)
    stop = tl.minimum(tl.maximum(tl.load(cu_ptr + segment + 1), start), n_rows)
    return start.to(tl.int64), stop - start


@triton.jit
def _load_rows(
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
def _store_rows(ptr, stride, rows, n_rows, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < n_rows) & (dims[None, :] < HEAD_DIM)
    ptrs = ptr + rows[:, None] * stride + dims[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _is_visible(
    queries, keys, n_keys, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):
    """Whether query i sees key j, over two index tiles that broadcast against each other."""
    last = queries + offset
    visible = (keys < n_keys) & (queries >= 0)
    if CAUSAL:
        visible = visible & (keys <= last)
    if WINDOWED:
        visible = visible & (keys > last - window)
    return visible


@triton.jit
def _key_range(
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
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    queries,
    start,
    stop,
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
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Fold keys [start, stop) into the running output, sum and maximum of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAPPED:  # both in base-2 units, which the cap takes as any other
            scores = soft_cap(scores, softcap_log2)
        if MASKED:
            visible = _is_visible(
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
        v = _load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator, input_precision="ieee")
    return accumulator, total, top


@triton.jit(do_not_specialize=_UNSPECIALISED)
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
        segment, block = _find_block(cu_q_ptr, n_segments, block, SEGMENTS, BLOCK_M)
        if segment >= n_segments:
            return
        q0, n_queries = _bounds(cu_q_ptr, segment, n_rows_q)
        k0, n_keys = _bounds(cu_k_ptr, segment, n_rows_k)
    first = block * BLOCK_M
    if first >= n_queries:
        return
    offset = n_keys - n_queries
    queries = first + tl.arange(0, BLOCK_M)
    q_ptr += q0 * stride_qt + head * stride_qh
    k_ptr += k0 * stride_kt + head // group * stride_kh
    v_ptr += k0 * stride_vt + head // group * stride_vh
    q = _load_rows(q_ptr, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    low, full_low, full_high, high = _key_range(
        first, n_queries, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
    )
    if WINDOWED:
        accumulator, total, top = _forward_loop(
            accumulator, total, top, q, k_ptr, v_ptr, stride_kt, stride_vt, queries,
            low, full_low, n_keys, offset, window, scale_log2, softcap_log2,
            CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
        )  # fmt: skip
    accumulator, total, top = _forward_loop(
        accumulator, total, top, q, k_ptr, v_ptr, stride_kt, stride_vt, queries,
        full_low, full_high, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, False, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    accumulator, total, top = _forward_loop(
        accumulator, total, top, q, k_ptr, v_ptr, stride_kt, stride_vt, queries,
        full_high, high, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (top + tl.log2(total)) * _LN2, -float("inf"))
    out = accumulator / total[:, None]
    lse_ptr += head * n_rows_q + q0
    tl.store(lse_ptr + queries, lse, mask=queries < n_queries)
    out_ptr += q0 * stride_ot + head * stride_oh
    _store_rows(out_ptr, stride_ot, queries, n_queries, out, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["n_rows"])
def _attention_delta_kernel(
    grad_ptr,
    out_ptr,
    delta_ptr,
    stride_gt,
    stride_gh,
    stride_ot,
    stride_oh,
    n_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute delta[head, row] = sum_d grad_out out, in fp32."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    left = n_rows - first
    grad_ptr += first * stride_gt + head * stride_gh
    out_ptr += first * stride_ot + head * stride_oh
    grad = _load_rows(grad_ptr, stride_gt, rows, left, HEAD_DIM, BLOCK_D, True, True)
    out = _load_rows(out_ptr, stride_ot, rows, left, HEAD_DIM, BLOCK_D, True, True)
    delta_ptr += head * n_rows + first
    tl.store(delta_ptr + rows, tl.sum(grad * out, 1), mask=rows < left)


@triton.jit
def _query_range(
    first,
    n_queries,
    n_keys,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return first and number of the blocks of queries that see any of the keys from ``first`` on."""
    offset = n_keys - n_queries
    last = tl.minimum(first + BLOCK_N, n_keys) - 1
    low = 0
    high = n_queries
    if WINDOWED:
        high = tl.maximum(tl.minimum(last + window - offset, n_queries), 0)
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - offset, 0), high) // BLOCK_M
    return low, (high + BLOCK_M - 1) // BLOCK_M - low


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _attention_key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_dt,
    stride_dh,
    n_rows_q,
    n_rows_k,
    n_segments,
    group,
    window,
    scale,
    scale_log2,
    softcap_log2,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute dK and dV of BLOCK_N keys of one head, over all query heads that read it, in order."""
    block = tl.program_id(0)  # the first keys of a causal segment are seen by the most queries
    head = tl.program_id(1).to(tl.int64)
    if WIDE:  # a segment of more than 2^31 elements; otherwise registers are better spent
        stride_qt = tl.cast(stride_qt, tl.int64)
        stride_kt = tl.cast(stride_kt, tl.int64)
        stride_vt = tl.cast(stride_vt, tl.int64)
        stride_gt = tl.cast(stride_gt, tl.int64)
        stride_dt = tl.cast(stride_dt, tl.int64)
    segment, q0, k0, n_queries, n_keys = 0, 0, 0, n_rows_q, n_rows_k
    if SEGMENTS:
        segment, block = _find_block(cu_k_ptr, n_segments, block, SEGMENTS, BLOCK_N)
        if segment >= n_segments:
            return
        q0, n_queries = _bounds(cu_q_ptr, segment, n_rows_q)
        k0, n_keys = _bounds(cu_k_ptr, segment, n_rows_k)
    first = block * BLOCK_N
    if first >= n_keys:
        return
    offset = n_keys - n_queries
    keys = first + tl.arange(0, BLOCK_N)
    k_ptr += k0 * stride_kt + head * stride_kh
    v_ptr += k0 * stride_vt + head * stride_vh
    k = _load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    v = _load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    low, n_blocks = _query_range(
        first, n_queries, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
    )
    # One loop over all readers and blocks, so that loads run ahead across readers; one body, as
    # three of them do not fit the registers.
    q_ptr += q0 * stride_qt + head * group * stride_qh
    grad_ptr += q0 * stride_gt + head * group * stride_gh
    lse_ptr += head * group * n_rows_q + q0
    delta_ptr += head * group * n_rows_q + q0
    for step in range(group * n_blocks):
        member = (step // n_blocks).to(tl.int64)
        queries = (low + step % n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = queries < n_queries
        q_head = q_ptr + member * stride_qh
        q = _load_rows(q_head, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
        lse = tl.load(lse_ptr + member * n_rows_q + queries, mask=mask, other=0.0) * _LOG2E
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
        if CAPPED:
            scores = soft_cap(scores, softcap_log2)
        p = tl.exp2(scores - lse[None, :])
        visible = _is_visible(
            queries[None, :], keys[:, None], n_keys, offset, window, CAUSAL, WINDOWED
        )
        p = tl.where(visible, p, 0.0)
        g_head = grad_ptr + member * stride_gh
        grad = _load_rows(
            g_head, stride_gt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT
        )
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision="ieee")
        delta = tl.load(delta_ptr + member * n_rows_q + queries, mask=mask, other=0.0)
        grad_p = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = p * (grad_p - delta[None, :])
        if CAPPED:
            grad_scores *= 1.0 - (scores / softcap_log2) * (scores / softcap_log2)
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
    grad_k_ptr += k0 * stride_dt + head * stride_dh
    grad_v_ptr += k0 * stride_dt + head * stride_dh
    _store_rows(grad_k_ptr, stride_dt, keys, n_keys, grad_k * scale, HEAD_DIM, BLOCK_D)
    _store_rows(grad_v_ptr, stride_dt, keys, n_keys, grad_v, HEAD_DIM, BLOCK_D)


@triton.jit
def _query_gradient_loop(
    grad_q,
    q,
    grad,
    lse,
    delta,
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    queries,
    start,
    stop,
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
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Add what keys [start, stop) give to dQ (without the scale) of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        v = _load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAPPED:
            scores = soft_cap(scores, softcap_log2)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            visible = _is_visible(
                queries[:, None], keys[None, :], n_keys, offset, window, CAUSAL, WINDOWED
            )
            p = tl.where(visible, p, 0.0)
        grad_p = tl.dot(grad, tl.trans(v), input_precision="ieee")
        grad_scores = p * (grad_p - delta[:, None])
        if CAPPED:
            grad_scores *= 1.0 - (scores / softcap_log2) * (scores / softcap_log2)
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")
    return grad_q


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _attention_query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_dt,
    stride_dh,
    n_rows_q,
    n_rows_k,
    n_segments,
    group,
    window,
    scale,
    scale_log2,
    softcap_log2,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute dQ of BLOCK_M queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if WIDE:  # a segment of more than 2^31 elements; otherwise registers are better spent
        stride_qt = tl.cast(stride_qt, tl.int64)
        stride_kt = tl.cast(stride_kt, tl.int64)
        stride_vt = tl.cast(stride_vt, tl.int64)
        stride_gt = tl.cast(stride_gt, tl.int64)
        stride_dt = tl.cast(stride_dt, tl.int64)
    segment, q0, k0, n_queries, n_keys = 0, 0, 0, n_rows_q, n_rows_k
    if SEGMENTS:
        segment, block = _find_block(cu_q_ptr, n_segments, block, SEGMENTS, BLOCK_M)
        if segment >= n_segments:
            return
        q0, n_queries = _bounds(cu_q_ptr, segment, n_rows_q)
        k0, n_keys = _bounds(cu_k_ptr, segment, n_rows_k)
    first = block * BLOCK_M
    if first >= n_queries:
        return
    offset = n_keys - n_queries
    queries = first + tl.arange(0, BLOCK_M)
    mask = queries < n_queries
    q_ptr += q0 * stride_qt + head * stride_qh
    grad_ptr += q0 * stride_gt + head * stride_gh
    k_ptr += k0 * stride_kt + head // group * stride_kh
    v_ptr += k0 * stride_vt + head // group * stride_vh
    q = _load_rows(q_ptr, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    grad = _load_rows(grad_ptr, stride_gt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
    lse = tl.load(lse_ptr + head * n_rows_q + q0 + queries, mask=mask, other=0.0) * _LOG2E
    delta = tl.load(delta_ptr + head * n_rows_q + q0 + queries, mask=mask, other=0.0)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, full_low, full_high, high = _key_range(
        first, n_queries, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
    )
    if WINDOWED:
        grad_q = _query_gradient_loop(
            grad_q, q, grad, lse, delta, k_ptr, v_ptr, stride_kt, stride_vt, queries,
            low, full_low, n_keys, offset, window, scale_log2, softcap_log2,
            CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
        )  # fmt: skip
    grad_q = _query_gradient_loop(
        grad_q, q, grad, lse, delta, k_ptr, v_ptr, stride_kt, stride_vt, queries,
        full_low, full_high, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, False, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    grad_q = _query_gradient_loop(
        grad_q, q, grad, lse, delta, k_ptr, v_ptr, stride_kt, stride_vt, queries,
        full_high, high, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    grad_q_ptr += q0 * stride_dt + head * stride_dh
    _store_rows(grad_q_ptr, stride_dt, queries, n_queries, grad_q * scale, HEAD_DIM, BLOCK_D)
