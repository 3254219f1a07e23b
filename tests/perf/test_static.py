"""Every kernel compiles for a GPU without spilling, without fp64, and onto the matrix units."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from perf import static

FULL = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100")


def kernels() -> set[str]:
    """Return the name of every kernel in the package."""
    from triton.runtime.jit import JITFunction

    found = set()
    for file in (Path(static.__file__).parents[1] / "entrenar" / "kernels").glob("*.py"):
        module = importlib.import_module(f"entrenar.kernels.{file.stem}")
        found |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, JITFunction) and name.endswith("_kernel")
        }
    return found


def test_every_kernel_compiles_without_a_fault(counts: Callable[[int, int], int]) -> None:
    full = bool(counts(0, 1))
    dtypes = ("bf16", "fp32", "fp16") if full else ("bf16", "fp32")
    found = static.rows(FULL if full else ("sm_90",), dtypes, one_each=not full)
    wrong = {
        f"{r['kernel']} {r['dtype']} {r['target']} {r['config']}": static.faults(r) for r in found
    }
    assert {name: faults for name, faults in wrong.items() if faults} == {}
    assert {row["kernel"] for row in found} == kernels()


ROW = {
    "kernel": "k", "op": "matmul", "dtype": "bf16", "config": "", "target": "sm_90",
    "registers": 64, "spill_bytes": 0, "shared_bytes": 0, "matrix_instructions": 8, "wgmma": 8,
    "has_dot": True, "tile_m": 128, "ldst128_share": 1.0, "fp64": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 240_000}, "needs 240000 bytes of shared memory where 232448 are"),
        ({"fp64": 2}, "has 2 fp64 instructions"),
        ({"wgmma": 0}, "has a tile of 128 rows and no wgmma"),
        ({"matrix_instructions": 0, "wgmma": 0}, "multiplies without matrix instructions"),
        ({"error": "CompilationError: no"}, "CompilationError: no"),
    ],
)
def test_a_fault_is_named(change: dict[str, object], fault: str) -> None:
    assert static.faults({**ROW, **change}) == [fault]


@pytest.mark.parametrize("change", [{}, {"tile_m": 16, "wgmma": 0}, {"dtype": "fp32", "wgmma": 0}])
def test_no_fault_where_there_is_none(change: dict[str, object]) -> None:
    assert static.faults({**ROW, **change}) == []
