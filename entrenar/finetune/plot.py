"""``loss.png``: the training loss, raw and smoothed, the held-out loss, and the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entrenar import runtime
from entrenar.errors import DataError

__all__ = ["plot_loss", "smoothed"]


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
    """Draw the losses of a run's metrics into an image.

    Args:
        rows: Rows of ``metrics.jsonl``.
        path: Image to write; the suffix chooses the format.
        title: Text above the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: No row has a loss, or the file type cannot be drawn.
    """
    rows = list(rows)
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    rate = [(row["step"], row["learning_rate"]) for row in rows if "learning_rate" in row]
    if not train and not held:
        raise DataError("the metrics hold no loss to draw", "run some steps first")
    runtime.require("matplotlib", extra="plot", feature="the loss plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: no display and no global pyplot state
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    if train:
        steps = [step for step, _ in train]
        losses = [loss for _, loss in train]
        axes.plot(steps, losses, color="#9db8d2", linewidth=1, label="training")
        axes.plot(steps, smoothed(losses), color="#1f5a93", linewidth=2, label="training, smoothed")
    if held:
        axes.plot(*zip(*held, strict=True), color="#c05a1c", marker="o", label="held out")
    axes.set_ylabel("loss (nats per response token)")
    axes.grid(alpha=0.3)
    axes.legend()
    if title:
        axes.set_title(title)
    if rate:
        below.plot(*zip(*rate, strict=True), color="#555555")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise DataError(f"cannot draw {path}: {error}", "name a .png, .svg or .pdf") from error
