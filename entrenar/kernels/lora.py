"""A linear layer with a low-rank adapter: ``y = x @ W.T + bias + scale * drop(x) @ A.T @ B.T``.

Forward is two launches: ``s = drop(x) @ A.T`` [T, r], then the base product, whose accumulator starts
from ``scale * s @ B.T``. Backward reads grad_y once for both ``dS = scale * grad_y @ B`` and
``dB = scale * grad_y.T @ s``, reads x once for ``dA = dS.T @ drop(x)``, and starts the accumulator of
``grad_y @ W`` from ``drop'(dS @ A)``. B is stored unscaled: with the scale folded in, it would cancel
under Adam. The dropout mask is a function of seed and index, made again wherever it is needed and
never stored. An NF4 weight is decoded inside the base product for few rows, and once into reused
scratch for many (see :mod:`entrenar.kernels.nf4_gemm`).

Numerics: factors, s, dS, the dropped input and a decoded weight have the dtype of x; every sum is
float32; sums over programs are added from parts in a fixed order.

Bytes moved beyond the base product: forward reads x once more, writes and reads s; backward reads
grad_y and x once more, and writes and reads the parts.

Source: Hu et al., LoRA, equation 3; the split at the rank-r tensor follows LoRAFusion (arXiv
2510.00206).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError
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
from entrenar.kernels._lora_kernels import (
    _add_parts_kernel,
    _down_kernel,
    _grad_a_kernel,
    _grad_s_b_kernel,
    _seeded_product_kernel,
)
from entrenar.kernels.nf4 import check_storage
from entrenar.kernels.nf4_gemm import (
    Adapter,
    decode_to_scratch,
    fused,
    launch_backward,
    launch_forward,
)
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["lora_backward", "lora_forward"]

Weight = torch.Tensor | NF4Weight
Seed = int | torch.Tensor


def lora_forward(
    x: torch.Tensor,
    w: Weight,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = 0,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output and the rank-r activations that backward reads.

    Args:
        x: [T, in]; fp32, fp16 or bf16, contiguous, like everything here.
        w: [out, in], dense of ``x``'s dtype, or NF4.
        lora_a: [r, in]; fp32, fp16 or bf16.
        lora_b: [out, r], of ``lora_a``'s dtype.
        scale: The adapter's factor, such as ``lora_alpha / r``.
        bias: [out] of ``x``'s dtype, or None.
        dropout_p: Share of the adapter's input that is dropped, in [0, 1).
        seed: Of the dropout mask, in [0, 2**63); a number, or int64 [1] on the device.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``y`` [T, out] and ``s`` [T, r] = ``drop(x) @ A.T``, unscaled, both of ``x``'s dtype.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not fp32, fp16 or bf16, or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
        LayoutError: Storage is not contiguous.
    """
    op = "lora_forward"
    _check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, bias=bias)
    if bias is not None:
        check_shape(op, "bias", bias, (w.shape[0],))
    require_contiguous(op, bias=bias)
    prepare(op, x, lora_a, lora_b, bias, *_storages(w))
    s = _down(op, x, lora_a, dropout_p, seed, stream)
    y = empty((x.shape[0], w.shape[0]), x.dtype, like=x)
    up = Adapter(s, lora_b, float(scale))
    if isinstance(w, NF4Weight) and fused(w, x.shape[0]):
        launch_forward(op, x, w, bias, up, y, stream)
    else:
        _seeded_product(op, x, _dense(w, x.dtype, stream), True, up, bias, y, stream)
    return y, s


