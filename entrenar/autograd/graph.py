"""``Graph``: a whole training step captured once and replayed, on a GPU and on the CPU.

A call with a new form runs the step as ever and notes what it reads from outside; the next one of that
form captures it; later ones replay. Each call is one step of training, the first two included. On a GPU
the capture is a CUDA graph. On the CPU it is a list of what was computed, with its storage, which replay
computes again in the same order over the same storage: same functions, same bits, no tape.

What a replay cannot follow is refused at capture with the op's name: a host that waits for a result or
reads one, memory from outside the graph that did not exist before, a number or a host array that changed
since the step before. Whatever changes from step to step (data, learning rate, loss scale, dropout seed)
is an input, which the step receives as storage on the device.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar import runtime
from entrenar.autograd.stream import Stream
from entrenar.autograd.tape import forked
from entrenar.autograd.tensor import Tensor
from entrenar.errors import CaptureError, ConfigError
from entrenar.optable import storage
from entrenar.optable.dispatch import again, recorded, storages, written

__all__ = ["Graph"]

_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_COPIES = ("aten::clone", "aten::_to_copy")
_MOST_WARM_UPS = 4


class Graph:
    """A training step that is captured and replayed.

    Args:
        step: Called with one torch tensor an input; returns Tensors, storage, numbers or a tuple of
            them. It must compute on the current stream or one that forks from it and joins it.
        device: Where the step computes.
        watch: Arenas and buffers that the step uses beside its inputs. Another address among them is
            another form; on the CPU they are as before a capture that failed.
        capacity: Forms that are kept; the one not used for longest goes first.

    Attributes:
        stream: The stream that capture and replay run on; calls are ordered with the current one.
        captures: Captures made so far.
        replays: Replays made so far.

    Raises:
        ConfigError: ``capacity`` is below 1.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        device: str | torch.device = "cpu",
        watch: Sequence[Any] = (),
        capacity: int = 8,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}, wanted at least 1", "")
        self.stream = Stream(device)
        self.captures = self.replays = 0
        self._step = step
        self._watch = tuple(watch)
        self._capacity = capacity
        self._forms: OrderedDict[Hashable, _Form] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of forms that are kept."""
        return len(self._forms)

    def __call__(self, *inputs: Any, key: Hashable = ()) -> Any:
        """Take one step.

        Args:
            *inputs: Arrays, storage, Tensors or numbers; a float becomes float32 [1], an int int64 [1].
                Shapes and dtypes are part of the form.
            key: What else the step bakes in, such as the set of targets or whether it clips.

        Returns:
            What the step returned. A replay writes its results over those of the one before: copy what
            is to last.

        Raises:
            CaptureError: The step does what cannot be replayed. No parameter has changed, and the graph
                can be called again.
        """
        given = [_as_input(value) for value in inputs]
        buffers = self._buffers()
        places = tuple((t.data_ptr(), t.numel()) for t in buffers)
        form_key = (tuple((tuple(t.shape), t.dtype) for t in given), places, key)
        form = self._forms.get(form_key)
        if form is None:
            form = self._forms[form_key] = _Form(given, self.stream)
            while len(self._forms) > self._capacity:
                self._forms.popitem(last=False)
        self._forms.move_to_end(form_key)
        with forked(self.stream):
            form.fill(given, self.stream)
            if form.replay is not None:
                self.replays += 1
                return form.run_again(self.stream)
            if form.survey is None:
                return form.warm_up(self._step)
            if self.stream.device.type == "cuda":
                return self._count(form.capture_cuda(self._step, self.stream), form)
            return self._count(form.capture_cpu(self._step, self.stream, buffers), form)

    def _count(self, outputs: Any, form: _Form) -> Any:
        self.captures += form.replay is not None
        return outputs

    def _buffers(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for item in self._watch:
            found += getattr(item, "buffers", None) or [
                item.data if isinstance(item, Tensor) else item
            ]
        return found


class _Trace(TorchDispatchMode):
    """Follows one run of a step: its calls, the numbers they bake in, the storage from outside.

    Args:
        survey: The trace of the run before, against which a capture is checked; None in a warm-up.
    """

    def __init__(self, survey: _Trace | None) -> None:
        super().__init__()
        self.survey = survey
        self.last = "the step"
        self.calls: list[tuple[str, list[Any]]] = []
        self.outside: dict[int, weakref.ref[Any]] = {}
        self.reads: dict[Hashable, torch.Tensor] = {}
        self.writes: dict[Hashable, torch.Tensor] = {}
        self.entries: list[Callable[[], Any]] = []
        self._made: dict[int, weakref.ref[Any]] = {}
        self._held: list[Any] = []
        self._busy = False
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the block; while capturing, refuse waits of the host too."""
        on_sync = self._sync if self.survey is not None else None
        with recorded(self), self, runtime.listening(on_sync=on_sync):
            yield

    def call(
        self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run one call of the op table, and note how to run it again."""
        self.last = function
        values = [*args, *kwargs.values()]
        # storage stays in the list too, so that a number in its place shows
        self.calls.append((function, [None if storages(v) else _copied(v) for v in values]))
        for tensor in (t for v in values for t in storages(v)):
            self._source(tensor, function)
        for tensor in written(function, args, kwargs):
            self._sink(tensor)
        self._busy = True
        try:
            result = run()
        finally:
            self._busy = False
        for value in result if isinstance(result, tuple) else (result,):
            for tensor in storages(value):
                self._make(tensor)
        if self.survey is not None and not _on_gpu(values):
            self._held.append((args, kwargs, result))
            self.entries.append(again(function, args, kwargs, result))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of torch's own operators on storage, and note how to run it again."""
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        name = func._schema.name
        capturing = self.survey is not None
        given = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        if capturing and name in _HOST_READS:
            raise self._refusal("the host reads its result")
        mutable = func._schema.is_mutable
        known = {id(t.untyped_storage()) for t in given}
        out = func(*args, **kwargs)
        made = [t for t in _flat(out) if isinstance(t, torch.Tensor)]
        new = [t for t in made if id(t.untyped_storage()) not in known]
        if capturing and len({t.device.type for t in (*given, *made)}) > 1:
            raise self._refusal("memory is copied between host and device after it")
        if not mutable and not new:
            return out  # a view
        for tensor in given:
            self._source(tensor, name.removeprefix("aten::"))
        if mutable:
            self._sink(given[0])
        for tensor in new:
            self._make(tensor)
        if capturing and name not in _EMPTY:
            self._held.append((args, kwargs, out))
            self.entries.append(_torch_again(func, name, args, kwargs, made, mutable))
        return out

    def differs(self) -> str:
        """Return how the run differs from the one before in what it bakes in, or nothing.

        Raises:
            CaptureError: The calls are the same, but a number or a host array of one is not.
        """
        assert self.survey is not None
        before, now = self.survey.calls, self.calls
        names_before, names = [name for name, _ in before], [name for name, _ in now]
        if names_before != names:
            pairs = zip([*names_before, "nothing"], [*names, "nothing"], strict=False)
            return next((f"{b} then, {n} now" for b, n in pairs if b != n), "")
        for (name, old), (_, new) in zip(before, now, strict=True):
            for was, value in zip(old, new, strict=True):
                if not _same(was, value):
                    raise CaptureError(
                        f"{name} was given {value!r}, and {was!r} in the step before: a replay would "
                        "repeat it",
                        "make it an input of the step, which receives it as storage on the device",
                    )
        return ""

    def knows(self, memory: Any) -> bool:
        """Whether storage was there when this run ended: read from outside, or made and kept."""
        return _alive(self.outside, memory) or _alive(self._made, memory)

    def _sync(self, record: runtime.SyncRecord) -> None:
        if record.kind == "synchronize" and threading.get_ident() == self._thread:
            raise self._refusal("the host waits for its result")

    def _refusal(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.last}: {what} inside a capture, which a replay could not repeat",
            "return it from the step and read it after the call",
        )

    def _source(self, tensor: torch.Tensor, op: str) -> None:
        """Note storage that is read; refuse what came into being outside of the graph meanwhile."""
        memory = tensor.untyped_storage()
        if _alive(self._made, memory):
            return
        if self.survey is not None and not self.survey.knows(memory):
            raise CaptureError(
                f"{op}: reads {tensor.dtype} {tuple(tensor.shape)} that the step allocated outside "
                "of the graph's memory: a replay would see the same values again",
                "make it an input of the step, or allocate it once before the first step",
            )
        self.outside[id(memory)] = weakref.ref(memory)
        self.reads[(tensor.data_ptr(), tensor.shape, tensor.stride())] = tensor

    def _sink(self, tensor: torch.Tensor) -> None:
        if not _alive(self._made, tensor.untyped_storage()):
            self.writes[(tensor.data_ptr(), tensor.shape, tensor.stride())] = tensor

    def _make(self, tensor: torch.Tensor) -> None:
        memory = tensor.untyped_storage()
        if not _alive(self.outside, memory):
            self._made[id(memory)] = weakref.ref(memory)


