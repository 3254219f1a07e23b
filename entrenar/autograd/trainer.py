"""``Trainer`` and ``CudaTrainer``: products, clipping and AdamW on plain buffers, on a stream of their own.

For those who write their own forward and backward pass. Buffers are Tensors, so work of several
trainers, streams and tapes on one buffer is ordered by itself; nothing waits for the device but
``synchronize``, ``download`` and ``step_count``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch

from entrenar import runtime
from entrenar.autograd.stream import Stream
from entrenar.autograd.tape import no_grad, run
from entrenar.autograd.tensor import Tensor
from entrenar.errors import (
    AllocationFailedError,
    ConfigError,
    CudaNotAvailableError,
    KernelError,
    ShapeMismatchError,
    TransferFailedError,
)

__all__ = ["CudaTrainer", "Trainer", "cuda_training_available"]

Buffer = Tensor | torch.Tensor


def cuda_training_available() -> bool:
    """Whether there is a GPU that :class:`CudaTrainer` can use."""
    return runtime.cuda_available()


class Trainer:
    """Training primitives on one device, each given to the trainer's own stream.

    ``with trainer:`` makes its stream the current one and waits for it at the end.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; ``"auto"`` falls back to the CPU
            with one warning.

    Raises:
        CudaNotAvailableError: A GPU was asked for that is not there.
        ConfigError: The device has no such name.
    """

    def __init__(self, device: str = "auto") -> None:
        name = runtime.resolve_device(device)
        if name == "cpu" and device == "auto":
            _say_cpu_once()
        index = int(name.partition(":")[2] or 0)
        if name != "cpu" and index >= torch.cuda.device_count():
            raise CudaNotAvailableError(
                f"device {name} was asked for, but there are {torch.cuda.device_count()} GPUs",
                "counting starts at 0",
            )
        self._stream = Stream(name)
        # Steps completed by each optimiser state, known by the storage of its first moment.
        self._steps: dict[int, torch.Tensor] = {}
        self._rate = self._empty((1,), torch.float32)

    @property
    def context(self) -> torch.device:
        """The device; torch holds one context for it, shared by all trainers."""
        return self._stream.device

    @property
    def stream(self) -> Stream:
        """The stream that everything here is given to."""
        return self._stream

    def synchronize(self) -> None:
        """Wait for all work given to the stream.

        Raises:
            KernelError: Some of it failed.
        """
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise KernelError(f"work on {self.device_name()} failed: {error}", "") from error

    # memory

    def upload(self, array: Any) -> Tensor:
        """Return a float32 buffer on the device with the values and the shape of an array.

        Raises:
            AllocationFailedError: The device has not enough memory.
            TransferFailedError: The copy failed.
        """
        source = torch.from_numpy(np.array(array, dtype=np.float32))
        target = self._empty(tuple(source.shape), torch.float32)
        try:
            with self._stream:
                target.copy_(source)
        except RuntimeError as error:
            raise TransferFailedError(f"the upload of {target.shape} failed: {error}") from error
        return self._owned(target)

    def zeros(self, n: int | tuple[int, ...]) -> Tensor:
        """Return a float32 buffer of zeros, filled on the device.

        Raises:
            AllocationFailedError: The device has not enough memory.
        """
        buffer = self._owned(self._empty((n,) if isinstance(n, int) else tuple(n), torch.float32))
        self._run("fill_", buffer, 0.0)
        return buffer

    def download(self, buffer: Buffer) -> np.ndarray:
        """Return a copy of a buffer after all work given to the stream so far.

        Raises:
            TransferFailedError: The copy failed.
        """
        tensor = _as_tensor(buffer)
        tensor.ready_on(self._stream)
        self.synchronize()
        try:
            with self._stream:
                return np.array(tensor.data.cpu().numpy())
        except RuntimeError as error:
            raise TransferFailedError(f"the download of {tensor.shape} failed: {error}") from error

    def free_memory_mb(self) -> int | None:
        """Return the MiB that can still be allocated; None where the driver does not tell."""
        try:
            return runtime.available_memory_bytes(str(self._stream.device)) >> 20
        except RuntimeError:
            return None

    def total_memory(self) -> int:
        """Return the bytes of memory the device has."""
        if self._stream.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._stream.device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def device_name(self) -> str:
        """Return the name of the device."""
        if self._stream.device.type == "cuda":
            return str(torch.cuda.get_device_name(self._stream.device))
        return platform.processor() or platform.machine() or "CPU"

    # arithmetic

    def matmul_forward(self, a: Buffer, b: Buffer, c: Buffer, m: int, k: int, n: int) -> None:
        """Write ``a @ b`` to ``c``: a [m, k], b [k, n], c [m, n], row-major, in any shape of that size.

        Raises:
            ShapeMismatchError: A buffer has another length.
        """
        op = "matmul_forward"
        left, right = _matrix(op, "a", a, m, k), _matrix(op, "b", b, k, n)
        self._run("gemm_forward", left, right, out=_matrix(op, "c", c, m, n))

    def matmul_backward(
        self,
        a: Buffer,
        b: Buffer,
        grad_c: Buffer,
        grad_a: Buffer | None,
        grad_b: Buffer | None,
        m: int,
        k: int,
        n: int,
    ) -> None:
        """Write the gradients of ``a @ b`` that are asked for: one that is None is not computed.

        Args:
            a: [m, k].
            b: [k, n].
            grad_c: [m, n].
            grad_a: [m, k], becomes ``grad_c @ b.T``; or None.
            grad_b: [k, n], becomes ``a.T @ grad_c``; or None.
            m: Rows of ``a``.
            k: Columns of ``a``.
            n: Columns of ``b``.

        Raises:
            ShapeMismatchError: A buffer has another length.
        """
        op = "matmul_backward"
        left, right = _matrix(op, "a", a, m, k), _matrix(op, "b", b, k, n)
        grad = _matrix(op, "grad_c", grad_c, m, n)
        out_a = None if grad_a is None else _matrix(op, "grad_a", grad_a, m, k)
        out_b = None if grad_b is None else _matrix(op, "grad_b", grad_b, k, n)
        if out_a is not None:
            self._run("gemm_backward_a", grad, right, out=out_a)
        if out_b is not None:
            self._run("gemm_backward_b", left, grad, out=out_b)

    def adamw_step(
        self,
        params: Buffer,
        grads: Buffer,
        m_state: Buffer,
        v_state: Buffer,
        lr: float | Buffer,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """Take one AdamW step in place. The step belongs to ``m_state`` and ``v_state``: each pair counts.

        Args:
            params: Any shape; written.
            grads: Of the same length.
            m_state: First moment, of the same length; zeros before the first step; written.
            v_state: Second moment, likewise.
            lr: A number, or float32 [1] on the device, which a replayed graph reads anew.
            beta1: Decay rate of the first moment.
            beta2: Decay rate of the second.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled weight decay.

        Raises:
            ShapeMismatchError: Lengths differ.
            ConfigError: A setting is out of range.
        """
        given = {"params": params, "grads": grads, "m_state": m_state, "v_state": v_state}
        length = _as_tensor(params).data.numel()
        flat = [_shaped("adamw_step", name, t, (length,)) for name, t in given.items()]
        rate: Any = lr
        if isinstance(lr, int | float):
            rate = Tensor(self._rate)
            self._run("fill_", rate, float(lr))
        self._run(
            "adamw_step", *flat, self._step_of(m_state), rate, beta1=beta1, beta2=beta2,
            eps=eps, weight_decay=weight_decay,
        )  # fmt: skip

    def clip_gradients(self, grads: Buffer, max_norm: float) -> Tensor:
        """Scale gradients in place to a norm of at most ``max_norm``, without waiting for the device.

        Returns:
            The norm before, float32 [1] on the device; ``.item()`` waits for it. Where it is not
            finite the gradients stay as they are.

        Raises:
            ConfigError: ``max_norm`` is not above 0.
        """
        tensor = _as_tensor(grads)
        flat = _shaped("clip_gradients", "grads", tensor, (tensor.data.numel(),))
        return self._run("clip_grad_norm", flat, max_norm)

    def step_count(self, m_state: Buffer | None = None) -> int:
        """Return the steps an optimiser state has taken; the most any has where none is named. Waits."""
        self.synchronize()
        if m_state is not None:
            return int(self._step_of(m_state).item())
        return max((int(step.item()) for step in self._steps.values()), default=0)

    def reset_step(self, m_state: Buffer | None = None) -> None:
        """Count an optimiser state's steps from 0 again, or everyone's; moments stay as they are."""
        for step in [self._step_of(m_state)] if m_state is not None else self._steps.values():
            with self._stream:
                step.zero_()

    # inside

    def _run(self, function: str, *args: Any, **kwargs: Any) -> Any:
        with no_grad(), self._stream, _kernel_errors(function):
            return run(function, *args, **kwargs)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if any(n < 0 for n in shape):
            raise ConfigError(
                f"a buffer of shape {shape} was asked for, wanted sizes of at least 0"
            )
        try:
            with self._stream:
                return torch.empty(shape, dtype=dtype, device=self._stream.device)
        except (RuntimeError, MemoryError) as error:
            raise AllocationFailedError(
                f"{self.device_name()} has no room for {shape} of {dtype}: {error}",
                f"{self.free_memory_mb()} MiB are free",
            ) from error

    def _owned(self, storage: torch.Tensor) -> Tensor:
        with self._stream:
            return Tensor(storage)

    def _step_of(self, m_state: Buffer) -> torch.Tensor:
        """Return the device counter of a state, which goes when the memory of its moment does."""
        data = _as_tensor(m_state).data
        key = data.data_ptr()
        if key not in self._steps:
            with self._stream:
                self._steps[key] = torch.zeros(1, dtype=torch.int64, device=data.device)
            weakref.finalize(data.untyped_storage(), self._steps.pop, key, None)
        return self._steps[key]

    def __enter__(self) -> Trainer:
        self._stream.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)
        if error is None:
            self.synchronize()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(device={self.device_name()!r}, "
            f"memory_gb={self.total_memory() / 1e9:.1f}, step={self.step_count()})"
        )


class CudaTrainer(Trainer):
    """A :class:`Trainer` on a GPU.

    Args:
        index: Which one.

    Raises:
        CudaNotAvailableError: There is none, or not this one.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__(f"cuda:{index}")

    @classmethod
    def with_device(cls, index: int) -> CudaTrainer:
        """Return a trainer on the GPU of this number; several work side by side.

        Raises:
            CudaNotAvailableError: There is no such GPU.
        """
        return cls(index)


