"""The constants that NF4 kernels look up, as NumPy arrays and as storage on each device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from entrenar.errors import AllocationFailedError

__all__ = ["BLOCK_SIZES", "NESTED_BLOCK", "NF4_CODE", "Tables", "tables"]

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Absmax that share one absmax2.
NESTED_BLOCK = 256
# Points of [-1, 1] on which bitsandbytes chooses 8-bit codes.
_GRID = 65536

# Dettmers et al., QLoRA, appendix E: expected values of a normal variable between its quantiles, with
# an exact zero, normalised to [-1, 1].
NF4_CODE = np.array(
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
    ],
    np.float32,
)
NF4_CODE.setflags(write=False)


class Tables(NamedTuple):
    """Look-up tables on one device.

    Attributes:
        levels: float32 [16], what a 4-bit code stands for; at a multiple of its 64 bytes.
        middles: float32 [16], midpoints between neighbours, the last one infinite.
        nested: float32 [256], what an 8-bit code of an absmax stands for.
        steps: int32 [256], the grid point at which each next 8-bit code begins; the last is never
            reached.
    """

    levels: torch.Tensor
    middles: torch.Tensor
    nested: torch.Tensor
    steps: torch.Tensor


def _dynamic_code() -> np.ndarray:
    """Return the 256 levels of bitsandbytes' signed dynamic type with 7 exponent bits, sorted."""
    found = [0.0, 1.0]
    start, end = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        count = 2**exponent
        step = float((end - start) / np.float32(count))
        # from either end, rounded once: what torch.linspace gives in float32
        points = [
            float(start) + step * i if 2 * i < count else float(end) - step * (count - i)
            for i in range(count + 1)
        ]
        bounds = np.array(points, np.float32)
        means = (bounds[1:] + bounds[:-1]) / np.float32(2) * np.float32(10.0 ** (exponent - 6))
        found += [*means.tolist(), *(-means).tolist()]
    return np.array(sorted(found), np.float32)


def _grid_steps(code: np.ndarray) -> np.ndarray:
    """Return, for each code but the last, the first point of the grid that lies past its midpoint."""
    points = np.arange(_GRID, dtype=np.float32) * np.float32(2) / np.float32(_GRID - 1)
    points = points - np.float32(1)
    middles = (code[:-1] + code[1:]) * np.float32(0.5)
    steps = np.searchsorted(points, middles, side="right")
    return np.append(steps, _GRID).astype(np.int32)


@functools.cache
def tables(device: torch.device) -> Tables:
    """Return the tables on a device, copied there once."""
    code = _dynamic_code()
    middles = np.append((NF4_CODE[:-1] + NF4_CODE[1:]) * np.float32(0.5), np.float32(np.inf))
    arrays = (NF4_CODE.copy(), middles, code, _grid_steps(code))
    made = Tables(*(_stored(array, device) for array in arrays))
    if made.levels.data_ptr() % made.levels.nbytes:
        raise AllocationFailedError(
            f"the table of NF4 levels lies at {made.levels.data_ptr():#x} on {device}, wanted a "
            f"multiple of {made.levels.nbytes}",
            "use torch's own allocator, which aligns to it",
        )
    return made


def _stored(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to storage of torch's own allocator, which aligns to 64 bytes and more; NumPy's does not."""
    made = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)
    return made.copy_(torch.from_numpy(array))
