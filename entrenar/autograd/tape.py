"""The tape: ops in the order they ran, walked once in reverse.

The active tape is held in a context variable, so each thread and coroutine has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from entrenar.autograd.draw import draw
from entrenar.autograd.node import Backward, Edge, Node, Watched
from entrenar.autograd.stream import Stream, current_stream
from entrenar.autograd.tensor import Slot, Tensor
from entrenar.autograd.walk import walk
from entrenar.errors import AutogradError
from entrenar.optable import call
from entrenar.optable.storage import StorageState, state_of

__all__ = [
    "Probe", "Tape", "active", "no_grad", "overwriting", "record", "recording", "run", "wrap",
]  # fmt: skip


class Probe:
    """Stands in for a tape while ``checkpoint`` runs forward: records nothing, sees gradients wanted.

    Args:
        token: Identity of the tape it stands in for, which owns what is made.

    Attributes:
        wanted: Whether any op so far had an input that requires a gradient.
        read: What ops read that was made outside, once for each piece of storage, as it was first.
    """

    def __init__(self, token: object) -> None:
        self.token = token
        self.wanted = False
        self.read: dict[StorageState, Watched] = {}

    def see(self, op: str, inputs: Sequence[Tensor | None], saved: Sequence[Any]) -> None:
        """Note an op's inputs, and what its backward would read.

        Raises:
            AutogradError: One was made on a tape outside the checkpointed function.
        """
        for tensor in inputs:
            if tensor is not None and tensor.slot is not None:
                raise AutogradError(
                    f"checkpoint: the function's {op} reads a tensor of shape {tensor.shape} that "
                    f"{tensor.slot.op} made outside of it, so its gradient would be lost",
                    "pass the tensor to checkpoint as an argument",
                )
            self.wanted = self.wanted or (tensor is not None and tensor.requires_grad)
        for value in (*inputs, *saved):
            if isinstance(value, Tensor) and value.state.owner is not self.token:
                self.read.setdefault(value.state, Watched(value))


_ACTIVE: ContextVar[Tape | Probe | None] = ContextVar("entrenar_tape", default=None)


def active() -> Tape | Probe | None:
    """Return the tape that ops record on now, or None."""
    return _ACTIVE.get()


@contextlib.contextmanager
def activated(tape: Tape | Probe | None) -> Iterator[None]:
    """Make ``tape`` the active one inside the block."""
    token = _ACTIVE.set(tape)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextlib.contextmanager
def forked(stream: Stream | None) -> Iterator[None]:
    """Run the block on ``stream``, after the surrounding stream's work and before what follows on it."""
    if stream is None:
        yield
        return
    outer = current_stream(stream.device)
    try:
        with stream:
            yield
    finally:
        outer.wait_stream(stream)


class no_grad(contextlib.ContextDecorator):
    """Compute without recording, as a block or as a decorator; nesting and recursion are fine."""

    def __init__(self) -> None:
        self._tokens: list[Token[Tape | Probe | None]] = []

    def _recreate_cm(self) -> no_grad:
        return no_grad()

    def __enter__(self) -> no_grad:
        self._tokens.append(_ACTIVE.set(None))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _ACTIVE.reset(self._tokens.pop())


