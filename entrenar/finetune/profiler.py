"""Where a training step's time goes: by phase, by op, by layer.

Nothing is instrumented but the phases themselves: ops are seen as every launch is, through
:func:`entrenar.runtime.listening`, and a launch belongs to the layer whose weight was read last. On a GPU
times lie between events that the device records as it reaches them, never between host clocks around
launches that return at once; on the CPU a monotonic clock does. What lies between two launches, Python
included, counts as the later one's on the CPU and the earlier one's on a GPU.

While no step is profiled there is no listener, no clock is read, and a phase is an empty context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from entrenar import runtime
from entrenar.finetune.files import write_text

__all__ = ["DeviceMarks", "HostMarks", "Marks", "Span", "StepProfiler"]

_OUTSIDE = "other"  # of a step, outside every phase
_HOT = 1.5  # times the mean of all layers


class Marks(Protocol):
    """Takes points in time as work is reached."""

    def mark(self, stream: Any) -> Any:
        """Take a point after all that ``stream`` was given so far."""

    def settle(self) -> None:
        """Wait until every mark is reached."""

    def seconds(self, mark: Any) -> float:
        """Return when a mark was reached, from any fixed origin."""


class HostMarks:
    """Points on the host's monotonic clock, for work that is done when a call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self, stream: Any) -> float:
        """Read the clock."""
        return self._clock()

    def settle(self) -> None:
        """Nothing is outstanding."""

    def seconds(self, mark: float) -> float:
        """Return the reading."""
        return mark


class DeviceMarks:
    """Events on a GPU's streams."""

    def __init__(self) -> None:
        self._first: Any = None

    def mark(self, stream: Any) -> Any:
        """Record an event on the stream; torch's current one where None."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(getattr(stream, "torch_stream", stream))
        self._first = self._first or event
        return event

    def settle(self) -> None:
        """Wait for the device, once a step."""
        import torch

        torch.cuda.synchronize()

    def seconds(self, mark: Any) -> float:
        """Return the time since the first event."""
        return float(self._first.elapsed_time(mark)) / 1e3


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of one step.

    Attributes:
        name: Of the phase or op.
        phase: The phase it lies in; its own name for a phase.
        layer: What it belongs to, such as ``"layer 3"``; empty for a phase and before the first weight.
        lane: Number of the stream, in order of appearance; 0 for phases.
        start: Seconds from the step's start.
        seconds: How long.
    """

    name: str
    phase: str
    layer: str
    lane: int
    start: float
    seconds: float