def lora_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    w: Weight,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    s: torch.Tensor,
    scale: float,
    dropout_p: float = 0.0,
    seed: Seed = 0,
    need_grad_x: bool = True,
    grad_a_out: torch.Tensor | None = None,
    grad_b_out: torch.Tensor | None = None,
    stream: Any = None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the gradients of the input and of both factors; the weight and bias are frozen.

    Args:
        grad_y: [T, out] of ``x``'s dtype.
        x: As in forward, like ``w``, ``lora_a``, ``lora_b``, ``scale``, ``dropout_p`` and ``seed``.
        w: [out, in].
        lora_a: [r, in].
        lora_b: [out, r].
        s: [T, r] that forward returned.
        scale: The adapter's factor.
        dropout_p: Share dropped.
        seed: Of the mask.
        need_grad_x: Whether the input's gradient is wanted.
        grad_a_out: [r, in] fp32, fp16 or bf16 that the gradient of A is added to, or None.
        grad_b_out: [out, r] that the gradient of B is added to, or None.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``grad_x`` [T, in] of ``x``'s dtype, or None; ``grad_a`` and ``grad_b`` of ``lora_a``'s
        dtype, or the storage they were added to.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not fp32, fp16 or bf16, or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
        LayoutError: Storage is not contiguous.
    """
    op = "lora_backward"
    _check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, grad_y=grad_y, s=s)
    check_shape(op, "grad_y", grad_y, (x.shape[0], w.shape[0]))
    check_shape(op, "s", s, (x.shape[0], lora_a.shape[0]))
    require_contiguous(op, grad_y=grad_y, s=s)
    grad_a = _gradient(op, "grad_a_out", grad_a_out, lora_a)
    grad_b = _gradient(op, "grad_b_out", grad_b_out, lora_b)
    prepare(op, grad_y, x, lora_a, lora_b, s, grad_a, grad_b, *_storages(w))
    accumulate = (grad_a_out is not None, grad_b_out is not None)
    grad_s = _grad_s_b(op, grad_y, lora_b, s, scale, grad_b, accumulate[1], stream)
    _grad_a(op, x, grad_s, dropout_p, seed, grad_a, accumulate[0], stream)
    if not need_grad_x:
        return None, grad_a, grad_b
    grad_x = empty(x.shape, x.dtype, like=x)
    down = Adapter(grad_s, lora_a, 1.0, dropout_p, seed)
    if isinstance(w, NF4Weight) and fused(w, x.shape[0]):
        launch_backward(op, grad_y, w, down, False, grad_x, stream)
    else:
        _seeded_product(op, grad_y, _dense(w, x.dtype, stream), False, down, None, grad_x, stream)
    return grad_x, grad_a, grad_b


def _check(
    op: str,
    x: torch.Tensor,
    w: Weight,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    dropout_p: float,
    seed: Seed,
) -> None:
    check_floating(op, x=x, lora_a=lora_a)
    check_same_dtype(op, lora_a=lora_a, lora_b=lora_b)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "x", x, (-1, n_in), f"w is {tuple(w.shape)}")
    check_ndim(op, "lora_a", lora_a, 2)
    rank = lora_a.shape[0]
    if rank > _MOST_RANK:
        raise ShapeMismatchError(
            f"{op}: the rank is {rank}, wanted at most {_MOST_RANK}",
            "a factor's row is held in a program's registers; use a lower rank",
        )
    check_shape(op, "lora_a", lora_a, (-1, n_in), f"w is {tuple(w.shape)}")
    check_shape(op, "lora_b", lora_b, (n_out, rank), f"w is {tuple(w.shape)}, rank is {rank}")
    if not 0 <= dropout_p < 1:
        raise ConfigError(f"{op}: dropout_p is {dropout_p}, wanted at least 0 and below 1", "")
    if isinstance(seed, torch.Tensor):
        check_dtype(op, "seed", seed, "int64")
        check_shape(op, "seed", seed, (1,))
    elif not 0 <= seed < 2**63:
        raise ConfigError(f"{op}: seed is {seed}, wanted at least 0 and below 2**63", "")
    require_contiguous(op, x=x, lora_a=lora_a, lora_b=lora_b)
    if isinstance(w, NF4Weight):
        check_storage(op, w)
    else:
        check_same_dtype(op, x=x, w=w)
        require_contiguous(op, w=w)


def _storages(w: Weight) -> list[torch.Tensor]:
    return w.tensors() if isinstance(w, NF4Weight) else [w]


def _dense(w: Weight, dtype: torch.dtype, stream: Any) -> torch.Tensor:
    return decode_to_scratch(w, dtype, stream) if isinstance(w, NF4Weight) else w


def _gradient(op: str, name: str, out: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
    if out is None:
        return empty(factor.shape, factor.dtype, like=factor)
    check_dtype(op, name, out, "float32", "float16", "bfloat16")
    check_shape(op, name, out, tuple(factor.shape))
    require_contiguous(op, **{name: out})
    return out


def _on_device(seed: Seed) -> tuple[torch.Tensor, ...]:
    return (seed,) if isinstance(seed, torch.Tensor) else ()


def _block_r(rank: int) -> int:
    return max(next_power_of_2(rank), 16)


def _dropout(dropout_p: float, seed: Seed) -> dict[str, Any]:
    return {"seed": seed, "dropout_p": float(dropout_p), "keep_scale": 1.0 / (1.0 - dropout_p)}


def _down(
    op: str, x: torch.Tensor, lora_a: torch.Tensor, dropout_p: float, seed: Seed, stream: Any
) -> torch.Tensor:
    """Return ``drop(x) @ A.T`` in ``x``'s dtype."""
    rows, n_in = x.shape
    rank = lora_a.shape[0]
    s = empty((rows, rank), x.dtype, like=x)
    step = _reduction(rank, x)
    block_m = _rows_per_program(rows, 16, step.wide)
    block_k = step.wide if x.element_size() == 2 else 32
    launch(
        _down_kernel,
        (cdiv(rows, block_m),),
        op=op,
        stream=stream,
        reads=(x, lora_a, *_on_device(seed)),
        writes=(s,),
        x_ptr=x,
        a_ptr=lora_a,
        s_ptr=s,
        M=rows,
        K=n_in,
        rank=rank,
        **_dropout(dropout_p, seed),
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        BLOCK_R=_block_r(rank),
        EVEN_K=n_in % block_k == 0,
        DROPOUT=dropout_p > 0,
        UPCAST_DOT=interpreting(),
        num_warps=step.warps,
        num_stages=step.stages,
    )
    return s


