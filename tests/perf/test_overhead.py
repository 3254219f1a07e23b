"""A launcher's own cost in Python, counted in calls, which no noise of the machine changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from perf import overhead

pytestmark = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("cc")), reason="the emulator needs a C compiler"
)
# Triton's own launch of a kernel of thirty parameters makes as many.
MOST_CALLS = 240


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[overhead.Row]:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    found = [
        row
        for op in ("rms_norm_forward", "add_", "adamw")
        for row in overhead.measure(op, repeats=3)
    ]
    from entrenar.emulator import install_driver

    install_driver("sm_80")  # one that runs kernels
    return found


def test_a_launch_takes_few_calls(rows: list[overhead.Row]) -> None:
    assert {row["op"] for row in rows} == {"rms_norm_forward", "add_", "adamw_step"}
    for row in rows:
        assert row["launches"] >= 1
        assert 0 < row["calls_per_launch"] <= MOST_CALLS, row
        assert row["launcher_us"] > 0 < row["bare_us"]


def test_the_kept_result_is_within_the_bound() -> None:
    """Every launcher, as it was last measured."""
    path = Path(overhead.__file__).parent / "results" / "overhead.json"
    kept = json.loads(path.read_text())
    assert {"machine", "python", "torch", "triton", "date"} <= set(kept["environment"])
    assert len(kept["rows"]) > 80
    for row in kept["rows"]:
        assert row["calls_per_launch"] <= MOST_CALLS, row
