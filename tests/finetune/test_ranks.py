"""Several ranks on the CPU: two are one with twice the batch, one writes, and none is left waiting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from entrenar import runtime
from entrenar.autograd import Stream
from entrenar.cli import main
from entrenar.errors import ConfigError
from entrenar.finetune.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], world: int, *, per_rank: dict[int, list[str]] | None = None) -> list:
    """Start the processes of all ranks with the variables that torchrun sets."""
    port, started = free_port(), []
    for rank in range(world):
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ENTRENAR_BACKEND": "",
        }  # fmt: skip
        arguments = [*command, *(per_rank or {}).get(rank, [])]
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return started


def finish(processes: list, seconds: float = 120) -> list[tuple[int, str, str]]:
    """Return code, output and errors of each; none may outlive the time."""
    try:
        done = [(p, *p.communicate(timeout=seconds)) for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, out, err in done]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"{'abc' * (i % 3)} {i}?", "completion": f"answer {i * i}"} for i in range(13)
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_are_one_with_twice_the_batch(
    tmp_path: Path, data: Path, tiny_model: Path
) -> None:
    """Adapters, losses and norms agree to 1e-6, dropout masks included; 13 samples do not divide evenly."""

    def command(name: str, accumulate: int) -> list[str]:
        return [
            "train", "--model", str(tiny_model), "--data", str(data), "--output",
            str(tmp_path / name), "--grad-accum-steps", str(accumulate), "--max-steps", "5",
            "--eval-fraction", "0.3", "--learning-rate", "1e-2", "--lora-dropout", "0.2",
            "--lora-rank", "4", "--save-every", "3", "--device", "cpu",
        ]  # fmt: skip

    both = start(["-m", "entrenar", *command("two", 1)], 2)
    assert main(command("one", 2)) == 0
    lead, second = finish(both)
    assert lead[0] == second[0] == 0, lead[2] + second[2]
    assert "on 2 ranks" in lead[1]
    assert second[1] == ""
    mine, theirs = (
        load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("one", "two")
    )
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_allclose(theirs[name], array, atol=1e-6, rtol=0, err_msg=name)
    rows, other = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert len(rows) == len(other) == 7
    for row, twin in zip(rows, other, strict=True):
        assert row.keys() == twin.keys()
        for key in ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens"):
            if key in row:
                assert twin[key] == pytest.approx(row[key], abs=1e-6, rel=1e-6), key
    checkpoint = json.loads((tmp_path / "two/checkpoints/step-000003/state.json").read_text())
    assert checkpoint["ranks"] == 2


DIES = """
import sys, torch
from entrenar.autograd import Stream
from entrenar.cli import main
from entrenar.errors import EntrenarError
from entrenar.finetune.ranks import Ranks
ranks, stream, flat = Ranks.from_environment(), Stream("cpu"), torch.ones(8)
try:
    with ranks.joined("cpu", timeout_s=20):
        for step in range(100):
            if step == 3 and ranks.rank == 1:
                sys.exit(7)
            ranks.add(flat, stream)
            assert ranks.sums([1.0, ranks.rank])[0] == ranks.world
except EntrenarError as error:
    sys.exit(str(error))
"""


def test_a_rank_that_dies_ends_the_others_with_the_reason() -> None:
    lead, dead = finish(start(["-c", DIES], 2), seconds=60)
    assert dead[0] == 7
    assert lead[0] == 1
    assert "rank 0 of 2 cannot go on: a rank has ended or does not answer" in lead[2]
    assert "--resume" in lead[2]
    assert "Traceback" not in lead[2]


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(0, 1, 0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks = Ranks.from_environment()
    assert ranks == Ranks(3, 8, 1)
    assert not ranks.leads
    for bad in ("8", "-1", "three"):
        monkeypatch.setenv("RANK", bad)
        with pytest.raises(ConfigError, match="the environment names no rank: RANK="):
            Ranks.from_environment()


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: True)
    assert Ranks(5, 8, 1).device("auto") == Ranks(5, 8, 1).device("cuda") == "cuda:1"
    assert Ranks(5, 8, 1).device("cpu") == "cpu"
    assert Ranks().device("auto") == "auto"
    monkeypatch.setattr(runtime, "cuda_available", lambda: False)
    assert Ranks(5, 8, 1).device("auto") == "auto"


def test_one_rank_needs_no_connection() -> None:
    alone, flat = Ranks(), torch.ones(3)
    with alone.joined("cpu"):
        alone.add(flat, Stream("cpu"))
        assert alone.sums([2.0, 3.0]) == [2.0, 3.0]
    assert flat.tolist() == [1.0] * 3
    assert not torch.distributed.is_initialized()
