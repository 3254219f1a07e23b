"""The loop and its folder: what is written, and that a resumed run is the run it continues."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from entrenar import InstructConfig, InstructPipeline
from entrenar.errors import CheckpointError, ConfigError, DataError, NumericsError
from entrenar.finetune import checkpoint as checkpoint_module
from entrenar.finetune.batching import plan_epoch
from entrenar.finetune.chat import Example
from entrenar.finetune.checkpoint import latest_checkpoint
from entrenar.finetune.metrics import METRIC_KEYS, read_metrics
from entrenar.finetune.run_folder import RunFolder
from entrenar.finetune.training_run import RunResult, TrainingRun

SETTINGS: dict[str, Any] = {
    "lora_rank": 4,
    "learning_rate": 1e-2,
    "lora_dropout": 0.3,
    "batch_size": 2,
    "grad_accum_steps": 2,
    "epochs": 3,
    "warmup_steps": 2,
    "max_seq_len": 64,
    "device": "cpu",
}
TRAIN = [Example.from_pair([4 + i, 5, 6], [7 + i, 30 + i, 2]) for i in range(10)]
HELD = [Example.from_pair([40, 41], [42, 43, 2]), Example.from_pair([50], [51, 2])]


def make(
    model: Path,
    folder: Path,
    train: list[Example] = TRAIN,
    heldout: list[Example] = HELD,
    **more: Any,
) -> TrainingRun:
    names = ("save_every", "eval_every", "on_row", "keep_checkpoints", "patience", "allow_drift")
    options = {k: more.pop(k) for k in names if k in more}
    pipeline = InstructPipeline.from_pretrained(model, InstructConfig(**{**SETTINGS, **more}))
    return TrainingRun(pipeline, train, heldout, folder=RunFolder(folder), **options)


def stopped_after(step: int, model: Path, folder: Path, **more: Any) -> RunResult:
    run: TrainingRun
    run = make(
        model, folder, on_row=lambda row: row.get("step") == step and "loss" in row and run.stop(),
        **more,
    )  # fmt: skip
    return run.run()


def stable(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without what a clock or the memory decides."""
    moving = ("tokens_per_s", "step_time_s", "peak_memory_bytes")
    return [
        {k: v for k, v in row.items() if k not in moving}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_what_a_run_leaves_behind(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    result = make(tiny_model, folder, save_every=4, eval_every=3).run()
    assert (result.steps, result.total_steps, result.interrupted) == (9, 9, False)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter", "checkpoints", "config.toml", "environment.json", "loss.png", "metrics.jsonl",
    ]  # fmt: skip
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000008",
    ]
    assert sorted(p.name for p in (folder / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert InstructConfig.from_toml(folder / "config.toml") == InstructConfig(**SETTINGS)
    assert json.loads((folder / "environment.json").read_text())["device"] == "cpu"
    rows = read_metrics(folder / "metrics.jsonl")
    assert all(set(row) <= set(METRIC_KEYS) for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 3, 6, 9]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 10))
    assert rows[0]["eval_loss"] == result.eval_before
    assert rows[-1]["eval_loss"] == result.eval_after
    assert result.eval_after is not None
    assert all("step_time_s" not in row for row in rows if "eval_loss" in row)
    assert [row["tokens"] for row in rows if "loss" in row] == [24, 24, 12] * 3
    assert [row["response_tokens"] for row in rows if "loss" in row] == [12, 12, 6] * 3
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_are_the_same_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tiny_model, tmp_path / name).run()
    assert adapter(tmp_path / "a") == adapter(tmp_path / "b")
    assert stable(tmp_path / "a") == stable(tmp_path / "b")


@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    tiny_model: Path, tmp_path: Path, step: int
) -> None:
    """https://github.com/huggingface/transformers/issues/17032
    https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/issues/65
    https://github.com/vllm-project/speculators/issues/900
    """
    make(tiny_model, tmp_path / "whole").run()
    result = stopped_after(step, tiny_model, tmp_path / "parts")
    assert (result.interrupted, result.steps) == (True, step)
    assert not (tmp_path / "parts" / "adapter").exists()
    again = make(tiny_model, tmp_path / "parts").run(resume=True)
    assert not again.interrupted
    assert adapter(tmp_path / "whole") == adapter(tmp_path / "parts")
    assert stable(tmp_path / "whole") == stable(tmp_path / "parts")


RESUME_SCRIPT = """
import sys
from collections.abc import Callable
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import importlib.util
spec = importlib.util.spec_from_file_location("case", sys.argv[1])
case = importlib.util.module_from_spec(spec)
spec.loader.exec_module(case)
case.make(Path(sys.argv[2]), Path(sys.argv[3])).run(resume=True)
"""