@dataclasses.dataclass
class _Step:
    """One profiled step.

    Attributes:
        number: The step's.
        seconds: How long it took.
        phases: Its phases.
        ops: Its launches.
        by_op: Launches and seconds by op.
        by_layer: Seconds by layer and phase.
    """

    number: int
    seconds: float
    phases: list[Span]
    ops: list[Span]
    by_op: dict[str, list[float]] = dataclasses.field(init=False)
    by_layer: dict[tuple[str, str], float] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.by_op = defaultdict(lambda: [0.0, 0.0])
        self.by_layer = defaultdict(float)
        for span in self.ops:
            self.by_op[span.name][0] += 1
            self.by_op[span.name][1] += span.seconds
            self.by_layer[span.layer, span.phase] += span.seconds


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A launch that was heard.

    Attributes:
        op: The launcher.
        phase: The phase it came in.
        layer: What it belongs to.
        lane: Number of its stream.
        done: Whether it was announced when its results existed; a kernel is before it starts.
    """

    op: str
    phase: str
    layer: str
    lane: int
    done: bool


class StepProfiler:
    """Profiles the steps it is opened for.

    Args:
        owners: Address of each weight's storage to what it belongs to, such as ``"layer 3"``.
        marks: Where times come from.

    Attributes:
        steps: What was profiled; the ops of the last step alone.
    """

    def __init__(self, owners: Mapping[int, str] | None = None, marks: Marks | None = None) -> None:
        self.steps: list[_Step] = []
        self._owners = dict(owners or {})
        self._marks = marks or HostMarks()
        # what was marked, in order: launches, and None for an edge of a phase or of the step
        self._marked: list[tuple[_Launch | None, Any]] = []
        self._phases: list[tuple[str, Any, Any]] = []
        self._lanes: dict[Any, int] = {}
        self._phase, self._layer = _OUTSIDE, ""
        self._stream: Any = None

    @contextlib.contextmanager
    def step(self, number: int, stream: Any = None) -> Iterator[None]:
        """Profile the step inside the block.

        Args:
            number: The step's.
            stream: What phases are ordered on.
        """
        self._marked, self._phases = [], []
        self._lanes, self._stream, self._layer = {}, stream, ""
        start = self._edge()
        try:
            with runtime.listening(self._launched):
                yield
        finally:
            stop = self._edge()
            self._marks.settle()
            self._close(number, self._marks.seconds(start), self._marks.seconds(stop))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step at hand."""
        outer, self._phase = self._phase, name
        self._layer = ""
        start = self._edge()
        try:
            yield
        finally:
            self._phases.append((name, start, self._edge()))
            self._phase = outer

    def _edge(self) -> Any:
        mark = self._marks.mark(self._stream)
        self._marked.append((None, mark))
        return mark

    def _launched(self, record: runtime.LaunchRecord) -> None:
        for storage in record.reads:
            owner = self._owners.get(_address(storage))
            if owner is not None:
                self._layer = owner
        lane = self._lanes.setdefault(id(record.stream), len(self._lanes) + 1)
        launch = _Launch(record.op, self._phase, self._layer, lane, record.where == "numpy")
        self._marked.append((launch, self._marks.mark(record.stream)))

    def _close(self, number: int, start: float, stop: float) -> None:
        phases = [
            Span(name, name, "", 0, self._marks.seconds(a) - start, self._between(a, b))
            for name, a, b in self._phases
        ]
        if self.steps:
            self.steps[-1].ops = []
        self.steps.append(_Step(number, stop - start, phases, self._ops(start)))

    def _between(self, first: Any, last: Any) -> float:
        return self._marks.seconds(last) - self._marks.seconds(first)

    def _ops(self, start: float) -> list[Span]:
        """Return each launch's span: from the mark before it where it was done, else to the next one.

        The next one is of its own stream, or an edge.
        """
        times = [self._marks.seconds(mark) for _, mark in self._marked]
        following: dict[int, float] = {}  # by lane, when its next launch began
        edge = times[-1]
        spans = []
        for index in reversed(range(len(times))):
            launch, now = self._marked[index][0], times[index]
            if launch is None:
                edge = now
                following.clear()
                continue
            begin, end = now, following.get(launch.lane, edge)
            if launch.done:
                begin, end = times[index - 1], now
            seconds = max(end - begin, 0.0)
            spans.append(
                Span(launch.op, launch.phase, launch.layer, launch.lane, begin - start, seconds)
            )
            following[launch.lane] = now
        return spans[::-1]

    # what was found

    @property
    def steady(self) -> list[_Step]:
        """The steps that count: all but the first, or that one where there is no other."""
        return self.steps[1:] or self.steps

    def report(self) -> dict[str, Any]:
        """Return all results for JSON; times in milliseconds.

        The first profiled step is reported apart as ``warm_up_ms``. ``other`` is what no phase covers;
        ``coverage`` what they cover. ``hot_layers`` take more than 1.5 times the mean of all layers.
        """
        steady = self.steady
        if not steady:
            return {"steps": 0}
        wall = sum(step.seconds for step in steady)
        return {
            "steps": len(steady),
            "warm_up_ms": _ms(self.steps[0].seconds) if len(self.steps) > 1 else None,
            "step_ms": _spread([step.seconds for step in steady]),
            "coverage": round(self._covered() / wall, 4) if wall else 0.0,
            "phases": self._phase_rows(steady, wall),
            "ops": self._op_rows(),
            "layers": self._layer_rows(),
            "hot_layers": self._hot_layers(),
        }

    def _covered(self) -> float:
        return sum(span.seconds for step in self.steady for span in step.phases)

    def _phase_rows(self, steady: list[_Step], wall: float) -> dict[str, Any]:
        names = list(dict.fromkeys(span.name for step in steady for span in step.phases))
        rows: dict[str, Any] = {}
        for name in names:
            each = [sum(s.seconds for s in step.phases if s.name == name) for step in steady]
            rows[name] = {**_spread(each), "share": round(sum(each) / wall, 4) if wall else 0.0}
        rest = [step.seconds - sum(s.seconds for s in step.phases) for step in steady]
        rows[_OUTSIDE] = {**_spread(rest), "share": round(sum(rest) / wall, 4) if wall else 0.0}
        return rows

    def _op_rows(self) -> dict[str, Any]:
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for step in self.steady:
            for name, (launches, seconds) in step.by_op.items():
                found[name][0] += launches
                found[name][1] += seconds
        n = len(self.steady)
        total = sum(seconds for _, seconds in found.values())
        ordered = sorted(found.items(), key=lambda item: -item[1][1])
        return {
            name: {
                "launches": round(launches / n, 2),
                "mean_ms": _ms(seconds / n),
                "share": round(seconds / total, 4) if total else 0.0,
            }
            for name, (launches, seconds) in ordered
        }

    def _layer_seconds(self) -> dict[tuple[str, str], float]:
        """Return seconds by layer and phase over the steady steps."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for step in self.steady:
            for key, seconds in step.by_layer.items():
                found[key] += seconds
        return found

    def _layer_rows(self) -> dict[str, Any]:
        rows: dict[str, dict[str, float]] = defaultdict(dict)
        for (layer, phase), seconds in self._layer_seconds().items():
            if layer:
                rows[layer][f"{phase}_ms"] = _ms(seconds / len(self.steady))
        return dict(sorted(rows.items(), key=lambda item: _by_number(item[0])))

    def _hot_layers(self) -> list[str]:
        sums: dict[str, float] = defaultdict(float)
        for (layer, _), seconds in self._layer_seconds().items():
            if layer.startswith("layer "):
                sums[layer] += seconds
        if not sums:
            return []
        mean = sum(sums.values()) / len(sums)
        return sorted((name for name, s in sums.items() if s > _HOT * mean), key=_by_number)

    def table(self) -> str:
        """Return phases and ops as text, the largest first."""
        found = self.report()
        if not found["steps"]:
            return "no step was profiled"
        lines = [f"{found['steps']} steps of {found['step_ms']['mean_ms']:.1f} ms"]
        if found["warm_up_ms"] is not None:
            lines[0] += f", the first {found['warm_up_ms']:.1f} ms apart"
        heads = ("mean ms", "p50", "p95", "p99", "share")
        lines.append(f"{'phase':<28}" + "".join(f"{head:>10}" for head in heads))
        for name, row in sorted(found["phases"].items(), key=lambda item: -item[1]["mean_ms"]):
            numbers = [row["mean_ms"], row["p50_ms"], row["p95_ms"], row["p99_ms"]]
            shown = "".join(f"{number:>10.2f}" for number in numbers)
            lines.append(f"{name:<28}{shown}{100 * row['share']:>9.1f}%")
        lines.append(f"{'op':<28}{'launches':>10}{'mean ms':>10}{'share':>10}")
        for name, row in found["ops"].items():
            share = 100 * row["share"]
            lines.append(f"{name:<28}{row['launches']:>10g}{row['mean_ms']:>10.2f}{share:>9.1f}%")
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Return the last profiled step as a Chrome trace: open it in Perfetto or chrome://tracing."""
        step = self.steps[-1]
        lanes = {0: "phases"} | {span.lane: f"stream {span.lane}" for span in step.ops}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for lane, name in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": span.lane,
                "name": span.name,
                "cat": "op" if span.lane else "phase",
                "ts": round(1e6 * span.start, 3),
                "dur": round(1e6 * span.seconds, 3),
                "args": {"step": step.number, "phase": span.phase, "layer": span.layer},
            }
            for span in (*step.phases, *step.ops)
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, report: Path, trace: Path) -> None:
        """Write both files, each all or not at all."""
        write_text(report, json.dumps(self.report(), indent=1) + "\n")
        write_text(trace, json.dumps(self.trace()) + "\n")


def _address(storage: Any) -> int:
    """Return where storage begins, transposed or not; 0 for what is no storage."""
    address = getattr(storage, "data_ptr", None)
    return int(address()) if address is not None else 0


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _spread(seconds: list[float]) -> dict[str, float]:
    """Return mean and percentiles, linear between ranks, in milliseconds."""
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
    return {
        "mean_ms": _ms(float(np.mean(seconds))),
        "p50_ms": _ms(float(p50)),
        "p95_ms": _ms(float(p95)),
        "p99_ms": _ms(float(p99)),
    }


def _by_number(name: str) -> tuple[bool, int, str]:
    """Order layers by their numbers, and what is no layer after them."""
    number = name.removeprefix("layer ")
    return (not number.isdigit(), int(number) if number.isdigit() else 0, name)
