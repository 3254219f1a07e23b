"""Matrix products: ``c = scale * op(a) @ op(b) + bias``, plain or batched, with transposes as strides.

16-bit operands go to the matrix units with a float32 accumulator; fp32 operands are multiplied as
IEEE float32 unless ``precision="tf32"``. Scale, bias and what ``out`` held are applied to the float32
sum, and the result is rounded once, at the store. Where the tiles of the result are few and the inner
size is long, the sum is split over k: parts go to float32 scratch and a second launch adds them in
order, so two runs agree to the bit. Tiles and splits depend on shape and dtype (and on the shared
memory of the device) alone; nothing is tuned at run time.

Bytes moved: a once per column of tiles, b once per row of tiles, c once; programs are ordered in
groups of rows so that the second-level cache serves the repeats (Triton's tutorial 03).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError, LayoutError, ShapeMismatchError
from entrenar.kernels._gemm_tiles import GROUP_M, choose_split, choose_tile, kind_of
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    empty,
    interpreting,
    launch,
    next_power_of_2,
    on_amd,
    prepare,
    require_contiguous,
    shared_bytes,
)

__all__ = ["gemm_backward_a", "gemm_backward_b", "gemm_forward", "matmul"]


@triton.jit
def _grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Walk GROUP_M rows of tiles column by column, so that neighbours share what they read."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows


@triton.jit
def _matmul_kernel(
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
    pid_m, pid_n = _grouped_tile(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)

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
def _add_parts_kernel(
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


def gemm_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return ``a @ b``.

    Args:
        a: [m, k]; fp32, fp16 or bf16, any strides.
        b: [k, n], dtype of ``a``, any strides.
        out: [m, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or a new [m, n]; zeros where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    _check_pair("gemm_forward", "a", a, "b", b)
    check_shape("gemm_forward", "b", b, (a.shape[1], -1), "the inner sizes of a and b must agree")
    return _product("gemm_forward", a, b, None, 1.0, out, accumulate, precision, stream)


def gemm_backward_a(
    grad_c: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of ``a`` in ``c = a @ b``: ``grad_c @ b.T``, the transpose by strides.

    Args:
        grad_c: [m, n]; fp32, fp16 or bf16, any strides.
        b: [k, n], dtype of ``grad_c``, any strides.
        out: [m, k] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    op = "gemm_backward_a"
    _check_pair(op, "grad_c", grad_c, "b", b)
    check_shape(op, "b", b, (-1, grad_c.shape[1]), "grad_c and b share their columns")
    return _product(op, grad_c, b.transpose(0, 1), None, 1.0, out, accumulate, precision, stream)


def gemm_backward_b(
    a: torch.Tensor,
    grad_c: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of ``b`` in ``c = a @ b``: ``a.T @ grad_c``, the transpose by strides.

    Args:
        a: [m, k]; fp32, fp16 or bf16, any strides.
        grad_c: [m, n], dtype of ``a``, any strides.
        out: [k, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    op = "gemm_backward_b"
    _check_pair(op, "a", a, "grad_c", grad_c)
    check_shape(op, "grad_c", grad_c, (a.shape[0], -1), "a and grad_c share their rows")
    return _product(op, a.transpose(0, 1), grad_c, None, 1.0, out, accumulate, precision, stream)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return ``scale * (op(a) @ op(b)) + bias``, ``op`` transposing the last two axes where asked.

    Args:
        a: [m, k] or [B, m, k] after ``op``; fp32, fp16 or bf16, any strides.
        b: [k, n] after ``op``, shared by the batch, or [B, k, n]; dtype of ``a``, any strides.
        trans_a: ``a`` is stored [k, m].
        trans_b: ``b`` is stored [n, k].
        bias: [n] in the dtype of ``a``, contiguous, or None.
        scale: Factor of the product, not of the bias.
        out: [m, n] or [B, m, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or new storage in the dtype of ``a``; the bias alone, or zeros, where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage, or ``bias`` is not contiguous.
        ConfigError: Another precision, or ``accumulate`` without ``out``.

    Numerics: Sums in float32, in an order fixed by the shape; one rounding at the store.
    """
    check_ndim("matmul", "a", a, 2, 3)
    check_ndim("matmul", "b", b, *((2,) if a.ndim == 2 else (2, 3)))
    check_dtype("matmul", "a", a)
    check_same_dtype("matmul", a=a, b=b, bias=bias)
    left = a.transpose(-1, -2) if trans_a else a
    right = b.transpose(-1, -2) if trans_b else b
    if left.shape[-1] != right.shape[-2]:
        raise ShapeMismatchError(
            f"matmul: a has {left.shape[-1]} columns and b {right.shape[-2]} rows once transposed, "
            "wanted the same",
            "check trans_a and trans_b",
        )
    if right.ndim == 3:
        check_shape("matmul", "b", b, (a.shape[0], -1, -1), "a and b share the batch")
    if bias is not None:
        check_shape("matmul", "bias", bias, (right.shape[-1],), "one bias per column of b")
        require_contiguous("matmul", bias=bias)
    return _product("matmul", left, right, bias, float(scale), out, accumulate, precision, stream)