def test_a_new_process_resumes_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/17032"""
    make(tiny_model, tmp_path / "whole").run()
    stopped_after(3, tiny_model, tmp_path / "parts")
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", RESUME_SCRIPT, __file__, tiny_model, tmp_path / "parts", root]
    subprocess.run(list(map(str, command)), check=True)
    assert adapter(tmp_path / "whole") == adapter(tmp_path / "parts")


def test_the_checkpoint_holds_moments_and_step(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/issues/65"""
    stopped_after(3, tiny_model, tmp_path)
    saved = load_file(tmp_path / "checkpoints" / "step-000003" / "state.safetensors")
    assert saved["step"].tolist() == [3]
    assert all(np.any(saved[name]) for name in ("params", "m", "v"))


def test_a_bf16_model_is_resumed_with_float32_moments(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/43706"""
    make(tiny_model, tmp_path / "whole", dtype="bfloat16").run()
    stopped_after(3, tiny_model, tmp_path / "parts", dtype="bfloat16")
    state = tmp_path / "parts" / "checkpoints" / "step-000003" / "state.safetensors"
    saved = load_file(state)
    assert {saved[name].dtype.name for name in ("params", "m", "v")} == {"float32"}
    assert saved["step"].dtype == np.int64
    make(tiny_model, tmp_path / "parts", dtype="bfloat16").run(resume=True)
    assert adapter(tmp_path / "whole") == adapter(tmp_path / "parts")


def test_other_settings_or_data_are_not_resumed(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/vllm-project/speculators/issues/900"""
    stopped_after(3, tiny_model, tmp_path)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.01, now 0\.02"):
        make(tiny_model, tmp_path, learning_rate=2e-2).run(resume=True)
    with pytest.raises(CheckpointError, match="epochs was 3, now 4"):
        make(tiny_model, tmp_path, epochs=4).run(resume=True)
    with pytest.raises(CheckpointError, match="other data: 10 samples then, 9 now"):
        make(tiny_model, tmp_path, train=TRAIN[:9]).run(resume=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_the_newest_checkpoints_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    for keep, wanted in ((2, [8, 9]), (0, list(range(1, 10))), (1, [9])):
        folder = tmp_path / str(keep)
        make(tiny_model, folder, heldout=[], save_every=1, keep_checkpoints=keep).run()
        names = sorted(p.name for p in (folder / "checkpoints").iterdir())
        assert names == [f"step-{step:06d}" for step in wanted]


def test_a_save_that_fails_removes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint_module.save_file
    done: list[Path] = []

    def failing(tensors: Any, path: Path) -> None:
        done.append(path)
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", failing)
    with pytest.raises(CheckpointError, match="No space left"):
        make(tiny_model, tmp_path, heldout=[], save_every=1, keep_checkpoints=2).run()
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002"]


def with_losses(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Let evaluations see these losses by step."""
    original = InstructPipeline.evaluate_examples

    def told(self: InstructPipeline, *arguments: Any, **options: Any) -> Any:
        outcome = original(self, *arguments, **options)
        return dataclasses.replace(outcome, avg_loss=losses[self.steps])

    monkeypatch.setattr(InstructPipeline, "evaluate_examples", told)


LOSSES = {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: 3.0, 5: 9.0, 6: 2.0, 7: 8.0, 8: 8.0, 9: 8.0}


def test_patience_ends_a_run_with_its_best_adapter(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, LOSSES)
    make(tiny_model, tmp_path / "two", save_every=1, keep_checkpoints=0, heldout=[], epochs=3).run()
    result = make(tiny_model, tmp_path / "run", eval_every=1, patience=3).run()
    assert (result.steps, result.interrupted) == (5, False)  # 3.5, 3.0 and 9.0 are not below 3.0
    assert (result.best_step, result.best_loss, result.eval_after) == (2, 3.0, 3.0)
    assert any("stopped after step 5" in n and "step 2" in n for n in result.notices)
    (best,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert best.name == "best-000002"
    kept = (best / "adapter" / "adapter_model.safetensors").read_bytes()
    assert kept == adapter(tmp_path / "run")
    second = tmp_path / "two" / "checkpoints" / "step-000002" / "adapter"
    assert kept == (second / "adapter_model.safetensors").read_bytes()


def test_without_patience_the_last_adapter_is_the_runs_and_the_best_is_beside_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, LOSSES)
    result = make(tiny_model, tmp_path, eval_every=1).run()
    assert (result.steps, result.best_step, result.eval_after) == (9, 6, 8.0)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["best-000006"]
    best = tmp_path / "checkpoints" / "best-000006" / "adapter" / "adapter_model.safetensors"
    assert best.read_bytes() != adapter(tmp_path)


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_patience_and_best_survive_a_stop(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    with_losses(monkeypatch, LOSSES)
    options: dict[str, Any] = {"eval_every": 1, "patience": 3}
    make(tiny_model, tmp_path / "whole", **options).run()
    assert stopped_after(stop, tiny_model, tmp_path / "parts", **options).interrupted
    result = make(tiny_model, tmp_path / "parts", **options).run(resume=True)
    assert (result.steps, result.best_step) == (5, 2)
    assert adapter(tmp_path / "parts") == adapter(tmp_path / "whole")


def test_a_best_adapter_that_is_no_better_than_the_base_is_said(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, {step: 5.0 + (step > 0) for step in range(10)})
    result = make(tiny_model, tmp_path, eval_every=3).run()
    assert any("no held-out loss was below the base model's" in n for n in result.notices)


def test_patience_needs_evaluations(tiny_model: Path, tmp_path: Path) -> None:
    for options in ({"heldout": [], "eval_every": 1}, {"eval_every": 0}):
        with pytest.raises(ConfigError, match="patience is 2, but nothing is evaluated"):
            make(tiny_model, tmp_path, patience=2, **options)


def test_drift_that_is_allowed_is_listed(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/vllm-project/speculators/issues/900: more steps are asked for and logged."""
    stopped_after(3, tiny_model, tmp_path)
    changed: dict[str, Any] = {"epochs": 4, "learning_rate": 2e-2, "train": TRAIN[:9]}
    with pytest.raises(CheckpointError, match="--allow-drift"):
        make(tiny_model, tmp_path, **changed).run(resume=True)
    run = make(tiny_model, tmp_path, allow_drift=True, **changed)
    result = run.run(resume=True)
    assert result.steps == result.total_steps == 12
    for what in (
        "learning_rate was 0.01, now 0.02",
        "epochs was 3, now 4",
        "10 samples then, 9 now",
    ):
        assert any(f"continued although {what}" in n or what in n for n in result.notices), what
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["learning_rate"] for row in rows[3:]] == [run.schedule.at(n) for n in range(3, 12)]


def test_what_cannot_drift_is_refused_all_the_same(tiny_model: Path, tmp_path: Path) -> None:
    stopped_after(3, tiny_model, tmp_path)
    with pytest.raises(CheckpointError, match="belongs to other adapters"):
        make(tiny_model, tmp_path, allow_drift=True, lora_rank=8).run(resume=True)


def test_another_base_model_is_drift(
    tiny_model: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    stopped_after(3, tiny_model, tmp_path)
    other = make_model(rope_theta=20_000.0)
    with pytest.raises(CheckpointError, match="the base model has another config"):
        make(other, tmp_path).run(resume=True)


def test_a_crash_while_saving_leaves_the_older_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/688"""
    written: list[Path] = []
    original = checkpoint_module.save_file

    def failing(tensors: Any, path: Path) -> None:
        original(tensors, path)
        written.append(path)
        if len(written) == 2:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", failing)
    with pytest.raises(CheckpointError, match="No space left on device"):
        make(tiny_model, tmp_path, save_every=2).run()
    monkeypatch.undo()
    found, _ = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 2
    damaged = tmp_path / "checkpoints" / "step-000004"
    damaged.mkdir()
    (damaged / "state.safetensors").write_bytes(b"cut")
    (tmp_path / "checkpoints" / ".step-000006.tmp").mkdir()
    run = make(tiny_model, tmp_path)
    result = run.run(resume=True)
    assert result.steps == 9
    assert any("step-000004 is incomplete" in notice for notice in result.notices)
    make(tiny_model, tmp_path / "whole").run()
    assert adapter(tmp_path) == adapter(tmp_path / "whole")


def test_a_damaged_checkpoint_is_noticed_by_its_digest(tiny_model: Path, tmp_path: Path) -> None:
    stopped_after(2, tiny_model, tmp_path)
    path = tmp_path / "checkpoints" / "step-000002" / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found, passed = latest_checkpoint(tmp_path / "checkpoints")
    assert found is None
    assert passed == ["step-000002"]


def test_nothing_to_resume_starts_over_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    result = make(tiny_model, tmp_path).run(resume=True)
    assert result.steps == 9
    assert "starts over" in result.notices[0]


def test_damaged_checkpoints_are_set_aside_before_starting_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    stopped_after(2, tiny_model, tmp_path)
    damaged = tmp_path / "checkpoints" / "step-000002" / "state.safetensors"
    damaged.write_bytes(b"x")
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    result = make(tiny_model, tmp_path).run(resume=True)
    assert result.steps == 9
    kept = tmp_path / "set-aside-1"
    assert (kept / "checkpoints" / "step-000002" / "state.safetensors").read_bytes() == b"x"
    assert (kept / "metrics.jsonl").read_bytes() == metrics
    assert any(str(kept) in notice for notice in result.notices)


def test_a_run_that_learned_nothing_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/autotrain-advanced/issues/877"""
    run = make(tiny_model, tmp_path, heldout=[])
    run.pipeline.model.named_weights()["model.norm.weight"].data[0] = math.nan
    with pytest.raises(NumericsError, match="none of the 9 steps was finite"):
        run.run()
    assert not (tmp_path / "adapter").exists()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert all("loss" not in row and "grad_norm" not in row for row in rows)
    assert [row["non_finite"] for row in rows] == list(range(1, 10))


def test_steps_that_stay_not_finite_stop_the_run(tiny_model: Path, tmp_path: Path) -> None:
    run = make(tiny_model, tmp_path, heldout=[], max_steps=100)
    weight = run.pipeline.model.named_weights()["model.norm.weight"].data

    def spoil(row: Any) -> None:
        if row["step"] == 5:
            weight[0] = math.inf

    run.on_row = spoil
    with pytest.raises(NumericsError, match="the last 20 steps up to step 25 were not finite"):
        run.run()
    found, _ = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.arrays["step"].tolist() == [5]


def test_the_step_after_one_that_is_not_finite_trains(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/paiml/aprender/issues/563"""
    run = make(tiny_model, tmp_path, heldout=[], max_steps=10)
    weight = run.pipeline.model.named_weights()["model.norm.weight"].data
    kept = float(weight[0])
    params: list[np.ndarray] = []

    def spoil(row: Any) -> None:
        weight[0] = math.inf if row["step"] == 2 else kept
        params.append(run.pipeline.adapters.params.numpy().copy())

    run.on_row = spoil
    result = run.run()
    assert (result.steps, result.non_finite) == (10, 1)
    unchanged = [np.array_equal(a, b) for a, b in itertools.pairwise(params[:10])]
    assert unchanged == [False, True] + [False] * 7
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" not in row] == [3]


def test_without_matplotlib_the_run_is_not_lost(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = make(tiny_model, tmp_path).run()
    assert (tmp_path / "adapter").is_dir()
    assert any("entrenar[plot]" in notice for notice in result.notices)


def test_a_data_set_smaller_than_a_batch_is_one_step(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/slideflow/slideflow/issues/248"""
    result = make(tiny_model, tmp_path, train=TRAIN[:1], heldout=[], batch_size=8, epochs=1).run()
    assert result.steps == 1
    with pytest.raises(DataError, match="no samples"):
        make(tiny_model, tmp_path, train=[])


def test_the_partial_window_has_the_mean_gradient_of_its_sample(
    tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/19987"""
    settings = {"batch_size": 1, "grad_accum_steps": 4, "epochs": 1, "lora_dropout": 0.0}
    run = make(tiny_model, tmp_path, train=TRAIN[:5], heldout=[], **settings)
    run.run()
    norms = [row["grad_norm"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    order = [i for step in plan_epoch([6] * 5, run.config, 0) for batch in step for i in batch]
    alone = make(tiny_model, tmp_path / "x", **settings).pipeline
    alone.train_examples([[TRAIN[i] for i in order[:4]]], run.schedule.at(0))
    last = alone.train_examples([[TRAIN[order[4]]]], run.schedule.at(1))
    assert norms[1] == pytest.approx(last.grad_norm, rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_packing_reads_the_same_tokens(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    run = make(tiny_model, tmp_path, packing=packing, epochs=1, lora_dropout=0.0, batch_size=10)
    run.run()
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert sum(row["tokens"] for row in rows) == 60


class TestFolder:
    def test_one_that_is_not_empty(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match="is not empty and holds no earlier run"):
                RunFolder(tmp_path).check(**options)

    def test_one_of_an_earlier_run(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_text("seed = 0\n")
        with pytest.raises(ConfigError, match=r"--resume, replace it with --overwrite"):
            RunFolder(tmp_path).check()
        RunFolder(tmp_path).check(overwrite=True)
        RunFolder(tmp_path).check(resume=True)
        with pytest.raises(ConfigError, match="exclude each other"):
            RunFolder(tmp_path).check(resume=True, overwrite=True)

    def test_a_complete_run_is_not_resumed(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_text("seed = 0\n")
        (tmp_path / "adapter").mkdir()
        with pytest.raises(ConfigError, match="is complete, there is nothing to resume"):
            RunFolder(tmp_path).check(resume=True)

    def test_overwriting_removes_only_what_a_run_wrote(self, tmp_path: Path) -> None:
        for name in ("config.toml", "metrics.jsonl", "notes.txt"):
            (tmp_path / name).write_text("")
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
        RunFolder(tmp_path).clear()
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "run"):
            with pytest.raises(ConfigError, match="is a file, wanted a folder"):
                RunFolder(path).check()


def test_metrics_cut_short_by_a_crash_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is damaged"):
        read_metrics(path)
