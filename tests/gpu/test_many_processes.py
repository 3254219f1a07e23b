"""Processes that share a ledger: never over the budget, no live reservation lost, none left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from entrenar.gpu import Card, VramLedger

LIMIT = 1024
CARD = Card("GPU-aaaa", "", -(-LIMIT * 100 // 85))
FRAME = f"""
import os, random, sys, time
from pathlib import Path
from entrenar.errors import VramFullError
from entrenar.gpu import Card, VramGuard, VramLedger
ledger = VramLedger(Card("GPU-aaaa", "", {CARD.total_bytes}), Path(sys.argv[1]), lock_timeout_s=120)
assert ledger.budget_bytes == {LIMIT}
rng = random.Random(int(sys.argv[2]))
"""


def start(body: str, path: Path, seed: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FRAME + body, str(path), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    found = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return found


def test_two_of_600_never_hold_1024_together(
    tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    """https://github.com/Project-HAMi/HAMi-core/issues/273"""
    body = f"""
held = 0
for _ in range({counts(10, 200)}):
    try:
        mine = ledger.reserve(600, "round")
    except VramFullError:
        pass
    else:
        held += 1
        for _ in range(3):
            assert sum(r.counted_bytes for r in ledger.reservations()) == 600
        ledger.release(mine)
print(held)
"""
    path = tmp_path / "ledger.json"
    held = [int(text) for text in finish([start(body, path, n) for n in range(8)])]
    assert sum(held) > 0
    assert json.loads(path.read_text())["reservations"] == []


def test_no_update_is_lost_to_a_rename(tmp_path: Path, counts: Callable[[int, int], int]) -> None:
    """https://github.com/CortexLM/cortex-code/issues/174: the lock lay on the file that was replaced."""
    rounds = counts(50, 1000)
    body = f"""
mine = ledger.reserve(1, "count")
for n in range({rounds}):
    mine = ledger.update(mine, mine.counted_bytes + (n > 0))
print(mine.counted_bytes, flush=True)
sys.stdin.read()
"""
    path = tmp_path / "ledger.json"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FRAME + body, str(path), "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == rounds
    kept = [r.counted_bytes for r in VramLedger(CARD, path).reservations()]
    assert kept == [rounds, rounds]
    for process in both:
        process.communicate("")


@pytest.mark.parametrize("end", ["exit", "kill", "kill inside the lock"])
def test_a_process_that_dies_leaves_nothing_to_clean_up(tmp_path: Path, end: str) -> None:
    """https://github.com/ChrisCummins/clgen/issues/116"""
    path = tmp_path / "ledger.json"
    body = """
ledger.reserve(1000, "child")
if sys.argv[2] == "1":
    os._exit(0)
if sys.argv[2] == "2":
    inside = ledger._locked("inside")
    inside.__enter__()
print("ready", flush=True)
time.sleep(600)
"""
    child = start(body, path, {"exit": 1, "kill": 0, "kill inside the lock": 2}[end])
    assert child.stdout is not None
    if end != "exit":
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=60)
    child.stdout.close()
    ledger = VramLedger(CARD, path, lock_timeout_s=10)
    ledger.reserve(1000, "parent")
    assert [r.task for r in ledger.reservations()] == ["parent"]


WILD = """
for _ in range(int(rng.uniform(2, 7))):
    ask = rng.randint(1, 700)
    try:
        mine = ledger.reserve(ask, f"wild {sys.argv[2]}")
    except VramFullError:
        time.sleep(rng.uniform(0, 0.02))
        continue
    assert mine.id in {r.id for r in ledger.reservations()}, "a live reservation was lost"
    time.sleep(rng.uniform(0, 0.03))
    act = rng.random()
    if act < 0.1:
        os._exit(0)
    if act < 0.2:
        os.kill(os.getpid(), 9)
    if act < 0.5:
        mine = ledger.update(mine, rng.randint(1, ask))
    time.sleep(rng.uniform(0, 0.03))
    assert mine.id in {r.id for r in ledger.reservations()}, "a live reservation was lost"
    if act < 0.9:
        ledger.release(mine)
"""


def test_many_that_crash_and_are_killed(tmp_path: Path, counts: Callable[[int, int], int]) -> None:
    """What is on disk at any moment is within the budget, and whoever lives is in it."""
    path = tmp_path / "ledger.json"
    running = [start(WILD, path, seed) for seed in range(counts(12, 50))]
    rng = random.Random(7)
    killed: set[int] = set()
    seen = 0
    while any(process.poll() is None for process in running):
        if path.exists():
            kept = json.loads(path.read_text())["reservations"]
            total = sum(
                e["bytes"] if e["actual_bytes"] is None else e["actual_bytes"] for e in kept
            )
            assert total <= LIMIT, kept
            seen += bool(kept)
        if rng.random() < 0.02:
            victim = rng.choice(running)
            if victim.poll() is None:
                victim.kill()
                killed.add(victim.pid)
        time.sleep(0.005)
    for process in running:
        assert process.stdout is not None
        process.stdout.close()
        fates = (0, -signal.SIGKILL)
        assert process.returncode in fates, "a process found the ledger wrong"
    assert seen > 10
    ledger = VramLedger(CARD, path)
    assert ledger.reservations() == ()
    ledger.reserve(LIMIT, "all of it")
