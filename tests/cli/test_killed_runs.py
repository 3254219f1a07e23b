"""Runs killed at any moment resume to the bits of a run that was left alone.

A process that has imported everything and computed nothing forks a child for each part of a run and
kills it with SIGKILL; so a part costs no start of an interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from entrenar.finetune.metrics import read_metrics

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
SETTINGS = [
    f"--max-steps={STEPS}", "--packing", "--batch-size=1", "--grad-accum-steps=3", "--lora-dropout=0.2",
    "--lora-rank=4", "--learning-rate=0.01", "--max-seq-len=48", "--eval-fraction=0.2", "--device=cpu",
    "--save-every=5", "--eval-every=4", "--answers=0", "--log-every=100",
]  # fmt: skip
# Runs the command in a forked child; kills it where told: after so many seconds, or as it writes the
# row of a step. Prints how each part ended, and how long it took.
DRIVER = """
import json, os, random, signal, sys, time
import numpy, torch, safetensors.numpy, tokenizers, jinja2  # imported once, for all children
import entrenar.cli.train, entrenar.cli.session, entrenar.finetune.training_run, matplotlib.figure
from entrenar.cli import main
from entrenar.finetune.training_run import TrainingRun

def part(arguments, seconds=None, at_step=None):
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if at_step is not None:
            write = TrainingRun._write
            def dying(self, **row):
                write(self, **row)
                if row["step"] == at_step and "loss" in row:
                    os.kill(os.getpid(), signal.SIGKILL)
            TrainingRun._write = dying
        os._exit(main(arguments))
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if seconds is not None and time.monotonic() - started > seconds:
            os.kill(child, signal.SIGKILL)
            seconds = None
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(status), time.monotonic() - started

for line in sys.stdin:
    print(json.dumps(part(**json.loads(line))), flush=True)
"""


class Driver:
    """The process that forks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def part(self, arguments: list[str], **when: Any) -> tuple[int, float]:
        """Run one part; return its exit code and its seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, **when}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.process.communicate()[1]
        code, seconds = json.loads(answer)
        return code, seconds

    def close(self) -> str:
        """End it; return what all children wrote to standard error."""
        return self.process.communicate()[1]


@pytest.fixture
def command(tiny_model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns the arguments of a run into a folder."""
    data = tmp_path / "samples.jsonl"
    rows = [
        {
            "instruction": "say " + "ab"[: 1 + n % 2] * (1 + n % 5),
            "response": "xyz"[n % 3] * (1 + n % 7),
        }
        for n in range(17)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--model", str(tiny_model), "--data", str(data)]
    return lambda output, *more: ["train", *paths, "--output", str(output), *SETTINGS, *more]


def left_behind(run: Path) -> dict[str, Any]:
    """Return all that a run leaves but times and memory: losses, adapter, moments."""
    moving = ("tokens_per_s", "step_time_s", "peak_memory_bytes")
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    arrays = load_file(last / "state.safetensors")
    assert {"params", "m", "v", "step"} == set(arrays)
    return {
        "metrics": [
            {k: v for k, v in row.items() if k not in moving}
            for row in read_metrics(run / "metrics.jsonl")
        ],
        "adapter": (run / "adapter" / "adapter_model.safetensors").read_bytes(),
        "arena": {name: array.tobytes() for name, array in arrays.items()},
        "checkpoints": sorted(p.name for p in (run / "checkpoints").iterdir() if p.name[0] != "."),
    }


def test_killed_after_step_17_of_40(command: Callable[..., list[str]], tmp_path: Path) -> None:
    driver = Driver()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert driver.part(command(whole))[0] == 0
    assert driver.part(command(parts), at_step=17)[0] == -9
    assert not (parts / "adapter").exists()
    assert read_metrics(parts / "metrics.jsonl")[-1]["step"] == 17
    assert driver.part(["train", "--output", str(parts), "--resume"])[0] == 0
    assert driver.close() == ""
    assert left_behind(parts) == left_behind(whole)
    assert len(read_metrics(whole / "metrics.jsonl")) == STEPS + STEPS // 4 + 1


def test_killed_at_random_moments(
    command: Callable[..., list[str]], tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    """Each is killed up to three times, from before its first file to its last, and resumed."""
    import random

    rng = random.Random(2026)
    driver = Driver()
    whole = tmp_path / "whole"
    code, seconds = driver.part(command(whole))
    assert code == 0
    wanted = left_behind(whole)
    kills = 0
    runs = counts(3, 30)
    for number in range(runs):
        run = tmp_path / f"run-{number}"
        for _ in range(3):
            code, _ = driver.part(command(run, "--resume"), seconds=rng.uniform(0, 1.1 * seconds))
            if (run / "adapter").exists():
                break
            assert code == -9
            kills += 1
        if not (run / "adapter").exists():
            assert driver.part(command(run, "--resume"))[0] == 0
        assert left_behind(run) == wanted, run
    errors = [line for line in driver.close().splitlines() if "resource_tracker" not in line]
    assert errors == []
    assert (
        kills >= runs // 2
    )  # a tenth of the moments lie past the end, more where the machine is quick
