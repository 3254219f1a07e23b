"""Filling ahead: what is read is right, each side waits for what it must and for no more."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import (
    DecodeAhead,
    Event,
    Prefetcher,
    Stream,
    Tape,
    Tensor,
    current_stream,
    loaded_ahead,
    ops,
    run,
    upload,
)
from entrenar.autograd.hazards import detect_hazards
from entrenar.autograd.prefetch import Room
from entrenar.errors import AutogradError, StreamHazardError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call

Wait = tuple[Stream, Stream | None, int]


def doubled(item: torch.Tensor, room: Room) -> torch.Tensor:
    out = room(item.shape, item.dtype)
    return call("scale", item, 2.0, out=out, stream=current_stream("cpu"))


def items(count: int, size: int = 5) -> list[torch.Tensor]:
    return [torch.full((size,), float(i)) for i in range(count)]


def pipelined(prefetcher: Prefetcher, values: list[torch.Tensor], main: Stream) -> list[Any]:
    """Read each item while the next is being filled."""
    results = []
    with main:
        for i, value in enumerate(values):
            with prefetcher.take(i, value) as data:
                if i + 1 < len(values):
                    assert prefetcher.start(i + 1, values[i + 1])
                results.append(run("add", data, data))
    return results


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_reader_gets_its_item(slots: int) -> None:
    values = items(7)
    prefetcher = Prefetcher(doubled, "cpu", slots)
    main = Stream("cpu")
    with detect_hazards(), main:
        results = []
        for i, value in enumerate(values):
            with prefetcher.take(i, value) as data:
                prefetcher.start(i + 1, values[(i + 1) % 7])
                results.append(run("add", data, data))
    assert [r.numpy().tolist() for r in results] == [[4.0 * i] * 5 for i in range(7)]


def test_each_side_waits_for_exactly_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Wait] = []
    real = Stream.wait_event

    def wait_event(self: Stream, event: Event) -> None:
        waits.append((self, event.stream, event.position))
        real(self, event)

    prefetcher = Prefetcher(doubled, "cpu")
    side, main = prefetcher.stream, Stream("cpu")
    values = [Tensor(v).data for v in items(6)]
    with side:  # so that the items' own origin is waited for already
        for value in values:
            run("scale", value, 1.0)
    monkeypatch.setattr(Stream, "wait_event", wait_event)
    filled: list[int] = []
    read: list[int] = []
    with main:
        for i, value in enumerate(values):
            waits.clear()
            with prefetcher.take(i, value) as data:
                filled += [side.position] if i == 0 else []
                # the reader waits for the end of this fill, and not for the next, which is given
                assert waits[-1] == (main, side, filled[i])
                waits.clear()
                if i + 1 < len(values):
                    prefetcher.start(i + 1, values[i + 1])
                    filled.append(side.position)
                    # the fill waits for the reader before last, of the same slot, and for no later one
                    assert waits == ([(side, main, read[i - 1])] if i >= 1 else [])
                waits.clear()
                run("add", data, data)
                assert waits == []
            read.append(main.position)


@pytest.mark.parametrize("lost", ["fill", "read"])
def test_a_missing_wait_either_way_is_a_hazard(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/paiml/aprender/issues/2251: found without a GPU, and every time."""
    prefetcher = Prefetcher(doubled, "cpu")
    main = Stream("cpu")
    waiter, other = (main, prefetcher.stream) if lost == "fill" else (prefetcher.stream, main)
    real = Stream.wait_event

    def wait_event(self: Stream, event: Event) -> None:
        if not (self is waiter and event.stream is other):
            real(self, event)

    kind = "read after write" if lost == "fill" else "write after read"
    values = items(4)
    with detect_hazards():
        pipelined(prefetcher, values, main)
    monkeypatch.setattr(Stream, "wait_event", wait_event)
    prefetcher = Prefetcher(doubled, "cpu")
    waiter, other = (main, prefetcher.stream) if lost == "fill" else (prefetcher.stream, main)
    with pytest.raises(StreamHazardError, match=kind), detect_hazards():
        pipelined(prefetcher, values, main)


def test_scratch_grows_to_the_largest_and_is_used_again() -> None:
    addresses = []

    def fill(item: torch.Tensor, room: Room) -> torch.Tensor:
        out = room(item.shape, item.dtype).copy_(item)
        addresses.append(out.data_ptr())
        return out

    prefetcher = Prefetcher(fill, "cpu", slots=1)
    sizes = [4, 100, 7, 100, 0]
    for i, size in enumerate(sizes):
        value = torch.arange(size, dtype=torch.float64)
        with prefetcher.take(i, value) as data:
            assert torch.equal(data, value)
    assert addresses[1] == addresses[2] == addresses[3]


