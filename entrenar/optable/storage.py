"""What is remembered of a piece of storage: how often it was written, by which stream, who read since.

It hangs on torch's own storage object, which lives as long as the memory and is shared by every
tensor that views it. So raw storage, quantised weights and tensors of a tape are ordered alike, and
nothing is kept in process-global state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["StorageState", "known_state", "orders", "state_of"]

_ATTRIBUTE = "_entrenar_state"
# Streams remembered as readers of one storage before they are joined into one.
_MOST_READERS = 32


class StorageState:
    """What all tensors that view one piece of storage share.

    Attributes:
        version: How often functions of the table wrote it in place, and whoever declared a write.
        saves: How many times nodes of a tape hold it for their backward.
        owner: Identity of the tape whose op allocated it, or None for storage from outside.
        stream: The stream that last wrote it, or None where that is not known.
        fresh: A function of the table has just allocated it and nobody holds it yet.
    """

    __slots__ = ("_event", "_last", "_readers", "fresh", "owner", "saves", "stream", "version")

    def __init__(self, *, fresh: bool = False) -> None:
        self.version = 0
        self.saves = 0
        self.owner: object | None = None
        self.stream: Any = None
        self.fresh = fresh
        self._event: Any = None
        self._readers: dict[Any, Any] = {}
        self._last: Any = None

    def reading(self, stream: Any, data: torch.Tensor) -> None:
        """Let work given to ``stream`` from now on read: it waits for the last write, once."""
        if stream is self._last:
            return
        if stream in self._readers:
            self._readers[stream] = None
            return
        if stream == self.stream:
            if self._event is not None:  # which a later read is not before
                self._readers[stream] = None
            return
        if self.stream is not None:
            stream.wait_event(self.event)
        # also where the writer is not known: another stream may have allocated the memory
        stream.keep(data)
        if len(self._readers) >= _MOST_READERS:
            self._join(stream)
        self._readers[stream] = None
        self._last = stream

    def read_until(self, stream: Any, event: Any) -> None:
        """Note that ``stream`` reads no more after ``event``: a write waits for that and not longer."""
        self._readers[stream] = event
        self._last = None

    def writing(self, stream: Any, data: torch.Tensor) -> None:
        """Let work given to ``stream`` from now on write: it waits for the last write and all reads."""
        self.reading(stream, data)
        self._join(stream)

    def written(self, stream: Any, event: Any = None) -> None:
        """Note that work on ``stream`` has written, up to ``event``: if None, one recorded when needed."""
        self.stream = stream
        self._event = event
        if self._readers:
            self._readers = {}
        self._last = None

    @property
    def event(self) -> Any:
        """The event after the last write, recorded now where it was not recorded then."""
        if self._event is None and self.stream is not None:
            self._event = self.stream.record_event()
        return self._event

    def _join(self, stream: Any) -> None:
        """Let ``stream`` wait for the other readers, and forget them."""
        for reader, event in self._readers.items():
            if reader != stream:
                stream.wait_event(event or reader.record_event())
        self._readers = {}


def state_of(data: torch.Tensor, *, fresh: bool = False) -> StorageState:
    """Return what is remembered of the storage of ``data``; ``fresh`` marks what is new as such."""
    attributes = data.untyped_storage().__dict__
    state = attributes.get(_ATTRIBUTE)
    if state is None:
        state = attributes[_ATTRIBUTE] = StorageState(fresh=fresh)
    return state


def known_state(data: torch.Tensor) -> StorageState | None:
    """Return what is remembered of the storage of ``data``, or None."""
    return data.untyped_storage().__dict__.get(_ATTRIBUTE)


def orders(stream: Any) -> bool:
    """Whether ``stream`` is one of ours, which waits for storage by itself; torch's own do not."""
    return hasattr(stream, "keep")


def before(reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], stream: Any) -> None:
    """Order work about to be given to ``stream`` after what it depends on."""
    for data in reads:
        state_of(data).reading(stream, data)
    for data in writes:
        state_of(data).writing(stream, data)


def after(writes: Iterable[torch.Tensor], results: Iterable[torch.Tensor], stream: Any) -> None:
    """Note what work given to ``stream`` has written, arguments and results."""
    for data in writes:
        state = state_of(data)
        state.version += 1
        state.written(stream)
    for data in results:
        state = state_of(data, fresh=True)
        if state.fresh:
            state.written(stream)
