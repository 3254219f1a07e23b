"""Hazards: pairs without an order are found whatever the timing, ordered ones never reported."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Event, Stream
from entrenar.autograd.hazards import Hazard, detect_hazards
from entrenar.errors import StreamHazardError


def launch(op: str, stream: Stream, reads=(), writes=()) -> None:
    """Announce a launch as a launcher does; what it computes does not matter here."""
    runtime.announce(runtime.LaunchRecord(op, stream, tuple(reads), tuple(writes), "numpy"))


@pytest.fixture
def streams() -> tuple[Stream, Stream]:
    return Stream("cpu"), Stream("cpu")


KINDS = {
    "read after write": ("writes", "reads"),
    "write after read": ("reads", "writes"),
    "write after write": ("writes", "writes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_and_named(kind: str, streams: tuple[Stream, Stream]) -> None:
    """https://github.com/paiml/aprender/issues/2251: a product read what another stream still wrote."""
    one, two = streams
    x = torch.zeros(4, 6)
    first, second = KINDS[kind]
    with detect_hazards({"activations": x}):
        launch("rms_norm_forward", one, **{first: [x]})
        with pytest.raises(StreamHazardError) as caught:
            launch("gemm_forward", two, **{second: [x]})
    hazard = caught.value.hazard
    assert isinstance(hazard, Hazard)
    assert (hazard.kind, hazard.first.stream, hazard.second.stream) == (kind, one, two)
    text = str(caught.value)
    for part in (kind, "rms_norm_forward", "gemm_forward", "float32 (4, 6) 'activations'"):
        assert part in text
    assert "stream 1" in text
    assert "stream 2" in text
    assert text.count("test_hazards.py:") == 2


def test_two_reads_need_no_order(streams: tuple[Stream, Stream]) -> None:
    x = torch.zeros(4)
    with detect_hazards():
        for stream in streams:
            launch("add", stream, [x])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["event", "stream", "host", "event on the host", "third stream"])
