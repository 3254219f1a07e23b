"""Products with an NF4 weight: ``y = x @ W.T + bias`` and ``grad_x = grad_y @ W``.

For few rows the weight is decoded inside the product: its 4 bits are all that is read of it, so the
launch moves 0.5 B a weight where decoding first moves 4.5. For many rows each tile of rows would
decode it again, and decoding costs as many integer instructions as the matrix units need cycles; the
weight is then decoded once into scratch that the next weight reuses, and multiplied as a dense one.
No decoded weight outlives the call. A weight whose rows are not whole blocks takes the second way.

A program reads bytes, so it holds even and odd columns apart: it multiplies the even columns of x with
the high nibbles and the odd ones with the low nibbles, and no value changes lanes.

Numerics: ``level * absmax`` is rounded once to the dtype of x, as bitsandbytes does, then summed in
float32; one rounding at the store.

Source: Dettmers et al., QLoRA, equation 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from entrenar.checks import check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    empty,
    interpreting,
    launch,
    next_power_of_2,
    on_rdna,
    on_scalars,
    prepare,
    require_contiguous,
)
from entrenar.kernels._lora_kernels import adapter_tile, dropped, product
from entrenar.kernels.gemm import matmul
from entrenar.kernels.nf4 import (
    check_storage,
    decode_arguments,
    decode_reads,
    nf4_absmax,
    nf4_dequantize,
    nf4_levels,
)
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["nf4_gemm_backward", "nf4_gemm_forward"]

_UNSPECIALISED = ["M", "seed"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _forward_kernel(
    x_ptr,
    codes_ptr,
    absmax_ptr,
    absmax_codes_ptr,
    absmax2_ptr,
    offset_ptr,
    levels_ptr,
    nested_ptr,
    bias_ptr,
    u_ptr,
    v_ptr,
    out_ptr,
    M,
    N,
    K,
    rank,
    scale,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADAPTER: tl.constexpr,
    DOUBLE: tl.constexpr,
    NESTED: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """``out = x @ W.T + bias (+ scale * u @ v.T)`` for one tile, W decoded as it is read."""
    HALF: tl.constexpr = BLOCK_K // 2
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_rows = rows < M
    in_cols = cols < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ADAPTER:
        acc = adapter_tile(
            u_ptr,
            v_ptr,
            rows,
            in_rows,
            cols,
            in_cols,
            rank,
            1,
            rank,
            scale,
            BLOCK_R=BLOCK_R,
            UPCAST_DOT=UPCAST_DOT,
        )
    # whole blocks a row, said so that the compiler sees aligned rows
    blocks = K // BLOCK
    x_ptrs = x_ptr + rows[:, None] * (blocks * BLOCK) + tl.arange(0, BLOCK_K)[None, :]
    code_ptrs = codes_ptr + cols[:, None] * (blocks * (BLOCK // 2)) + tl.arange(0, HALF)[None, :]
    first_block = cols * blocks
    # The next step's operands are loaded by hand while this one is multiplied: Triton's pipelining
    # would send every look-up of a level through shared memory.
    x = tl.load(x_ptrs, mask=in_rows[:, None], other=0.0)
    byte = tl.load(code_ptrs, mask=in_cols[:, None], other=0)  # [BLOCK_N, HALF]
    absmax = nf4_absmax(
        absmax_ptr,
        absmax_codes_ptr,
        absmax2_ptr,
        offset_ptr,
        nested_ptr,
        first_block,
        in_cols,
        DOUBLE=DOUBLE,
        NESTED=NESTED,
    )
    for start in range(0, K, BLOCK_K):
        after = start + BLOCK_K
        next_rows = rows < tl.where(after < K, M, 0)
        next_cols = cols < tl.where(after < K, N, 0)
        x_ptrs += BLOCK_K
        code_ptrs += HALF
        next_x = tl.load(x_ptrs, mask=next_rows[:, None], other=0.0)
        next_byte = tl.load(code_ptrs, mask=next_cols[:, None], other=0)
        next_absmax = nf4_absmax(
            absmax_ptr,
            absmax_codes_ptr,
            absmax2_ptr,
            offset_ptr,
            nested_ptr,
            first_block + after // BLOCK,
            next_cols,
            DOUBLE=DOUBLE,
            NESTED=NESTED,
        )
        high, low = nf4_levels(byte, levels_ptr)
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, HALF, 2)))
        w_even = (high * absmax[:, None]).to(x_ptr.dtype.element_ty)
        w_odd = (low * absmax[:, None]).to(x_ptr.dtype.element_ty)
        acc = product(even, tl.trans(w_even), acc, UPCAST_DOT)
        acc = product(odd, tl.trans(w_odd), acc, UPCAST_DOT)
        x, byte, absmax = next_x, next_byte, next_absmax
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * N + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _backward_kernel(
    grad_y_ptr,
    codes_ptr,
    absmax_ptr,
    absmax_codes_ptr,
    absmax2_ptr,
    offset_ptr,
    levels_ptr,
    nested_ptr,
    u_ptr,
    v_ptr,
    out_ptr,
    M,
    N,
    K,
    rank,
    seed,
    dropout_p,
    keep_scale,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ADAPTER: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOUBLE: tl.constexpr,
    NESTED: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """``out (+)= grad_y @ W (+ drop(u @ v))`` for BLOCK_K columns, which lie in one block of W."""
    HALF: tl.constexpr = BLOCK_K // 2
    first = tl.program_id(0).to(tl.int64) * BLOCK_K
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pairs = tl.arange(0, HALF)
    in_rows = rows < M
    even = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
    odd = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
    if ADAPTER:
        at = first + 2 * pairs
        inside = at < K
        even = adapter_tile(
            u_ptr, v_ptr, rows, in_rows, at, inside, rank, K, 1, 1.0, BLOCK_R, UPCAST_DOT
        )
        odd = adapter_tile(
            u_ptr, v_ptr, rows, in_rows, at + 1, inside, rank, K, 1, 1.0, BLOCK_R, UPCAST_DOT
        )
        if DROPOUT:
            index = rows[:, None] * K + at[None, :]
            even = dropped(even, index, seed, dropout_p, keep_scale)
            odd = dropped(odd, index + 1, seed, dropout_p, keep_scale)
    # whole blocks a row, said so that the compiler sees aligned rows
    blocks = K // BLOCK
    half = tl.program_id(0).to(tl.int64) * HALF
    n = tl.arange(0, BLOCK_N)
    in_n = n < N
    grad_ptrs = grad_y_ptr + rows[:, None] * N + n[None, :]
    code_ptrs = codes_ptr + n.to(tl.int64)[:, None] * (blocks * (BLOCK // 2))
    code_ptrs = code_ptrs + (half + pairs)[None, :]
    block = n.to(tl.int64) * blocks + first // BLOCK
    step_codes = tl.full((), BLOCK_N, tl.int64) * (blocks * (BLOCK // 2))
    step_block = tl.full((), BLOCK_N, tl.int64) * blocks
    # loaded a step ahead by hand, as in forward
    grad_y = tl.load(grad_ptrs, mask=in_rows[:, None] & in_n[None, :], other=0.0)
    byte = tl.load(code_ptrs, mask=in_n[:, None], other=0)  # [BLOCK_N, HALF]
    absmax = nf4_absmax(
        absmax_ptr,
        absmax_codes_ptr,
        absmax2_ptr,
        offset_ptr,
        nested_ptr,
        block,
        in_n,
        DOUBLE=DOUBLE,
        NESTED=NESTED,
    )
    for start in range(0, N, BLOCK_N):
        in_n = n < N - start - BLOCK_N
        grad_ptrs += BLOCK_N
        code_ptrs += step_codes
        block += step_block
        next_grad = tl.load(grad_ptrs, mask=in_rows[:, None] & in_n[None, :], other=0.0)
        next_byte = tl.load(code_ptrs, mask=in_n[:, None], other=0)
        next_absmax = nf4_absmax(
            absmax_ptr,
            absmax_codes_ptr,
            absmax2_ptr,
            offset_ptr,
            nested_ptr,
            block,
            in_n,
            DOUBLE=DOUBLE,
            NESTED=NESTED,
        )
        high, low = nf4_levels(byte, levels_ptr)
        w_even = (high * absmax[:, None]).to(grad_y.dtype)
        w_odd = (low * absmax[:, None]).to(grad_y.dtype)
        even = product(grad_y, w_even, even, UPCAST_DOT)
        odd = product(grad_y, w_odd, odd, UPCAST_DOT)
        grad_y, byte, absmax = next_grad, next_byte, next_absmax
    acc = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_K))
    out_ptrs = out_ptr + rows[:, None] * (blocks * BLOCK) + first + tl.arange(0, BLOCK_K)[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=in_rows[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None])


class Adapter(NamedTuple):
    """A low-rank product added to a base product: ``scale * u @ v``, dropped with this mask."""

    u: torch.Tensor
    v: torch.Tensor
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: int | torch.Tensor = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The storage it reads; a seed may lie on the device."""
        seed = (self.seed,) if isinstance(self.seed, torch.Tensor) else ()
        return (self.u, self.v, *seed)

    @property
    def keep_scale(self) -> float:
        """What dropout multiplies the elements by that it keeps."""
        return 1.0 / (1.0 - self.dropout_p)