class Tape:
    """Records differentiable ops and computes gradients from them.

    ``with Tape(stream) as tape:`` runs the block's ops on ``stream`` and records each whose result
    has a gradient. :meth:`backward` may be called inside the block or after it. Both start after what
    the surrounding stream was given before, and the surrounding stream goes on after them: what an
    optimiser writes and reads between two steps needs no synchronisation by the caller.

    Args:
        stream: The stream of the block's ops; None keeps the stream that is current where an op
            runs.
        overwrite_activations: Backward may overwrite what the tape's own ops made, once no other
            op needs it: gradients of logits and of gated activations then need no memory of their
            own. Values of intermediate tensors must not be read after backward.
    """

    def __init__(
        self, stream: Stream | None = None, *, overwrite_activations: bool = False
    ) -> None:
        self.stream = stream
        self.overwrite_activations = overwrite_activations
        self._token = object()
        self._nodes: dict[int, Node] = {}
        self._serial = 0
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Tape:
        stack = contextlib.ExitStack()
        stack.enter_context(forked(self.stream))
        stack.enter_context(activated(self))
        self._entered.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().close()

    def __len__(self) -> int:
        """Return the number of recorded ops that were not freed."""
        return len(self._nodes)

    def __bool__(self) -> bool:
        """Return True, also before the first op."""
        return True

    @property
    def token(self) -> object:
        """Identity of the tape, which its tensors carry instead of the tape itself."""
        return self._token

    def add(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        saved: Sequence[Any],
        backward: Backward,
        settings: dict[str, Any],
    ) -> None:
        """Record one op; its outputs then require gradients."""
        edges = tuple(self._edge(op, tensor) for tensor in inputs)
        stream = current_stream(outputs[0].device)
        self._serial += 1
        node = Node(op, edges, saved, backward, stream, settings, self._token)
        slots = []
        for tensor in outputs:
            tensor.requires_grad = True
            tensor.slot = Slot(tensor, op, self._serial, self._token)
            slots.append(tensor.slot)
        node.outputs = tuple(slots)
        self._nodes[self._serial] = node

    def _edge(self, op: str, tensor: Tensor | None) -> Edge:
        if tensor is None or not tensor.requires_grad:
            return None
        if tensor.slot is None:
            return tensor
        if tensor.slot.version != tensor.state.version:
            raise AutogradError(
                f"{op}: an input of shape {tensor.shape}, made by {tensor.slot.op}, was overwritten "
                "in place since",
                "use what the in-place op returned, or the op that writes a copy",
            )
        if tensor.slot.token is not self._token:
            raise AutogradError(
                f"{op}: an input of shape {tensor.shape} was made by {tensor.slot.op} on another "
                "tape",
                "call .detach() on it, or run both ops on one tape",
            )
        return tensor.slot

    def check_overwrite(self, op: str, tensor: Tensor) -> None:
        """Raise where an op must not write ``tensor`` in place."""
        state, why = tensor.state, ""
        if tensor.slot is None and tensor.requires_grad:
            why = "is a leaf that requires a gradient"
        elif tensor.slot is not None and state.owner is not self._token:
            why = f"views storage that {tensor.slot.op} did not allocate on this tape"
        elif state.saves:
            readers = sorted({node.op for node in self._nodes.values() if node.saves(state)})
            why = f"is saved for the backward of {', '.join(readers) or 'an op of another tape'}"
        if why:
            raise AutogradError(
                f"{op}: an input of shape {tensor.shape} {why} and cannot be written in place",
                "use the form that writes a copy, or call it under no_grad()",
            )

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        grad: Any = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of ``loss`` to ``.grad`` of every leaf that requires one.

        Gradients of intermediate tensors are freed as soon as they are consumed, and what an op
        saved as soon as its backward has run.

        Args:
            loss: A tensor made on this tape, or several.
            grad: The gradient of ``loss``, of its shape and dtype; 1 for a scalar where None.
            retain_graph: Keep what was saved, so that backward can run again.

        Raises:
            AutogradError: The loss was not made on this tape, is not a scalar and has no ``grad``,
                the graph was freed by an earlier backward, or a saved tensor was modified in place.
                No gradient has changed then.
        """
        losses = (loss,) if isinstance(loss, Tensor) else tuple(loss)
        grads = tuple(grad) if isinstance(grad, list | tuple) else (grad,) * len(losses)
        if len(grads) != len(losses):
            raise AutogradError(f"backward: {len(grads)} gradients for {len(losses)} tensors", "")
        with contextlib.ExitStack() as stack:
            stack.enter_context(forked(self.stream))
            stack.enter_context(activated(None))
            seeds = [self._seed(t, g) for t, g in zip(losses, grads, strict=True)]
            overwrite = self.overwrite_activations and not retain_graph
            walk(self._nodes, seeds, retain=retain_graph, overwrite=overwrite)

    def draw(self, path: str | Path | None = None) -> str:
        """Return a picture of the ops recorded now: forms, streams, and bytes saved for backward.

        Args:
            path: None for a text table. A file to write, by its ending: ``.txt`` the table, ``.dot`` or
                ``.gv`` Graphviz' source, ``.svg``, ``.png`` or ``.pdf`` rendered by Graphviz' ``dot``.

        Returns:
            The table, or the source of the drawing.

        Raises:
            ConfigError: The path ends otherwise, or ``dot`` is needed and not installed.
        """
        return draw(self._nodes, self._token, path)

    def _seed(self, loss: Tensor, grad: Any) -> tuple[Slot, torch.Tensor, bool]:
        if not isinstance(loss, Tensor):
            raise AutogradError(
                f"backward: the loss is a {type(loss).__name__}, wanted a Tensor", ""
            )
        if loss.slot is None or loss.slot.token is not self._token:
            why = "is a leaf or needs no gradient" if loss.slot is None else "is on another tape"
            raise AutogradError(
                f"backward: the loss of shape {loss.shape} was not made on this tape: it {why}",
                "compute it inside `with tape:` from tensors with requires_grad=True, "
                "outside of no_grad()",
            )
        if grad is None:
            if loss.data.numel() != 1:
                raise AutogradError(
                    f"backward: the loss has shape {loss.shape}, wanted a scalar",
                    "pass grad=, the gradient of the loss",
                )
            seed = torch.empty(loss.shape, dtype=loss.dtype, device=loss.device)
            call("fill_", seed, 1.0, stream=current_stream(loss.device))
            return loss.slot, seed, True
        seed = grad.data if isinstance(grad, Tensor) else Tensor(grad).data
        if (
            tuple(seed.shape) != loss.shape
            or seed.dtype != loss.dtype
            or seed.device != loss.device
        ):
            raise AutogradError(
                f"backward: grad is {seed.dtype} {tuple(seed.shape)} on {seed.device}, wanted "
                f"{loss.dtype} {loss.shape} on {loss.device}",
                "",
            )
        return loss.slot, seed, False


def recording(*tensors: Tensor | None) -> bool:
    """Whether an op of these inputs will be put on a tape; of none: whether a tape is active."""
    if not isinstance(_ACTIVE.get(), Tape):
        return False
    return not tensors or any(t is not None and t.requires_grad for t in tensors)


def record(
    op: str,
    inputs: Sequence[Tensor | None],
    outputs: Tensor | Sequence[Tensor],
    backward: Backward,
    *,
    saved: Sequence[Any] = (),
    **settings: Any,
) -> None:
    """Put an op that has run on the active tape, where an input requires a gradient.

    Args:
        op: Its name, for messages.
        inputs: The inputs that may have gradients, in the order ``backward`` returns them.
        outputs: Its results; they require gradients from here on.
        backward: ``backward(node, *grads)``, see :class:`~entrenar.autograd.node.Node`.
        saved: What ``backward`` reads as ``node.saved``: tensors, whose in-place modification is
            noticed, and anything else.
        **settings: What ``backward`` reads as ``node.settings``.
    """
    tape = _ACTIVE.get()
    if tape is None:
        return
    if isinstance(tape, Probe):
        tape.see(op, inputs, saved)
    elif any(tensor is not None and tensor.requires_grad for tensor in inputs):
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        tape.add(op, inputs, outputs, saved, backward, settings)


@contextlib.contextmanager
def overwriting(
    op: str, tensors: Sequence[Tensor], beside: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Write the storage of ``tensors`` inside the block, where nothing needs what it holds.

    On an active tape that will record the op (of ``tensors`` and others ``beside`` them), a tensor
    must be one that the tape itself allocated and no backward reads. Tensors that view the same
    storage and were made before the write are refused by later ops.

    Raises:
        AutogradError: The tape cannot prove that; nothing was written then.
    """
    tape = _ACTIVE.get()
    if isinstance(tape, Tape) and recording(*tensors, *beside):
        for tensor in tensors:
            tape.check_overwrite(op, tensor)
    yield
    for tensor in tensors:
        if tensor.slot is not None:
            tensor.slot.version = tensor.state.version


