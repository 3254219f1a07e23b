"""NF4: quantise a weight to 4-bit codes with one absmax a block, and decode it.

``codes = nearest level of w / absmax``, two to a byte, the first in the high nibble;
``decoded = level[code] * absmax``. With double quantisation an absmax is
``nested[absmax_code] * absmax2 + offset``, and both steps are undone in the one decoding launch.

Numerics: the bits of bitsandbytes on a CPU. A full block is multiplied by the IEEE reciprocal of its
absmax, a short last block is divided by it; a value midway between two levels takes the lower; the
absmax is floored at 1e-38 before either. Multiply-add fusion is off, since an absmax is a rounded
product and then a rounded sum. Decoding rounds the float32 product once to the storage dtype.

Bytes moved: quantising reads the weight once and writes 0.5 B a value and the absmax; with double
quantisation the absmax (4 B a block) are written, read for their mean, and read again. Decoding reads
codes and scales once and writes the weight once. A 16-level table in the first-level cache costs one
load a value, where a tree of selects costs about 20 integer instructions; codes are loaded eight to a word,
and a nibble is shifted to where it is an offset into the table. On sm_90 that is 7.5 instructions a value
in bfloat16 and 8.0 in float32 (8.4 where scales are nested) (``tests/kernels/test_nf4.py`` counts them).

Source: Dettmers et al., QLoRA, section 3; bitsandbytes 0.50 ``backends/default/ops.py`` and
``csrc/cpu_ops.cpp``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from entrenar import runtime
from entrenar.checks import check_shape
from entrenar.errors import ConfigError, DTypeError, NumericsError, ShapeMismatchError
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    empty,
    launch,
    prepare,
    require_contiguous,
)
from entrenar.kernels._nf4_tables import BLOCK_SIZES, NESTED_BLOCK, NF4_CODE, tables
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["NF4_CODE", "NF4Weight", "nf4_dequantize", "nf4_quantize"]

_FLOOR: tl.constexpr = tl.constexpr(1e-38)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
# 2 ** -128: the reciprocal of this and less is infinite.
_TINY: tl.constexpr = tl.constexpr(2.938735877055719e-39)

# Only the last program compares with these: a new value compiles nothing.
_SIZES = ["n", "n_blocks", "n_parts", "steps"]


@triton.jit
def nf4_absmax(
    absmax_ptr,
    absmax_codes_ptr,
    absmax2_ptr,
    offset_ptr,
    nested_ptr,
    blocks,
    inside,
    DOUBLE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Load the float32 absmax of ``blocks``, undoing the second quantisation."""
    if DOUBLE:
        code = tl.load(absmax_codes_ptr + blocks, mask=inside, other=0).to(tl.int32)
        scale = tl.load(absmax2_ptr + blocks // NESTED, mask=inside, other=0.0)
        absmax = tl.load(nested_ptr + code) * scale + tl.load(offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + blocks, mask=inside, other=0.0)
    return absmax


@triton.jit
def nf4_levels(byte, levels_ptr):
    """Look up the levels of the high and the low nibble of each byte."""
    code = byte.to(tl.int32)
    return tl.load(levels_ptr + (code >> 4)), tl.load(levels_ptr + (code & 15))


@triton.jit
def _word_level(word, levels_at, SHIFT: tl.constexpr):
    """Look up the level of the nibble at bit SHIFT; the table lies at a multiple of its 64 bytes."""
    byte_offset = word >> (SHIFT - 2) if SHIFT >= 2 else word << (2 - SHIFT)
    # The offset joins the address by an or, one instruction, where an addition of 64 bits takes two.
    at = levels_at | (byte_offset & 60).to(tl.int64)
    return tl.load(at.to(tl.pointer_type(tl.float32)))


@triton.jit
def _word_values(word, absmax, levels_ptr):
    """Decode [ROWS, WORDS] words of eight codes to [ROWS, WORDS, 2, 2, 2] values, in order."""
    at = levels_ptr.to(tl.int64)
    # Bytes follow from the lowest, in each the high nibble first; joins go from the outermost index in.
    first = tl.join(_word_level(word, at, 4) * absmax, _word_level(word, at, 20) * absmax)
    second = tl.join(_word_level(word, at, 0) * absmax, _word_level(word, at, 16) * absmax)
    third = tl.join(_word_level(word, at, 12) * absmax, _word_level(word, at, 28) * absmax)
    fourth = tl.join(_word_level(word, at, 8) * absmax, _word_level(word, at, 24) * absmax)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit(do_not_specialize=_SIZES)
def _dequantize_kernel(
    codes_ptr,
    absmax_ptr,
    absmax_codes_ptr,
    absmax2_ptr,
    offset_ptr,
    levels_ptr,
    nested_ptr,
    out_ptr,
    n,
    n_blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DOUBLE: tl.constexpr,
    NESTED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Decode ROWS blocks: [ROWS, BLOCK / 2] bytes, or [ROWS, WORDS] words, to [ROWS, BLOCK] values."""
    HALF: tl.constexpr = BLOCK // 2
    first = tl.program_id(0).to(tl.int64) * ROWS
    blocks = first + tl.arange(0, ROWS)  # [ROWS]
    in_rows = blocks < n_blocks
    absmax = nf4_absmax(
        absmax_ptr,
        absmax_codes_ptr,
        absmax2_ptr,
        offset_ptr,
        nested_ptr,
        blocks,
        in_rows,
        DOUBLE=DOUBLE,
        NESTED=NESTED,
    )
    bytes_at = tl.arange(0, ROWS)[:, None] * HALF + tl.arange(0, HALF)[None, :]  # [ROWS, HALF]
    values_at = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [ROWS, BLOCK]
    codes_ptr += first * HALF
    out_ptr += first * BLOCK
    left = n - first * BLOCK
    if left >= ROWS * BLOCK:
        if WORDS > 0:
            words_at = tl.arange(0, ROWS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            word = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + words_at)
            whole = _word_values(word, absmax[:, None], levels_ptr)
        else:
            high, low = nf4_levels(tl.load(codes_ptr + bytes_at), levels_ptr)
            whole = tl.join(high * absmax[:, None], low * absmax[:, None])
        decoded = tl.reshape(whole, (ROWS, BLOCK)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + values_at, decoded)
    else:
        byte = tl.load(codes_ptr + bytes_at, mask=bytes_at * 2 < left, other=0)
        high, low = nf4_levels(byte, levels_ptr)
        pairs = tl.join(high * absmax[:, None], low * absmax[:, None])
        values = tl.reshape(pairs, (ROWS, BLOCK)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + values_at, values, mask=values_at < left)


@triton.jit
def _encode(scaled, middles_ptr):
    """Return how many midpoints lie below each value, by bisection."""
    code = tl.zeros(scaled.shape, dtype=tl.int32)
    for bit in tl.static_range(4):
        middle = tl.load(middles_ptr + (code + ((8 >> bit) - 1)))
        code = tl.where(scaled > middle, code + (8 >> bit), code)
    return code


@triton.jit
def _pack(code, ROWS: tl.constexpr, HALF: tl.constexpr):
    high, low = tl.split(tl.reshape(code, (ROWS, HALF, 2)))
    return ((high << 4) | low).to(tl.uint8)


@triton.jit(do_not_specialize=["n_blocks"])
def _quantize_kernel(
    w_ptr,
    codes_ptr,
    absmax_ptr,
    middles_ptr,
    status_ptr,
    n,
    n_blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Quantise ROWS blocks; values that are not finite go to status as (first index, count)."""
    HALF: tl.constexpr = BLOCK // 2
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    values_at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [ROWS, BLOCK]
    bytes_at = rows[:, None] * HALF + tl.arange(0, HALF)[None, :]  # [ROWS, HALF]
    w_ptr += first * BLOCK
    codes_ptr += first * HALF
    absmax_ptr += first
    left = n - first * BLOCK
    floor = tl.full(
        (ROWS,), _FLOOR, tl.float32
    )  # plain, triton 3.6 takes a subnormal for a float64
    if left >= ROWS * BLOCK:
        x = tl.load(w_ptr + values_at).to(tl.float32)
        bad = (tl.abs(x) <= _LARGEST) == 0
        x = tl.where(bad, 0.0, x)
        absmax = tl.max(tl.abs(x), 1)
        reciprocal = tl.div_rn(1.0, tl.maximum(absmax, floor))
        packed = _pack(_encode(x * reciprocal[:, None], middles_ptr), ROWS, HALF)
        tl.store(absmax_ptr + rows, absmax)
        tl.store(codes_ptr + bytes_at, packed)
    else:
        x = tl.load(w_ptr + values_at, mask=values_at < left, other=0.0).to(tl.float32)
        bad = (tl.abs(x) <= _LARGEST) == 0
        x = tl.where(bad, 0.0, x)
        absmax = tl.max(tl.abs(x), 1)
        floored = tl.maximum(absmax, floor)
        scaled = x * tl.div_rn(1.0, floored)[:, None]
        if SHORT:
            short = (rows + 1) * BLOCK > left  # [ROWS]
            scaled = tl.where(short[:, None], tl.div_rn(x, floored[:, None]), scaled)
            absmax = tl.where(short, floored, absmax)
        packed = _pack(_encode(scaled, middles_ptr), ROWS, HALF)
        tl.store(absmax_ptr + rows, absmax, mask=first + rows < n_blocks)
        tl.store(codes_ptr + bytes_at, packed, mask=bytes_at * 2 < left)
    count = tl.sum(tl.sum(bad.to(tl.int32), 1), 0)
    if count > 0:
        where = tl.where(bad, values_at, ROWS * BLOCK)
        tl.atomic_min(status_ptr, first * BLOCK + tl.min(tl.min(where, 1), 0))
        tl.atomic_add(status_ptr + 1, count.to(tl.int64))


@triton.jit
def _two_sum(high_a, low_a, high_b, low_b):
    """Add two numbers of doubled precision: the error of the float32 sum goes to the low part."""
    high = high_a + high_b
    part = high - high_a
    error = (high_a - (high - part)) + (high_b - part)
    return high, low_a + low_b + error


@triton.jit(do_not_specialize=_SIZES)
def _sum_kernel(x_ptr, high_ptr, low_ptr, n, steps, BLOCK: tl.constexpr):
    """Sum ``steps`` blocks of x in doubled precision, one result a program."""
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    high = tl.zeros((BLOCK,), dtype=tl.float32)
    low = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(steps):
        high, low = _two_sum(high, low, tl.load(x_ptr + at, mask=at < n, other=0.0), 0.0)
        at += BLOCK
    total, error = tl.reduce((high, low), 0, _two_sum)
    tl.store(high_ptr + pid, total)
    tl.store(low_ptr + pid, error)


@triton.jit(do_not_specialize=_SIZES)
def _quantize_absmax_kernel(
    absmax_ptr,
    high_ptr,
    low_ptr,
    offset_ptr,
    absmax_codes_ptr,
    absmax2_ptr,
    nested_steps_ptr,
    n,
    count,
    n_parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Subtract the mean of all absmax and quantise one block of BLOCK of them to 8 bits."""
    part = tl.arange(0, PARTS)
    high = tl.load(high_ptr + part, mask=part < n_parts, other=0.0)
    low = tl.load(low_ptr + part, mask=part < n_parts, other=0.0)
    total, error = tl.reduce((high, low), 0, _two_sum)
    offset = tl.div_rn(total + error, count)
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(offset_ptr, offset)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    centred = tl.load(absmax_ptr + at, mask=inside, other=0.0) - offset
    centred = tl.where(inside, centred, 0.0)
    absmax2 = tl.max(tl.abs(centred), 0)
    # with an infinite reciprocal, bitsandbytes' table gives the ends, and code 0 to 0 * inf
    tiny = absmax2 <= tl.full((), _TINY, tl.float32)
    scaled = centred * tl.div_rn(1.0, tl.where(tiny, 1.0, absmax2))
    scaled = tl.where(tiny, tl.where(centred > 0, 1.0, -1.0), scaled)
    scaled = tl.minimum(tl.maximum(scaled, -1.0), 1.0)
    point = ((scaled + 1.0) * 0.5 * 65535.0 + 0.5).to(tl.int32)
    code = tl.zeros((BLOCK,), dtype=tl.int32)
    for bit in tl.static_range(8):
        begins = tl.load(nested_steps_ptr + (code + ((128 >> bit) - 1)))
        code = tl.where(point >= begins, code + (128 >> bit), code)
    tl.store(absmax_codes_ptr + at, code.to(tl.uint8), mask=inside)
    tl.store(absmax2_ptr + pid, absmax2)


def nf4_quantize(
    w: torch.Tensor, block_size: int = 64, double_quant: bool = False, stream: Any = None
) -> NF4Weight:
    """Quantise a weight to NF4. Synchronises, to refuse a weight that is not finite.

    Args:
        w: Any shape, fp32, fp16 or bf16; copied first where it is not contiguous.
        block_size: Values that share one absmax: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
        double_quant: Quantise the absmax to 8 bits in blocks of 256.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        The weight, with ``w``'s shape and dtype. With an odd count the last low nibble is 7.

    Raises:
        ConfigError: ``block_size`` is none of the above.
        DTypeError: ``w`` is not fp32, fp16 or bf16.
        NumericsError: ``w`` holds a NaN or an infinity.

    Numerics:
        bitsandbytes' bits; the offset is the mean in doubled float32, within 1 ulp of exact.
    """
    op = "nf4_quantize"
    check_floating(op, w=w)
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"{op}: block_size is {block_size}, wanted one of {', '.join(map(str, BLOCK_SIZES))}",
            "64 is what checkpoints use",
        )
    prepare(op, w)
    values = w.contiguous()
    n, code_bytes, n_blocks = nf4_sizes(w.shape, block_size)
    codes = empty((code_bytes,), torch.uint8, like=w)
    absmax = empty((n_blocks,), torch.float32, like=w)
    status = torch.from_numpy(np.array([np.iinfo(np.int64).max, 0])).to(w.device)
    rows = max(_QUANTIZE_TILE // block_size, 1)
    middles = tables(w.device).middles
    launch(
        _quantize_kernel,
        (cdiv(n_blocks, rows),),
        op=op,
        stream=stream,
        reads=(values, middles),
        writes=(codes, absmax, status),
        w_ptr=values,
        codes_ptr=codes,
        absmax_ptr=absmax,
        middles_ptr=middles,
        status_ptr=status,
        n=n,
        n_blocks=n_blocks,
        BLOCK=block_size,
        ROWS=rows,
        SHORT=n % block_size != 0,
        num_warps=4 if block_size <= _QUANTIZE_TILE else 8,
        enable_fp_fusion=False,
    )
    _refuse_non_finite(w, status, stream)
    shape = tuple(w.shape)
    if not double_quant:
        return NF4Weight(codes, absmax, shape, w.dtype, block_size)
    nested = _quantize_absmax(absmax, stream)
    return NF4Weight(codes, None, shape, w.dtype, block_size, *nested)


def _refuse_non_finite(w: torch.Tensor, status: torch.Tensor, stream: Any) -> None:
    torch_stream = getattr(stream, "torch_stream", stream)
    if torch_stream is not None and w.device.type == "cuda":
        torch_stream.synchronize()
    first, bad = (int(v) for v in status.to("cpu").numpy())
    runtime.note_wait(stream)
    if bad:
        where = tuple(int(i) for i in np.unravel_index(first, tuple(w.shape)))
        raise NumericsError(
            f"nf4_quantize: w has {bad} values that are NaN or beyond float32, the first at "
            f"{where}, wanted finite weights",
            "a block would lose all its values to it; repair the checkpoint",
        )


def _quantize_absmax(
    absmax: torch.Tensor, stream: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the absmax's 8-bit codes, their absmax2 and the offset."""
    op, n = "nf4_quantize", absmax.shape[0]
    absmax_codes = empty((n,), torch.uint8, like=absmax)
    absmax2 = empty((cdiv(n, NESTED_BLOCK),), torch.float32, like=absmax)
    if n == 0:
        return absmax_codes, absmax2, torch.zeros((1,), dtype=torch.float32, device=absmax.device)
    offset = empty((1,), torch.float32, like=absmax)
    steps = cdiv(cdiv(n, _SUM_BLOCK), _SUM_PARTS)
    n_parts = cdiv(n, _SUM_BLOCK * steps)
    high = empty((n_parts,), torch.float32, like=absmax)
    low = empty((n_parts,), torch.float32, like=absmax)
    launch(
        _sum_kernel,
        (n_parts,),
        op=op,
        stream=stream,
        reads=(absmax,),
        writes=(high, low),
        x_ptr=absmax,
        high_ptr=high,
        low_ptr=low,
        n=n,
        steps=steps,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    nested_steps = tables(absmax.device).steps
    launch(
        _quantize_absmax_kernel,
        (cdiv(n, NESTED_BLOCK),),
        op=op,
        stream=stream,
        reads=(absmax, high, low, nested_steps),
        writes=(absmax_codes, absmax2, offset),
        absmax_ptr=absmax,
        high_ptr=high,
        low_ptr=low,
        offset_ptr=offset,
        absmax_codes_ptr=absmax_codes,
        absmax2_ptr=absmax2,
        nested_steps_ptr=nested_steps,
        n=n,
        count=float(n),
        n_parts=n_parts,
        BLOCK=NESTED_BLOCK,
        PARTS=_SUM_PARTS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return absmax_codes, absmax2, offset


def nf4_dequantize(
    w: NF4Weight,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Decode an NF4 weight in one launch.

    Args:
        w: The weight.
        dtype: float32, float16 or bfloat16; that of ``out``, else of the weight, where None.
        out: Contiguous storage of ``w.shape`` to write to.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``w.shape`` in the dtype wanted, or ``out``.

    Raises:
        DTypeError: The dtype wanted is none of these, or not that of ``out``.
        ShapeMismatchError: ``out`` or the storage of ``w`` does not have the size of ``w.shape``.
        LayoutError: ``out`` is not contiguous.
    """
    op = "nf4_dequantize"
    wanted = dtype or (w.dtype if out is None else out.dtype)
    if wanted not in (torch.float32, torch.float16, torch.bfloat16):
        raise DTypeError(f"{op}: dtype is {wanted}, wanted float32, float16 or bfloat16", "")
    check_storage(op, w)
    if out is None:
        out = empty(w.shape, wanted, like=w.codes)
    elif out.dtype != wanted:
        raise DTypeError(f"{op}: out is {out.dtype}, wanted {wanted}", "pass out of that dtype")
    check_shape(op, "out", out, tuple(w.shape))
    require_contiguous(op, out=out)
    prepare(op, *w.tensors(), out)
    n, _, n_blocks = nf4_sizes(w.shape, w.block_size)
    rows = max(_DEQUANTIZE_TILE // w.block_size, 1)
    launch(
        _dequantize_kernel,
        (cdiv(n_blocks, rows),),
        op=op,
        stream=stream,
        reads=decode_reads(w),
        writes=(out,),
        **decode_arguments(w),
        out_ptr=out,
        n=n,
        n_blocks=n_blocks,
        BLOCK=w.block_size,
        ROWS=rows,
        WORDS=w.block_size // 8 if w.codes.data_ptr() % 16 == 0 else 0,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def decode_arguments(w: NF4Weight) -> dict[str, Any]:
    """Return the keyword arguments that a kernel needs to decode ``w``; absent storage is codes."""
    found = tables(w.codes.device)
    return {
        "codes_ptr": w.codes,
        "absmax_ptr": w.codes if w.absmax is None else w.absmax,
        "absmax_codes_ptr": w.codes if w.absmax_codes is None else w.absmax_codes,
        "absmax2_ptr": w.codes if w.absmax2 is None else w.absmax2,
        "offset_ptr": w.codes if w.offset is None else w.offset,
        "levels_ptr": found.levels,
        "nested_ptr": found.nested,
        "DOUBLE": w.double_quant,
        "NESTED": NESTED_BLOCK,
    }


def decode_reads(w: NF4Weight) -> tuple[torch.Tensor, ...]:
    """Return the storage that a kernel reads to decode ``w``."""
    found = tables(w.codes.device)
    return (*w.tensors(), found.levels, *((found.nested,) if w.double_quant else ()))


def nf4_sizes(shape: tuple[int, ...], block_size: int) -> tuple[int, int, int]:
    """Return the number of values, of code bytes and of blocks."""
    n = math.prod(shape)
    return n, cdiv(n, 2), cdiv(n, block_size)


def check_storage(op: str, w: NF4Weight) -> None:
    """Refuse a weight whose storage does not have the size that its shape needs.

    Raises:
        ConfigError: Its block size is none of bitsandbytes'.
        ShapeMismatchError: The codes or scales are too few or too many, or some are missing.
        LayoutError: Some storage is not contiguous.
    """
    if w.block_size not in BLOCK_SIZES:
        raise ConfigError(f"{op}: w.block_size is {w.block_size}, wanted one of {BLOCK_SIZES}", "")
    _, code_bytes, n_blocks = nf4_sizes(w.shape, w.block_size)
    hint = "it belongs to another weight"
    check_shape(op, "w.codes", w.codes, (code_bytes,), hint)
    parts = {"codes": w.codes, "absmax": w.absmax}
    if w.double_quant:
        parts = {"absmax_codes": w.absmax_codes, "absmax2": w.absmax2, "offset": w.offset}
        check_shape(op, "w.absmax", w.absmax_codes, (n_blocks,), hint)
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise ShapeMismatchError(f"{op}: w has no {' and no '.join(missing)}", hint)
    if w.double_quant:
        check_shape(op, "w.absmax2", w.absmax2, (cdiv(n_blocks, NESTED_BLOCK),), hint)
        check_shape(op, "w.offset", w.offset, (1,), hint)
    else:
        check_shape(op, "w.absmax", w.absmax, (n_blocks,), hint)
    require_contiguous(op, **parts)


# Values a program decodes, two loads of 16 bytes of codes a thread of four warps: what is done once a program
# is then spread over 64 values a thread. And those it quantises, 16 a thread.
_DEQUANTIZE_TILE = 8192
_QUANTIZE_TILE = 2048
# Absmax summed at a time, and the most partial sums that the second step adds.
_SUM_BLOCK = 256
_SUM_PARTS = 256