def nf4_gemm_forward(
    x: torch.Tensor,
    w: NF4Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Return ``x @ W.T + bias``.

    Args:
        x: [T, in]; fp32, fp16 or bf16, contiguous.
        w: [out, in] weight.
        bias: [out] of ``x``'s dtype, or None.
        out: [T, out] of ``x``'s dtype to write to, or None for new storage.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or new storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype differs, or is not fp32, fp16 or bf16.
        LayoutError: Storage is not contiguous.

    Numerics: The decoded weight is rounded to ``x``'s dtype; sums in float32, one rounding.
    """
    op = "nf4_gemm_forward"
    check_floating(op, x=x)
    check_same_dtype(op, x=x, bias=bias, out=out)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "x", x, (-1, n_in), f"w is {tuple(w.shape)}")
    if bias is not None:
        check_shape(op, "bias", bias, (n_out,))
    check_storage(op, w)
    if out is not None:
        check_shape(op, "out", out, (x.shape[0], n_out))
    require_contiguous(op, x=x, bias=bias, out=out)
    prepare(op, x, bias, out, *w.tensors())
    if out is None:
        out = empty((x.shape[0], n_out), x.dtype, like=x)
    if fused(w, x.shape[0]):
        launch_forward(op, x, w, bias, None, out, stream)
    else:
        dense = decode_to_scratch(w, x.dtype, stream)
        matmul(x, dense, trans_b=True, bias=bias, out=out, stream=stream)
    return out


def nf4_gemm_backward(
    grad_y: torch.Tensor,
    w: NF4Weight,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of the input, ``grad_y @ W``; the weight is frozen.

    Args:
        grad_y: [T, out]; fp32, fp16 or bf16, contiguous.
        w: [out, in] weight.
        out: [T, in] of ``grad_y``'s dtype to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or new storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype differs, or is not fp32, fp16 or bf16.
        LayoutError: Storage is not contiguous.
        ConfigError: ``accumulate`` without ``out``.
    """
    op = "nf4_gemm_backward"
    check_floating(op, grad_y=grad_y)
    check_same_dtype(op, grad_y=grad_y, out=out)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "grad_y", grad_y, (-1, n_out), f"w is {tuple(w.shape)}")
    check_storage(op, w)
    if out is not None:
        check_shape(op, "out", out, (grad_y.shape[0], n_in))
    elif accumulate:
        raise ConfigError(f"{op}: accumulate without out, wanted storage to add to", "pass out")
    require_contiguous(op, grad_y=grad_y, out=out)
    prepare(op, grad_y, out, *w.tensors())
    if out is None:
        out = empty((grad_y.shape[0], n_in), grad_y.dtype, like=grad_y)
    if fused(w, grad_y.shape[0]):
        launch_backward(op, grad_y, w, None, accumulate, out, stream)
    else:
        dense = decode_to_scratch(w, grad_y.dtype, stream)
        matmul(grad_y, dense, out=out, accumulate=accumulate, stream=stream)
    return out


