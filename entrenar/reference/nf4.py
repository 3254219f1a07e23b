"""NF4: 4-bit NormalFloat weights in blocks, and the second quantisation of their scales.

A weight is cut into blocks of ``block_size`` consecutive values. Each block keeps its largest
magnitude, ``absmax``, and one of sixteen codes per value: the level nearest to ``w / absmax``. With
double quantisation the absmax, less their mean, are themselves quantised to 8 bits in blocks of 256.

Bit for bit what bitsandbytes writes on a CPU, whose arithmetic is IEEE (its CUDA build divides
approximately): a full block is multiplied by the rounded reciprocal of its absmax, a short last
block is divided by it; a value exactly between two levels takes the lower one; the reciprocal of an
absmax below 1e-38 is taken of 1e-38, and a short last block stores that floor. The 8-bit codes are
chosen on a grid of 65536 points of [-1, 1], as bitsandbytes' table does, not by exact distance.

Source: Dettmers et al., "QLoRA", section 3 and appendix E; bitsandbytes 0.50
``backends/default/ops.py`` (4 bits) and ``csrc/cpu_ops.cpp`` (8 bits).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from entrenar.checks import check_dtype, check_shape
from entrenar.errors import ConfigError, DTypeError, NumericsError

__all__ = ["DYNAMIC_CODE", "NF4_CODE", "NF4Weight", "nf4_dequantize", "nf4_quantize"]

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256
GRID = 65536
ABSMAX_FLOOR = np.float32(1e-38)


def _frozen(values: Any) -> np.ndarray:
    array = np.asarray(values, np.float32)
    array.setflags(write=False)
    return array


NF4_CODE = _frozen(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def _linspace(count: int) -> np.ndarray:
    """Return ``count`` float32 points of [0.1, 1], each rounded once from either end."""
    start, end = np.float32(0.1), np.float32(1.0)
    step = np.float64((end - start) / np.float32(count - 1))
    i = np.arange(count)
    up = (np.float64(start) + step * i).astype(np.float32)
    down = (np.float64(end) - step * (count - 1 - i)).astype(np.float32)
    return np.where(i < count // 2, up, down)


def _dynamic_code() -> np.ndarray:
    """Return the 256 levels of the signed dynamic 8-bit type with 7 exponent bits, sorted."""
    levels = [np.array([0.0, 1.0], np.float32)]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        magnitudes = np.float32(10.0 ** (exponent - 6)) * means
        levels += [magnitudes, -magnitudes]
    return np.sort(np.concatenate(levels))


def _midpoints(code: np.ndarray) -> np.ndarray:
    return (code[:-1] + code[1:]) / np.float32(2)


DYNAMIC_CODE = _frozen(_dynamic_code())


@dataclasses.dataclass(frozen=True)
class NF4Weight:
    """A 4-bit NormalFloat weight in ndarrays; the twin of ``entrenar.kernels.nf4_weight.NF4Weight``.

    Attributes:
        codes: uint8 [ceil(n/2)], two codes to a byte, the first in the high nibble.
        absmax: float32 [ceil(n/block_size)], or None with double quantisation.
        shape: Shape of the weight.
        dtype: Name of the dtype that decoding gives unless told otherwise.
        block_size: Weights that share one absmax.
        absmax_codes: uint8 [ceil(n/block_size)], codes of the absmax less ``offset``.
        absmax2: float32, one per 256 absmax codes.
        offset: float32 [1], mean of the absmax.
    """

    codes: np.ndarray
    absmax: np.ndarray | None
    shape: tuple[int, ...]
    dtype: Any
    block_size: int = 64
    absmax_codes: np.ndarray | None = None
    absmax2: np.ndarray | None = None
    offset: np.ndarray | None = None

    @property
    def double_quant(self) -> bool:
        """Whether the absmax is itself quantised."""
        return self.absmax_codes is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))


def _sizes(shape: tuple[int, ...], block_size: int) -> tuple[int, int, int]:
    """Return the number of values, of code bytes and of blocks, as unbounded integers."""
    count = math.prod(int(n) for n in shape)
    return count, -(-count // 2), -(-count // block_size)


def _check_finite(x: np.ndarray, shape: tuple[int, ...]) -> None:
    bad = np.flatnonzero(~np.isfinite(x))
    if bad.size:
        where = tuple(int(i) for i in np.unravel_index(bad[0], shape))
        raise NumericsError(
            f"nf4_quantize: w has {bad.size} values that are NaN or beyond float32, the first at "
            f"{where}, wanted finite weights",
            "a block would lose all its values to it; repair the checkpoint",
        )


def nf4_quantize(w: np.ndarray, block_size: int = 64, double_quant: bool = False) -> NF4Weight:
    """Quantise a weight to NF4.

    Args:
        w: Any shape and strides, float32, float16 or float64 (rounded to float32 first).
        block_size: Values that share one absmax: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
        double_quant: Quantise the absmax to 8 bits in blocks of 256.

    Returns:
        The weight, with ``w``'s shape and dtype. With an odd count the last low nibble is 7.

    Raises:
        ConfigError: ``block_size`` is none of the above.
        DTypeError: ``w`` is not floating.
        NumericsError: ``w`` holds a NaN, an infinity, or a value beyond float32.

    Numerics:
        float32 as bitsandbytes does it, see the module; the offset is the float64 mean, rounded.
    """
    check_dtype("nf4_quantize", "w", w)
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"nf4_quantize: block_size is {block_size}, wanted one of "
            f"{', '.join(map(str, BLOCK_SIZES))}",
            "64 is what checkpoints use",
        )
    with np.errstate(over="ignore", under="ignore"):
        x = np.ascontiguousarray(w).reshape(-1).astype(np.float32)
        _check_finite(x, w.shape)
        absmax, scaled = _scale_blocks(x, block_size)
    codes = np.searchsorted(_midpoints(NF4_CODE), scaled, side="left").astype(np.uint8)
    if codes.size % 2:
        codes = np.append(codes, np.uint8(7))
    packed = (codes[::2] << 4) | codes[1::2]
    shape, dtype = tuple(w.shape), str(w.dtype)
    if not double_quant:
        return NF4Weight(packed, absmax, shape, dtype, block_size)
    mean = absmax.mean(dtype=np.float64) if absmax.size else 0.0
    offset = np.array([mean], np.float32)
    absmax_codes, absmax2 = _quantize_absmax(absmax, offset)
    return NF4Weight(packed, None, shape, dtype, block_size, absmax_codes, absmax2, offset)


def _scale_blocks(x: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the absmax of each block and the values over it, clipped to [-1, 1]."""
    full = x.size - x.size % block_size
    blocks = x[:full].reshape(-1, block_size)
    absmax = np.abs(blocks).max(axis=1, initial=0)
    reciprocal = np.float32(1) / np.maximum(absmax, ABSMAX_FLOOR)
    scaled = (blocks * reciprocal[:, None]).reshape(-1)
    tail = x[full:]
    if tail.size:
        last = np.maximum(np.abs(tail).max(), ABSMAX_FLOOR)
        absmax = np.append(absmax, last)
        scaled = np.append(scaled, tail / last)
    return absmax, np.clip(scaled, -1, 1)


