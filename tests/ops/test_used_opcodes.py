"""Runs after the op suite: what was emulated in this process has no opcode that no test holds to NumPy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECORDED = Path(__file__).resolve().parents[1] / "data" / "ptx_arithmetic.txt"
# what moves data, orders it or branches; tests/emulator/test_checks.py and test_features.py hold these
MOVING = (
    "ld.", "st.", "bar.", "barrier.", "bra", "ret", "exit", "cp.", "ldmatrix", "stmatrix", "atom.",
    "red.", "mbarrier", "fence", "membar", "wgmma.fence", "wgmma.commit", "wgmma.wait", "elect",
    "griddepcontrol", "cvta", "activemask", "trap",
)  # fmt: skip


def test_every_opcode_that_was_emulated_is_tested(request: pytest.FixtureRequest) -> None:
    if "ptx" not in (request.config.getoption("--backend") or ()):
        pytest.skip("runs where kernels are emulated")
    pytest.importorskip("triton")
    from entrenar.emulator.driver import programs
    from entrenar.emulator.syntax import opcode_of

    if len(programs) < 50:
        pytest.skip("a part of the op suite was chosen")
    recorded = set(RECORDED.read_text().split("\n"))
    unknown: dict[str, str] = {}
    for program in programs.values():
        for text in program.text:
            opcode = opcode_of(text).text
            opcode = re.sub(r"m64n\d+k16", "m64nNk16", opcode)
            if opcode not in recorded and not opcode.startswith(MOVING):
                unknown.setdefault(opcode, f"{program.name}: {text[:100]}")
    assert not unknown, f"test in tests/emulator/test_arithmetic.py, and list: {sorted(unknown)}"
