"""Work ahead on a side stream: fill scratch that the main one reads next, or load what it reads next.

On a GPU the two overlap; on the CPU the same program runs in order. Orderings go both ways: a reader
waits for the fill of its slot and for nothing that the side stream was given later, and a fill waits for
the last reader of the slot and for nothing that the main stream was given later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from entrenar import runtime
from entrenar.autograd.stream import Stream, current_stream
from entrenar.errors import AutogradError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call
from entrenar.optable.storage import state_of

__all__ = ["DecodeAhead", "Prefetcher", "loaded_ahead", "upload"]

Room = Callable[[Sequence[int], torch.dtype], torch.Tensor]
Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


class _Slot:
    """Scratch for one item: a buffer that grows to the largest."""

    def __init__(self, stream: Stream) -> None:
        self.key: Hashable | None = None
        self.busy = False
        self.data: torch.Tensor | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=stream.device)
        self._stream = stream

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return scratch of a shape, which work on the side stream may write."""
        count = math.prod(shape) * dtype.itemsize
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=torch.uint8, device=self._buffer.device)
        state_of(self._buffer).writing(self._stream, self._buffer)
        return self._buffer[:count].view(dtype).view(*shape)


class Prefetcher:
    """Fills slots of scratch on a side stream, ahead of the stream that reads them.

    ``start(key, item)`` has a slot filled; ``with take(key, item) as data:`` lets the current stream
    read it, filling it first where it was not started. One thread uses a prefetcher at a time.

    Args:
        fill: ``fill(item, room)`` runs on the side stream. It writes into ``room(shape, dtype)`` and
            returns it. What it reads it gets from ops, which wait by themselves, or from the host.
        device: Where the scratch lies.
        slots: How many items are held at once: the one being read, and those filled ahead.

    Attributes:
        stream: The side stream.
    """

    def __init__(
        self, fill: Callable[[Any, Room], torch.Tensor], device: str | torch.device, slots: int = 2
    ) -> None:
        self.stream = Stream(device)
        self._fill = fill
        self._slots = [_Slot(self.stream) for _ in range(slots)]

    def start(self, key: Hashable, item: Any) -> bool:
        """Fill a slot with ``item``, unless all are being read or hold what was not taken yet."""
        if any(slot.key == key and not slot.busy for slot in self._slots):
            return True
        slot = next((s for s in self._slots if s.key is None), None)
        if slot is None:
            return False
        self._fill_slot(slot, key, item)
        return True

    @contextlib.contextmanager
    def take(self, key: Hashable, item: Any) -> Iterator[torch.Tensor]:
        """Let the current stream read what was filled for ``key``; at the end the slot is free again.

        Raises:
            AutogradError: Every slot is being read.
        """
        slot = self._slot_of(key)
        if slot.key != key:
            self._fill_slot(slot, key, item)
        data, stream = slot.data, current_stream(self.stream.device)
        assert data is not None
        state = state_of(data)
        state.reading(stream, data)
        slot.busy = True
        try:
            yield data
        finally:
            state.read_until(stream, stream.record_event())
            slot.key, slot.busy, slot.data = None, False, None
            # the slot just read is filled last, so that a fill has the least to wait for
            self._slots.remove(slot)
            self._slots.append(slot)

    def _slot_of(self, key: Hashable) -> _Slot:
        """Return the slot that holds ``key``, else a free one, else one that was filled in vain."""
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            raise AutogradError(
                f"prefetch: all {len(self._slots)} slots are being read", "pass a larger slots="
            )
        return min(idle, key=lambda s: 0 if s.key == key else 1 if s.key is None else 2)

    def _fill_slot(self, slot: _Slot, key: Hashable, item: Any) -> None:
        slot.key = None  # an error in fill leaves it free
        with self.stream.entered():
            slot.data = self._fill(item, slot.room)
            state_of(slot.data).written(self.stream, self.stream.record_event())
        slot.key = key


