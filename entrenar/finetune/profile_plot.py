"""``profile.png``: where a step's time goes, as two bars, phases above the ops inside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar.errors import DataError
from entrenar.finetune.plot import new_figure, save_figure

__all__ = ["plot_profile"]

_NARROW = 0.025  # share of a step below which a part has no room for its name
_PHASES = ("#3b6ea5", "#c05a1c", "#3a7d44", "#7b4397", "#8c6d1f", "#2a8c8c", "#b0306a", "#888888")
_OPS = ("#9db8d2", "#e3b08f", "#a9cfae", "#c6abd6", "#d6c58f", "#a3d0d0", "#dfa3bf", "#cfcfcf")


def plot_profile(trace: Mapping[str, Any], path: str | Path, title: str = "") -> None:
    """Draw the step of a profiler's trace; within a phase, ops of one name are put together.

    Args:
        trace: What :meth:`StepProfiler.trace` returns.
        path: Image to write; the suffix chooses the format.
        title: Text above the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: The trace has no phase, or the file type cannot be drawn.
    """
    spans = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    phases: dict[str, float] = defaultdict(float)
    ops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span["cat"] == "phase":
            phases[span["name"]] += span["dur"] / 1e3
        else:
            ops[span["args"]["phase"]][span["name"]] += span["dur"] / 1e3
    total = sum(phases.values())
    if not total:
        raise DataError("the trace holds no phase to draw", "profile a step: --profile-interval 10")
    figure = new_figure(12, 3)
    axes = figure.subplots()
    left = 0.0
    for number, (phase, width) in enumerate(phases.items()):
        _bar(axes, 1, left, width, total, phase, _PHASES[number % len(_PHASES)])
        inside = left
        for count, (op, took) in enumerate(sorted(ops[phase].items(), key=lambda item: -item[1])):
            colour = _OPS[count % len(_OPS)]
            _bar(axes, 0, inside, min(took, left + width - inside), total, op, colour)
            inside = min(inside + took, left + width)
        left += width
    axes.set_yticks((0, 1), ("ops", "phases"))
    axes.set_xlabel("milliseconds of the step")
    axes.set_xlim(0, total)
    if title:
        axes.set_title(title)
    save_figure(figure, path)


def _bar(
    axes: Any, row: int, left: float, width: float, total: float, name: str, colour: str
) -> None:
    axes.barh(row, width, left=left, height=0.9, color=colour, edgecolor="white")
    if width > _NARROW * total:
        text = f"{name}\n{width:.1f} ms"
        rotation = 0 if width > 0.008 * len(name) * total else 90
        axes.text(
            left + width / 2, row, text, ha="center", va="center", fontsize=7, rotation=rotation,
            color="white" if row else "black",
        )  # fmt: skip