def run(function: str, /, *args: Any, strided: bool = False, **kwargs: Any) -> Any:
    """Run a function of the table on the current stream, after what last wrote its arguments.

    Args:
        function: Its name.
        *args: Its arguments: Tensors, or anything the function takes.
        strided: It takes any strides; otherwise Tensors are made contiguous first.
        **kwargs: Its keyword arguments.

    Returns:
        Its results as Tensors that remember the stream; what is not storage as it is.
    """
    given = (*args, *kwargs.values())
    device = next((a.device for a in given if isinstance(a, torch.Tensor | Tensor)), None)
    stream = current_stream("cpu" if device is None else device)

    def storage(value: Any) -> Any:
        data = value.data if isinstance(value, Tensor) else value
        if strided or not isinstance(data, torch.Tensor) or data.is_contiguous():
            return data
        state_of(data).reading(stream, data)
        return data.contiguous()

    args = tuple(storage(a) for a in args)
    kwargs = {name: storage(a) for name, a in kwargs.items()}
    result = call(function, *args, stream=stream, **kwargs)
    if isinstance(result, tuple):
        return tuple(wrap(r, stream) for r in result)
    return wrap(result, stream)


def wrap(value: Any, stream: Stream) -> Any:
    """Return storage that work on ``stream`` writes as a Tensor of the active tape."""
    if not isinstance(value, torch.Tensor):
        return value
    tape = _ACTIVE.get()
    state = state_of(value, fresh=True)
    if state.fresh and tape is not None:
        state.owner = tape.token
    home = tape.stream if isinstance(tape, Tape) else None
    away = home is not None and stream != home
    if (
        away or state.stream is None
    ):  # away from home the event is exact, elsewhere a later one does
        state.written(stream, stream.record_event() if away else None)
    return Tensor(value)