@functools.cache
def _say_cpu_once() -> None:
    warnings.warn(
        f"torch {torch.__version__} sees no GPU: training on the CPU", UserWarning, stacklevel=3
    )


@contextlib.contextmanager
def _kernel_errors(function: str) -> Iterator[None]:
    """Name the function where the device, not the caller, is at fault."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise AllocationFailedError(f"{function}: {error}") from error


def _as_tensor(buffer: Buffer) -> Tensor:
    return buffer if isinstance(buffer, Tensor) else Tensor(buffer)


def _shaped(op: str, name: str, buffer: Buffer, shape: tuple[int, ...]) -> Tensor:
    """Return a view of a buffer, or say that its length does not fit."""
    tensor = _as_tensor(buffer)
    length = int(np.prod(shape))
    if tensor.data.numel() != length or not tensor.data.is_contiguous():
        form = "" if tensor.data.is_contiguous() else " with gaps"
        raise ShapeMismatchError(
            f"{op}: {name} has {tensor.data.numel()} elements{form}, wanted {length} in a row",
            f"shape {tensor.shape} does not hold {shape}",
        )
    return tensor.view(tensor.data.view(shape))


def _matrix(op: str, name: str, buffer: Buffer, rows: int, cols: int) -> Tensor:
    if rows < 0 or cols < 0:
        raise ConfigError(f"{op}: {name} would be {rows} by {cols}, wanted sizes of at least 0", "")
    return _shaped(op, name, buffer, (rows, cols))
