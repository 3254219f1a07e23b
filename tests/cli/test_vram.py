"""`entrenar vram`, and what a training run reserves and gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar.cli import main
from entrenar.cli import vram as command
from entrenar.errors import VramError
from entrenar.finetune import vram as reserving
from entrenar.gpu import Card, VramLedger

CARD = Card("GPU-aaaa", "NVIDIA H200", 64 << 30, 1 << 30)
QUICK = ["--max-steps=2", "--lora-rank=2", "--device=cpu", "--answers=0", "--max-seq-len=64"]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of its own, and one card behind the CPU."""
    found = tmp_path / "ledger.json"
    monkeypatch.setenv("ENTRENAR_VRAM_LEDGER", str(found))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(command, "read_cards", lambda: (CARD,))
    monkeypatch.setattr(reserving, "card_in_use", lambda device: CARD)
    return found


def train(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    paths = ["--model", str(model), "--data", str(data), "--output", str(output)]
    return ["train", *paths, *QUICK, *more]


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = VramLedger(CARD)
    held = ledger.reserve(10 << 30, "train first")
    ledger.update(held, 9 << 30)
    assert main(["vram"]) == 0
    shown = capsys.readouterr().out
    assert "cuda:0  NVIDIA H200  GPU-aaaa" in shown
    assert "64.00 GiB, 1.00 GiB in use" in shown
    assert "54.40 GiB, 9.00 GiB reserved, 45.40 GiB left" in shown
    assert (
        f"pid {held.owner.pid}  train first  for 0:00, measured after asking for 10.00 GiB" in shown
    )
    assert main(["vram", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    assert card["reserved_bytes"] == 9 << 30
    assert card["reservations"][0]["task"] == "train first"


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "read_cards", tuple)
    assert main(["vram"]) == 0
    assert "no GPU is listed" in capsys.readouterr().out
    monkeypatch.setattr(command, "read_cards", lambda: (Card("GPU-b"),))
    assert main(["vram"]) == 0
    assert "could not be read" in capsys.readouterr().out


def test_a_probe_that_fails_is_the_environments_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise VramError("the GPU's memory could not be read", "see that nvidia-smi runs")

    monkeypatch.setattr(command, "read_cards", fail)
    assert main(["vram"]) == 3
    assert "could not be read" in capsys.readouterr().err


def test_a_run_reserves_before_it_loads_and_gives_back(
    tiny_model: Path, pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrenar.finetune.instruct_pipeline import InstructPipeline

    seen: list[Any] = []
    load, step = InstructPipeline.from_pretrained, InstructPipeline.train_examples

    def loading(*arguments: Any, **options: Any) -> Any:
        seen.append(VramLedger(CARD).reservations())
        return load(*arguments, **options)

    def stepping(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(VramLedger(CARD).reservations())
        return step(self, *arguments, **options)

    monkeypatch.setattr(InstructPipeline, "from_pretrained", loading)
    monkeypatch.setattr(InstructPipeline, "train_examples", stepping)
    assert main(train(tiny_model, pairs_file, tmp_path / "run")) == 0
    (before,), (first,), (second,) = seen
    assert before == first
    assert before.task == "entrenar train run"
    assert before.bytes > 0
    assert before.actual_bytes is None
    assert second.actual_bytes > 0  # measured by the first step
    assert VramLedger(CARD).reservations() == ()


def test_a_part_of_a_card_has_the_size_that_torch_sees(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrenar import InstructConfig

    monkeypatch.setattr(reserving, "card_in_use", lambda device: Card("MIG-1234"))
    monkeypatch.setattr(reserving.runtime, "total_memory_bytes", lambda device: 1000)
    guard = reserving.guard_for(InstructConfig(), tiny_model, "cpu", task="run")
    assert guard is not None
    assert guard.ledger.budget_bytes == 850


def test_a_run_that_does_not_fit_says_who_holds_the_card(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    ledger = VramLedger(CARD)
    ledger.reserve(ledger.budget_bytes - 1, "train another")
    for more in ((), ("--vram-wait", "1")):
        assert main(train(tiny_model, pairs_file, tmp_path / "run", *more)) == 3
        captured = capsys.readouterr()
        assert "train another (pid" in captured.err
        assert captured.err.count("\n") == 1
        assert ("waiting" in captured.out) is bool(more)
    assert not (tmp_path / "run" / "adapter").exists()
    assert main(train(tiny_model, pairs_file, tmp_path / "run", "--vram-wait", "-1")) == 2
    assert "vram_wait is -1" in capsys.readouterr().err