class _Form:
    """One form of the inputs: their storage, and the step captured for them."""

    def __init__(self, given: Sequence[torch.Tensor], stream: Stream) -> None:
        with stream.entered():
            self.inputs = [torch.empty_like(t, device=stream.device) for t in given]
        self.survey: _Trace | None = None
        self.replay: Callable[[], None] | None = None
        self.outputs: Any = None
        self._trace: _Trace | None = None
        self._tries = 0

    def fill(self, given: Sequence[torch.Tensor], stream: Stream) -> None:
        """Copy the inputs of a step to their storage, on the graph's stream."""
        for target, source in zip(self.inputs, given, strict=True):
            if source.device == target.device:
                storage.state_of(source).reading(stream, source)
            storage.state_of(target).writing(stream, target)
            target.copy_(source)
            storage.state_of(target).written(stream)

    def warm_up(self, step: Callable[..., Any]) -> Any:
        """Run the step as ever, following it."""
        trace = _Trace(None)
        with trace.following():
            outputs = step(*self.inputs)
        trace.reads.clear()
        trace.writes.clear()
        self.survey = trace
        return outputs

    def capture_cpu(
        self, step: Callable[..., Any], stream: Stream, buffers: Sequence[torch.Tensor]
    ) -> Any:
        """Run the step and keep what it computed as a list that can be run again."""
        trace = _Trace(self.survey)
        saved = [t.clone() for t in buffers]
        try:
            with trace.following():
                outputs = step(*self.inputs)
            difference = trace.differs()
        except BaseException:
            for target, source in zip(buffers, saved, strict=True):
                target.copy_(source)
            raise
        if difference:
            self._again_later(difference, trace)
            return outputs
        entries = trace.entries

        def replay() -> None:
            for entry in entries:
                entry()

        return self._captured(trace, outputs, replay, stream)

    def capture_cuda(self, step: Callable[..., Any], stream: Stream) -> Any:
        """Capture the step as a CUDA graph, then launch it: the capture itself computes nothing."""
        trace = _Trace(self.survey)
        self._claim(stream)
        graph, first = torch.cuda.CUDAGraph(), []
        try:
            with torch.cuda.graph(
                graph, stream=stream.torch_stream, capture_error_mode="thread_local"
            ):
                try:
                    with trace.following():
                        outputs = step(*self.inputs)
                except BaseException as error:
                    first.append(error)  # ending the broken capture raises another one
                    raise
            difference = trace.differs()
        except Exception as error:
            self._claim(stream)
            cause = first[0] if first else error
            if isinstance(cause, RuntimeError) and not isinstance(cause, CaptureError):
                raise CaptureError(f"{trace.last}: {cause}", "the step was not taken") from error
            raise cause from None
        self._claim(stream)
        if difference:
            self._again_later(difference, trace)
            return self.warm_up(step)
        self._captured(trace, outputs, graph.replay, stream)
        return self.run_again(stream)

    def run_again(self, stream: Stream) -> Any:
        """Replay on the graph's stream, after whatever else touched what it reads and writes."""
        assert self.replay is not None
        assert self._trace is not None
        reads, writes = self._trace.reads.values(), self._trace.writes.values()
        storage.before(reads, writes, stream)
        where = "cuda" if stream.torch_stream is not None else runtime.backend()
        if runtime.has_listeners():
            record = runtime.LaunchRecord("graph", stream, tuple(reads), tuple(writes), where)
            runtime.announce(record)
        self.replay()
        storage.after(writes, _storages_of(self.outputs), stream)
        for tensor in _storages_of(self.outputs):
            storage.state_of(tensor).written(stream)
        return self.outputs

    def _captured(
        self, trace: _Trace, outputs: Any, replay: Callable[[], None], stream: Stream
    ) -> Any:
        trace.survey = None
        self.survey, self._trace, self.outputs, self.replay = None, trace, outputs, replay
        for tensor in _storages_of(outputs):
            storage.state_of(tensor).written(stream)
        return outputs

    def _again_later(self, difference: str, trace: _Trace) -> None:
        """Take the run as another warm-up: caches are filled in the first step, say."""
        self._tries += 1
        if self._tries >= _MOST_WARM_UPS:
            raise CaptureError(
                f"the step made other calls in each of {self._tries + 1} runs: {difference}",
                "a captured step must do the same each time",
            )
        fresh = _Trace(None)
        fresh.calls, fresh.outside, fresh._made = trace.calls, trace.outside, trace._made
        self.survey = fresh

    def _claim(self, stream: Stream) -> None:
        """Let no event from outside a capture be waited for inside it, and none from inside later."""
        assert self.survey is not None
        for reference in list(self.survey.outside.values()):
            memory = reference()
            if memory is not None:
                view = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
                state = storage.state_of(view)
                state.reading(stream, view)
                state.written(stream)


