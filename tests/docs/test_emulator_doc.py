"""The document on the emulator: its snippets run as they stand, and its numbers are those on record."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "emulator.md"
WORDS_A_PAGE = 500


def test_every_snippet_runs(tmp_path: Path) -> None:
    """As one program, in a process of its own: the emulator becomes Triton's driver there."""
    pytest.importorskip("triton")
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 3
    program = tmp_path / "snippets.py"
    program.write_text("\n".join(blocks))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_is_under_three_pages_of_prose() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.M | re.S)
    assert len(prose.split()) < 3 * WORDS_A_PAGE


def test_mutation_figures_are_those_on_record() -> None:
    text = PAGE.read_text()
    runs = json.loads((ROOT / "perf" / "results" / "mutation.json").read_text())
    assert all(run["changed_and_not_noticed"] == 0 for run in runs)
    ampere = next(r["kinds"] for r in runs if r["target"] == "sm_80" and "barrier" in r["kinds"])
    barrier, wait = ampere["barrier"], ampere["wait"]
    assert f"Of {barrier['mutants']} barriers" in text
    assert (
        f"{barrier['noticed']} deletions were noticed, of {wait['mutants']} waits {wait['noticed']}"
        in text
    )
    faults = next(r["kinds"] for r in runs if r["target"] == "sm_80" and "mask" in r["kinds"])
    reached = {k: faults[k]["mutants"] - faults[k]["idle"] for k in ("compare", "mask")}
    shares = [f"{faults[k]['noticed']} of {reached[k]}" for k in ("compare", "mask")]
    assert f"{shares[0]} and {shares[1]} are noticed" in text
    hopper = [run["kinds"] for run in runs if run["target"] == "sm_90"]
    totals = {
        (kind, field): sum(kinds[kind][field] for kinds in hopper)
        for kind in ("barrier", "wait")
        for field in ("mutants", "noticed")
    }
    assert f"{totals['barrier', 'noticed']} of {totals['barrier', 'mutants']} barriers" in text
    assert f"{totals['wait', 'noticed']} of {totals['wait', 'mutants']} waits" in text


def test_the_table_of_times_is_the_one_on_record() -> None:
    text = PAGE.read_text()
    for row in json.loads((ROOT / "perf" / "results" / "emulation.json").read_text()):
        assert (
            f"| {row['op']} | {row['sample']}, {row['dtype']} | {1e3 * row['emulated_s']:.1f} ms"
            in text
        )


def test_the_table_of_counters_is_the_one_on_record() -> None:
    lines = (ROOT / "docs" / "counters.md").read_text().splitlines()
    rows = json.loads((ROOT / "perf" / "results" / "counters.json").read_text())
    assert {"nf4_dequantize", "rms_norm_backward", "gemm_forward", "adamw_step"} <= {
        r["op"] for r in rows
    }
    for row in rows:
        for name, side in ((row["op"], "ours"), (f"· {row['peer']}", "theirs")):
            if side in row:
                instructions = row[side]["per_element"]["instructions"]
                start = f"| {name} | {row['dtype']} | {instructions:.1f} |"
                assert any(line.startswith(start) for line in lines), start
