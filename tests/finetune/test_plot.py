"""Pictures of runs: what is drawn, what is refused, that a viewer never sees half of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from entrenar.cli import main
from entrenar.errors import DataError
from entrenar.finetune import plot
from entrenar.finetune.plot import compare_runs, plot_loss
from entrenar.finetune.profile_plot import plot_profile

ROWS: list[dict[str, Any]] = [{"step": 0, "eval_loss": 5.0}]
ROWS += [
    {"step": n, "loss": 5 / n, "learning_rate": 1e-3, "grad_norm": 1.0 + n, "tokens_per_s": 50.0}
    for n in range(1, 9)
]
ROWS += [{"step": 8, "eval_loss": 2.0}]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    found: list[Any] = []
    save = plot.save_figure
    monkeypatch.setattr(plot, "save_figure", lambda f, path: (found.append(f), save(f, path))[1])
    return found


def test_a_run_has_a_panel_for_each_metric(drawn: list[Any], tmp_path: Path) -> None:
    plot_loss(ROWS, tmp_path / "loss.png", "first")
    (figure,) = drawn
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == [
        "loss (nats per response token)", "learning rate", "gradient norm", "tokens/s",
    ]  # fmt: skip
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"training", "training, smoothed", "held out"}
    assert lines["training"].get_ydata().tolist() == [5 / n for n in range(1, 9)]
    assert lines["held out"].get_xdata().tolist() == [0, 8]
    assert figure.axes[2].lines[0].get_ydata().tolist() == [1.0 + n for n in range(1, 9)]
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_panel_without_values_is_left_out(drawn: list[Any], tmp_path: Path) -> None:
    plot_loss([{"step": 1, "loss": 1.0}], tmp_path / "a.svg")
    assert len(drawn[0].axes) == 1


def test_runs_are_told_apart(drawn: list[Any], tmp_path: Path) -> None:
    compare_runs({"one": ROWS, "two": ROWS[:5]}, tmp_path / "both.png")
    texts = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert texts == [
        "one: training, smoothed", "one: held out", "two: training, smoothed", "two: held out",
    ]  # fmt: skip
    with pytest.raises(DataError, match="the metrics of two hold no loss"):
        compare_runs({"one": ROWS, "two": [{"step": 1}]}, tmp_path / "both.png")


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    plot_loss(ROWS, tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    with pytest.raises(DataError, match=r"cannot draw .*loss.xyz"):
        plot_loss(ROWS, tmp_path / "loss.xyz")
    assert (tmp_path / "loss.png").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def span(name: str, phase: str, milliseconds: float, category: str) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "ts": 0.0, "dur": 1e3 * milliseconds,
        "args": {"phase": phase},
    }  # fmt: skip


def test_a_profile_is_two_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from entrenar.finetune import profile_plot

    found: list[Any] = []
    monkeypatch.setattr(profile_plot, "save_figure", lambda figure, path: found.append(figure))
    events = [span("forward", "forward", 30, "phase"), span("backward", "backward", 70, "phase")]
    events += [span("gemm", "forward", 10, "op"), span("gemm", "forward", 5, "op")]
    events += [span("norm", "forward", 1, "op"), span("gemm", "backward", 60, "op")]
    plot_profile({"traceEvents": [{"ph": "M"}, *events]}, tmp_path / "p.png")
    bars = [(p.get_y() > 0.5, p.get_x(), p.get_width()) for p in found[0].axes[0].patches]
    wanted = [(True, 0, 30), (False, 0, 15), (False, 15, 1), (True, 30, 70), (False, 30, 60)]
    assert [pytest.approx(bar) for bar in bars] == wanted
    with pytest.raises(DataError, match="holds no phase"):
        plot_profile({"traceEvents": []}, tmp_path / "p.png")


def test_pictures_and_profile_are_there_while_the_run_goes_on(
    tiny_model: Path, pairs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from entrenar.finetune import training_run
    from entrenar.finetune.training_run import TrainingRun

    run, seen = tmp_path / "run", []
    save = TrainingRun._draw

    def drawing(self: TrainingRun) -> None:
        save(self)
        seen.append((self.result.steps, sorted(p.name for p in run.glob("*.png"))))

    arguments = [
        "train", "--model", str(tiny_model), "--data", str(pairs_file), "--output", str(run),
        "--max-steps=4", "--lora-rank=2", "--device=cpu", "--answers=0", "--max-seq-len=64",
        "--save-every=2", "--profile-interval=2",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingRun, "_draw", drawing)
        patched.setattr(training_run, "_DRAW_EVERY_S", 0.0)
        assert main(arguments) == 0
    both = ["loss.png", "profile.png"]
    assert seen == [(2, both), (4, both), (4, both)]
    assert json.loads((run / "profile.json").read_text())["steps"] == 1
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    seen.clear()
    with pytest.MonkeyPatch.context() as patched:  # not more often than twice a minute
        patched.setattr(TrainingRun, "_draw", drawing)
        assert main([*arguments, "--overwrite"]) == 0
    assert [step for step, _ in seen] == [2, 4]
    for name in both:
        (run / name).unlink()
    capsys.readouterr()
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'loss.png'}\n{run / 'profile.png'}\n"
    assert main(["plot", str(run), str(run)]) == 2
    assert "--output is missing" in capsys.readouterr().err
    assert main(["plot", str(run), str(run), "--output", str(tmp_path / "c.png")]) == 2
    assert "named twice" in capsys.readouterr().err
    (run / "trace.json").write_text("{")
    assert main(["plot", str(run)]) == 2
    assert "is no trace of a step" in capsys.readouterr().err
