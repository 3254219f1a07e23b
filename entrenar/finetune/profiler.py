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
    """One profiled step: its number, its seconds, its phases and ops."""

    number: int
    seconds: float
    phases: list[Span]
    ops: list[Span]


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
        self._launches: list[tuple[str, str, str, int, bool, Any]] = []
        self._phases: list[tuple[str, Any, Any]] = []
        self._edges: list[tuple[int, Any]] = []
        self._lanes: dict[Any, int] = {}
        self._phase, self._layer = _OUTSIDE, ""
        self._stream: Any = None
        self._totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._by_layer: dict[tuple[str, str], float] = defaultdict(float)

    @contextlib.contextmanager
    def step(self, number: int, stream: Any = None) -> Iterator[None]:
        """Profile the step inside the block.

        Args:
            number: The step's.
            stream: What phases are ordered on.
        """
        self._launches, self._phases, self._edges = [], [], []
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
        self._edges.append((len(self._launches), mark))
        return mark

    def _launched(self, record: runtime.LaunchRecord) -> None:
        for storage in record.reads:
            owner = self._owners.get(_address(storage))
            if owner is not None:
                self._layer = owner
        lane = self._lanes.setdefault(id(record.stream), len(self._lanes) + 1)
        done = (
            record.where == "numpy"
        )  # announced when its results exist; a kernel before it starts
        mark = self._marks.mark(record.stream)
        self._launches.append((record.op, self._phase, self._layer, lane, done, mark))

    def _close(self, number: int, start: float, stop: float) -> None:
        phases = [
            Span(name, name, "", 0, self._marks.seconds(a) - start, self._between(a, b))
            for name, a, b in self._phases
        ]
        ops = [span for _, span in sorted(self._ops(start, stop), key=lambda item: item[0])]
        if self.steps:
            self.steps[-1].ops = []
        self.steps.append(_Step(number, stop - start, phases, ops))
        if len(self.steps) > 1:  # the first has compilation and first touches in it
            for span in ops:
                self._totals[span.name][0] += 1
                self._totals[span.name][1] += span.seconds
                self._by_layer[span.layer, span.phase] += span.seconds

    def _between(self, first: Any, last: Any) -> float:
        return self._marks.seconds(last) - self._marks.seconds(first)

    def _ops(self, start: float, stop: float) -> Iterator[tuple[int, Span]]:
        """Yield each launch's span: from the mark before it where it was done, else to the next one."""
        seconds = self._marks.seconds
        edges = [(at, seconds(mark)) for at, mark in self._edges]
        marks = [seconds(launch[-1]) for launch in self._launches]
        before: dict[int, float] = {}
        after: dict[int, float] = {}
        for index, (*_, done, _mark) in enumerate(self._launches):
            if done:
                edge = max((t for at, t in edges if at <= index), default=start)
                previous = marks[index - 1] if index else start
                before[index] = max(edge, previous)
        following: dict[int, int] = {}
        for index in reversed(range(len(self._launches))):
            lane, done = self._launches[index][3], self._launches[index][4]
            if not done:
                edge = min((t for at, t in edges if at > index), default=stop)
                later = following.get(lane)
                after[index] = min(edge, marks[later]) if later is not None else edge
            following[lane] = index
        for index, (op, phase, layer, lane, done, _mark) in enumerate(self._launches):
            begin, end = (before[index], marks[index]) if done else (marks[index], after[index])
            yield index, Span(op, phase, layer, lane, begin - start, max(end - begin, 0.0))

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
            "layers": self._layer_rows(len(steady)),
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

    def _measured_ops(self) -> dict[str, list[float]]:
        """Return launches and seconds by op over the steady steps."""
        if len(self.steps) > 1:
            return self._totals
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for span in self.steps[0].ops:
            found[span.name][0] += 1
            found[span.name][1] += span.seconds
        return found

    def _op_rows(self) -> dict[str, Any]:
        found = self._measured_ops()
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
        if len(self.steps) > 1:
            return self._by_layer
        found: dict[tuple[str, str], float] = defaultdict(float)
        for span in self.steps[0].ops:
            found[span.layer, span.phase] += span.seconds
        return found

    def _layer_rows(self, n: int) -> dict[str, Any]:
        rows: dict[str, dict[str, float]] = defaultdict(dict)
        for (layer, phase), seconds in self._layer_seconds().items():
            if layer:
                rows[layer][f"{phase}_ms"] = _ms(seconds / n)
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
