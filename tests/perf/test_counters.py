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
    command += ["--tokens", "64"]
    command += ["--dtypes", "bf16,fp32"] if counts(0, 1) else ["--op", "attention"]
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


def test_a_tally_adds_launches_up_and_divides_by_elements() -> None:
    """Known answers: y = 2x over 4096 float32 in two launches of 1024 threads each."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    source = """
import json, sys
import numpy as np
from entrenar import emulator
from perf.tally import tally
ptx = '''.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1)
.reqntid 128
{
.reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<4>;
ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 128, %r0;
mul.wide.s32 %rd2, %r2, 4; add.s64 %rd3, %rd0, %rd2; add.s64 %rd4, %rd1, %rd2;
ld.global.f32 %f0, [%rd3]; add.f32 %f1, %f0, %f0; st.global.f32 [%rd4], %f1;
ret;
}'''
class Metadata: name, num_warps, shared = "k", 4, 0
x, y = np.ones(2048, np.float32), np.zeros(2048, np.float32)
history = []
for _ in range(2):
    done = emulator.execute(emulator.Program(ptx, "k"), (16,), 128, 0, [x, y], ["*fp32"] * 2,
                            emulator.storage, counters=True)
    done.metadata = Metadata
    history.append(done)
assert (y == 2).all()
json.dump(tally(history, 4096), sys.stdout)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    each = row["per_element"]
    assert row["launches"] == 2
    assert row["blocks"] == 32
    assert (each["loaded_bytes"], each["stored_bytes"]) == (4, 4)
    assert (each["loaded_sector_bytes"], each["stored_sector_bytes"]) == (4, 4)
    assert each["by_class"]["fp32"] == 1
    assert each["by_class"]["global memory"] == 2
    assert each["by_class"]["integer"] == 4
    assert (row["load_efficiency"], row["store_efficiency"]) == (1.0, 1.0)
    assert row["bank_conflicts"] is None
    assert [kernel["kernel"] for kernel in row["kernels"]] == ["k", "k"]