def _check_pair(op: str, name_x: str, x: torch.Tensor, name_y: str, y: torch.Tensor) -> None:
    check_ndim(op, name_x, x, 2)
    check_ndim(op, name_y, y, 2)
    check_dtype(op, name_x, x)
    check_same_dtype(op, **{name_x: x, name_y: y})


def _product(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor | None,
    accumulate: bool,
    precision: str,
    stream: Any,
) -> torch.Tensor:
    """Launch ``scale * a @ b + bias`` on [.., m, k] and [.., k, n] of any strides."""
    shape = (*a.shape[:-1], b.shape[-1])
    _check_out(op, out, shape, accumulate, precision)
    given = {name: t for name, t in (("a", a), ("b", b), ("out", out)) if t is not None}
    check_floating(op, **given)
    prepare(op, *given.values(), *(() if bias is None else (bias,)))
    c = empty(shape, a.dtype, like=a) if out is None else out
    if c.numel() == 0:
        return c
    rows = c
    if (
        b.ndim == 2
        and a.ndim == 3
        and a.stride(0) == a.shape[1] * a.stride(1)
        and c.is_contiguous()
    ):
        # rows of the whole batch lie evenly: one product with more rows fills the tiles better
        a, rows = a.flatten(0, 1), c.flatten(0, 1)
    order = {"op": op, "stream": stream}
    _launch_product(order, a, b, bias, scale, rows, accumulate, precision)
    return c


def _check_out(
    op: str, out: torch.Tensor | None, shape: tuple[int, ...], accumulate: bool, precision: str
) -> None:
    if precision not in ("ieee", "tf32"):
        raise ConfigError(f"{op}: precision is {precision!r}, wanted 'ieee' or 'tf32'", "")
    if out is None:
        if accumulate:
            raise ConfigError(f"{op}: accumulate without out, wanted storage to add to", "pass out")
        return
    check_dtype(op, "out", out)
    check_shape(op, "out", out, shape)
    if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)):
        raise LayoutError(
            f"{op}: out has strides {out.stride()}, wanted storage of its own for each element",
            "expanded storage cannot be written to; make it contiguous",
        )


def _launch_product(
    order: dict[str, Any],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    c: torch.Tensor,
    accumulate: bool,
    precision: str,
) -> None:
    batch = a.shape[0] if a.ndim == 3 else 1
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    kind = kind_of(a, b, precision)
    tile = choose_tile(kind, batch, m, n, shared_bytes(a.device))
    tiles = batch * cdiv(m, tile.m) * cdiv(n, tile.n)
    k_per_split, splits = choose_split(tiles, k, tile.k)
    target = c if splits == 1 else empty((splits, batch, m, n), torch.float32, like=a)
    finish: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "ACCUMULATE": accumulate,
        "scale": scale,
    }
    finish["bias_ptr"] = a if bias is None else bias
    extra = () if bias is None else (bias,)
    extra = (*extra, c) if accumulate else extra
    launch(
        _matmul_kernel,
        (tiles * splits,),
        **order,
        reads=(a, b, *extra) if splits == 1 else (a, b),
        writes=(target,),
        a_ptr=a,
        b_ptr=b,
        out_ptr=target,
        M=m,
        N=n,
        K=k,
        k_per_split=k_per_split,
        stride_ab=a.stride(0) if a.ndim == 3 else 0,
        stride_am=a.stride(-2),
        stride_ak=a.stride(-1),
        stride_bb=b.stride(0) if b.ndim == 3 else 0,
        stride_bk=b.stride(-2),
        stride_bn=b.stride(-1),
        stride_os=target.stride(0) if splits > 1 else 0,
        stride_ob=target.stride(-3) if target.ndim > 2 else 0,
        stride_om=target.stride(-2),
        stride_on=target.stride(-1),
        **finish,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=GROUP_M,
        SPLIT_K=splits,
        EVEN_K=k % tile.k == 0,
        PRECISION="ieee" if on_amd() or interpreting() else precision,
        UPCAST_DOT=interpreting(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _launch_add_parts(order, target, c, finish, extra, (batch, m, n))


def _launch_add_parts(
    order: dict[str, Any],
    parts: torch.Tensor,
    c: torch.Tensor,
    finish: dict[str, Any],
    extra: tuple[torch.Tensor, ...],
    sizes: tuple[int, int, int],
) -> None:
    batch, m, n = sizes
    block_n = min(next_power_of_2(n), 256)
    block_m = min(next_power_of_2(m), max(1024 // block_n, 1))
    launch(
        _add_parts_kernel,
        (batch * cdiv(m, block_m) * cdiv(n, block_n),),
        **order,
        reads=(parts, *extra),
        writes=(c,),
        parts_ptr=parts,
        out_ptr=c,
        M=m,
        N=n,
        n_parts=parts.shape[0],
        stride_part=parts.stride(0),
        stride_ob=c.stride(0) if c.ndim == 3 else 0,
        stride_om=c.stride(-2),
        stride_on=c.stride(-1),
        **finish,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
