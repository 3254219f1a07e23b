"""``perf step``: what it measures on a small model, and how runs beside peers are taken and summed up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from entrenar.errors import DataError
from perf import __main__ as perf
from perf import step, step_beside


def test_the_floor_is_the_time_of_its_products() -> None:
    small, large = step.floor_seconds([(8, 8, 8)]), step.floor_seconds([(256, 256, 256)] * 3)
    assert 0 < small < large


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--steps", "1"]])
def test_refuses_what_it_cannot_time(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert perf.main(["step", "--model", "absent", *arguments]) != 0
    assert "wanted at least 2" in capsys.readouterr().err


def test_variants_take_turns_and_ratios_are_of_medians(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ours is twice as fast as the dense peer and takes a fifth of its memory, whatever one run says."""
    model = tmp_path / "model"
    model.mkdir()
    commands: list[list[str]] = []

    def output(command: Sequence[str]) -> str:
        commands.append(list(command))
        noise = 50 if len(commands) in (1, 5) else 1  # one run of ours, one of theirs
        speed, memory = (20.0, 1e9) if "perf" in command else (10.0, 5e9)
        row = {"tokens_per_s": speed * noise, "peak_rss_bytes": memory, "cpu_s": 60 / speed}
        return "a warning\n" + json.dumps(row)

    monkeypatch.setattr(step_beside, "_output", output)
    monkeypatch.setattr(step_beside, "make_environment", lambda folder: folder / "bin" / "python")
    log = tmp_path / "log.jsonl"
    rows = step_beside.beside(model, tmp_path / "env", ["--tokens", "8"], 3, log)
    assert ["perf" in command for command in commands] == [True, False, False] * 3
    assert [command[-1] for command in commands[:3]] == ["8", "--dense", "8"]
    assert all(str(model) in command for command in commands)
    found = step_beside.summary(rows)
    assert [row["who"] for row in found] == [name for name, _, _ in step_beside.VARIANTS]
    assert [row["speed_ratio"] for row in found] == [1, 2, 2]
    assert [row["memory_ratio"] for row in found] == [1, 0.2, 0.2]
    line = "| transformers + peft, dense | 10.0 | 6.00 | 5.00 GB | 2.00 | 2.00 | 0.20 |"
    assert line in step_beside.table(rows)
    without = [{k: v for k, v in row.items() if k != "cpu_s"} for row in rows]
    assert "| 10.0 |  | 5.00 GB | 2.00 |  | 0.20 |" in step_beside.table(without)
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["who"] for row in kept] == [row["who"] for row in rows]
    assert all(row["device"] and row["date"] for row in kept)


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(DataError, match=r"code 3: of the peer"):
        step_beside._output(["sh", "-c", "echo of the peer >&2; exit 3"])