def _torch_again(
    func: Any, name: str, args: Any, kwargs: Any, made: Sequence[torch.Tensor], mutable: bool
) -> Callable[[], Any]:
    if mutable:
        return lambda: func(*args, **kwargs)
    if name in _COPIES:
        return lambda: made[0].copy_(args[0])
    if name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros"):
        return made[0].zero_

    def repeat() -> None:
        for target, source in zip(made, _flat(func(*args, **kwargs)), strict=True):
            target.copy_(source)

    return repeat


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [x for item in value for x in _flat(item)]
    return (
        [x for item in value.values() for x in _flat(item)] if isinstance(value, dict) else [value]
    )


def _storages_of(outputs: Any) -> list[torch.Tensor]:
    found = [x.data if isinstance(x, Tensor) else x for x in _flat(outputs)]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _alive(references: dict[int, weakref.ref[Any]], memory: Any) -> bool:
    reference = references.get(id(memory))
    return reference is not None and reference() is memory


def _on_gpu(values: Sequence[Any]) -> bool:
    return any(t.is_cuda for v in values for t in storages(v))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b) or (a != a and b != b)


def _as_input(value: Any) -> torch.Tensor:
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int):
        return torch.from_numpy(np.array([value], dtype=np.int64))
    if isinstance(value, float):
        return torch.from_numpy(np.array([value], dtype=np.float32))
    return torch.from_numpy(np.ascontiguousarray(value))
