"""The op suite in Triton's interpreter, which runs as a process beside this one."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest


def test_the_suite_passes_interpreted(interpreted: Any) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if interpreted is None:
        pytest.skip("a backend was chosen with --backend")
    code, output = interpreted.wait()
    assert code == 0, output[-8000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) > 100, output[-2000:]