def fused(w: NF4Weight, n_rows: int) -> bool:
    """Whether a product decodes ``w`` as it goes: few rows, and rows of ``w`` that are whole blocks."""
    return n_rows <= _FUSED_ROWS and w.shape[1] % w.block_size == 0


def launch_forward(
    op: str,
    x: torch.Tensor,
    w: NF4Weight,
    bias: torch.Tensor | None,
    adapter: Adapter | None,
    out: torch.Tensor,
    stream: Any,
) -> None:
    """Launch the fused forward on checked arguments; the adapter's v is [out, rank]."""
    n_out, n_in = w.shape
    rows = x.shape[0]
    tile = _tile(rows, x)
    parts = () if adapter is None else (adapter.u, adapter.v)
    rank = 0 if adapter is None else adapter.u.shape[1]
    launch(
        _forward_kernel,
        (cdiv(n_out, tile.n), cdiv(rows, tile.m)),
        op=op,
        stream=stream,
        reads=(x, *decode_reads(w), *(() if bias is None else (bias,)), *parts),
        writes=(out,),
        x_ptr=x,
        **decode_arguments(w),
        bias_ptr=x if bias is None else bias,
        u_ptr=x if adapter is None else adapter.u,
        v_ptr=x if adapter is None else adapter.v,
        out_ptr=out,
        M=rows,
        N=n_out,
        K=n_in,
        rank=rank,
        scale=1.0 if adapter is None else adapter.scale,
        BLOCK=w.block_size,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=min(w.block_size, tile.k),
        BLOCK_R=max(next_power_of_2(rank), 16),
        HAS_BIAS=bias is not None,
        ADAPTER=adapter is not None,
        UPCAST_DOT=interpreting(),
        num_warps=tile.warps,
        num_stages=1,
        enable_fp_fusion=False,
    )