@dataclasses.dataclass
class _Pass:
    """What one thread knows of the order in which weights are read."""

    prefetcher: Prefetcher
    before: list[tuple[NF4Weight, torch.dtype]] = dataclasses.field(default_factory=list)
    now: list[tuple[NF4Weight, torch.dtype]] = dataclasses.field(default_factory=list)


class DecodeAhead:
    """Decodes the 4-bit weight that a product reads next, while the one before it is computed.

    It learns the order from the pass before: forward, recomputation and backward of a training step
    read the same weights in the same order each time. Where a pass differs, weights are decoded as
    they are read, and the next pass follows the new order. Scratch is two of the largest weight,
    decoded, for each thread that computes.

    Args:
        device: Where the weights lie.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._local = threading.local()

    def begin(self) -> None:
        """Say that a pass begins: the first product of a forward is next."""
        own = self._own()
        if own.now:
            own.before, own.now = own.now, []

    @contextlib.contextmanager
    def decoded(self, weight: NF4Weight, x: torch.Tensor) -> Iterator[torch.Tensor | NF4Weight]:
        """Yield what a product of ``x`` with ``weight`` reads: decoded to the dtype of ``x``, or itself.

        It is the weight itself where the product decodes it in passing, which is cheaper for few rows,
        and while a graph is captured.
        """
        if self._in_passing(weight, x):
            yield weight
            return
        own = self._own()
        own.now.append((weight, x.dtype))
        following = len(own.now)
        if following > len(own.before) or own.before[following - 1][0] is not weight:
            own.before = []
        with own.prefetcher.take((id(weight), x.dtype), (weight, x.dtype)) as dense:
            if following < len(own.before):
                after, dtype = own.before[following]
                own.prefetcher.start((id(after), dtype), (after, dtype))
            yield dense

    def _own(self) -> _Pass:
        if not hasattr(self._local, "own"):
            self._local.own = _Pass(Prefetcher(_decode, self.device))
        own: _Pass = self._local.own
        return own

    def _in_passing(self, weight: NF4Weight, x: torch.Tensor) -> bool:
        if x.device.type == "cpu" and runtime.backend() == "numpy":
            return False
        from entrenar.kernels.nf4_gemm import fused  # needs triton

        return fused(weight, x.shape[0]) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _decode(item: tuple[NF4Weight, torch.dtype], room: Room) -> torch.Tensor:
    weight, dtype = item
    stream = current_stream(weight.device)
    return call("nf4_dequantize", weight, dtype, room(weight.shape, dtype), stream=stream)


def loaded_ahead(
    items: Iterable[Item], load: Callable[[Item], Loaded], side: Stream
) -> Iterator[Loaded]:
    """Yield ``load(item)`` of each item, the next one loaded on a side stream before each is yielded.

    The current stream waits for what is yielded, and memory is kept until it is done with it.

    Args:
        items: What to load.
        load: Runs on the side stream; returns torch storage, or tuples, lists, dicts or dataclasses of
            it. Host memory it copies from may be written to as soon as it returns: see :func:`upload`.
        side: The side stream, of the device it loads to.
    """

    def start(item: Item) -> Loaded:
        with side.entered():
            loaded = load(item)
            event = side.record_event()
        for data in _storages(loaded):
            state_of(data).written(side, event)
        return loaded

    iterator = iter(items)
    for first in iterator:
        waiting = start(first)
        for item in iterator:
            following = start(item)
            yield _handed_over(waiting, side.device)
            waiting = following
        yield _handed_over(waiting, side.device)


def _handed_over(loaded: Loaded, device: torch.device) -> Loaded:
    stream = current_stream(device)
    for data in _storages(loaded):
        state_of(data).reading(stream, data)
    return loaded


def _storages(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _storages(part)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _storages([getattr(value, f.name) for f in dataclasses.fields(value)])


def upload(array: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """Return a copy of ``array`` on ``device`` without waiting for it, on the current stream.

    The array is read before this returns: on a GPU into page-locked memory, which torch holds until the
    copy is done.
    """
    host = torch.from_numpy(np.array(array))
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
