"""No op moves more bytes than its row, or its named exception, allows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_traffic_is_within_its_bounds(
    tmp_path: Path, pytestconfig: pytest.Config, counts: Callable[[int, int], int]
) -> None:
    """In a process of its own: a counting driver would slow every later test of this one."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    out = tmp_path / "traffic.json"
    command = [sys.executable, "-m", "perf", "traffic", "--json", str(out)]
    command += [
        "--tokens",
        str(counts(64, 512)),
        "--dtypes",
        "fp32,bf16" if counts(0, 1) else "bf16",
        "--interpreted-tokens",
        str(counts(4, 16)),
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(out.read_text())
    assert len(rows) > 25
    for row in rows:
        assert row["loaded_bytes"] + row["stored_bytes"] > 0, row
        assert row["why"]
        both = row["interpreted"]
        assert both["programs"] > 0
        # the command fails beyond two per cent; with triton 3.9 they are equal
        for way in ("loaded", "stored"):
            assert both[f"program_{way}_bytes"] == pytest.approx(
                both[f"interpreted_{way}_bytes"], rel=0.02
            )
        # less than the floor is right only where a mask leaves inputs unread
        assert row["ratio"] > 0.9 or "causal" in row["op"] + row["shape"], row


def test_calls_cover_every_function_and_every_row() -> None:
    """Whatever the table lists is compiled offline, counted and timed: perf goes through these calls."""
    from entrenar.optable import FUNCTIONS, OPS
    from perf.calls import CALLS

    assert set(FUNCTIONS) == {call.function for call in CALLS}
    assert set(OPS) == {call.op for call in CALLS}
