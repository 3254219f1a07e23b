"""Tiles of products: choice by architecture and shape, what each compiles to, splits of the inner size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from entrenar.kernels import _gemm_tables, _gemm_tiles, _launch, gemm
from entrenar.kernels._gemm_described import parts_of_columns
from entrenar.kernels._gemm_tables import KINDS, PROCESSORS, SHARED_BYTES, TABLES, Tile
from perf import static
from perf.static_rows import compile_row, faults

choose = _gemm_tiles.choose_tile


@pytest.mark.parametrize(
    ("architecture", "m", "n", "wanted"),
    [
        ("sm_90", 8192, 8192, (128, 256, 64)),
        ("sm_90", 2048, 2048, (128, 256, 64)),
        ("sm_90", 8192, 128, (128, 64, 64)),
        ("sm_100", 8192, 8192, (128, 256, 64)),
        ("sm_80", 8192, 8192, (128, 256, 64)),
        ("sm_89", 8192, 8192, (128, 256, 32)),
        ("gfx942", 8192, 8192, (128, 128, 64)),
    ],
)
def test_large_products_take_large_tiles(
    architecture: str, m: int, n: int, wanted: tuple[int, int, int]
) -> None:
    assert choose(architecture, "16-bit", 1, m, n, 2048)[:3] == wanted


@pytest.mark.parametrize("architecture", TABLES)
def test_tiles_follow_rows(architecture: str) -> None:
    """Few rows take short tiles, and no more than 64 rows of one are ever computed for nothing."""
    for kind in KINDS:
        for m in (1, 2, 16, 17, 32, 33, 63, 64, 200, 2048, 8192):
            for n in (1, 16, 256, 1536, 4096):
                tile = choose(architecture, kind, 1, m, n, 2048)
                assert tile in TABLES[architecture][kind]
                if kind.startswith("16-bit") and m >= 64:
                    assert tile.m >= 64
                else:
                    assert tile.m <= max(2 * m, 16)
    assert choose(architecture, "16-bit", 1, 4, 4096, 2048).m == 16


@pytest.mark.parametrize("architecture", TABLES)
def test_every_tile_fits_shared_memory_and_says_where_it_is_from(architecture: str) -> None:
    assert tuple(TABLES[architecture]) == KINDS
    stated = set(re.findall(r"^\* ``(\w+)``", _gemm_tables.__doc__ or "", re.MULTILINE))
    assert len(stated) == 5
    for kind in KINDS:
        itemsize = 2 if kind.startswith("16-bit") else 4
        for tile in TABLES[architecture][kind]:
            staged = (tile.m + tile.n) * tile.k * itemsize * tile.stages
            assert staged <= SHARED_BYTES[architecture]
            assert tile.source in stated
            for itemsize_out in (2, 4):
                parts = parts_of_columns(tile, itemsize_out, accumulate=False)
                laid_out = tile.m * tile.n // parts * itemsize_out
                if kind == "16-bit" and _gemm_tiles.has_descriptors(architecture):
                    assert staged + laid_out <= SHARED_BYTES[architecture]


def test_architectures_without_a_row_take_one_below() -> None:
    listed = _gemm_tiles.listed
    assert [listed(f"sm_{n}") for n in (70, 75, 87, 90, 103, 121)] == [
        "sm_75", "sm_75", "sm_86", "sm_90", "sm_100", "sm_120",
    ]  # fmt: skip
    assert [listed(n) for n in ("gfx90a", "gfx950", "gfx1201", "6.2")] == [
        "gfx90a", "gfx942", "gfx1100", "gfx90a",
    ]  # fmt: skip


def _forms(target: str, kind: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what products of a tile launch on a target: plain, and transposed with all there is to finish."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setattr(gemm, "architecture_of", lambda _: target)
    monkeypatch.setattr(gemm, "choose_tile", lambda *_: tile)
    monkeypatch.setattr(gemm, "on_amd", lambda: target.startswith("gfx"))
    dtype = torch.float16 if kind.startswith("16-bit") else torch.float32
    odd = 1 if "unaligned" in kind else 0
    m = n = 8192 + odd
    k = 512 + odd
    precision = "tf32" if kind == "tf32" else "ieee"
    found: list[Any] = []

    def keep(op: str, kernel: Any, grid: Any, given: dict[str, Any]) -> None:
        found.append(static._spec(op, kind, f"{m}x{n}x{k}", kernel, given))

    a, b = torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype)
    with _launch.launching(keep):
        gemm.matmul(a, b, precision=precision)
        gemm.matmul(
            a, b.T.contiguous(), trans_b=True, bias=b[0], scale=0.5, precision=precision,
            out=torch.zeros(m, n, dtype=dtype), accumulate=True,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("target", TABLES)
def test_tiles_compile_without_spilling(
    target: str, counts: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within shared memory, with matrix instructions: wgmma on sm_90 from 64 rows on, in 16 bits."""
    every = counts(0, 1)
    if not every and target not in ("sm_80", "sm_90"):
        pytest.skip("make prove compiles for this target")
    for kind in KINDS if every else KINDS[:1]:
        for tile in TABLES[target][kind] if every else TABLES[target][kind][:1]:
            for spec in _forms(target, kind, tile, monkeypatch):
                row = compile_row(spec, target)
                assert "error" not in row, (kind, tile, row["error"])
                assert not faults(row), (kind, tile, faults(row))
                if target == "sm_90" and kind.startswith("16-bit") and tile.m >= 64:
                    assert row["wgmma"] > 0, (kind, tile)


@pytest.mark.parametrize("k", [0, 1, 255, 256, 511, 1031, 11008])
@pytest.mark.parametrize("tiles", [1, 2, 66, 67, 500])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "gfx942"])
def test_parts_cover_the_inner_size_once(architecture: str, tiles: int, k: int) -> None:
    for tile in TABLES[architecture]["16-bit"]:
        each, parts = _gemm_tiles.choose_split(architecture, tiles, k, tile)
        assert parts >= 1
        assert (parts - 1) * each < max(k, 1) <= parts * each
        together = 1 if tile.m >= 64 else 3
        assert parts == 1 or tiles * parts <= together * PROCESSORS[architecture]


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(576, 1536), (1536, 8960), (8960, 1536), (4096, 14_336), (128_256, 4096)]
)
def test_few_rows_keep_the_memory_of_a_device_busy(rows: int, n: int, k: int) -> None:
    """Products of a layer with few rows are bound by reading the weight, which most of the device does.

    Parts of less than 256 would leave more to add up than they save.
    """
    for architecture in ("sm_80", "sm_90"):
        tile = choose(architecture, "16-bit", 1, rows, n, k)
        tiles = -(-rows // tile.m) * -(-n // tile.n)
        _, parts = _gemm_tiles.choose_split(architecture, tiles, k, tile)
        share = 1 / 2 if rows == 64 else 2 / 3
        assert tiles * parts >= min(PROCESSORS[architecture] * share, tiles * (k // 256))
        # bytes of parts, written and read, beside those of the weight
        assert parts == 1 or 8 * parts * rows * n <= 2 * n * k