def test_whatever_orders_is_understood(kind: str, how: str, streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x = torch.zeros(4)
    first, second = KINDS[kind]
    with detect_hazards():
        launch("a", one, **{first: [x]})
        if how == "event":
            two.wait_event(one.record_event())
        elif how == "stream":
            two.wait_stream(one)
        elif how == "host":
            one.synchronize()
        elif how == "event on the host":
            one.record_event().synchronize()
        else:
            between = Stream("cpu")
            between.wait_stream(one)
            two.wait_stream(between)
        launch("b", two, **{second: [x]})


@pytest.mark.parametrize("how", ["too early", "the wrong way", "another stream", "recorded again"])
def test_what_only_looks_ordered_is_found(how: str, streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x = torch.zeros(4)
    with detect_hazards():
        early = one.record_event()
        launch("a", one, writes=[x])
        if how == "too early":
            two.wait_event(early)
        elif how == "the wrong way":
            one.wait_stream(two)
        elif how == "another stream":
            Stream("cpu").wait_stream(one)
        else:
            event = one.record_event()
            event.record(two)  # the newest recording is the one that counts
            two.wait_event(event)
        with pytest.raises(StreamHazardError, match="read after write"):
            launch("b", two, [x])


def test_ranges_decide_not_buffers(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    flat = torch.zeros(100)
    square = flat.view(10, 10)
    apart = [
        (flat[:50], flat[50:]), (square[:, :5], square[:, 5:]), (flat[::2], flat[1::2]),
        (square[2:4, :3], square[4:6, 3:]), (flat[10:10], flat), (square[:, 1], square[:, 2]),
        # six elements over six places, of which four are never touched
        (flat.as_strided((2, 3), (5, 0), 21), flat.as_strided((3, 1), (6, 4), 12)),
    ]  # fmt: skip
    for a, b in apart:
        with detect_hazards():
            launch("a", one, writes=[a])
            launch("b", two, writes=[b])
    together = [
        (flat[:51], flat[50:]), (square[:, :6], square[:, 5:]), (flat[::2], flat[2::4]),
        (square.t()[3], square[7]), (flat[99:], square), (flat.view(torch.int32), flat[3:4]),
        (square[0, :1].expand(7), flat),
    ]  # fmt: skip
    for a, b in together:
        with detect_hazards():
            launch("a", one, writes=[a])
            with pytest.raises(StreamHazardError):
                launch("b", two, [b])


def test_overlap_agrees_with_marking_bytes(streams: tuple[Stream, Stream], counts) -> None:
    """Random strided views: reported exactly where the sets of elements meet."""
    rng = np.random.default_rng(0)
    one, two = streams
    flat = torch.zeros(72)  # the farthest element is 23 + 3 * 8 + 3 * 8

    def view() -> torch.Tensor:
        rows, cols = (int(n) for n in rng.integers(1, 5, 2))
        strides = tuple(int(s) for s in rng.integers(0, 9, 2))
        return torch.as_strided(flat, (rows, cols), strides, int(rng.integers(0, 24)))

    def elements(t: torch.Tensor) -> set[int]:
        return {
            t.storage_offset() + i * t.stride(0) + j * t.stride(1)
            for i in range(t.shape[0])
            for j in range(t.shape[1])
        }

    meetings = 0
    for _ in range(counts(200, 5000)):
        a, b = view(), view()
        found = False
        try:
            with detect_hazards():
                launch("a", one, writes=[a])
                launch("b", two, [b])
        except StreamHazardError:
            found = True
        meetings += found
        assert found == bool(elements(a) & elements(b)), (a.stride(), b.stride())
    assert meetings > 20


def test_a_later_access_does_not_hide_an_earlier_one(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x = torch.zeros(8)
    with detect_hazards():
        launch("whole", one, writes=[x])
        event = one.record_event()
        launch("part", one, writes=[x[:4]])
        two.wait_event(event)
        launch("rest", two, [x[4:]])
        with pytest.raises(StreamHazardError) as caught:
            launch("all", two, [x])
    assert (caught.value.hazard.first.op, caught.value.hazard.second.op) == ("part", "all")


def test_memory_freed_under_another_stream_is_found(streams: tuple[Stream, Stream]) -> None:
    """https://github.com/meta-pytorch/torchrec/issues/4231: a buffer reused before its copy ended."""
    one, two = streams

    def use() -> None:
        x = torch.zeros(16)
        launch("make", one, writes=[x])
        two.wait_stream(one)
        launch("copy", two, [x])

    watching = detect_hazards()
    watching.__enter__()
    use()
    with pytest.raises(StreamHazardError, match=r"freed to stream 1 .* while copy on stream 2"):
        watching.__exit__(None, None, None)
    with detect_hazards():
        use()
        with pytest.raises(StreamHazardError, match="is freed"):
            launch("next", one)


@pytest.mark.parametrize("how", ["keep", "join", "host"])
def test_memory_freed_in_order_is_not_reported(how: str, streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    with detect_hazards():
        x = torch.zeros(16)
        launch("make", one, writes=[x])
        two.wait_stream(one)
        launch("copy", two, [x])
        if how == "keep":
            two.keep(x)
        elif how == "join":
            one.wait_stream(two)
        else:
            two.synchronize()
        del x
        launch("next", one)


def test_a_new_buffer_at_an_old_address_has_no_history(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    array = np.zeros(1024, dtype=np.float32)  # two storages, one after the other, at one address
    with detect_hazards():
        for stream in (one, two):
            x = torch.from_numpy(array)
            launch("make", stream, writes=[x])
            del x


def test_two_storages_over_one_array_are_one_buffer(streams: tuple[Stream, Stream]) -> None:
    array = np.zeros(16, dtype=np.float32)
    with detect_hazards():
        a, b = torch.from_numpy(array), torch.from_numpy(array[8:])
        launch("a", streams[0], writes=[a])
        with pytest.raises(StreamHazardError, match="read after write"):
            launch("b", streams[1], [b])


def test_the_host_orders_only_the_thread_that_waited(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x = torch.zeros(4)
    ready, waited = threading.Event(), threading.Event()
    with detect_hazards():
        launch("start", two)

        def other() -> None:
            launch("own", Stream("cpu"))
            ready.wait()
            one.synchronize()
            waited.set()

        thread = threading.Thread(target=other)
        thread.start()
        launch("write", one, writes=[x])
        ready.set()
        waited.wait()
        with pytest.raises(StreamHazardError):
            launch("read", two, [x])
        thread.join()


def test_a_thread_starts_after_what_was_waited_for(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x = torch.zeros(4)
    with detect_hazards():
        launch("write", one, writes=[x])
        one.synchronize()
        thread = threading.Thread(target=launch, args=("read", two, [x]))
        thread.start()
        thread.join()


def test_nothing_is_watched_outside_the_block(streams: tuple[Stream, Stream]) -> None:
    x = torch.zeros(4)
    with detect_hazards():
        launch("a", streams[0], writes=[x])
    launch("b", streams[1], [x])
    assert not runtime.has_listeners()
    assert not runtime.has_sync_listeners()
    gc.collect()


def test_events_from_before_the_block_order_nothing_of_it(streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    x, event = torch.zeros(4), Event().record(one)
    with detect_hazards():
        launch("a", one, writes=[x])
        two.wait_event(event)
        with pytest.raises(StreamHazardError):
            launch("b", two, [x])
