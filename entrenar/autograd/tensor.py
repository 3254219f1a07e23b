"""A tensor: torch storage with what the tape and the streams must know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.autograd.stream import Stream, current_stream
from entrenar.errors import AutogradError, DTypeError, ShapeMismatchError
from entrenar.optable.storage import state_of

__all__ = ["HookHandle", "Slot", "Tensor"]

Hook = Callable[[torch.Tensor], torch.Tensor | None]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class HookHandle:
    """What :meth:`Tensor.register_hook` returns: :meth:`remove` takes the hook off again."""

    __slots__ = ("_hook", "_place")

    def __init__(self, place: Slot | Tensor, hook: Hook) -> None:
        self._place, self._hook = place, hook
        place.hooks = (*place.hooks, hook)

    def remove(self) -> None:
        """Take the hook off; again does nothing."""
        self._place.hooks = tuple(h for h in self._place.hooks if h is not self._hook)


class Slot:
    """Where the gradient of a tensor that an op made is gathered during backward.

    It knows the tensor's form but not its storage, so that a tape keeps no activation alive that
    no backward function reads.
    """

    __slots__ = (
        "device", "dtype", "grad", "hooks", "op", "owned", "serial", "shape", "token", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, op: str, serial: int, token: object) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.op = op
        self.serial = serial
        self.token = token
        self.version = tensor.state.version
        self.grad: torch.Tensor | None = None
        self.owned = False
        self.hooks: tuple[Hook, ...] = ()


class Tensor:
    """Torch storage with a gradient, a version and the stream that last wrote it.

    Args:
        data: A torch tensor, or an ndarray whose memory is shared (copied where it is read-only).
        requires_grad: Whether a tape computes its gradient; only for floating dtypes.
        name: For messages.

    Attributes:
        grad: Torch storage of the same shape, or None. It may be set beforehand to a view into an
            arena, of a wider dtype too: gradients then accumulate into that storage.
        state: Version, streams and events of the storage, shared with all that view it.
        hooks: What :meth:`register_hook` was given, for a leaf.
        slot: The tape's gradient slot; None for a leaf.

    Raises:
        DTypeError: ``requires_grad`` with integers, or data of another type.
    """

    __slots__ = (
        "__weakref__", "_data", "_grad", "hooks", "name", "requires_grad", "slot", "state",
    )  # fmt: skip

    def __init__(
        self, data: torch.Tensor | np.ndarray, requires_grad: bool = False, name: str = ""
    ) -> None:
        if isinstance(data, np.ndarray | np.generic):
            array = np.asarray(data)
            data = torch.from_numpy(array if array.flags.writeable else array.copy())
        if isinstance(data, torch.Tensor):
            data = data.detach() if data.requires_grad else data
        else:
            raise DTypeError(
                f"Tensor data is a {type(data).__name__}, wanted a torch tensor or an ndarray",
                "wrap it with numpy.asarray",
            )
        if requires_grad and data.dtype not in _FLOATS:
            raise DTypeError(
                f"a tensor of {data.dtype} cannot require a gradient, wanted a floating dtype", ""
            )
        self._data = data
        self._grad: torch.Tensor | None = None
        self.requires_grad = requires_grad
        self.name = name
        self.slot: Slot | None = None
        self.hooks: tuple[Hook, ...] = ()
        self.state = state_of(data, fresh=True)
        if self.state.fresh:
            self.state.fresh = False
            if self.state.stream is None:  # nobody said who wrote it: work given to this stream
                self.state.written(current_stream(data.device))

    @property
    def data(self) -> torch.Tensor:
        """The storage, as a torch tensor."""
        return self._data

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient accumulated so far, or None."""
        return self._grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None and tuple(grad.shape) != self.shape:
            raise ShapeMismatchError(
                f"grad of {self._label()} has shape {tuple(grad.shape)}, wanted {self.shape}", ""
            )
        self._grad = grad

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(self._data.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        """Where the storage lies."""
        return self._data.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._data.ndim

    @property
    def is_leaf(self) -> bool:
        """Whether no op of a tape made it, so that its gradient is kept."""
        return self.slot is None

    @property
    def version(self) -> tuple[int, int]:
        """Counts of in-place writes: by ops, and by torch on the storage itself."""
        return self.state.version, 0 if self._data.is_inference() else self._data._version

    def written(self, stream: Stream) -> None:
        """Declare that work on ``stream`` wrote the storage in place, other than by an op."""
        self.state.version += 1
        self.state.written(stream)

    def ready_on(self, stream: Stream) -> None:
        """Let ``stream`` wait for the last write, and keep the storage alive for its work."""
        self.state.reading(stream, self._data)

    def register_hook(self, hook: Hook) -> HookHandle:
        """Call ``hook(grad)`` on the gradient of this tensor in each backward, once it is complete.

        The gradient of an op's result is complete when the walk reaches the op; that of a leaf when
        the outermost backward has run all ops, and before it is added to ``grad``. Hooks of one tensor
        run in the order they were registered, leaves in the order their gradients first appeared.
        What a hook returns takes the gradient's place; None leaves it. It must not write to its
        argument, which others may hold.

        Args:
            hook: Gets the gradient as torch storage, on the current stream; returns storage of the
                same shape, dtype and device, or None.

        Returns:
            A handle whose ``remove`` takes the hook off.

        Raises:
            AutogradError: The tensor requires no gradient.
        """
        if not self.requires_grad:
            raise AutogradError(
                f"register_hook: {self._label()} of shape {self.shape} requires no gradient",
                "set requires_grad=True on it, or compute it on a tape from tensors that do",
            )
        return HookHandle(self if self.slot is None else self.slot, hook)

    def view(self, data: torch.Tensor, requires_grad: bool = False) -> Tensor:
        """Return a leaf over ``data``, which views this tensor's storage, sharing version and event."""
        other = Tensor(data, requires_grad=requires_grad, name=self.name)
        other.state = self.state
        return other

    def detach(self) -> Tensor:
        """Return a tensor over the same storage that no tape follows.

        Writing to it in place writes to this one too; the shared version counter then makes a
        backward that still needs the old values raise.
        """
        return self.view(self._data)

    def numpy(self) -> np.ndarray:
        """Return the values as a read-only ndarray: a view on the CPU, a copy from a GPU.

        16-bit storage is returned as float32, since NumPy has no bfloat16.
        """
        if self.state.stream is not None:
            self.state.stream.synchronize()
        data = self._data.detach().to("cpu")
        if data.dtype in (torch.float16, torch.bfloat16):
            data = data.to(torch.float32)
        array = data.numpy()
        array.flags.writeable = False
        return array

    def item(self) -> float:
        """Return the only element as a Python number, waiting for it.

        Raises:
            ShapeMismatchError: There is not exactly one element.
        """
        if self._data.numel() != 1:
            raise ShapeMismatchError(f"item() of shape {self.shape}, wanted one element", "")
        return self.numpy().reshape(()).item()

    def _label(self) -> str:
        return f"tensor {self.name!r}" if self.name else "a tensor"

    def __bool__(self) -> bool:
        raise AutogradError("the truth of a tensor is not defined", "compare .item() or .numpy()")

    def __repr__(self) -> str:
        parts = [f"shape={self.shape}", f"dtype={str(self.dtype).removeprefix('torch.')}"]
        parts += [f"device={str(self.device)!r}"] if self._data.is_cuda else []
        parts += ["requires_grad=True"] if self.requires_grad else []
        parts += [f"name={self.name!r}"] if self.name else []
        return f"Tensor({', '.join(parts)})"


def as_storage(value: Any) -> Any:
    """Return the torch storage of a Tensor or ndarray, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, np.ndarray):
        return Tensor(value).data
    return value
