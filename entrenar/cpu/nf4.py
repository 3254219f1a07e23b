"""NF4 on a CPU: quantise in cache-sized pieces, decode a byte to two values by one table look-up.

The same bits as ``entrenar.reference.nf4``. Decoding a [1536, 576] weight takes about 0.55 ms on one
core where its product with 500 rows takes 9 ms (AMD EPYC, OpenBLAS).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from entrenar.checks import check_dtype, check_shape
from entrenar.cpu import threads
from entrenar.errors import ConfigError, DTypeError
from entrenar.reference import nf4 as plain
from entrenar.reference.nf4 import DYNAMIC_CODE, NF4_CODE, NF4Weight

__all__ = [
    "DECODE_FLOPS",
    "check_storage",
    "decode_rows",
    "nf4_dequantize",
    "nf4_quantize",
    "row_step",
    "rows_per_piece",
]

# Values decoded at a time: their indices and the table's reads stay in a 1 MiB second-level cache.
PIECE = 1 << 17
# Values of a weight decoded into scratch before a product reads them: 4 MiB in float32.
SCRATCH_VALUES = 1 << 20
# What BLAS computes on one core in the time that a value takes to decode: 0.6 ns.
DECODE_FLOPS = 45


@functools.cache
def _byte_table(dtype: np.dtype) -> np.ndarray:
    """Return 256 pairs of levels, each pair one element wide enough to hold both."""
    byte = np.arange(256)
    pairs = np.stack([NF4_CODE[byte >> 4], NF4_CODE[byte & 15]], axis=1).astype(dtype)
    return pairs.view(_pair_type(dtype)).reshape(-1)


def _pair_type(dtype: np.dtype) -> Any:
    return np.complex64 if dtype == np.float32 else np.complex128


@functools.cache
def _code_of_grid() -> np.ndarray:
    grid = np.float32(2) * np.arange(plain.GRID, dtype=np.float32) / np.float32(plain.GRID - 1)
    middle = (DYNAMIC_CODE[:-1] + DYNAMIC_CODE[1:]) / np.float32(2)
    return np.searchsorted(middle, grid - np.float32(1), side="left").astype(np.uint8)


def nf4_quantize(w: np.ndarray, block_size: int = 64, double_quant: bool = False) -> NF4Weight:
    """Quantise a weight to NF4; see ``entrenar.reference.nf4.nf4_quantize``.

    Args:
        w: Any shape and strides, floating.
        block_size: Values that share one absmax.
        double_quant: Quantise the absmax to 8 bits in blocks of 256.

    Returns:
        The weight, the same bits as the reference's.

    Raises:
        ConfigError: ``block_size`` is not one of bitsandbytes'.
        DTypeError: ``w`` is not floating.
        NumericsError: ``w`` holds a NaN, an infinity, or a value beyond float32.
    """
    check_dtype("nf4_quantize", "w", w)
    count = w.size
    if block_size not in plain.BLOCK_SIZES or count % block_size:
        return plain.nf4_quantize(w, block_size, double_quant)
    x = np.ascontiguousarray(w).reshape(-1)
    codes = np.empty(count // 2, np.uint8)
    absmax = np.empty(count // block_size, np.float32)

    def some(part: slice) -> None:
        for start in range(part.start, part.stop, PIECE):
            stop = min(start + PIECE, part.stop)
            found = absmax[start // block_size : stop // block_size]
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                piece = x[start:stop].astype(np.float32).reshape(-1, block_size)
                _largest(piece, found)
                piece *= (np.float32(1) / np.maximum(found, plain.ABSMAX_FLOOR))[:, None]
            _encode(piece.reshape(-1), codes[start // 2 : stop // 2])

    threads.spread(some, count, PIECE, block_size)
    if not np.isfinite(absmax).all():
        return plain.nf4_quantize(w, block_size, double_quant)
    shape, dtype = tuple(w.shape), str(w.dtype)
    if not double_quant:
        return NF4Weight(codes, absmax, shape, dtype, block_size)
    offset = np.array([absmax.mean(dtype=np.float64) if count else 0.0], np.float32)
    absmax_codes, absmax2 = _quantize_absmax(absmax, offset)
    return NF4Weight(codes, None, shape, dtype, block_size, absmax_codes, absmax2, offset)


def _largest(blocks: np.ndarray, out: np.ndarray) -> None:
    """Write the largest magnitude of each row, a power of two of values: halves against halves.

    NumPy's own reduction of so short rows takes several times as long.
    """
    left = np.abs(blocks)
    while left.shape[1] > 1:
        half = left.shape[1] // 2
        left = np.maximum(left[:, :half], left[:, half:])
    out[...] = left[:, 0]


def _encode(scaled: np.ndarray, packed: np.ndarray) -> None:
    """Write the codes of values in [-1, 1]: how many midpoints lie below each."""
    codes = np.zeros(scaled.size, np.uint8)
    above = np.empty(scaled.size, np.bool_)
    for middle in (NF4_CODE[:-1] + NF4_CODE[1:]) / np.float32(2):
        np.greater(scaled, middle, out=above)
        codes += above
    np.left_shift(codes[::2], 4, out=packed)
    packed |= codes[1::2]


def _quantize_absmax(absmax: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8-bit codes of ``absmax - offset`` and the largest magnitude per 256 of them."""
    size = plain.NESTED_BLOCK
    blocks = -(-absmax.size // size)
    padded = np.zeros(blocks * size, np.float32)
    np.subtract(absmax, offset, out=padded[: absmax.size])
    centred = padded.reshape(blocks, size)
    absmax2 = np.abs(centred).max(axis=1, initial=0)
    with np.errstate(all="ignore"):
        scaled = np.clip(centred * (np.float32(1) / absmax2)[:, None], -1, 1)
    scaled = np.nan_to_num(scaled, nan=-1)
    position = (scaled + np.float32(1)) * np.float32(0.5) * np.float32(plain.GRID - 1)
    codes = _code_of_grid()[(position + np.float32(0.5)).astype(np.int64)]
    return codes.reshape(-1)[: absmax.size], absmax2


def _absmax_of(w: NF4Weight, blocks: slice | None = None) -> np.ndarray:
    """Return the float32 absmax of these blocks, or all, with the second quantisation undone."""
    if w.absmax_codes is None or w.absmax2 is None or w.offset is None:
        assert w.absmax is not None
        return w.absmax if blocks is None else w.absmax[blocks]
    chosen = slice(0, w.absmax_codes.size) if blocks is None else blocks
    values = DYNAMIC_CODE[w.absmax_codes[chosen]]
    values *= w.absmax2[np.arange(chosen.start, chosen.stop) // plain.NESTED_BLOCK]
    values += w.offset
    return values


def _decode(codes: np.ndarray, absmax: np.ndarray, block_size: int, out: np.ndarray) -> None:
    """Decode whole blocks into contiguous ``out``, which has two values a byte of ``codes``."""
    table = _byte_table(out.dtype)
    pairs = out.view(table.dtype)
    for start in range(0, out.size, PIECE):
        stop = min(start + PIECE, out.size)
        # "clip" writes straight to out, where "raise" would go through a copy; no byte is out of range
        np.take(
            table, codes[start // 2 : stop // 2], out=pairs[start // 2 : stop // 2], mode="clip"
        )
        blocks = out[start:stop].reshape(-1, block_size)
        blocks *= absmax[start // block_size : stop // block_size, None]


def nf4_dequantize(w: NF4Weight, dtype: Any = None, out: np.ndarray | None = None) -> np.ndarray:
    """Decode an NF4 weight; see ``entrenar.reference.nf4.nf4_dequantize``.

    Args:
        w: The weight.
        dtype: Name of the dtype wanted; that of the weight where None.
        out: Array of ``w.shape`` to write to.

    Returns:
        ``w.shape``: float64 where that was asked for, float16 likewise, else float32; or ``out``.

    Raises:
        DTypeError: ``dtype`` is not floating.
        ShapeMismatchError: ``out`` or the storage of ``w`` does not have the size of ``w.shape``.
    """
    name = str(w.dtype if dtype is None else dtype).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16", "float64"):
        raise DTypeError(f"nf4_dequantize: dtype is {name}, wanted a floating type", "")
    if name == "float16" or math.prod(w.shape) % w.block_size:
        return plain.nf4_dequantize(w, dtype, out)
    check_storage("nf4_dequantize", w)
    wanted = np.dtype(np.float64 if name == "float64" else np.float32)
    if out is not None:
        check_shape("nf4_dequantize", "out", out, tuple(w.shape))
    direct = out is not None and out.flags.c_contiguous and out.dtype == wanted
    values = out if direct and out is not None else np.empty(w.shape, wanted)
    _decode(w.codes, _absmax_of(w), w.block_size, values.reshape(-1))
    if out is None or direct:
        return values
    out[...] = values
    return out


def check_storage(op: str, w: NF4Weight) -> None:
    """Refuse a weight whose storage does not have the size that its shape needs.

    Raises:
        ConfigError: ``block_size`` is not above zero.
        ShapeMismatchError: The codes or the scales are too few or too many.
    """
    if w.block_size <= 0:
        raise ConfigError(f"{op}: w.block_size is {w.block_size}, wanted more than 0", "")
    _, code_bytes, blocks = plain._sizes(w.shape, w.block_size)
    check_shape(op, "w.codes", w.codes, (code_bytes,), "it belongs to another weight")
    scales = w.absmax if w.absmax_codes is None else w.absmax_codes
    check_shape(op, "w.absmax", scales, (blocks,), "it belongs to another weight")


def row_step(w: NF4Weight) -> int:
    """Return the least number of rows of a [out, in] weight that are whole blocks."""
    return w.block_size // math.gcd(w.shape[1], w.block_size) if w.shape[1] else 1


def rows_per_piece(w: NF4Weight) -> int:
    """Return how many rows of a [out, in] weight to decode at a time: whole blocks, 4 MiB of them."""
    step = row_step(w)
    return min(max(SCRATCH_VALUES // max(w.shape[1] * step, 1), 1) * step, max(w.shape[0], 1))


def decode_rows(w: NF4Weight, rows: slice, out: np.ndarray) -> None:
    """Decode rows of a [out, in] weight into contiguous ``out``.

    ``rows`` starts at a multiple of :func:`row_step`.
    """
    first, last = rows.start * w.shape[1], rows.stop * w.shape[1]
    blocks = slice(first // w.block_size, -(-last // w.block_size))
    codes, absmax = w.codes[first // 2 : -(-last // 2)], _absmax_of(w, blocks)
    if last % w.block_size:  # the last block of the weight is short
        short = NF4Weight(codes, absmax, (last - first,), w.dtype, w.block_size)
        out.reshape(-1)[...] = plain.nf4_dequantize(short, out.dtype)
    else:
        _decode(codes, absmax, w.block_size, out.reshape(-1))
