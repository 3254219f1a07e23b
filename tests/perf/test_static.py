"""Every kernel compiles for a GPU without spilling, without fp64, and onto the matrix units."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from entrenar.optable import OPS
from perf import static
from perf.calls import CALLS
from perf.static_cache import RowCache, cache_folder
from perf.static_rows import Spec, faults

REDUCED = ("sm_80", "sm_90", "gfx942")


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
    """Reduced: each kernel in one configuration; full: all of them, every dtype and target."""
    full = bool(counts(0, 1))
    found = static.rows(
        static.ALL_TARGETS if full else REDUCED, ("bf16", "fp32", "fp16"), one_each=not full,
        cache=cache_folder(),
    )  # fmt: skip
    wrong = {f"{r['kernel']} {r['dtype']} {r['target']} {r['config']}": faults(r) for r in found}
    assert {name: wrongs for name, wrongs in wrong.items() if wrongs} == {}
    for target in {row["target"] for row in found}:
        wanted = kernels() if target in ("sm_90", "sm_100") else kernels() - {"described_kernel"}
        assert {row["kernel"] for row in found if row["target"] == target} == wanted, target


def test_every_function_of_the_table_is_called() -> None:
    called = {call.function for call in CALLS}
    assert called >= {f.name for op in OPS.values() for f in (op.forward, *op.backward)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def compiled(folder: Path, **options: object) -> tuple[list[dict[str, object]], int]:
    """Return the rows of one small kernel, and how many of them were compiled now."""
    made: list[int] = []
    found = static.rows(
        ("sm_80",), ("fp32",), "softmax_backward", 1, lambda done, _: made.append(done),
        cache=folder, **options,
    )  # fmt: skip
    return found, len(made)


def test_rows_are_kept_and_damaged_ones_are_compiled_again(folder: Path) -> None:
    first, made = compiled(folder)
    assert made == len(first) > 0
    assert compiled(folder) == (first, 0)
    files = sorted(folder.rglob("*.json"))
    assert len(files) == len(first)
    files[0].write_text("{")
    assert compiled(folder) == (first, 1)
    assert not list(folder.rglob("*.part"))


def test_what_a_row_is_kept_by(folder: Path) -> None:
    spec = Spec("m", "k", "op", "fp32", "T", {"x": "*fp32"}, {"BLOCK": 64}, (0,), {}, "hash")
    cache = RowCache(folder)
    row = {**ROW, "registers": 7}
    cache.put(f"sm_80\0{spec.key}", row)
    assert cache.get(f"sm_80\0{spec.key}") == row
    others = (
        {"source": "other"}, {"constants": {"BLOCK": 128}}, {"aligned": ()},
        {"options": {"num_warps": 8}}, {"signature": {"x": "*fp16"}},
    )  # fmt: skip
    for change in others:
        assert cache.get(f"sm_80\0{dataclasses.replace(spec, **change).key}") is None
    assert cache.get(f"sm_90\0{spec.key}") is None
    (kept,) = folder.rglob("*.json")
    for damage in ("", "{", "[]", '{"registers": 3}'):
        kept.write_text(damage)
        assert cache.get(f"sm_80\0{spec.key}") is None
    cache.put("failed", {"error": "CompilationError"})
    assert cache.get("failed") is None
    assert RowCache(None).get(f"sm_80\0{spec.key}") is None


ROW = {
    "kernel": "k", "op": "matmul", "dtype": "bf16", "config": "", "target": "sm_90",
    "registers": 64, "spill_bytes": 0, "shared_bytes": 0, "shared_limit": 232_448,
    "matrix_instructions": 8, "wgmma": 8,
    "has_dot": True, "tile_m": 128, "ldst128_share": 1.0, "fp64": 0, "async_copies": 3,
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
    assert faults({**ROW, **change}) == [fault]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tile_m": 16, "wgmma": 0},
        {"dtype": "fp32", "wgmma": 0},
        {"target": "sm_75", "dtype": "fp16", "matrix_instructions": 0, "wgmma": 0},
    ],
)
def test_no_fault_where_there_is_none(change: dict[str, object]) -> None:
    assert faults({**ROW, **change}) == []


def test_the_table_shows_the_worst_of_each_kernel() -> None:
    found = [ROW, {**ROW, "registers": 255, "spill_bytes": 16, "wgmma": 2, "ldst128_share": 0.5}]
    header, line = static.table(found).splitlines()
    assert header.split()[:5] == ["kernel", "target", "rows", "registers", "spilled"]
    assert line.split() == [
        "k", "sm_90", "2", "255", "16", "0", "0%", "8", "2", "0.5", "3", "0", "1",
    ]  # fmt: skip
    assert "error" not in static.table([{**ROW, "error": "CompilationError"}])


def test_an_unknown_target_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        static.main(["--targets", "sm_91"])
    assert "unknown target sm_91" in capsys.readouterr().err
