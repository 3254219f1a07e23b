"""Pictures of a run: ``loss.png`` with all its metrics, and several runs in one for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrenar import runtime
from entrenar.errors import DataError
from entrenar.finetune.files import appearing_file

__all__ = ["compare_runs", "new_figure", "plot_loss", "save_figure", "smoothed"]

Rows = Sequence[Mapping[str, Any]]
_BELOW = (
    ("learning_rate", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)
_COLOURS = ("#1f5a93", "#c05a1c", "#3a7d44", "#7b4397", "#8c6d1f", "#2a8c8c", "#b0306a", "#555555")


def smoothed(values: Iterable[float], keep: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected for its start.

    Args:
        values: The series.
        keep: Weight of the past, from 0 (no smoothing) to below 1.
    """
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(average / weight)
    return result


def plot_loss(rows: Iterable[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw a run's metrics: losses above; learning rate, gradient norm and speed below.

    Args:
        rows: Rows of ``metrics.jsonl``.
        path: Image to write; the suffix chooses the format.
        title: Text above the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: No row has a loss, or the file type cannot be drawn.
    """
    _draw([(title, list(rows))], path, title)


def compare_runs(runs: Mapping[str, Rows], path: str | Path) -> None:
    """Draw several runs into one figure, each in its colour.

    Args:
        runs: Name to rows of ``metrics.jsonl``.
        path: Image to write; the suffix chooses the format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: A run has no loss, or the file type cannot be drawn.
    """
    _draw(list(runs.items()), path, "")


def _draw(runs: list[tuple[str, Rows]], path: str | Path, title: str) -> None:
    for name, rows in runs:
        if not any("loss" in row or "eval_loss" in row for row in rows):
            where = f" of {name}" if len(runs) > 1 else ""
            raise DataError(f"the metrics{where} hold no loss to draw", "run some steps first")
    shown = [
        (key, text) for key, text in _BELOW if any(key in row for _, rows in runs for row in rows)
    ]
    figure = new_figure(8, 4 + 1.1 * len(shown))
    heights = (4, *(1 for _ in shown))
    axes = figure.subplots(1 + len(shown), 1, sharex=True, height_ratios=heights, squeeze=False)
    top, below = axes[0][0], [row[0] for row in axes[1:]]
    for number, (name, rows) in enumerate(runs):
        _draw_losses(top, rows, name if len(runs) > 1 else "", number)
        for axis, (key, _) in zip(below, shown, strict=True):
            colour = _COLOURS[number % len(_COLOURS)] if len(runs) > 1 else "#555555"
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linewidth=1)
    top.set_ylabel("loss (nats per response token)")
    top.legend()
    if title:
        top.set_title(title)
    for axis, (_, text) in zip(below, shown, strict=True):
        axis.set_ylabel(text)
    for axis in (top, *below):
        axis.grid(alpha=0.3)
    (below[-1] if below else top).set_xlabel("step")
    save_figure(figure, path)


def _draw_losses(axes: Any, rows: Rows, name: str, number: int) -> None:
    """Draw raw and smoothed training loss, and the held-out one as points."""
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    colour = _COLOURS[number % len(_COLOURS)]
    prefix = f"{name}: " if name else ""
    if train:
        steps, losses = [step for step, _ in train], [loss for _, loss in train]
        axes.plot(
            steps, losses, color=colour, alpha=0.35, linewidth=1,
            label=None if name else "training",
        )  # fmt: skip
        label = f"{prefix}training, smoothed"
        axes.plot(steps, smoothed(losses), color=colour, linewidth=2, label=label)
    if held:
        line = "--" if name else "-"
        axes.plot(
            *zip(*held, strict=True), color=colour if name else _COLOURS[1], marker="o",
            linestyle=line, label=f"{prefix}held out",
        )  # fmt: skip


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure on a canvas of its own: no display, no global state.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    runtime.require("matplotlib", extra="plot", feature="pictures of a run")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure, which takes its name once it is whole: a viewer may look at it meanwhile.

    Raises:
        DataError: The file type cannot be drawn.
    """
    try:
        with appearing_file(Path(path)) as temporary:
            figure.savefig(temporary)
    except ValueError as error:
        raise DataError(f"cannot draw {path}: {error}", "name a .png, .svg or .pdf") from error
