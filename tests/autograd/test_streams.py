"""Streams and events: what ops run on, and that another stream waits without being told."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import (
    Event,
    Stream,
    Tape,
    Tensor,
    checkpoint,
    current_stream,
    ops,
    recording,
    run,
)
from entrenar.autograd import stream as stream_module
from entrenar.errors import ConfigError, CudaNotAvailableError, DeviceError
from entrenar.optable import call

Waits = list[tuple[Stream, Stream | None]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Collects (who waits, for whom)."""
    seen: Waits = []
    real = Stream.wait_event

    def wait_event(self: Stream, event: Event) -> None:
        seen.append((self, event.stream))
        real(self, event)

    monkeypatch.setattr(stream_module.Stream, "wait_event", wait_event)
    return seen


def streams_of(fn) -> list[Stream]:
    seen = []
    with runtime.listening(lambda launch: seen.append(launch.stream)):
        fn()
    return seen


def test_every_launch_names_its_stream() -> None:
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    main = Stream("cpu")

    def step() -> None:
        with Tape(main) as tape:
            y = ops.silu(ops.multiply(x, x))
        tape.backward(y, np.ones((2, 2)))

    streams = streams_of(step)
    assert len(streams) >= 4
    assert set(streams) == {main}
    assert all(isinstance(s, Stream) for s in streams_of(lambda: ops.silu(x)))


def test_backward_runs_on_the_stream_of_forward(waits: Waits) -> None:
    x = Tensor(np.ones(2), requires_grad=True)
    main, side = Stream("cpu"), Stream("cpu")
    with Tape(main) as tape:
        y = ops.silu(x)
        with side:
            z = ops.silu(y)
        w = ops.silu(z)
    outer = current_stream("cpu")
    assert waits == [
        (main, outer),  # the tape's stream forks from the surrounding one
        (main, outer),  # where x came from
        (side, main),  # entering a stream forks it too
        (side, main),  # y was written on main
        (main, side),  # and z on side
        (outer, main),  # the tape is joined
    ]
    waits.clear()
    seen: list[Stream] = []
    with runtime.listening(lambda launch: seen.append(launch.stream)):
        tape.backward(w, np.ones(2))
    assert seen == [main, side, main]
    # the side stream starts after what came before backward, and is joined at its end
    assert waits[:2] == [(main, outer), (side, main)]
    assert waits[-2:] == [(main, side), (outer, main)]
    assert (side, main) in waits[2:-2]


def test_an_op_on_another_stream_waits_for_the_last_write(waits: Waits) -> None:
    one, two = Stream("cpu"), Stream("cpu")
    with one:
        x = ops.scale(Tensor(np.ones(2)), 2.0)
        ops.scale(x, 1.0)
    outer = current_stream("cpu")
    assert waits == [(one, outer)]
    waits.clear()
    with two:
        ops.scale(x, 1.0)
        ops.scale(x, 1.0)
    assert waits == [(two, outer), (two, one)]  # a stream waits once for a write
    waits.clear()
    with two:
        ops.add_(x, Tensor(np.ones(2)))
    assert waits == [(two, outer)]  # one has read x, but only before the write that two waited for
    waits.clear()
    with one:
        y = ops.reshape(x.detach(), (2, 1))  # views share what they remember
        ops.scale(y, 1.0)
    assert waits == [(one, outer), (one, two)]


def test_a_write_waits_for_reads_on_other_streams(waits: Waits) -> None:
    one, two, three = Stream("cpu"), Stream("cpu"), Stream("cpu")
    x, y = Tensor(np.ones(2)), Tensor(np.ones(2))
    outer = current_stream("cpu")
    for stream in (one, two):
        with stream:
            ops.scale(x, 2.0)
    waits.clear()
    with three:
        ops.add_(x, y)
    assert waits[0] == (three, outer)
    assert set(waits[1:]) == {(three, outer), (three, one), (three, two)}
    waits.clear()
    with three:
        ops.add_(x, y)
    assert waits == [(three, outer)]  # nothing has happened elsewhere since


def test_raw_storage_and_quantised_weights_are_waited_for(waits: Waits) -> None:
    """What was made on one stream by an op is ordered also where only its storage is handed on."""
    one, two = Stream("cpu"), Stream("cpu")
    with one:
        dense = ops.scale(Tensor(np.ones((4, 64))), 2.0)
        weight = run("nf4_quantize", dense)
        ids = ops.cast(Tensor(np.zeros(3)), torch.float32).data  # any storage that an op made
    waits.clear()
    with two:
        run("nf4_dequantize", weight)
    assert set(waits[1:]) == {(two, one)}
    waits.clear()
    with two:
        run("scale", ids, 1.0)
        run("scale", ids[1:], 1.0)
    assert waits[1:] == [(two, one)]


def test_many_readers_are_joined_into_one(waits: Waits) -> None:
    x = torch.ones(2)
    readers = [Stream("cpu") for _ in range(100)]
    for stream in readers:
        call("scale", x, 1.0, stream=stream)
    writer = Stream("cpu")
    call("add_", x, torch.ones(2), stream=writer)
    after = {writer}  # who is waited for by the writer, through others too
    for stream, other in reversed(waits):
        if stream in after and other is not None:
            after.add(other)
    assert after >= set(readers)
    assert sum(stream is writer for stream, _ in waits) < 40