def test_what_was_started_in_vain_gives_way() -> None:
    prefetcher = Prefetcher(doubled, "cpu")
    a, b, c = items(3)
    assert prefetcher.start("a", a)
    assert prefetcher.start("a", a)  # is there already
    assert prefetcher.start("b", b)
    assert not prefetcher.start("c", c)
    with prefetcher.take("c", c) as data:
        assert data.tolist() == [4.0] * 5
        with prefetcher.take("a", a) as other:
            assert other.tolist() == [0.0] * 5
            with pytest.raises(AutogradError, match="all 2 slots are being read"):
                prefetcher.take("b", b).__enter__()


def test_an_error_while_filling_leaves_the_slot_free() -> None:
    def fill(item: torch.Tensor, room: Room) -> torch.Tensor:
        if item is bad:
            raise ValueError("broken")
        return doubled(item, room)

    bad, good = items(2)
    before = current_stream("cpu")
    prefetcher = Prefetcher(fill, "cpu", slots=1)
    with pytest.raises(ValueError, match="broken"):
        prefetcher.start("bad", bad)
    assert current_stream("cpu") is before
    with prefetcher.take("good", good) as data:
        assert data.tolist() == [2.0] * 5


# decoding ahead

RNG = np.random.default_rng(2)
SHAPES = [(8, 16), (24, 8), (16, 24)]


def weights() -> list[NF4Weight]:
    made = [torch.from_numpy(RNG.standard_normal(s).astype(np.float32)) for s in SHAPES]
    return [call("nf4_quantize", w, double_quant=i == 1) for i, w in enumerate(made)]


def step(
    held: list[NF4Weight], ahead: DecodeAhead | None, stream: Stream, x: np.ndarray
) -> list[torch.Tensor]:
    """A chain of frozen layers, an adapter on the last; returns the result and both gradients."""
    leaf = Tensor(x, requires_grad=True)
    a = Tensor(np.linspace(-1, 1, 2 * 24, dtype=np.float32).reshape(2, 24), requires_grad=True)
    b = Tensor(np.linspace(-1, 1, 16 * 2, dtype=np.float32).reshape(16, 2), requires_grad=True)
    if ahead is not None:
        ahead.begin()
    with Tape(stream) as tape:
        h = ops.nf4_linear(leaf, held[0], ahead=ahead)
        h = ops.nf4_linear(ops.silu(h), held[1], ahead=ahead)
        y = ops.lora_linear(h, held[2], a, b, 0.5, dropout_p=0.25, seed=1, ahead=ahead)
    tape.backward(y, np.ones(y.shape, np.float32))
    return [y.data, *(t.grad for t in (leaf, a, b) if t.grad is not None)]


def test_decoding_ahead_changes_no_result_and_has_no_hazard() -> None:
    held, x = weights(), RNG.standard_normal((5, 16)).astype(np.float32)
    main, ahead = Stream("cpu"), DecodeAhead("cpu")
    plain = step(held, None, main, x)
    with detect_hazards() as detector:
        for _ in range(3):
            got = step(held, ahead, main, x)
            assert len(got) == len(plain) == 4
            for mine, wanted in zip(got, plain, strict=True):
                # both decode to the same values; sums of at most 24 terms run in another order
                torch.testing.assert_close(mine, wanted, rtol=24 * 2.0**-23, atol=24 * 2.0**-23)
    assert detector.launches > 30


def test_the_order_of_the_pass_before_is_followed() -> None:
    held, x = weights(), RNG.standard_normal((5, 16)).astype(np.float32)
    main, ahead = Stream("cpu"), DecodeAhead("cpu")

    def decodes(chain: list[NF4Weight]) -> tuple[list[str], list[Stream]]:
        seen: list[runtime.LaunchRecord] = []
        with runtime.listening(seen.append):
            step(chain, ahead, main, x)
        kinds = [r.op for r in seen if "nf4" in r.op or "matmul" in r.op or r.op.startswith("lora")]
        return kinds, [r.stream for r in seen if r.op == "nf4_dequantize"]

    d, m = "nf4_dequantize", "matmul"
    late = [d, m, d, m, d, "lora_forward", d, "lora_backward", d, m, d, m]
    early = [d, d, m, d, m, d, "lora_forward", d, "lora_backward", d, m, m]
    first, streams = decodes(held)
    assert first == late
    assert len(set(streams)) == 1
    assert streams[0] != main
    assert decodes(held)[0] == early
    assert decodes(held)[0] == early
    # another model's weights: nothing is decoded in vain but the first guess
    other = weights()
    kinds, _ = decodes(other)
    assert kinds.count(d) <= 7
    assert decodes(other)[0] == early


