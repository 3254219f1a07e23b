"""Compiled kernels race nowhere and read nothing that was not written."""

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


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_race_nowhere(
    target: str, tmp_path: Path, pytestconfig: pytest.Config, counts: Callable[[int, int], int]
) -> None:
    """Reduced: attention, whose loops copy asynchronously and, on sm_90, multiply with wgmma."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    out = tmp_path / "counters.json"
    command = [sys.executable, "-m", "perf", "counters", "--target", target, "--json", str(out)]
    command += ["--dtypes", "bf16,fp32"] if counts(0, 1) else ["--only", "attention"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
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
    assert {"attention_forward", "attention_backward"} <= {row["op"] for row in rows}
    for row in rows:
        assert row["reports"] == []
        assert row["by_class"].get("local memory", 0) == 0, row
