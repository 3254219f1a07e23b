"""The time model: known answers, and the order it gives to variants whose order is known."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entrenar.errors import ConfigError, KernelError
from perf.devices import DEVICES, Device
from perf.model import beside, bounds, launch_model, occupancy

ONE = Device(
    "one", "sm_80", 1, 1e9, 1e9, 32, 32, {"bf16": 1e12}, 64 << 10, 64, 32,
    integer_lanes=16, special_lanes=4, shuffle_lanes=32, conversion_lanes=16,
)  # fmt: skip
NOTHING = {"sectors": 0}


def launch(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "k", "warps": 4, "shared_bytes": 0, "blocks": 1, "by_class": {}, "matrix": {},
        "loads": NOTHING, "stores": NOTHING, "atomics": NOTHING, "shared": {"wavefronts": 0},
        "distinct_loaded_bytes": 0, "distinct_stored_bytes": 0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "unit", "seconds"),
    [
        ({"by_class": {"integer": 1000}}, "integer", 1000 * 32 / 16 / 1e9),
        ({"by_class": {"fp32": 1000, "fp16/bf16": 1000}}, "float", 2000 / 1e9),
        ({"by_class": {"special function": 100}}, "special function", 100 * 32 / 4 / 1e9),
        ({"by_class": {"conversion": 100}}, "conversion", 100 * 32 / 16 / 1e9),
        ({"by_class": {"shuffle": 100}}, "shuffle", 100 / 1e9),
        ({"by_class": {"control": 4000, "other": 9e9}}, "issue slots", 1000 / 1e9),
        ({"shared": {"wavefronts": 70}}, "shared memory", 70 / 1e9),
        ({"loads": {"sectors": 3}, "stores": {"sectors": 5}}, "l2", 8 / 1e9),
        ({"distinct_loaded_bytes": 60, "distinct_stored_bytes": 4}, "dram", 64 / 1e9),
        ({"matrix": {"mma m16n8k16 bf16": {"flops": 4096}}}, "matrix", 4096 / 1e12),
    ],
)
def test_each_unit_takes_its_work_over_its_rate(
    changes: dict[str, Any], unit: str, seconds: float
) -> None:
    times = bounds(ONE, launch(**changes))
    assert times[unit] == pytest.approx(seconds)
    found = launch_model(ONE, launch(**changes), 32)
    assert found["tightest"] == unit
    assert found["model_us"] == pytest.approx(1e6 * seconds, abs=5e-5)


def test_the_busiest_multiprocessor_decides() -> None:
    """Five equal blocks on four multiprocessors take as long as eight; memory does not care."""
    four = dataclasses.replace(ONE, multiprocessors=4)
    five = bounds(four, launch(blocks=5, by_class={"fp32": 500}, distinct_loaded_bytes=500))
    eight = bounds(four, launch(blocks=8, by_class={"fp32": 800}, distinct_loaded_bytes=500))
    assert five["float"] == pytest.approx(eight["float"]) == pytest.approx(200 / 1e9)
    assert five["dram"] == eight["dram"]


def test_more_work_never_takes_less() -> None:
    work = {"integer": 10, "fp32": 20, "special function": 5, "shuffle": 3, "control": 9}
    before = bounds(ONE, launch(by_class=work))
    for name in work:
        after = bounds(ONE, launch(by_class={**work, name: work[name] + 1}))
        assert all(after[unit] >= before[unit] for unit in before)
        assert after["issue slots"] > before["issue slots"]


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "blocks", "limit"),
    [
        (4, 32, 0, 16, "warps"),  # 64 warps held, 4 a block
        (4, 64, 0, 8, "registers"),  # 65536 / (64 * 32) = 32 warps
        (4, 255, 0, 2, "registers"),  # 256 a thread: 8 warps
        (1, 16, 0, 32, "blocks"),
        (8, 32, 48 << 10, 3, "shared memory"),  # 164 KiB over 49
    ],
)
def test_occupancy_of_an_a100(
    warps: int, registers: int, shared: int, blocks: int, limit: str
) -> None:
    found = occupancy(DEVICES["a100"], warps, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.warps == pytest.approx(blocks * warps / 64, abs=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="shared memory"):
        occupancy(DEVICES["rtx4090"], 4, 32, 120 << 10)
    with pytest.raises(KernelError, match="no published matrix rate for f64"):
        bounds(DEVICES["rtx4090"], launch(matrix={"mma m8n8k4 f64": {"flops": 1}}))


def test_measured_times_stand_beside_with_the_error(tmp_path: Path) -> None:
    row = {"op": "add", "dtype": "bf16", "shape": "TxH, T=1", "model_us": 8.0}
    other = {**row, "op": "scale"}
    file = tmp_path / "results.jsonl"
    file.write_text(
        json.dumps({"op": "add", "dtype": "bf16", "shape": "TxH, T=1", "median_us": 10.0})
    )
    found, without = beside([row, other], file)
    assert (found["measured_us"], found["model_error"]) == (10.0, -0.2)
    assert (without["measured_us"], without["model_error"]) == (None, None)
    file.write_text("no json")
    with pytest.raises(ConfigError, match="--measured"):
        beside([row], file)


def test_it_ranks_decoding_by_table_over_a_tree_of_selects(pytestconfig: pytest.Config) -> None:
    """Sixteen levels by selects take about four times the instructions of a look-up, and as many bytes."""
    pytest.importorskip("triton")
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "decode_variants.py")],
        cwd=pytestconfig.rootpath,
        env={**environment, "PYTHONPATH": str(pytestconfig.rootpath)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table, tree = json.loads(done.stdout)
    assert tree["model_us_by_unit"]["issue slots"] > 2 * table["model_us_by_unit"]["issue slots"]
    assert tree["model_us_by_unit"]["dram"] == pytest.approx(
        table["model_us_by_unit"]["dram"], rel=0.01
    )
    assert tree["tightest"] in ("issue slots", "integer", "float")
    assert tree["model_us"] > table["model_us"]