def test_one_leaf_written_by_two_streams(waits: Waits) -> None:
    x = Tensor(np.ones(2), requires_grad=True)
    x.grad = torch.zeros(2, dtype=torch.float64)
    main, side = Stream("cpu"), Stream("cpu")
    with Tape(main) as tape:
        a = ops.scale(x, 2.0)
        with side:
            b = ops.scale(x, 3.0)
        c = ops.add(a, b)
    waits.clear()
    tape.backward(c, np.ones(2))
    assert x.grad.tolist() == [5.0, 5.0]
    # side wrote the gradient first (it is later on the tape); main adds to it after
    assert (main, side) in waits


def test_streams_of_threads_are_their_own() -> None:
    seen = {}

    def other() -> None:
        seen["stream"], seen["recording"] = current_stream("cpu"), recording()

    mine = Stream("cpu")
    with Tape(mine):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert current_stream("cpu") is mine
        assert recording()
    assert seen["stream"] is not mine
    assert seen["recording"] is False


def test_two_tapes_in_two_threads_do_not_disturb_each_other() -> None:
    """Each has its tape, stream, hooks and checkpoints; they share frozen weights and the op table."""
    rng = np.random.default_rng(0)
    weight = Tensor(rng.standard_normal((16, 16)))
    inputs = [rng.standard_normal((8, 16)) for _ in range(2)]
    start = threading.Barrier(2)
    errors: list[str] = []

    def step(x: Tensor, w: Tensor, stream: Stream, hooked: list[float]) -> list[np.ndarray]:
        w.grad = None
        with Tape(stream, overwrite_activations=True) as tape:
            h = checkpoint(lambda a: ops.silu(ops.linear(a, weight)), ops.linear(x, w))
            h.register_hook(lambda g: hooked.append(float(g.numpy()[0, 0])))
            y = ops.multiply(h, h)
        tape.backward(y, np.ones(y.shape))
        assert w.grad is not None
        return [np.array(w.grad.numpy()), np.array([hooked[-1]])]

    def leaves(which: int) -> tuple[Tensor, Tensor]:
        return Tensor(inputs[which]), Tensor(np.eye(16) * (which + 1.0), requires_grad=True)

    wanted = [step(*leaves(i), Stream("cpu"), []) for i in range(2)]

    def work(which: int) -> None:
        stream, hooked = Stream("cpu"), []
        x, w = leaves(which)
        start.wait()
        for _ in range(50):
            got = step(x, w, stream, hooked)
            if not all(np.array_equal(a, b) for a, b in zip(got, wanted[which], strict=True)):
                errors.append(f"thread {which}: values")
        if set(streams[which]) != {stream} or len(hooked) != 50 or recording():
            errors.append(f"thread {which}: state")

    streams: list[list[Stream]] = [[], []]
    threads = [threading.Thread(target=work, args=(i,), name=str(i)) for i in range(2)]

    def note(launch: runtime.LaunchRecord) -> None:
        streams[int(threading.current_thread().name)].append(launch.stream)

    with runtime.listening(note):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(streams[0]) == len(streams[1]) > 300


def test_blocks_nest_and_are_left_on_errors() -> None:
    outer, inner = Stream("cpu"), Stream("cpu")
    before = current_stream("cpu")
    with outer:
        with inner:
            assert current_stream("cpu") is inner
        assert current_stream("cpu") is outer
    with pytest.raises(KeyError), outer, inner:
        raise KeyError
    assert current_stream("cpu") is before


def test_events_number_themselves() -> None:
    stream = Stream("cpu")
    first, second = stream.record_event(), Event().record(stream)
    assert (first.position, second.position) == (1, 2)
    assert second.stream is stream
    assert second.query()
    second.synchronize()
    stream.synchronize()
    with pytest.raises(DeviceError, match="never recorded"):
        stream.wait_event(Event())


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="wanted auto, cpu, cuda"):
        Stream("gpu")
    if not runtime.cuda_available():
        with pytest.raises(CudaNotAvailableError):
            Stream("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_chain_over_two_streams_on_a_gpu() -> None:
    """Two streams, no synchronisation by the caller: the values and gradients are those of one."""
    main, side = Stream("cuda"), Stream("cuda")
    assert main != side
    x = Tensor(torch.ones((1 << 22,), device="cuda"), requires_grad=True)
    torch.cuda.synchronize()
    with Tape(main) as tape:
        y = x
        for i in range(20):
            with side if i % 2 else main:
                y = ops.add(y, y)
        loss = ops.reshape(y, (-1,))
    tape.backward(loss, Tensor(torch.ones_like(loss.data)))
    main.synchronize()
    assert x.grad is not None
    assert float(y.data.min()) == float(y.data.max()) == 2.0**20
    assert float(x.grad.min()) == float(x.grad.max()) == 2.0**20


def test_operations_on_streams_are_announced() -> None:
    one, two = Stream("cpu"), Stream("cpu")
    memory = torch.zeros(2)
    seen: list[runtime.SyncRecord] = []
    with runtime.listening(on_sync=seen.append):
        event = one.record_event()
        two.wait_event(event)
        event.synchronize()
        two.synchronize()
        two.keep(memory)
        two.wait_stream(two)  # of its own work nothing needs to be said
    assert not runtime.has_sync_listeners()
    assert [(r.kind, r.stream, r.event) for r in seen] == [
        ("record", one, event),
        ("wait", two, event),
        ("synchronize", one, event),
        ("synchronize", two, None),
        ("keep", two, None),
    ]
    assert seen[-1].storage is memory
