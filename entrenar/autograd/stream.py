"""Streams and events: torch's on a GPU, light objects on the CPU, where work runs in order.

A program written for streams runs unchanged on the CPU. Which stream is current is held in a
context variable and nowhere else, so threads and coroutines do not see each other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch

from entrenar import runtime
from entrenar.errors import DeviceError

__all__ = ["Event", "Stream", "current_stream"]

_ENTERED: ContextVar[tuple[tuple[Stream, Any], ...]] = ContextVar("entrenar_streams", default=())
_CPU: ContextVar[Stream | None] = ContextVar("entrenar_cpu_stream", default=None)


class Stream:
    """A queue of work on one device; work on one stream runs in the order it was given.

    ``with stream:`` makes it current: ops run on it, and torch allocates on it. It starts after
    what the stream that was current before has been given; that one goes on without waiting.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        torch_stream: A ``torch.cuda.Stream`` to wrap instead of making one.

    Attributes:
        device: The device as torch names it.
        torch_stream: The wrapped ``torch.cuda.Stream``; None on the CPU.
        position: On the CPU, how many events were recorded so far.

    Raises:
        ConfigError: The device has no such name.
        CudaNotAvailableError: A GPU was asked for and there is none.
    """

    __slots__ = ("__weakref__", "device", "position", "torch_stream")

    def __init__(self, device: str | torch.device = "cpu", torch_stream: Any = None) -> None:
        if torch_stream is not None:
            self.device = torch_stream.device
        else:
            self.device = torch.device(runtime.resolve_device(str(device)))
        if torch_stream is None and self.device.type == "cuda":
            torch_stream = torch.cuda.Stream(self.device)
        self.torch_stream = torch_stream
        self.position = 0

    def synchronize(self) -> None:
        """Block until all work given to the stream so far is done."""
        if self.torch_stream is not None:
            self.torch_stream.synchronize()
        _announce("synchronize", self)

    def record_event(self) -> Event:
        """Return an event that is complete once the work given so far is."""
        return Event().record(self)

    def wait_event(self, event: Event) -> None:
        """Let work given from now on start only after ``event``.

        Raises:
            DeviceError: The event was never recorded.
        """
        if event.stream is None:
            raise DeviceError("the event was never recorded", "call event.record(stream) first")
        if self.torch_stream is not None and event.torch_event is not None:
            self.torch_stream.wait_event(event.torch_event)
        _announce("wait", self, event)

    def wait_stream(self, other: Stream) -> None:
        """Let work given from now on start only after what ``other`` has been given so far."""
        if self != other:
            self.wait_event(other.record_event())

    def keep(self, data: torch.Tensor) -> None:
        """Let the memory of ``data``, once freed, not be handed out before this stream's work is done.

        Needed where another stream allocated it, which otherwise could use it again at once.
        """
        if data.is_cuda and self.torch_stream is not None:
            data.record_stream(self.torch_stream)
        _announce("keep", self, storage=data)

    def __enter__(self) -> Stream:
        self.wait_stream(current_stream(self.device))
        return self._push()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pop()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Stream]:
        """Make the stream current inside the block, without waiting for the one that was before."""
        self._push()
        try:
            yield self
        finally:
            self._pop()

    def _push(self) -> Stream:
        context = None
        if self.torch_stream is not None:
            context = torch.cuda.stream(self.torch_stream)
            context.__enter__()
        _ENTERED.set((*_ENTERED.get(), (self, context)))
        return self

    def _pop(self) -> None:
        *rest, (_, context) = _ENTERED.get()
        _ENTERED.set(tuple(rest))
        if context is not None:
            context.__exit__(None, None, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        if self.torch_stream is None or other.torch_stream is None:
            return self is other
        return bool(self.torch_stream == other.torch_stream)

    def __hash__(self) -> int:
        return id(self) if self.torch_stream is None else hash(self.torch_stream)

    def __repr__(self) -> str:
        if self.torch_stream is None:
            return f"Stream(device={str(self.device)!r})"
        return f"Stream(device={str(self.device)!r}, handle={self.torch_stream.cuda_stream:#x})"


class Event:
    """A point in a stream's work.

    Attributes:
        stream: The stream it was recorded on; None before :meth:`record`.
        position: Its number among the events of that stream.
        torch_event: The ``torch.cuda.Event``; None on the CPU.
    """

    __slots__ = ("__weakref__", "position", "stream", "torch_event")

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.position = 0
        self.torch_event: Any = None

    def record(self, stream: Stream) -> Event:
        """Mark the point that ``stream`` has reached, and return the event."""
        stream.position += 1
        self.stream, self.position = stream, stream.position
        if stream.torch_stream is not None:
            self.torch_event = self.torch_event or torch.cuda.Event()
            self.torch_event.record(stream.torch_stream)
        _announce("record", stream, self)
        return self

    def synchronize(self) -> None:
        """Block until the work before the event is done."""
        if self.torch_event is not None:
            self.torch_event.synchronize()
        if self.stream is not None:
            _announce("synchronize", self.stream, self)

    def query(self) -> bool:
        """Whether the work before the event is done."""
        return self.torch_event is None or bool(self.torch_event.query())


def _announce(
    kind: str, stream: Stream, event: Event | None = None, storage: torch.Tensor | None = None
) -> None:
    if runtime.has_sync_listeners():
        runtime.announce_sync(runtime.SyncRecord(kind, stream, event, storage))


def current_stream(device: str | torch.device) -> Stream:
    """Return the stream that ops on ``device`` run on now.

    The innermost ``with stream:`` or ``with Tape(stream):`` of that device; without one, torch's
    current stream of the device, by name, or this context's CPU stream.
    """
    device = torch.device(device)
    for stream, _ in reversed(_ENTERED.get()):
        if stream.device.type == device.type and device.index in (None, stream.device.index):
            return stream
    if device.type == "cuda":
        return Stream(torch_stream=torch.cuda.current_stream(device))
    stream_or_none = _CPU.get()
    if stream_or_none is None:
        stream_or_none = Stream("cpu")
        _CPU.set(stream_or_none)
    return stream_or_none