def launch_backward(
    op: str,
    grad_y: torch.Tensor,
    w: NF4Weight,
    adapter: Adapter | None,
    accumulate: bool,
    out: torch.Tensor,
    stream: Any,
) -> None:
    """Launch the fused backward on checked arguments; the adapter's v is [rank, in]."""
    n_out, n_in = w.shape
    rows = grad_y.shape[0]
    tile = _tile(rows, grad_y)
    parts = () if adapter is None else adapter.tensors
    rank = 0 if adapter is None else adapter.u.shape[1]
    block_k = min(w.block_size, tile.k)
    launch(
        _backward_kernel,
        (cdiv(n_in, block_k), cdiv(rows, tile.m)),
        op=op,
        stream=stream,
        reads=(grad_y, *decode_reads(w), *parts, *((out,) if accumulate else ())),
        writes=(out,),
        grad_y_ptr=grad_y,
        **decode_arguments(w),
        u_ptr=grad_y if adapter is None else adapter.u,
        v_ptr=grad_y if adapter is None else adapter.v,
        out_ptr=out,
        M=rows,
        N=n_out,
        K=n_in,
        rank=rank,
        seed=0 if adapter is None else adapter.seed,
        dropout_p=0.0 if adapter is None else adapter.dropout_p,
        keep_scale=1.0 if adapter is None else adapter.keep_scale,
        BLOCK=w.block_size,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=block_k,
        BLOCK_R=max(next_power_of_2(rank), 16),
        ACCUMULATE=accumulate,
        ADAPTER=adapter is not None,
        DROPOUT=adapter is not None and adapter.dropout_p > 0,
        UPCAST_DOT=interpreting(),
        num_warps=tile.warps,
        num_stages=1,
        enable_fp_fusion=False,
    )


# Decoded weights, one per device, stream, dtype and size class. Sizes are powers of two and storage is
# never given back: a captured graph may hold its address.
_scratch: dict[tuple[Any, ...], torch.Tensor] = {}


def decode_to_scratch(w: NF4Weight, dtype: torch.dtype, stream: Any) -> torch.Tensor:
    """Decode a weight into storage that the next weight on the same stream overwrites."""
    count = w.shape[0] * w.shape[1]
    device = w.codes.device
    key = (device, _stream_id(stream, device), dtype, next_power_of_2(count))
    if key not in _scratch:
        _scratch[key] = empty((next_power_of_2(count),), dtype, like=w.codes)
    dense = _scratch[key][:count].view(w.shape)
    return nf4_dequantize(w, dtype, dense, stream)


def _stream_id(stream: Any, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch_stream = getattr(stream, "torch_stream", stream)
    if torch_stream is None:
        torch_stream = torch.cuda.current_stream(device)
    return int(torch_stream.cuda_stream)


class _Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int


def _tile(rows: int, x: torch.Tensor) -> _Tile:
    """Return the tile of a fused product: 16 rows are the least that the matrix units take."""
    scalars = on_scalars(x)
    block_m = min(max(next_power_of_2(rows), 16), 32 if scalars else 64)
    spills = scalars and (x.element_size() == 2 or on_rdna())
    return _Tile(block_m, 64, 64, 8 if spills else 4)


# The most rows for which decoding inside the product is meant to be faster on a GPU with a fast dense
# product; bitsandbytes' dispatcher uses 64 on sm_90 for large weights.
_FUSED_ROWS = 64
