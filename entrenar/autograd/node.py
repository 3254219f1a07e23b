"""One recorded op: what it saved, where its gradients come from and go to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from entrenar import runtime
from entrenar.autograd.stream import Stream, current_stream
from entrenar.autograd.tensor import Slot, Tensor
from entrenar.errors import AutogradError
from entrenar.optable import call
from entrenar.optable.dispatch import storages
from entrenar.optable.storage import StorageState, known_state

__all__ = ["ACCUMULATED", "Backward", "Edge", "Node", "Saved", "Watched"]


class _Accumulated:
    """The gradient is already where it belongs: the kernel added it to the leaf's ``grad``."""


ACCUMULATED = _Accumulated()

Edge = Slot | Tensor | None
Gradient = torch.Tensor | _Accumulated | None
Backward = Callable[..., Gradient | tuple[Gradient, ...]]


class Saved:
    """Something a backward function reads, with the version its storage had when it was saved."""

    __slots__ = ("name", "state", "value", "version")

    def __init__(self, value: Any) -> None:
        self.state: StorageState | None = None
        self.version: tuple[int, int] = (0, 0)
        self.value = value
        self.name = ""
        if isinstance(value, Tensor):
            self.value, self.state, self.name = value.data, value.state, value.name
            self.version = value.version
            value.state.saves += 1

    def check(self, op: str, position: int) -> None:
        """Raise where the storage was written since it was saved."""
        if self.state is None:
            return
        torch_version = 0 if self.value.is_inference() else self.value._version
        now = (self.state.version, torch_version)
        if now != self.version:
            label = f" ({self.name!r})" if self.name else ""
            raise AutogradError(
                f"{op}: saved tensor {position}{label} of shape {tuple(self.value.shape)} was "
                f"modified in place after the forward pass: version {sum(now)}, wanted "
                f"{sum(self.version)}",
                "write to a copy, or run backward before the in-place write",
            )


class Watched(Saved):
    """Something that backward reads without the node keeping it: only its version is remembered."""

    __slots__ = ("_alive", "_of", "_shape")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(None)
        self.name, self.version = tensor.name, tensor.version
        self._of, self._alive, self._shape = tensor.state, weakref.ref(tensor.data), tensor.shape

    def check(self, op: str, position: int) -> None:
        """Raise where it was written since."""
        data = self._alive()
        torch_version = self.version[1] if data is None or data.is_inference() else data._version
        if (self._of.version, torch_version) != self.version:
            label = f"{self.name!r}" if self.name else "a tensor"
            raise AutogradError(
                f"{op}: {label} of shape {self._shape}, which the function read, was modified in "
                "place after the forward pass, and backward would compute with other values",
                "run backward before the in-place write",
            )


