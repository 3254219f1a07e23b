"""What every launcher does around a kernel: check, allocate, pick the backend, enter the stream, announce.

CUDA storage is launched on its GPU. CPU storage runs under ``ENTRENAR_BACKEND=triton``, which
interprets the kernel's source, or ``=ptx``, which compiles it and executes the PTX; without either a
launcher refuses it, since ``entrenar.optable`` computes on the CPU with NumPy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from entrenar import runtime
from entrenar.checks import check_dtype
from entrenar.errors import DeviceError, DTypeError, LayoutError
from entrenar.kernels import _interpreter

__all__ = [
    "allocating",
    "cdiv",
    "check_floating",
    "check_storage",
    "driving",
    "empty",
    "interpreting",
    "launch",
    "launching",
    "next_power_of_2",
    "num_warps_for",
    "on_amd",
    "on_rdna",
    "on_scalars",
    "prepare",
    "require_contiguous",
    "shared_bytes",
]

# Triton 3.9 announces that fused multiply-add will be off by default in 3.10. It stays on here:
# tolerances are derived for either, and products gain a rounding less.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

Allocator = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
Runner = Callable[[str, Any, tuple[int, ...], dict[str, Any]], None]


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, where 16-bit ``tl.dot`` must be up-cast first."""
    return runtime.interpreting_requested()


@functools.cache
def on_amd() -> bool:
    """Whether torch was built for AMD GPUs."""
    return torch.version.hip is not None


@functools.cache
def on_rdna() -> bool:
    """Whether the GPU is AMD's with wavefronts of 32 lanes: half as many lanes to hold a tile.

    Offline compilation names its target in ``torch.version.hip``.
    """
    if not on_amd():
        return False
    if torch.cuda.is_available():
        return int(getattr(torch.cuda.get_device_properties(0), "warp_size", 64)) == 32
    return "gfx1" in str(torch.version.hip)


def on_scalars(x: torch.Tensor) -> bool:
    """Whether products of x run on the scalar units and want small tiles: float32, and all on sm_75.

    Triton uses the matrix units of NVIDIA's GPUs from sm_80 on; sm_75 is told by its shared memory.
    """
    return x.dtype == torch.float32 or (not on_amd() and shared_bytes(x.device) <= 64 << 10)


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory a program may use on a device, or on the target a CPU stands in for."""
    if device.type == "cuda":
        return _shared_bytes_of(device)
    if on_amd():
        return 64 << 10
    from entrenar.emulator.targets import shared_memory_bytes

    return shared_memory_bytes(runtime.ptx_target())


@functools.cache
def _shared_bytes_of(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or (64 << 10)


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least ``n`` (1 for n < 1)."""
    return 1 << max(n - 1, 0).bit_length()


