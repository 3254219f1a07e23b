"""The step profiler: whose time it was, what is warm-up, that it costs nothing while it is off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar import InstructConfig, InstructPipeline, runtime
from entrenar.finetune import profiler as module
from entrenar.finetune.instruct_pipeline.profiled import weight_owners
from entrenar.finetune.profiler import HostMarks, StepProfiler


class Device:
    """A device that works off what it was given, while the host goes on; events lie in its queue."""

    def __init__(self) -> None:
        self.host = 0.0
        self.busy_until = 0.0
        self.settled = 0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.busy_until)

    # marks

    def mark(self, stream: Any) -> float:
        return max(self.busy_until, self.host)

    def settle(self) -> None:
        self.settled += 1
        self.wait()

    def seconds(self, mark: float) -> float:
        return mark


def phases(profiler: StepProfiler, step: int = -1) -> dict[str, float]:
    return {span.name: span.seconds for span in profiler.steps[step].phases}


def test_time_belongs_to_the_phase_that_gave_the_work() -> None:
    """https://github.com/brian-team/brian2cuda/issues/57"""
    device = Device()
    profiler = StepProfiler(marks=device)
    with profiler.step(1):
        with profiler.phase("a"):
            device.launch(0.1)
        with profiler.phase("b"):
            device.wait()
    assert phases(profiler) == pytest.approx({"a": 0.1, "b": 0.0})


def test_every_phase_of_every_step_has_its_own() -> None:
    """https://github.com/sgl-project/sglang/issues/34124: the tail of one was charged to the next."""
    device = Device()
    profiler = StepProfiler(marks=device)
    for number in (1, 2, 3):
        with profiler.step(number):
            for name, seconds in (("a", 0.01), ("b", 0.02), ("c", 0.03)):
                with profiler.phase(name):
                    device.launch(seconds)
    for step in range(3):
        assert phases(profiler, step) == pytest.approx({"a": 0.01, "b": 0.02, "c": 0.03})
    assert profiler.report()["coverage"] == pytest.approx(1.0, abs=0.05)
    assert device.settled == 3  # the device is waited for once a step


def test_warm_up_is_reported_apart() -> None:
    """https://github.com/arbor-sim/arbor/issues/188"""
    now = [0.0]
    profiler = StepProfiler(marks=HostMarks(lambda: now[0]))
    for number in range(10):
        with profiler.step(number), profiler.phase("a"):
            now[0] += 0.01 if number else 1.0
    found = profiler.report()
    assert found["warm_up_ms"] == pytest.approx(1000)
    assert found["steps"] == 9
    assert found["step_ms"]["mean_ms"] == pytest.approx(10)
    assert found["phases"]["a"]["p99_ms"] == pytest.approx(10)
    assert "9 steps of 10.0 ms, the first 1000.0 ms apart" in profiler.table()


def test_percentiles_and_what_no_phase_covers() -> None:
    now = [0.0]
    profiler = StepProfiler(marks=HostMarks(lambda: now[0]))
    for number in range(102):
        with profiler.step(number):
            with profiler.phase("a"):
                now[0] += max(number - 1, 0) / 1000  # 0 to 100 ms
            now[0] += 0.05
    found = profiler.report()["phases"]
    assert [found["a"][f"{name}_ms"] for name in ("p50", "p95", "p99")] == pytest.approx(
        [50, 95, 99]
    )
    assert found["other"]["mean_ms"] == pytest.approx(50)
    assert found["other"]["share"] == pytest.approx(0.5)


def record(op: str, where: str, *reads: Any, stream: Any = None) -> runtime.LaunchRecord:
    return runtime.LaunchRecord(op, stream, reads, (), where)


class Weight:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_ops_and_layers_on_the_host() -> None:
    """NumPy is announced when it is done: an op has the time since what came before."""
    now = [0.0]
    owners = {1: "embed_tokens", 2: "layer 0", 3: "layer 1"}
    profiler = StepProfiler(owners, HostMarks(lambda: now[0]))
    with profiler.step(1):
        now[0] += 5  # before the phase: nobody's
        with profiler.phase("forward"):
            for op, seconds, reads in (
                ("embedding", 1, [Weight(1)]), ("gemm", 2, [Weight(9), Weight(2)]), ("silu", 3, []),
                ("gemm", 4, [Weight(3)]),
            ):  # fmt: skip
                now[0] += seconds
                runtime.announce(record(op, "numpy", *reads))
    found = profiler.report()
    assert {name: row["mean_ms"] for name, row in found["ops"].items()} == {
        "gemm": 6000, "silu": 3000, "embedding": 1000,
    }  # fmt: skip
    assert found["ops"]["gemm"]["launches"] == 2
    assert found["layers"] == {
        "layer 0": {"forward_ms": 5000}, "layer 1": {"forward_ms": 4000},
        "embed_tokens": {"forward_ms": 1000},
    }  # fmt: skip
    assert found["phases"]["other"]["mean_ms"] == 5000
    assert found["hot_layers"] == []