@pytest.mark.skipif(not runtime.triton_available(), reason="triton is not installed")
def test_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are decoded ahead by the kernels the product uses itself; few are left to it."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    w = call("nf4_quantize", torch.from_numpy(RNG.standard_normal((16, 64)).astype(np.float32)))
    ahead = DecodeAhead("cpu")
    for rows in (65, 64):
        x = RNG.standard_normal((rows, 64)).astype(np.float32)
        results = []
        for used in (None, ahead, ahead):
            leaf, ops_seen = Tensor(x, requires_grad=True), []
            ahead.begin()
            with runtime.listening(lambda r, seen=ops_seen: seen.append(r.op)), Tape() as tape:
                y = ops.nf4_linear(leaf, w, ahead=used)
                tape.backward(y, np.ones(y.shape, np.float32))
            assert ("nf4_dequantize" in ops_seen) == (rows == 65)
            assert leaf.grad is not None
            results.append((y.data, leaf.grad))
        for y, grad in results[1:]:
            assert torch.equal(y, results[0][0])
            assert torch.equal(grad, results[0][1])


def test_two_threads_share_one() -> None:
    held = weights()
    ahead = DecodeAhead("cpu")
    inputs = [RNG.standard_normal((5, 16)).astype(np.float32) for _ in range(2)]
    wanted = [step(held, None, Stream("cpu"), x) for x in inputs]
    errors: list[str] = []

    def work(which: int) -> None:
        stream = Stream("cpu")
        for _ in range(20):
            for mine, want in zip(
                step(held, ahead, stream, inputs[which]), wanted[which], strict=True
            ):
                if not torch.allclose(mine, want, rtol=1e-5, atol=1e-5):
                    errors.append(f"thread {which}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# loading ahead


@dataclasses.dataclass
class Batch:
    name: str
    ids: torch.Tensor
    more: dict[str, torch.Tensor]


def test_loading_ahead_keeps_order_and_copies_the_host_buffer() -> None:
    """https://github.com/meta-pytorch/torchrec/issues/4231: the source was rewritten during the copy."""
    buffer = np.zeros(3, np.float32)
    loaded: list[str] = []

    def numbered() -> Iterator[int]:
        for i in range(4):
            buffer[:] = i  # one host buffer for every batch
            yield i

    def load(i: int) -> Batch:
        loaded.append(f"load {i}")
        return Batch(str(i), upload(buffer, "cpu"), {"twice": upload(2 * buffer, "cpu")})

    seen = []
    with detect_hazards() as detector, Stream("cpu"):
        for batch in loaded_ahead(numbered(), load, Stream("cpu")):
            loaded.append(f"use {batch.name}")
            total = run("add", batch.ids, batch.more["twice"])
            seen.append(total.numpy().tolist())
        assert detector.waits >= 4
    assert seen == [[3.0 * i] * 3 for i in range(4)]
    assert loaded == [
        "load 0", "load 1", "use 0", "load 2", "use 1", "load 3", "use 2", "use 3",
    ]  # fmt: skip
    assert list(loaded_ahead([], load, Stream("cpu"))) == []
    assert len(list(loaded_ahead([7], load, Stream("cpu")))) == 1


def test_the_reader_waits_for_its_batch_and_not_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[Wait] = []
    real = Stream.wait_event

    def wait_event(self: Stream, event: Event) -> None:
        waits.append((self, event.stream, event.position))
        real(self, event)

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    main = Stream("cpu")
    with main:
        waits.clear()
        for _ in loaded_ahead(range(3), lambda i: (torch.ones(2), [torch.ones(i)]), Stream("cpu")):
            pass
    assert [(stream, position) for stream, _, position in waits] == [
        (main, 1), (main, 1), (main, 2), (main, 2), (main, 3), (main, 3),
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pipeline_on_a_gpu() -> None:
    values = [torch.full((1 << 22,), float(i), device="cuda") for i in range(8)]

    def fill(item: torch.Tensor, room: Room) -> torch.Tensor:
        out = room(item.shape, item.dtype)
        return call("scale", item, 2.0, out=out, stream=current_stream("cuda"))

    prefetcher, main = Prefetcher(fill, "cuda"), Stream("cuda")
    results = pipelined(prefetcher, [Tensor(v).data for v in values], main)
    main.synchronize()
    for i, result in enumerate(results):
        assert float(result.data.min()) == float(result.data.max()) == 4.0 * i