def num_warps_for(block: int) -> int:
    """Return warps for a row of ``block`` elements: a thread then holds 8 to 16 of them."""
    return min(max(block // 512, 1), 16) if block >= 1024 else max(min(block // 128, 4), 1)


_CPU = {torch.device("cpu")}


def prepare(op: str, *tensors: torch.Tensor | None) -> None:
    """Check that storage lies on one device and that kernels can run there.

    Raises:
        DeviceError: Several devices, or CPU storage without a backend that runs kernels on it.
    """
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        listed = " and ".join(sorted(map(str, devices)))
        raise DeviceError(
            f"{op}: arguments lie on {listed}, wanted one device",
            "move them to the same device first",
        )
    if devices == _CPU and runtime.backend() == "numpy":
        raise DeviceError(
            f"{op}: a Triton kernel was given CPU storage",
            "set ENTRENAR_BACKEND=triton to interpret kernels or ENTRENAR_BACKEND=ptx to emulate "
            "them, or call it through entrenar.optable, which computes with NumPy",
        )


def check_storage(op: str, **tensors: Any) -> None:
    """Refuse what is no torch tensor: an ndarray, None, a list.

    Raises:
        DTypeError: Names the argument and what it is.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            got = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise DTypeError(
                f"{op}: {name} is {got}, wanted a torch tensor",
                "torch.from_numpy(array) views an ndarray",
            )


def check_floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse storage that is not float32, float16 or bfloat16; None is passed over."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_storage(op, **{name: tensor})
            check_dtype(op, name, tensor, "float32", "float16", "bfloat16")


def require_contiguous(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse storage with gaps or permuted axes; None is passed over.

    Raises:
        LayoutError: Names the argument and its strides.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise LayoutError(
                f"{op}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, "
                "wanted contiguous rows",
                f"pass {name}.contiguous()",
            )


def _plain_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_allocators: list[Allocator] = [_plain_empty]


@contextlib.contextmanager
def allocating(allocator: Allocator) -> Iterator[None]:
    """Take the storage of results from ``allocator`` inside the block: tests poison and count it."""
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.remove(allocator)


def empty(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Allocate uninitialised storage on the device of ``like``."""
    made = _allocators[-1](tuple(shape), dtype, like.device)
    runtime.announce_allocation(made.nbytes)
    return made


_runners: list[Runner] = []


@contextlib.contextmanager
def launching(runner: Runner) -> Iterator[None]:
    """Hand launches to ``runner`` inside the block, in place of a device.

    ``runner(op, kernel, grid, arguments)`` gets what a launcher chose: offline compilation collects
    kernels with their constants and options that way, without running them.
    """
    _runners.append(runner)
    try:
        yield
    finally:
        _runners.remove(runner)


def _emulate(target: str) -> None:
    """Make the emulator Triton's driver, unless one for this target (a counting one, say) is."""
    from entrenar.emulator import active_driver, install_driver

    driver = active_driver()
    if driver is None or driver.target != target:
        install_driver(target)


def _leave_emulator() -> None:
    """Give Triton the GPU's driver back where this process emulated before."""
    emulator = sys.modules.get("entrenar.emulator")
    if emulator is not None and emulator.active_driver() is not None:
        emulator.uninstall_driver()


@contextlib.contextmanager
def driving(device: str) -> Iterator[None]:
    """Let Triton's driver be that of a device inside the block: a GPU's, or the emulator's for the CPU.

    Args:
        device: ``"cpu"``, for a process that emulates kernels, or ``"cuda:N"``.
    """
    if device == "cpu":
        _emulate(runtime.ptx_target())
        yield
        return
    _leave_emulator()
    with torch.cuda.device(device):
        yield


def _where(tensor: torch.Tensor | None) -> str:
    if tensor is None or tensor.device.type != "cpu":
        return "cuda"
    return runtime.backend()


@contextlib.contextmanager
def _on_stream(stream: Any, tensor: torch.Tensor) -> Iterator[None]:
    """Make ``stream`` torch's current one: Triton launches on that and takes no stream itself."""
    torch_stream = getattr(stream, "torch_stream", stream)
    with torch.cuda.device(tensor.device):
        if torch_stream is None:
            yield
        else:
            with torch.cuda.stream(torch_stream):
                yield


def _keep_for(stream: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Keep memory that another stream allocated, partial results say, until ``stream`` is done with it."""
    torch_stream = getattr(stream, "torch_stream", stream)
    if torch_stream is None or torch_stream == torch.cuda.current_stream(torch_stream.device):
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch_stream)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    op: str,
    stream: Any,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    **arguments: Any,
) -> None:
    """Announce a launch and run it; a grid without programs is announced only.

    Args:
        kernel: A ``@triton.jit`` function.
        grid: Programs along each axis.
        op: Name of the launcher, for records and errors.
        stream: None for torch's current stream, a torch stream, or one with ``torch_stream``.
        reads: Storage the kernel reads.
        writes: Storage the kernel writes.
        **arguments: Keyword arguments of the kernel, and Triton's launch options.

    Raises:
        DeviceError: CPU storage without a backend that runs kernels there, or a kernel that was
            imported for another backend than the one in force.
    """
    first = next((t for t in (*writes, *reads) if t is not None), None)
    where = _where(first)
    if runtime.has_listeners():
        record = runtime.LaunchRecord(op, stream, tuple(reads), tuple(writes), where)
        runtime.announce(record)
    if any(n == 0 for n in grid):
        return
    if _runners:
        _runners[-1](op, kernel, grid, arguments)
        return
    if where == "cuda":
        assert first is not None
        _leave_emulator()
        with _on_stream(stream, first):
            kernel[grid](**arguments)
        _keep_for(stream, (*reads, *writes))
        return
    _check_backend(op, kernel, where)
    if where == "ptx":
        _emulate(runtime.ptx_target())
    else:
        _interpreter.repair()
    kernel[grid](**arguments)


def _check_backend(op: str, kernel: Any, where: str) -> None:
    compiled = hasattr(kernel, "cache_key")
    if where == "numpy" or compiled != (where == "ptx"):
        found = "compiled" if compiled else "interpreted"
        raise DeviceError(
            f"{op}: kernels of this process are {found}, but ENTRENAR_BACKEND is {where!r}",
            "choose the backend before the first kernel is imported",
        )