def _seeded_product(
    op: str,
    a: torch.Tensor,
    w: torch.Tensor,
    transposed: bool,
    adapter: Adapter,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stream: Any,
) -> None:
    """Write ``a @ W.T`` or ``a @ W``, plus the adapter's product and the bias, to ``out``."""
    rows, inner = a.shape
    cols = out.shape[1]
    rank = adapter.u.shape[1]
    dropout = adapter.dropout_p > 0
    block_m, block_n, block_k, warps, stages = _tile(
        rows, cols, rank, on_scalars(a) or on_rdna(), dropout
    )
    v_is_rows = transposed  # B is [out, r] and read transposed, A is [r, in]
    launch(
        _seeded_product_kernel,
        (cdiv(rows, block_m) * cdiv(cols, block_n),),
        op=op,
        stream=stream,
        reads=(a, w, *adapter.tensors, *(() if bias is None else (bias,))),
        writes=(out,),
        a_ptr=a,
        b_ptr=w,
        u_ptr=adapter.u,
        v_ptr=adapter.v,
        bias_ptr=a if bias is None else bias,
        out_ptr=out,
        M=rows,
        N=cols,
        K=inner,
        rank=rank,
        stride_bk=1 if transposed else cols,
        stride_bn=inner if transposed else 1,
        stride_vr=1 if v_is_rows else cols,
        stride_vn=rank if v_is_rows else 1,
        scale=adapter.scale,
        **_dropout(adapter.dropout_p, adapter.seed),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=_block_r(rank),
        GROUP_M=8,
        EVEN_K=inner % block_k == 0,
        HAS_BIAS=bias is not None,
        DROPOUT=dropout,
        UPCAST_DOT=interpreting(),
        num_warps=warps,
        num_stages=stages,
    )


def _grad_s_b(
    op: str,
    grad_y: torch.Tensor,
    lora_b: torch.Tensor,
    s: torch.Tensor,
    scale: float,
    grad_b: torch.Tensor,
    accumulate: bool,
    stream: Any,
) -> torch.Tensor:
    """Return ``scale * grad_y @ B`` in ``grad_y``'s dtype; write or add ``scale * grad_y.T @ s``."""
    rows, cols = grad_y.shape
    rank = lora_b.shape[1]
    step = _reduction(rank, grad_y)
    block_m = 16 if rows <= 16 else step.tall
    block_n = step.wide
    row_parts = cdiv(rows, block_m)
    blocks_per_part, col_parts = _split(cols, block_n, row_parts)
    grad_s_parts = empty((col_parts, rows, rank), torch.float32, like=grad_y)
    grad_b_parts = empty((row_parts, cols, rank), torch.float32, like=grad_y)
    launch(
        _grad_s_b_kernel,
        (row_parts, col_parts),
        op=op,
        stream=stream,
        reads=(grad_y, lora_b, s),
        writes=(grad_s_parts, grad_b_parts),
        grad_y_ptr=grad_y,
        b_ptr=lora_b,
        s_ptr=s,
        grad_s_parts_ptr=grad_s_parts,
        grad_b_parts_ptr=grad_b_parts,
        M=rows,
        N=cols,
        rank=rank,
        blocks_per_part=blocks_per_part,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=_block_r(rank),
        UPCAST_DOT=interpreting(),
        num_warps=step.warps,
        num_stages=step.stages,
    )
    grad_s = empty((rows, rank), grad_y.dtype, like=grad_y)
    _add_parts(op, grad_s_parts, grad_s, scale, False, stream)
    _add_parts(op, grad_b_parts, grad_b, scale, accumulate, stream)
    return grad_s