class Node:
    """An op on the tape.

    Its backward function is called as ``backward(node, *grads)`` with one gradient per output, None
    for an output that received none, and returns one gradient per input in the same order.

    Attributes:
        op: Name of the op, for messages.
        edges: Per input: the slot of a tensor made on the tape, a leaf, or None without gradient.
        outputs: Slots of the outputs.
        stream: The stream forward ran on, and backward will.
        settings: The op's plain arguments.
        grads_owned: Per output, whether backward may overwrite its gradient.
        unit: Whether the gradient is the 1 that ``Tape.backward`` seeds itself.
    """

    __slots__ = (
        "_backward", "_overwrite", "_overwritten", "_saved", "_token", "edges", "grads_owned", "op",
        "outputs", "settings", "stream", "unit",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        edges: tuple[Edge, ...],
        saved: Sequence[Any],
        backward: Backward,
        stream: Stream,
        settings: dict[str, Any],
        token: object,
    ) -> None:
        self.op = op
        self.edges = edges
        self.outputs: tuple[Slot, ...] = ()
        self.stream = stream
        self.settings = settings
        self.grads_owned: tuple[bool, ...] = ()
        self.unit = False
        self._saved = tuple(v if isinstance(v, Saved) else Saved(v) for v in saved)
        self._backward = backward
        self._token = token
        self._overwrite = False
        self._overwritten: set[int] = set()

    @property
    def needs(self) -> tuple[bool, ...]:
        """Per input, whether its gradient is wanted."""
        return tuple(edge is not None for edge in self.edges)

    @property
    def saved(self) -> tuple[Any, ...]:
        """What was saved, as storage, after checking that nothing wrote to it since.

        Raises:
            AutogradError: A saved tensor was modified in place.
        """
        self.check()
        return tuple(saved.value for saved in self._saved)

    def check(self) -> None:
        """Raise where a saved tensor was modified in place."""
        for position, saved in enumerate(self._saved):
            saved.check(self.op, position)

    def saves(self, state: StorageState) -> bool:
        """Whether backward reads a tensor on this storage."""
        return any(saved.state is state for saved in self._saved)

    def held(self) -> list[tuple[object, int, object | None]]:
        """Return (identity, bytes, tape that allocated it) of each piece of storage that is saved.

        What a tape's op allocated counts whole, as it is kept; of other storage the part in use.
        """
        found: list[tuple[object, int, object | None]] = []
        for value in (saved.value for saved in self._saved):
            for data in storages(value):
                state = known_state(data)
                if state is not None and state.owner is not None:
                    whole = data.untyped_storage()
                    found.append((whole.data_ptr(), whole.nbytes(), state.owner))
                else:
                    used = data.numel() * data.element_size()
                    found.append(((data.data_ptr(), used), used, None))
        return found

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function of the table on the node's stream."""
        return call(function, *args, stream=self.stream, **kwargs)

    def may_overwrite(self, *positions: int) -> bool:
        """Whether these saved tensors are dead after this node, and if so mark them as written.

        True only on a tape that owns its activations, for storage that this tape allocated and no
        other node still holds.
        """
        chosen = [self._saved[p] for p in positions]
        free = self._overwrite and all(
            s.state is not None and s.state.owner is self._token and s.state.saves == 1
            for s in chosen
        )
        if free:
            for saved in chosen:
                if saved.state is not None:
                    saved.state.version += 1
                self._overwritten.add(storage_address(saved.value))
        return free

    def grad_target(self, position: int) -> torch.Tensor | None:
        """Return the leaf's gradient storage where a kernel can add to it directly, else None."""
        edge = self.edges[position]
        if not isinstance(edge, Tensor) or edge.grad is None or edge.hooks:
            return None
        return edge.grad if edge.grad.is_contiguous() else None

    def zeros(self, output: int) -> torch.Tensor:
        """Return a zero gradient for an output that received none."""
        slot = self.outputs[output]
        return torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)

    def scalar(self, grad: torch.Tensor) -> float:
        """Return a scalar gradient as a number; waits for the device unless it is the seed."""
        if self.unit:
            return 1.0
        runtime.note_wait(current_stream(grad.device))
        return float(grad.reshape(()).item())

    def run(self, grads: tuple[torch.Tensor | None, ...], *, overwrite: bool) -> tuple[Any, ...]:
        """Call the backward function and return one gradient per input.

        Raises:
            AutogradError: It returned another number of gradients.
        """
        self._overwrite = overwrite
        results = self._backward(self, *grads)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(self.edges):
            raise AutogradError(
                f"{self.op}: backward returned {len(results)} gradients for {len(self.edges)} "
                "inputs",
                "return None for an input without gradient",
            )
        return results

    def holds(self, address: int, *, retain: bool) -> bool:
        """Whether the memory at this address is still somebody's after the node has run.

        A saved Tensor is, unless backward was allowed to overwrite it; what only the node has saved
        is, where it is kept for another backward.
        """
        return address not in self._overwritten and any(
            isinstance(s.value, torch.Tensor)
            and (retain or s.state is not None)
            and storage_address(s.value) == address
            for s in self._saved
        )

    def release(self) -> None:
        """Let go of everything saved."""
        for saved in self._saved:
            if saved.state is not None:
                saved.state.saves -= 1
        self._saved = ()


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the memory a tensor views; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()
