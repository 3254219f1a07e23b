"""Proof that launches on several streams are ordered: vector clocks over streams, events and memory.

Every launch announces what it reads and writes, every event its recording and its waits. From the
latter follows what happens before what: each stream has a clock with one entry per stream, an event
carries the clock of the stream that recorded it, a wait takes the larger of both. Two launches on
different streams that touch the same bytes, one of them writing, must be ordered by that; so must the
end of a buffer's life, since the stream that allocated it may hand the memory out again. Nothing here
depends on timing or on a device: on the CPU, where streams run in order, the same orderings are
demanded, so a missing wait shows itself in every run.

What torch copies by itself (``copy_``, ``contiguous``) is not announced and so not seen.

Source: Lamport, doi:10.1145/359545.359563; Fidge 1988; the ranges follow FastTrack,
doi:10.1145/1542476.1542490, in keeping only accesses that a later one has not superseded.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from entrenar import runtime
from entrenar.autograd.stream import Event, Stream, current_stream
from entrenar.autograd.tensor import Tensor
from entrenar.errors import StreamHazardError
from entrenar.optable.storage import known_state

__all__ = ["Access", "Detector", "Hazard", "detect_hazards"]

Clock = dict[Stream, int]
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames of these are how a launch is made, not where.
_INSIDE = tuple(
    os.path.join(_PACKAGE, name)
    for name in ("autograd", "cpu", "kernels", "optable", "reference", "runtime.py")
)
_MOST_RUNS = 1 << 20  # runs of a strided view that are told apart; above, its whole span counts


@dataclasses.dataclass(frozen=True, eq=False)
class Access:
    """One launch's use of one buffer.

    Attributes:
        op: Name of the op.
        stream: The stream it is ordered on.
        tick: Its number on that stream.
        writes: Whether it writes.
        site: Where it was launched, ``file:line in function``.
        start, stop: The bytes it spans, as addresses.
        shape, strides, itemsize, dtype: The form of what it was given.
    """

    op: str
    stream: Stream
    tick: int
    writes: bool
    site: str
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    def overlaps(self, other: Access) -> bool:
        """Whether the two touch a byte in common, strides considered."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        mine, theirs = self._runs(), other._runs()
        if mine is None or theirs is None:
            return True
        (a, a_bytes), (b, b_bytes) = mine, theirs
        at = np.searchsorted(b, a - b_bytes, side="right")
        inside = at < len(b)
        return bool(np.any(b[at[inside]] < a[inside] + a_bytes))

    def covers(self, other: Access) -> bool:
        """Whether every byte of the other is one of this access, which has no gaps."""
        return self._dense() and self.start <= other.start and other.stop <= self.stop

    def _dense(self) -> bool:
        # by strides and not by the number of elements: repeated ones can make up for gaps
        run = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != run:
                return False
            run *= size
        return True

    def _runs(self) -> tuple[np.ndarray, int] | None:
        """Return the sorted starts of contiguous runs and the bytes of each; None for one or too many."""
        if self._dense():
            return np.array([self.start]), self.stop - self.start
        sizes = sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1)
        run = 1
        while sizes and sizes[0][0] in (0, run):
            stride, size = sizes.pop(0)
            run *= size if stride else 1
        if np.prod([size for _, size in sizes]) > _MOST_RUNS:
            return None
        starts = np.zeros(1, dtype=np.int64)
        for stride, size in sizes:
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
        return np.unique(self.start + starts * self.itemsize), run * self.itemsize


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A pair that nothing orders.

    Attributes:
        kind: ``"read after write"``, ``"write after read"``, ``"write after write"`` or ``"free"``.
        buffer: Shape, dtype and, where known, name.
        first, second: The two accesses; of a free there is no second.
    """

    kind: str
    buffer: str
    first: Access
    second: Access | None


@dataclasses.dataclass(eq=False)
class _Memory:
    """One allocation: who used it since when, and who may reuse it once it is free."""

    start: int
    stop: int
    home: Stream | None = None
    storages: int = 0
    kept: set[Stream] = dataclasses.field(default_factory=set)
    accesses: list[Access] = dataclasses.field(default_factory=list)


class Detector:
    """Follows launches and operations on streams, and raises at the first pair without an order.

    Attributes:
        launches: Launches seen.
        waits: Waits seen.
    """

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self.launches = self.waits = 0
        self._names = {_storage(t).data_ptr(): name for name, t in (names or {}).items()}
        self._clocks: dict[Stream, Clock] = {}
        self._labels: dict[Stream, int] = {}
        self._events: weakref.WeakKeyDictionary[Event, Clock] = weakref.WeakKeyDictionary()
        self._hosts: dict[int, Clock] = {}
        self._starts: list[int] = []
        self._memory: dict[int, _Memory] = {}
        self._known: set[int] = set()
        # filled by finalisers, which may run in the middle of anything
        self._freed: deque[tuple[int, int, int]] = deque()
        self._lock = threading.RLock()

    # what is announced

    def launch(self, record: runtime.LaunchRecord) -> None:
        """Take note of a launch, and check it against everything it is not ordered after."""
        with self._lock:
            self.settle()
            self.launches += 1
            touched = [*((t, False) for t in record.reads), *((t, True) for t in record.writes)]
            given = [(t, w) for t, w in touched if isinstance(t, torch.Tensor) and t.numel()]
            if not given:
                return
            stream = _stream_of(record.stream, given[0][0])
            clock = self._clock(stream)
            clock[stream] = clock.get(stream, 0) + 1
            site = str(getattr(record, "site", "") or _site())
            for tensor, writes in given:
                memory = self._memory_of(tensor)
                access = _access(record.op, stream, clock[stream], writes, site, tensor)
                memory.home = memory.home or _home_of(tensor, writes, stream)
                self._check(memory, access, clock)
                _remember(memory, access, clock)

    def sync(self, record: runtime.SyncRecord) -> None:
        """Take note of an operation on streams."""
        with self._lock:
            self.settle()
            clock = self._clock(record.stream)
            if record.kind == "record":
                self._events[record.event] = dict(clock)
            elif record.kind == "wait":
                self.waits += 1
                _join(clock, self._events.get(record.event, {}))
            elif record.kind == "synchronize":
                done = clock if record.event is None else self._events.get(record.event, {})
                _join(self._host(threading.get_ident()), done)
            elif record.kind == "keep" and record.storage.numel():
                self._memory_of(record.storage).kept.add(record.stream)

    def settle(self) -> None:
        """Check the buffers that were freed since the last announcement.

        Raises:
            StreamHazardError: Work on one is not before what its own stream does next.
        """
        while self._freed:
            start, storage, thread = self._freed.popleft()
            self._known.discard(storage)
            memory = self._memory.get(start)
            if memory is None:
                continue
            memory.storages -= 1
            if memory.storages:
                continue
            del self._memory[start]
            self._starts.remove(start)
            if memory.home is None:
                continue
            clock = dict(self._clock(memory.home))
            _join(clock, self._host(thread))
            for access in memory.accesses:
                if access.stream not in memory.kept and not _before(access, clock):
                    self._raise("free", access, None, memory)

    # clocks

    def _clock(self, stream: Stream) -> Clock:
        """Return the clock of a stream, which follows what this thread has waited for."""
        clock = self._clocks.setdefault(stream, {})
        self._labels.setdefault(stream, len(self._labels) + 1)
        _join(clock, self._host(threading.get_ident()))
        return clock

    def _host(self, thread: int) -> Clock:
        """Return what a thread has waited for; a new thread starts with what others had by then."""
        if thread not in self._hosts:
            known: Clock = {}
            for other in self._hosts.values():
                _join(known, other)
            self._hosts[thread] = known
        return self._hosts[thread]

    # memory

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        """Return the allocation that a tensor views; storages that share memory share it."""
        storage = tensor.untyped_storage()
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if id(storage) in self._known and start in self._memory:
            return self._memory[start]
        at = bisect.bisect_right(self._starts, start) - 1
        memory = self._memory[self._starts[at]] if at >= 0 else None
        if memory is None or memory.stop <= start:
            memory = _Memory(start, stop)
            bisect.insort(self._starts, start)
            self._memory[start] = memory
        memory.stop = max(memory.stop, stop)
        if id(storage) not in self._known:
            self._known.add(id(storage))
            memory.storages += 1
            freed, base, key = self._freed, memory.start, id(storage)
            weakref.finalize(
                storage, lambda: freed.append((base, key, threading.get_ident()))
            ).atexit = False
        return memory

    def _check(self, memory: _Memory, access: Access, clock: Clock) -> None:
        for other in memory.accesses:
            conflict = (access.writes or other.writes) and not _before(other, clock)
            if conflict and access.overlaps(other):
                kinds = {True: "write", False: "read"}
                kind = f"{kinds[access.writes]} after {kinds[other.writes]}"
                self._raise(kind, other, access, memory)

    def _raise(self, kind: str, first: Access, second: Access | None, memory: _Memory) -> None:
        form = second or first
        name = self._names.get(memory.start, "")
        buffer = f"{form.dtype} {form.shape}" + (f" {name!r}" if name else "")
        did = "writes" if first.writes else "reads"
        if second is None:
            home = self._label(memory.home)
            text = (
                f"a buffer {buffer} is freed to {home} while {first.op} on "
                f"{self._label(first.stream)}, which {did} it, is not ordered before: "
                f"{first.op} was launched at {first.site}"
            )
            hint = "let the freeing stream wait for the other, or keep the buffer: stream.keep(t)"
        else:
            does = "writes" if second.writes else "reads"
            text = (
                f"{kind}: {second.op} on {self._label(second.stream)} {does} a buffer {buffer} and "
                f"nothing orders it after {first.op} on {self._label(first.stream)}, which {did} it: "
                f"{first.op} was launched at {first.site}, {second.op} at {second.site}"
            )
            hint = "record an event after the first and let the second's stream wait for it"
        error = StreamHazardError(text, hint)
        error.hazard = Hazard(kind, buffer, first, second)
        raise error

    def _label(self, stream: Stream | None) -> str:
        number = 0 if stream is None else self._labels.setdefault(stream, len(self._labels) + 1)
        return f"stream {number} ({stream!r})"


@contextlib.contextmanager
def detect_hazards(names: Mapping[str, Tensor | torch.Tensor] | None = None) -> Iterator[Detector]:
    """Raise inside the block where two launches share memory and nothing orders them.

    Args:
        names: Names of buffers, for messages.

    Yields:
        The detector.

    Raises:
        StreamHazardError: At the second of two launches, or, for memory freed too early, at the next
            announcement or the end of the block. Its ``hazard`` holds both accesses.
    """
    detector = Detector(names)
    with runtime.listening(detector.launch, detector.sync):
        yield detector
    with detector._lock:
        detector.settle()


def _remember(memory: _Memory, access: Access, clock: Clock) -> None:
    """Add an access, and drop those that every later one which conflicts must pass by it anyway."""
    memory.accesses = [
        other
        for other in memory.accesses
        if not (
            (access.writes or not other.writes) and _before(other, clock) and access.covers(other)
        )
    ]
    memory.accesses.append(access)


def _before(access: Access, clock: Clock) -> bool:
    return clock.get(access.stream, 0) >= access.tick


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _storage(value: Any) -> Any:
    return (value.data if isinstance(value, Tensor) else value).untyped_storage()


def _access(
    op: str, stream: Stream, tick: int, writes: bool, site: str, tensor: torch.Tensor
) -> Access:
    shape, strides, itemsize = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    start = tensor.data_ptr()
    dtype = str(tensor.dtype).removeprefix("torch.")
    stop = start + span * itemsize
    return Access(op, stream, tick, writes, site, start, stop, shape, strides, itemsize, dtype)


def _stream_of(stream: Any, tensor: torch.Tensor) -> Stream:
    if isinstance(stream, Stream):
        return stream
    return current_stream(tensor.device) if stream is None else Stream(torch_stream=stream)


def _home_of(tensor: torch.Tensor, writes: bool, stream: Stream) -> Stream:
    """Return the stream that allocated what is seen first: that of the launch, unless others wrote it."""
    state = known_state(tensor)
    return stream if writes or state is None else state.stream or stream


def _site() -> str:
    """Return the innermost place outside of the machinery that makes launches."""
    found = frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSIDE) and os.path.basename(file) != "contextlib.py":
            found = frame
            break
        frame = frame.f_back
    code = found.f_code
    return f"{code.co_filename}:{found.f_lineno} in {code.co_name}"
