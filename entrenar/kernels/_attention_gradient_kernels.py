"""The Triton kernels of :mod:`entrenar.kernels.attention`'s backward pass: delta, then dK and dV, then dQ.

Tiles are loaded and masked as in the forward kernel's file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from entrenar.kernels._attention_kernels import (
    UNSPECIALISED,
    bounds,
    find_block,
    is_visible,
    key_range,
    load_rows,
    row_products,
    store_rows,
)
from entrenar.kernels._soft_cap import soft_cap

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
    stride_gt = tl.cast(stride_gt, tl.int64)
    stride_ot = tl.cast(stride_ot, tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    left = n_rows - first
    grad_ptr += first * stride_gt + head * stride_gh
    out_ptr += first * stride_ot + head * stride_oh
    grad = load_rows(grad_ptr, stride_gt, rows, left, HEAD_DIM, BLOCK_D, True, True)
    out = load_rows(out_ptr, stride_ot, rows, left, HEAD_DIM, BLOCK_D, True, True)
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


@triton.jit(do_not_specialize=UNSPECIALISED)
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
    CHUNK_D: tl.constexpr,
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
        segment, block = find_block(cu_k_ptr, n_segments, block, SEGMENTS, BLOCK_N)
        if segment >= n_segments:
            return
        q0, n_queries = bounds(cu_q_ptr, segment, n_rows_q)
        k0, n_keys = bounds(cu_k_ptr, segment, n_rows_k)
    first = block * BLOCK_N
    if first >= n_keys:
        return
    offset = n_keys - n_queries
    keys = first + tl.arange(0, BLOCK_N)
    k_ptr += k0 * stride_kt + head * stride_kh
    v_ptr += k0 * stride_vt + head * stride_vh
    if not CHUNK_D:
        k = load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
        v = load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
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
        q = load_rows(q_head, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
        lse = tl.load(lse_ptr + member * n_rows_q + queries, mask=mask, other=0.0) * _LOG2E
        if CHUNK_D:
            scores = row_products(
                k_ptr, stride_kt, keys, n_keys, q_head, stride_qt, queries, n_queries,
                BLOCK_N, BLOCK_M, HEAD_DIM, BLOCK_D, CHUNK_D, UPCAST_DOT,
            )  # fmt: skip
        else:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        scores *= scale_log2
        if CAPPED:
            scores = soft_cap(scores, softcap_log2)
        p = tl.exp2(scores - lse[None, :])
        visible = is_visible(
            queries[None, :], keys[:, None], n_keys, offset, window, CAUSAL, WINDOWED
        )
        p = tl.where(visible, p, 0.0)
        g_head = grad_ptr + member * stride_gh
        grad = load_rows(g_head, stride_gt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision="ieee")
        delta = tl.load(delta_ptr + member * n_rows_q + queries, mask=mask, other=0.0)
        if CHUNK_D:
            grad_p = row_products(
                v_ptr, stride_vt, keys, n_keys, g_head, stride_gt, queries, n_queries,
                BLOCK_N, BLOCK_M, HEAD_DIM, BLOCK_D, CHUNK_D, UPCAST_DOT,
            )  # fmt: skip
        else:
            grad_p = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = p * (grad_p - delta[None, :])
        if CAPPED:
            grad_scores *= 1.0 - (scores / softcap_log2) * (scores / softcap_log2)
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
    grad_k_ptr += k0 * stride_dt + head * stride_dh
    grad_v_ptr += k0 * stride_dt + head * stride_dh
    store_rows(grad_k_ptr, stride_dt, keys, n_keys, grad_k * scale, HEAD_DIM, BLOCK_D)
    store_rows(grad_v_ptr, stride_dt, keys, n_keys, grad_v, HEAD_DIM, BLOCK_D)


@triton.jit
def _query_gradient_loop(
    grad_q,
    q,
    grad,
    lse,
    delta,
    q_ptr,
    grad_ptr,
    k_ptr,
    v_ptr,
    stride_qt,
    stride_gt,
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
    """Add what keys [start, stop) give to dQ (without the scale) of a block of queries."""
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, stride_kt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
        if CHUNK_D:
            scores = row_products(
                q_ptr, stride_qt, queries, n_queries, k_ptr, stride_kt, keys, n_keys,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, CHUNK_D, UPCAST_DOT,
            )  # fmt: skip
            grad_p = row_products(
                grad_ptr, stride_gt, queries, n_queries, v_ptr, stride_vt, keys, n_keys,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, CHUNK_D, UPCAST_DOT,
            )  # fmt: skip
        else:
            v = load_rows(v_ptr, stride_vt, keys, n_keys, HEAD_DIM, BLOCK_D, MASKED, UPCAST_DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            grad_p = tl.dot(grad, tl.trans(v), input_precision="ieee")
        scores *= scale_log2
        if CAPPED:
            scores = soft_cap(scores, softcap_log2)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            visible = is_visible(
                queries[:, None], keys[None, :], n_keys, offset, window, CAUSAL, WINDOWED
            )
            p = tl.where(visible, p, 0.0)
        grad_scores = p * (grad_p - delta[:, None])
        if CAPPED:
            grad_scores *= 1.0 - (scores / softcap_log2) * (scores / softcap_log2)
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")
    return grad_q


@triton.jit(do_not_specialize=UNSPECIALISED)
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
    CHUNK_D: tl.constexpr,
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
    mask = queries < n_queries
    q_ptr += q0 * stride_qt + head * stride_qh
    grad_ptr += q0 * stride_gt + head * stride_gh
    k_ptr += k0 * stride_kt + head // group * stride_kh
    v_ptr += k0 * stride_vt + head // group * stride_vh
    q, grad = 0, 0
    if not CHUNK_D:
        q = load_rows(q_ptr, stride_qt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT)
        grad = load_rows(
            grad_ptr, stride_gt, queries, n_queries, HEAD_DIM, BLOCK_D, True, UPCAST_DOT
        )
    lse = tl.load(lse_ptr + head * n_rows_q + q0 + queries, mask=mask, other=0.0) * _LOG2E
    delta = tl.load(delta_ptr + head * n_rows_q + q0 + queries, mask=mask, other=0.0)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, full_low, full_high, high = key_range(
        first, n_queries, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N
    )
    if WINDOWED:
        grad_q = _query_gradient_loop(
            grad_q, q, grad, lse, delta, q_ptr, grad_ptr, k_ptr, v_ptr,
            stride_qt, stride_gt, stride_kt, stride_vt, queries,
            low, full_low, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
            CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
        )  # fmt: skip
    grad_q = _query_gradient_loop(
        grad_q, q, grad, lse, delta, q_ptr, grad_ptr, k_ptr, v_ptr,
        stride_qt, stride_gt, stride_kt, stride_vt, queries,
        full_low, full_high, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, False, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    grad_q = _query_gradient_loop(
        grad_q, q, grad, lse, delta, q_ptr, grad_ptr, k_ptr, v_ptr,
        stride_qt, stride_gt, stride_kt, stride_vt, queries,
        full_high, high, n_queries, n_keys, offset, window, scale_log2, softcap_log2,
        CAUSAL, WINDOWED, CAPPED, True, HEAD_DIM, BLOCK_D, CHUNK_D, BLOCK_M, BLOCK_N, UPCAST_DOT,
    )  # fmt: skip
    grad_q_ptr += q0 * stride_dt + head * stride_dh
    store_rows(grad_q_ptr, stride_dt, queries, n_queries, grad_q * scale, HEAD_DIM, BLOCK_D)
