"""Times of emulation: what is timed exists, and the record holds all of it."""

from __future__ import annotations

import json

import pytest

from entrenar.optable import OPS
from perf import emulation

RECORD = emulation.ROOT / "perf" / "results" / "emulation.json"


def test_ten_kernels_are_timed_on_samples_of_the_table() -> None:
    assert len(emulation.CASES) == len({op for op, _, _ in emulation.CASES}) == 10
    for op, sample, dtype in emulation.CASES:
        assert sample in {s.id for s in OPS[op].samples}
        assert dtype in OPS[op].dtypes


def test_the_record_holds_every_case() -> None:
    recorded = json.loads(RECORD.read_text())
    assert [(r["op"], r["sample"], r["dtype"]) for r in recorded] == list(emulation.CASES)
    assert all(r["emulated_s"] > 0 and r["interpreted_s"] > 0 for r in recorded)


def test_a_case_is_timed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "numpy")
    assert len(emulation._seconds("swiglu", "T7_F123", "float32", 3)) == 3
