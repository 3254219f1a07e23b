"""The script a stranger would write runs as it stands, compiled and interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "kernels_on_your_tensors.py"


@pytest.mark.parametrize("backend", ["ptx", "triton"])
def test_it_agrees_with_numpy(backend: str) -> None:
    if backend == "ptx" and not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("on a GPU the script uses it")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ENTRENAR", "TRITON_INTER"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**kept, "ENTRENAR_BACKEND": backend, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest error") == 4
    assert "1 wait of the host" in done.stdout