def _grad_a(
    op: str,
    x: torch.Tensor,
    grad_s: torch.Tensor,
    dropout_p: float,
    seed: Seed,
    grad_a: torch.Tensor,
    accumulate: bool,
    stream: Any,
) -> None:
    """Write or add ``grad_s.T @ drop(x)`` to ``grad_a``."""
    rows, n_in = x.shape
    rank = grad_s.shape[1]
    step = _reduction(rank, x)
    block_m = block_k = step.wide
    tiles = cdiv(n_in, block_k)
    blocks_per_part, parts = _split(rows, block_m, tiles)
    grad_a_parts = empty((parts, rank, n_in), torch.float32, like=x)
    launch(
        _grad_a_kernel,
        (tiles, parts),
        op=op,
        stream=stream,
        reads=(x, grad_s, *_on_device(seed)),
        writes=(grad_a_parts,),
        x_ptr=x,
        grad_s_ptr=grad_s,
        parts_ptr=grad_a_parts,
        M=rows,
        K=n_in,
        rank=rank,
        blocks_per_part=blocks_per_part,
        **_dropout(dropout_p, seed),
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        BLOCK_R=_block_r(rank),
        DROPOUT=dropout_p > 0,
        UPCAST_DOT=interpreting(),
        num_warps=step.warps,
        num_stages=step.stages,
    )
    _add_parts(op, grad_a_parts, grad_a, 1.0, accumulate, stream)


def _add_parts(
    op: str, parts: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, stream: Any
) -> None:
    """Write or add ``scale`` times the sum of ``parts`` over its first axis to ``out``."""
    n = out.numel()
    block = min(max(next_power_of_2(n), 32), 1024)
    launch(
        _add_parts_kernel,
        (cdiv(n, block),),
        op=op,
        stream=stream,
        reads=(parts, out) if accumulate else (parts,),
        writes=(out,),
        parts_ptr=parts,
        out_ptr=out,
        n=n,
        n_parts=parts.shape[0],
        scale=float(scale),
        ACCUMULATE=accumulate,
        BLOCK=block,
        num_warps=4,
    )


# What work is spread over, whatever the device, so that the order of sums is the same on all: two
# programs on each of an H100's or H200's processors.
_PROGRAMS = 264
_MOST_RANK = 256


def _split(size: int, block: int, others: int) -> tuple[int, int]:
    """Return (blocks of a part, parts): parts times ``others`` fill the device, none is tiny."""
    blocks = max(cdiv(size, block), 1)
    wanted = min(max(_PROGRAMS // max(others, 1), 1), cdiv(blocks, 4))
    per_part = cdiv(blocks, wanted)
    return per_part, cdiv(blocks, per_part)


def _rows_per_program(rows: int, least: int, most: int) -> int:
    """Return a power of two of rows that leaves enough programs, between ``least`` and ``most``."""
    block = most
    while block > least and cdiv(rows, block) < _PROGRAMS:
        block //= 2
    return block


class _Reduction(NamedTuple):
    tall: int
    wide: int
    warps: int
    stages: int


def _reduction(rank: int, x: torch.Tensor) -> _Reduction:
    """Return the block of rows of grad_y, the block of all else, warps and stages, for sums over rank.

    Each with the most registers' worth of work that spills none on sm_80 or sm_90.
    """
    if rank > 128 or on_rdna():
        return _Reduction(32, 32, 8, 2)
    if on_scalars(x):
        return _Reduction(64 if rank <= 32 else 32, 32, 4 if rank <= 32 else 8, 3)
    return _Reduction(128, 64, 4, 3) if rank <= 32 else _Reduction(64, 64, 8, 3)


def _tile(
    rows: int, cols: int, rank: int, scalars: bool, dropout: bool
) -> tuple[int, int, int, int, int]:
    """Return rows, columns, inner step, warps and stages of a tile of the base product.

    The published order for Hopper (Triton's tutorials 03 and 09, LoRAFusion): 128 x 256 x 64 where the
    device is filled, smaller where it is not. Dropout's integers and a high rank need registers that
    the larger tiles do not leave; with these choices no kernel spills on sm_80 or sm_90.
    """
    if scalars:
        return 32, 64, 32, 4, 3
    large = ((128, 256, 8, 3),) if rank <= 32 else ()
    tiles = ((128, 64, 8, 4),) if dropout else (*large, (128, 128, 8, 4))
    for block_m, block_n, warps, stages in tiles:
        if cdiv(rows, block_m) * cdiv(cols, block_n) >= _PROGRAMS // 2:
            return block_m, block_n, 64, warps, stages
    return (64, 64, 64, 4, 4) if rows > 32 else (16, 64, 128, 4, 4)