def _quantize_absmax(absmax: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8-bit codes of ``absmax - offset`` and the largest magnitude per 256 of them."""
    grid = np.float32(2) * np.arange(GRID, dtype=np.float32) / np.float32(GRID - 1) - np.float32(1)
    code_of_grid = np.searchsorted(_midpoints(DYNAMIC_CODE), grid, side="left").astype(np.uint8)
    centred = absmax - offset
    codes = np.zeros(absmax.size, np.uint8)
    absmax2 = np.zeros(-(-absmax.size // NESTED_BLOCK), np.float32)
    for block in range(absmax2.size):
        at = slice(block * NESTED_BLOCK, (block + 1) * NESTED_BLOCK)
        absmax2[block] = np.abs(centred[at]).max()
        with np.errstate(all="ignore"):
            scaled = np.clip(centred[at] * (np.float32(1) / absmax2[block]), -1, 1)
        # 0 times an infinite reciprocal: code 0, whose level times absmax2 adds next to nothing
        scaled = np.nan_to_num(scaled, nan=-1)
        position = (scaled + np.float32(1)) * np.float32(0.5) * np.float32(GRID - 1)
        codes[at] = code_of_grid[(position + np.float32(0.5)).astype(np.int64)]
    return codes, absmax2


def _absmax_of(w: NF4Weight) -> np.ndarray:
    """Return the float32 absmax per block, with the second quantisation undone."""
    if w.absmax_codes is None or w.absmax2 is None or w.offset is None:
        assert w.absmax is not None
        return w.absmax
    scales = np.repeat(w.absmax2, NESTED_BLOCK)[: w.absmax_codes.size]
    return DYNAMIC_CODE[w.absmax_codes] * scales + w.offset


def nf4_dequantize(w: NF4Weight, dtype: Any = None, out: np.ndarray | None = None) -> np.ndarray:
    """Decode an NF4 weight.

    Args:
        w: The weight.
        dtype: Name of the dtype wanted; that of the weight where None.
        out: Array of ``w.shape`` to write to.

    Returns:
        ``w.shape``: float64 where that was asked for, float16 likewise, else float32; NumPy has no
        bfloat16, and a caller who wants it rounds once. ``out`` where it was given.

    Raises:
        DTypeError: ``dtype`` is not floating.
        ShapeMismatchError: ``out`` or the storage of ``w`` does not have the size of ``w.shape``.

    Numerics:
        The absmax is float32 arithmetic, two roundings with double quantisation; the product
        ``level * absmax`` is rounded once to float32 (float64: exact), then to float16.
    """
    name = str(w.dtype if dtype is None else dtype).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16", "float64"):
        raise DTypeError(f"nf4_dequantize: dtype is {name}, wanted a floating type", "")
    count, code_bytes, blocks = _sizes(w.shape, w.block_size)
    check_shape("nf4_dequantize", "w.codes", w.codes, (code_bytes,), "it belongs to another weight")
    absmax = _absmax_of(w)
    check_shape("nf4_dequantize", "w.absmax", absmax, (blocks,), "it belongs to another weight")
    accumulate = np.float64 if name == "float64" else np.float32
    levels = np.stack([w.codes >> 4, w.codes & 15], axis=1).reshape(-1)[:count]
    values = NF4_CODE[levels].astype(accumulate) * np.repeat(absmax, w.block_size)[:count]
    values = values.reshape(w.shape)
    if out is not None:
        check_shape("nf4_dequantize", "out", out, tuple(w.shape))
        out[...] = values
        return out
    return values.astype(np.float16) if name == "float16" else values
