"""The op suite interpreted and emulated, and the kernels' own tests, in processes beside this one."""

from __future__ import annotations

import importlib.util
import re
import shutil
from typing import Any

import pytest


@pytest.mark.parametrize("backend", ["interpret", "ptx", "kernels"])
def test_it_passes(backend: str, children: Any) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if backend != "interpret" and not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    if children is None:
        how = "run tests/kernels" if backend == "kernels" else f"tests/ops with --backend={backend}"
        pytest.skip(f"a part of the tests was chosen: {how}")
    code, output = children.wait(backend)
    assert code == 0, output[-8000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) > 100, output[-2000:]
