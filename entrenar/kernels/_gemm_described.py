"""Matrix products that read and write tiles through tensor descriptors, on GPUs that copy tiles themselves.

A persistent kernel: as many programs as the device runs at a time walk the tiles in turn, so that the
copies of the next tile run while the last one is finished (Triton's tutorial 09). Which program
computes a tile changes nothing in its sum. A copy fills what lies outside a matrix with zeros and drops
what would be stored there, so no edge is masked.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from entrenar.kernels._gemm_kernels import grouped_tile
from entrenar.kernels._gemm_tiles import GROUP_M, Tile, programs_at_a_time
from entrenar.kernels._launch import cdiv, interpreting, launch

__all__ = ["Layout", "describe", "described_kernel", "launch_described", "parts_of_columns"]

_ALIGNMENT = 16
_PART_BYTES = 32 << 10


class Layout(NamedTuple):
    """How the storage of a matrix, or a batch of them, is described.

    Attributes:
        shape: [batch, rows, columns] as stored: the last axis is the one without gaps.
        strides: In elements.
        transposed: Whether the matrix's columns are the storage's rows.
        shared: Whether one matrix serves the whole batch.
    """

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    transposed: bool
    shared: bool


def describe(x: torch.Tensor) -> Layout | None:
    """Return the layout of [.., r, c], or None where tiles of it cannot be copied by a descriptor.

    One axis has to lie without gaps, the other steps be multiples of 16 bytes, and so the address.
    """
    if x.data_ptr() % _ALIGNMENT:
        return None
    return _layout(x.shape, x.stride(), _ALIGNMENT // x.element_size())


@functools.lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> Layout | None:
    """Describe an array whose rows have to start at multiples of ``step`` elements."""
    batch, outer = (shape[0], strides[0]) if len(shape) == 3 else (1, 0)
    shared = batch == 1 or outer == 0
    if not shared and (outer % step or outer < 0):
        return None
    for transposed in (False, True):
        row, column = (-1, -2) if transposed else (-2, -1)
        rows, columns, gap = shape[row], shape[column], strides[row]
        if columns > 1 and strides[column] != 1:
            continue
        if rows == 1:
            gap = cdiv(columns, step) * step
        if gap > 0 and gap % step == 0:
            whole = rows * gap if shared else outer
            return Layout(
                (1 if shared else batch, rows, columns), (whole, gap, 1), transposed, shared
            )
    return None


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split [ROWS, COLUMNS] into its left and its right half."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _finish_part(
    acc,
    c_desc,
    bias_ptr,
    out_ptr,
    place,
    first_row,
    first_column,
    M,
    N,
    stride_ob,
    stride_om,
    stride_on,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Scale, add to and store some columns of a tile."""
    cols = first_column + tl.arange(0, COLUMNS)
    acc = acc * scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if DESCRIBED:
        if ACCUMULATE:
            held = tl.reshape(c_desc.load([place, first_row, first_column]), (ROWS, COLUMNS))
            acc += held.to(tl.float32)
        done = tl.reshape(acc.to(c_desc.dtype), (1, ROWS, COLUMNS))
        c_desc.store([place, first_row, first_column], done)
    else:
        rows = first_row.to(tl.int64) + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        out_ptrs = out_ptr + place.to(tl.int64) * stride_ob
        out_ptrs += rows[:, None] * stride_om + cols[None, :].to(tl.int64) * stride_on
        if ACCUMULATE:
            acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def described_kernel(
    a_desc,
    b_desc,
    c_desc,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    batches,
    k_per_split,
    stride_ob,
    stride_om,
    stride_on,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    A_SHARED: tl.constexpr,
    B_SHARED: tl.constexpr,
    C_DESCRIBED: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
):
    """Walk the tiles of all products, and of all parts of the inner size; store each in PARTS."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_product = tiles_m * tiles_n
    COLUMNS: tl.constexpr = BLOCK_N // PARTS
    # flattened: the copies of the next tile start before the last one is stored
    last = batches * SPLIT_K * per_product
    for tile in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=True):
        piece = tile // per_product
        split = piece % SPLIT_K
        batch = piece // SPLIT_K
        pid_m, pid_n = grouped_tile(tile % per_product, tiles_m, tiles_n, GROUP_M)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        in_a = 0 if A_SHARED else batch
        in_b = 0 if B_SHARED else batch
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        first_k = split * k_per_split
        for k in tl.range(first_k, tl.minimum(first_k + k_per_split, K), BLOCK_K):
            if A_TRANSPOSED:
                a = tl.reshape(a_desc.load([in_a, k, row]), (BLOCK_K, BLOCK_M)).T
            else:
                a = tl.reshape(a_desc.load([in_a, row, k]), (BLOCK_M, BLOCK_K))
            if B_TRANSPOSED:
                b = tl.reshape(b_desc.load([in_b, column, k]), (BLOCK_N, BLOCK_K)).T
            else:
                b = tl.reshape(b_desc.load([in_b, k, column]), (BLOCK_K, BLOCK_N))
            if UPCAST_DOT:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        place = split * batches + batch
        # fmt: off
        if PARTS == 1:
            _finish_part(acc, c_desc, bias_ptr, out_ptr, place, row, column, M, N, stride_ob, stride_om,
                         stride_on, scale, BLOCK_M, COLUMNS, HAS_BIAS, ACCUMULATE, C_DESCRIBED)
        else:
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            for half in tl.static_range(2):
                x = left if half == 0 else right
                at = column + half * (BLOCK_N // 2)
                if PARTS == 2:
                    _finish_part(x, c_desc, bias_ptr, out_ptr, place, row, at, M, N, stride_ob, stride_om,
                                 stride_on, scale, BLOCK_M, COLUMNS, HAS_BIAS, ACCUMULATE, C_DESCRIBED)
                else:
                    x0, x1 = _halves(x, BLOCK_M, BLOCK_N // 2)
                    _finish_part(x0, c_desc, bias_ptr, out_ptr, place, row, at, M, N, stride_ob, stride_om,
                                 stride_on, scale, BLOCK_M, COLUMNS, HAS_BIAS, ACCUMULATE, C_DESCRIBED)
                    _finish_part(x1, c_desc, bias_ptr, out_ptr, place, row, at + COLUMNS, M, N, stride_ob,
                                 stride_om, stride_on, scale, BLOCK_M, COLUMNS, HAS_BIAS, ACCUMULATE,
                                 C_DESCRIBED)
        # fmt: on


def parts_of_columns(tile: Tile, itemsize: int, accumulate: bool) -> int:
    """Return in how many parts a tile is stored: one takes at most 32 KiB of shared memory to lay out.

    Half as many bytes where what ``out`` holds is read too: both lie there, and in registers.
    """
    nbytes = tile.m * tile.n * itemsize * (2 if accumulate else 1)
    return min(max(nbytes // _PART_BYTES, 1), 4)


def launch_described(
    order: dict[str, Any],
    a: tuple[torch.Tensor, Layout],
    b: tuple[torch.Tensor, Layout],
    target: torch.Tensor,
    finish: dict[str, Any],
    reads: tuple[torch.Tensor, ...],
    sizes: tuple[int, int, int, int],
    split: tuple[int, int],
    tile: Tile,
    architecture: str,
) -> None:
    """Launch the persistent kernel.

    Args:
        order: Name and stream of the launcher.
        a: [.., m, k] and its layout.
        b: [.., k, n] and its layout.
        target: [.., m, n], or [parts of k, batch, m, n] in float32.
        finish: Scale, bias and accumulation; those of parts are left to who adds them.
        reads: Storage that is read.
        sizes: batch, m, n, k.
        split: Inner length of a part, and parts.
        tile: The tile.
        architecture: Such as ``"sm_90"``.
    """
    batch, m, n, k = sizes
    k_per_split, splits = split
    if splits > 1:
        target = target.view(splits * batch, m, n)
        finish = {**finish, "HAS_BIAS": False, "ACCUMULATE": False, "scale": 1.0}
    accumulate = finish["ACCUMULATE"]
    out = describe(target)
    described = out is not None and not out.transposed
    parts = parts_of_columns(tile, target.element_size(), accumulate)
    stages = tile.stages - 1 if accumulate and tile.stages > 3 else tile.stages
    tiles = batch * splits * cdiv(m, tile.m) * cdiv(n, tile.n)
    programs = programs_at_a_time(a[0].device, architecture, tile)
    launch(
        described_kernel,
        (min(tiles, programs),),
        **order,
        reads=reads,
        writes=(target,),
        a_desc=_descriptor(*a, (tile.m, tile.k)),
        b_desc=_descriptor(*b, (tile.k, tile.n)),
        c_desc=_descriptor(target, out, (tile.m, tile.n // parts)) if described and out else None,
        out_ptr=None if described else target,
        M=m,
        N=n,
        K=k,
        batches=batch,
        k_per_split=k_per_split,
        stride_ob=target.stride(0) if target.ndim == 3 else 0,
        stride_om=target.stride(-2),
        stride_on=target.stride(-1),
        **finish,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=GROUP_M,
        SPLIT_K=splits,
        A_TRANSPOSED=a[1].transposed,
        B_TRANSPOSED=b[1].transposed,
        A_SHARED=a[1].shared,
        B_SHARED=b[1].shared,
        C_DESCRIBED=described,
        PARTS=parts,
        UPCAST_DOT=interpreting(),
        num_warps=tile.warps,
        num_stages=stages,
    )


def _descriptor(x: torch.Tensor, layout: Layout, block: tuple[int, int]) -> Any:
    sides = block[::-1] if layout.transposed else block
    return TensorDescriptor(x, list(layout.shape), list(layout.strides), [1, *sides])