def test_ops_on_a_device() -> None:
    """A kernel is announced before it starts: an op has the time until what comes after on its stream."""
    device = Device()
    profiler = StepProfiler({2: "layer 0"}, device)
    main, side = object(), object()
    with profiler.step(1, main), profiler.phase("forward"):
        for op, seconds, stream in (("a", 0.1, main), ("b", 0.2, main), ("c", 0.3, side)):
            runtime.announce(record(op, "cuda", Weight(2), stream=stream))
            device.launch(seconds)
    spans = {span.name: span for span in profiler.steps[0].ops}
    assert spans["a"].seconds == pytest.approx(0.1)
    assert spans["b"].seconds == pytest.approx(0.5)  # until the phase ends: no event lies between
    assert spans["c"].seconds == pytest.approx(0.3)
    assert (spans["a"].lane, spans["c"].lane) == (1, 2)
    assert spans["b"].start == pytest.approx(0.1)


def test_hot_layers() -> None:
    now = [0.0]
    profiler = StepProfiler({n: f"layer {n}" for n in range(1, 5)}, HostMarks(lambda: now[0]))
    with profiler.step(1), profiler.phase("forward"):
        for layer, seconds in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 4.0)):
            now[0] += seconds
            runtime.announce(record("gemm", "numpy", Weight(layer)))
    assert profiler.report()["hot_layers"] == ["layer 4"]


def test_an_error_inside_a_step_leaves_no_listener() -> None:
    profiler = StepProfiler()
    with pytest.raises(KeyError), profiler.step(1), profiler.phase("a"):
        raise KeyError
    assert not runtime.has_listeners()


def test_no_step_at_all() -> None:
    assert StepProfiler().report() == {"steps": 0}
    assert StepProfiler().table() == "no step was profiled"


# in the pipeline


def pipeline(model: Path, **more: Any) -> InstructPipeline:
    return InstructPipeline.from_pretrained(
        model, InstructConfig(lora_rank=2, max_seq_len=32, device="cpu", **more)
    )


def test_off_reads_no_clock_and_has_no_listener(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the profiler was used")

    for name in ("mark", "settle", "seconds"):
        monkeypatch.setattr(HostMarks, name, never)
    monkeypatch.setattr(module.StepProfiler, "phase", never)
    off = pipeline(tiny_model)
    heard: list[bool] = []
    update = InstructPipeline._update
    monkeypatch.setattr(
        InstructPipeline, "_update",
        lambda self, *rest: (heard.append(runtime.has_listeners()), update(self, *rest))[1],
    )  # fmt: skip
    off.train_step([4, 5], [6, 2])
    assert heard == [False]
    assert off.profiler is None


@pytest.mark.parametrize("nf4", [False, True])
def test_every_nth_step_is_profiled_and_changes_nothing(tiny_model: Path, nf4: bool) -> None:
    plain = pipeline(tiny_model, quantize_nf4=nf4)
    profiled = pipeline(tiny_model, quantize_nf4=nf4, profile_interval=2)
    for _ in range(5):
        losses = [p.train_step([4, 5], [6, 7, 2]).loss for p in (plain, profiled)]
        assert losses[0] == losses[1]
    assert profiled.profiler is not None
    assert [step.number for step in profiled.profiler.steps] == [2, 4]
    found = profiled.profiler.report()
    names = {"zero", "data", "forward", "backward", "reduce", "clip", "optimiser", "other"}
    assert set(found["phases"]) == names
    assert found["coverage"] > 0.8
    assert {"layer 0", "layer 1"} <= set(found["layers"])
    for layer in ("layer 0", "layer 1"):  # and no part of the optimiser
        assert set(found["layers"][layer]) == {"forward_ms", "backward_ms"}
    inside = sum(row["mean_ms"] for row in found["ops"].values())
    assert inside <= found["step_ms"]["mean_ms"] * 1.001
    assert found["ops"]["adamw_step"]["launches"] == 1


def test_clipping_has_its_phase(tiny_model: Path) -> None:
    """https://github.com/openvla/openvla/issues/334: the setting was there, and never applied."""
    profiled = pipeline(tiny_model, profile_interval=1, gradient_clip_norm=0.1)
    profiled.train_step([4, 5], [6, 2])
    assert profiled.profiler is not None
    (step,) = profiled.profiler.steps
    assert [span.name for span in step.ops if span.phase == "clip"] == ["clip_factor"]


def test_weights_have_owners(tiny_model: Path) -> None:
    owners = weight_owners(pipeline(tiny_model).model)
    assert set(owners.values()) == {"embed_tokens", "norm", "layer 0", "layer 1"}
    assert len(owners) == 2 * 9 + 2


def test_the_trace_is_one_that_viewers_read(tiny_model: Path, tmp_path: Path) -> None:
    """The trace event format: complete events with microseconds, and a name for each thread."""
    profiled = pipeline(tiny_model, profile_interval=1)
    for _ in range(2):
        profiled.train_step([4, 5], [6, 7, 2])
    assert profiled.profiler is not None
    profiled.profiler.write(tmp_path / "profile.json", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {span["tid"] for span in spans} == set(names)
    assert names[0] == "phases"
    step = profiled.profiler.steps[-1]
    for span in spans:
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert span["ts"] + span["dur"] <= 1e6 * step.seconds + 1
        assert span["args"]["step"] == 2
    outer = {span["name"]: span for span in spans if span["cat"] == "phase"}
    for span in spans:
        if span["cat"] == "op":
            around = outer[span["args"]["phase"]]
            assert around["ts"] - 1 <= span["ts"]
            assert span["ts"] + span["dur"] <= around["ts"] + around["dur"] + 1
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 1
