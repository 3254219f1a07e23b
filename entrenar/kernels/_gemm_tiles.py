"""Tiles of matrix products: which, by architecture, kind of operand and sizes, and how k is split.

Chosen by a table and a cost, never tuned at run time, so that the order of a sum is a function of shape,
dtype, alignment and architecture: the same on every run.
"""

from __future__ import annotations

import functools
import math

import torch

from entrenar import runtime
from entrenar.kernels._gemm_tables import KINDS, PROCESSORS, SHARED_BYTES, TABLES, Tile
from entrenar.kernels._launch import cdiv, next_power_of_2, on_amd

__all__ = [
    "GROUP_M",
    "KINDS",
    "MATRIX_ROWS",
    "Tile",
    "architecture_of",
    "choose_split",
    "choose_tile",
    "has_descriptors",
    "kind_of",
    "listed",
    "programs_at_a_time",
]

GROUP_M = 8
MATRIX_ROWS = 64
_MIN_K_PER_SPLIT = 256
_MAX_SPLITS = 32
_WARPS_OF_PROCESSOR = 64
_MOST_TOGETHER = 3
# What a processor multiplies while it writes and reads one float32 of a part, and during a launch of 2 us:
# 8 bytes at its share of the second cache (5120 bytes a clock for 108 processors: A100 whitepaper) and
# 1.4 GHz, at 1024 products a clock in 16 bits, half as many in tf32, 64 in float32.
_PARTS_COST = {"16-bit": (174, 2.9e6), "tf32": (87, 1.4e6), "fp32": (11, 1.8e5)}
# Of the first row below it where an architecture has none of its own.
_CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)


def architecture_of(device: torch.device) -> str:
    """Return the architecture whose row of the tables a device takes, or the target a CPU stands in for."""
    if device.type == "cuda":
        return _architecture_of_gpu(device)
    if not on_amd():
        return listed(runtime.ptx_target())
    if torch.cuda.is_available():  # the host's storage stands in for the GPU's
        return _architecture_of_gpu(torch.device("cuda", torch.cuda.current_device()))
    # offline compilation names its target in torch.version.hip
    return listed(str(torch.version.hip).rsplit(" ", 1)[-1])


@functools.cache
def _architecture_of_gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if on_amd():
        return listed(str(properties.gcnArchName).split(":")[0])
    return listed(f"sm_{properties.major}{properties.minor}")


@functools.cache
def listed(name: str) -> str:
    """Return the architecture of the tables that stands for another: sm_87 takes the row of sm_86, say."""
    if name in TABLES:
        return name
    if not name.startswith("sm_"):
        newer = name.startswith(("gfx10", "gfx11", "gfx12"))
        return "gfx1100" if newer else "gfx942" if name.startswith("gfx9") else "gfx90a"
    capability = int(name.removeprefix("sm_"))
    return f"sm_{max((c for c in _CAPABILITIES if c <= capability), default=75)}"


def has_descriptors(architecture: str) -> bool:
    """Whether products there go through tensor descriptors.

    GPUs of compute capability 12.0 have them too, but with 99 KiB of shared memory and without the
    matrix instructions that read operands from it they gain nothing, and Triton 3.6 spills there.
    """
    return architecture in ("sm_90", "sm_100")


@functools.lru_cache(maxsize=4096)
def choose_tile(architecture: str, kind: str, batch: int, m: int, n: int, k: int) -> Tile:
    """Return the tile that finishes a product first: waves times work over speed, and adding parts up.

    Args:
        architecture: A row of the tables, such as ``"sm_90"``.
        kind: ``"16-bit"``, ``"fp32"``, either followed by ``" unaligned"``, or ``"tf32"``.
        batch: Products.
        m: Rows of each result.
        n: Columns of each result.
        k: Inner size.
    """
    tiles = TABLES[architecture][kind]
    fastest = max(_speed(tile) for tile in tiles)
    of_part, of_launch = _PARTS_COST[kind.removesuffix(" unaligned")]

    def cost(tile: Tile) -> float:
        """Return the multiplications that fit in the time of the busiest processor."""
        count = batch * cdiv(m, tile.m) * cdiv(n, tile.n)
        length, parts = choose_split(architecture, count, k, tile)
        together = _together(architecture, tile)
        waves = together * cdiv(count * parts, together * PROCESSORS[architecture])
        work = waves * tile.m * tile.n * length * fastest / _speed(tile)
        if parts == 1:
            return work
        return work + of_launch + of_part * parts * batch * m * n / PROCESSORS[architecture]

    if m >= MATRIX_ROWS and kind.startswith("16-bit"):
        # shorter tiles miss the widest matrix instructions
        tiles = tuple(tile for tile in tiles if tile.m >= MATRIX_ROWS)
    else:
        # few rows are bound by reading b: rows that are not there would be computed for nothing
        least = min(tile.m for tile in tiles)
        tiles = tuple(tile for tile in tiles if tile.m <= max(next_power_of_2(m), least))
    return min(tiles, key=cost)


def _speed(tile: Tile) -> float:
    """Return what a tile's throughput on a full device goes with; a rule, not a measurement.

    Operations per byte read are m n / (m + n). With matrix units the bound, a tile's shape would not
    matter; with the second cache the bound, throughput would go with that number. Its root lies between
    and keeps the order of Triton's tutorials 03 and 09.
    """
    return math.sqrt(tile.m * tile.n / (tile.m + tile.n))


def programs_at_a_time(device: torch.device, architecture: str, tile: Tile) -> int:
    """Return how many programs of a persistent product a device runs at a time.

    Its own count on a GPU, as no sum depends on it, else that of the architecture.
    """
    itemsize = 2
    # four stages and 32 KiB of the result, as _gemm_described lays it out
    nbytes = (tile.m + tile.n) * tile.k * itemsize * tile.stages + (33 << 10)
    of_processor = min(SHARED_BYTES[architecture] // nbytes, _WARPS_OF_PROCESSOR // tile.warps)
    return _processors_of(device, architecture) * max(of_processor, 1)


@functools.cache
def _processors_of(device: torch.device, architecture: str) -> int:
    if device.type != "cuda":
        return PROCESSORS[architecture]
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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


def choose_split(architecture: str, tiles: int, k: int, tile: Tile) -> tuple[int, int]:
    """Return (inner length of a part, parts): one part unless tiles leave half the device idle."""
    programs = _together(architecture, tile) * PROCESSORS[architecture]
    wanted = min(programs // max(tiles, 1), k // _MIN_K_PER_SPLIT, _MAX_SPLITS)
    if wanted < 2:
        return max(k, 1), 1
    per_split = cdiv(cdiv(k, wanted), tile.k) * tile.k
    return per_split, cdiv(k, per_split)


def _together(architecture: str, tile: Tile) -> int:
    """Return how many programs of a tile are to run on a processor at a time.

    Products of few rows are bound by reading b: it takes more than one short program's copies to keep
    memory busy. Larger tiles are bound by their multiplications, which one program keeps busy.
    """
    if tile.m >= MATRIX_ROWS:
        return 1
    nbytes = (tile.m + tile.n) * tile.k * 2 * tile.stages
    return max(min(SHARED_BYTES[architecture] // nbytes, _MOST_TOGETHER), 1)
