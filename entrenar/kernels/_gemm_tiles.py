"""Tiles of matrix products: which, by kind of operand, sizes and shared memory, and how k is split.

Chosen by a table and a cost, never tuned at run time, so that the order of a sum is a function of
shape, dtype, alignment and the device's shared memory: the same on every run.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from entrenar.kernels._launch import cdiv

__all__ = ["GROUP_M", "Tile", "choose_split", "choose_tile", "kind_of"]


class Tile(NamedTuple):
    """A tile of the result, the step over k, and how it is run.

    ``speed`` is its throughput on a full device as a share of the fastest tile's: the published order
    of Triton's tutorials 03 and 09 on Hopper, not measured here. It weighs tiles against waves.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    speed: float


GROUP_M = 8
# What work is spread over, whatever the device has (132 is H100's), so that its count changes no sum.
_PROCESSORS = 132
# By kind of operand. None spills on sm_80 or sm_90; those of 64 rows and more use wgmma on sm_90.
# Rows that do not start at multiples of 16 elements are read element by element, through registers,
# which wide tiles have not enough of.
_TILES = {
    "16-bit": (
        Tile(128, 256, 64, 8, 3, 1.0),
        Tile(128, 128, 64, 8, 4, 0.88),
        Tile(128, 64, 64, 4, 4, 0.72),
        Tile(64, 128, 64, 4, 4, 0.72),
        Tile(64, 64, 64, 4, 4, 0.55),
        Tile(64, 32, 64, 4, 4, 0.35),
        Tile(64, 16, 64, 4, 4, 0.2),
        Tile(32, 64, 128, 4, 4, 0.3),
        Tile(16, 64, 128, 4, 4, 0.2),
    ),
    "16-bit unaligned": (
        Tile(128, 64, 32, 8, 2, 1.0),
        Tile(64, 64, 32, 4, 2, 0.8),
        Tile(64, 32, 32, 4, 2, 0.5),
        Tile(32, 64, 64, 4, 2, 0.5),
        Tile(16, 64, 64, 4, 2, 0.3),
    ),
    "fp32": (
        Tile(128, 128, 16, 8, 3, 1.0),
        Tile(128, 64, 16, 8, 3, 0.85),
        Tile(64, 64, 16, 4, 2, 0.75),
        Tile(32, 64, 32, 4, 3, 0.5),
        Tile(16, 64, 32, 4, 3, 0.35),
    ),
    "fp32 unaligned": (
        Tile(64, 64, 16, 4, 3, 1.0),
        Tile(32, 64, 32, 4, 3, 0.7),
        Tile(16, 64, 32, 4, 3, 0.5),
    ),
    "tf32": (
        Tile(128, 128, 32, 8, 3, 1.0),
        Tile(64, 64, 32, 4, 4, 0.6),
        Tile(16, 64, 64, 4, 4, 0.2),
    ),
}
_MATRIX_ROWS = 64
_MIN_K_PER_SPLIT = 256
_MAX_SPLITS = 32


@functools.lru_cache(maxsize=4096)
def choose_tile(kind: str, batch: int, m: int, n: int, shared_bytes: int) -> Tile:
    """Return the tile that finishes a product first by waves times work over speed.

    Args:
        kind: ``"16-bit"``, ``"fp32"``, either followed by ``" unaligned"``, or ``"tf32"``.
        batch: Products.
        m: Rows of each result.
        n: Columns of each result.
        shared_bytes: Shared memory a program may use; stages are given up to fit it.
    """
    itemsize = 2 if kind.startswith("16-bit") else 4

    def cost(tile: Tile) -> float:
        count = batch * cdiv(m, tile.m) * cdiv(n, tile.n)
        return cdiv(count, _PROCESSORS) * tile.m * tile.n / tile.speed

    fitting = [f for f in (_fit(t, itemsize, shared_bytes) for t in _TILES[kind]) if f is not None]
    if m >= _MATRIX_ROWS and itemsize == 2:
        # shorter tiles miss the widest matrix instructions
        fitting = [tile for tile in fitting if tile.m >= _MATRIX_ROWS]
    return min(fitting, key=cost)


def _fit(tile: Tile, itemsize: int, shared_bytes: int) -> Tile | None:
    per_stage = (tile.m + tile.n) * tile.k * itemsize
    stages = min(tile.stages, shared_bytes // per_stage)
    # the widest tile spills 64 bytes on sm_120 with two stages
    least = 3 if tile.m * tile.n > 128 * 128 else 2
    return tile._replace(stages=stages) if stages >= least else None


def kind_of(a: torch.Tensor, b: torch.Tensor, precision: str) -> str:
    """Return the kind of tile two operands take, by dtype, precision and alignment."""
    if a.element_size() == 4 and precision == "tf32":
        return "tf32"
    kind = "16-bit" if a.element_size() == 2 else "fp32"
    return kind if _aligned(a) and _aligned(b) else f"{kind} unaligned"


def _aligned(storage: torch.Tensor) -> bool:
    """Whether Triton reads 128 bits at a time: a unit stride, everything else in sixteens."""
    steps = [s for s in storage.stride() if s != 1]
    lengths = [n for n, s in zip(storage.shape, storage.stride(), strict=True) if s == 1]
    even = all(size % 16 == 0 for size in (*steps, *lengths))
    return bool(lengths) and even and storage.data_ptr() % 16 == 0


def choose_split(tiles: int, k: int, block_k: int) -> tuple[int, int]:
    """Return (inner length of a part, parts): one part unless tiles leave half the device idle."""
    wanted = min(_PROCESSORS // max(tiles, 1), k // _MIN_K_PER_SPLIT, _MAX_SPLITS)
    if wanted < 2:
        return max(k, 1), 1
    per_split = cdiv(cdiv(k, wanted), block_k) * block_k
    return per_split, cdiv(k, per_split)
