"""Which device and backend this process computes on, how much memory it has, who watches launches.

Importing this module imports neither torch nor triton; the probes do when they are called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from entrenar.errors import ConfigError, CudaNotAvailableError, MissingExtraError

__all__ = [
    "BACKENDS",
    "Counts",
    "LaunchRecord",
    "SyncRecord",
    "announce",
    "announce_allocation",
    "announce_sync",
    "available_memory_bytes",
    "backend",
    "counting",
    "cuda_available",
    "has_listeners",
    "has_sync_listeners",
    "interpreting_requested",
    "listening",
    "note_wait",
    "peak_memory_bytes",
    "ptx_target",
    "require",
    "resolve_device",
    "total_memory_bytes",
    "triton_available",
]

BACKENDS = ("numpy", "triton", "ptx")


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch, or one call of the CPU backend that stands in for it.

    Attributes:
        op: Name of the launcher, such as ``"rms_norm_forward"``.
        stream: The stream it was ordered on; None on the CPU without one.
        reads: Storage it reads.
        writes: Storage it writes.
        where: ``"cuda"``, ``"numpy"``, ``"triton"`` (interpreted) or ``"ptx"`` (emulated).
    """

    op: str
    stream: Any
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    where: str


@dataclasses.dataclass(frozen=True)
class SyncRecord:
    """One operation on streams that orders work, or keeps memory for it.

    Attributes:
        kind: ``"record"``: ``stream`` records ``event``. ``"wait"``: ``stream`` waits for ``event``.
            ``"synchronize"``: the host has waited for ``event``, or for all work of ``stream`` where
            ``event`` is None. ``"keep"``: once freed, ``storage`` is not handed out again before
            what ``stream`` was given until then is done.
        stream: The stream that records, waits, was waited for, or uses the memory.
        event: The event; None where there is none.
        storage: The torch storage that is kept; None otherwise.
    """

    kind: str
    stream: Any
    event: Any = None
    storage: Any = None


@dataclasses.dataclass
class Counts:
    """What happened inside a block of :func:`counting`.

    Attributes:
        launches: Launches, or calls of the CPU backend that stand in for them.
        by_op: The same by the name of the launcher.
        waits: Times the host waited for a device; on the CPU, where it would on a GPU.
        allocations: Pieces of storage that launchers allocated for results and scratch.
        allocated_bytes: Their bytes.
    """

    launches: int = 0
    by_op: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    waits: int = 0
    allocations: int = 0
    allocated_bytes: int = 0


_listeners: list[Callable[[LaunchRecord], None]] = []
_allocation_listeners: list[Callable[[int], None]] = []
_sync_listeners: list[Callable[[SyncRecord], None]] = []


@contextlib.contextmanager
def listening(
    listener: Callable[[LaunchRecord], None] | None = None,
    on_sync: Callable[[SyncRecord], None] | None = None,
) -> Iterator[None]:
    """Report each launch, and each operation on streams, inside the block.

    Args:
        listener: Called with a :class:`LaunchRecord` for each launch: before it where a kernel runs,
            after it where NumPy computes, whose results are storage only then.
        on_sync: Called with a :class:`SyncRecord`.
    """
    if listener is not None:
        _listeners.append(listener)
    if on_sync is not None:
        _sync_listeners.append(on_sync)
    try:
        yield
    finally:
        if listener is not None:
            _listeners.remove(listener)
        if on_sync is not None:
            _sync_listeners.remove(on_sync)


def announce(record: LaunchRecord) -> None:
    """Tell every listener of one launch."""
    for listener in tuple(_listeners):
        listener(record)


def announce_sync(record: SyncRecord) -> None:
    """Tell every listener of one operation on streams."""
    for listener in tuple(_sync_listeners):
        listener(record)


def note_wait(stream: Any) -> None:
    """Tell listeners that the host has waited for all work of ``stream``, by reading a result, say."""
    if _sync_listeners:
        announce_sync(SyncRecord("synchronize", stream))


def announce_allocation(nbytes: int) -> None:
    """Tell every listener that a launcher allocated storage."""
    for listener in tuple(_allocation_listeners):
        listener(nbytes)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count launches, waits of the host and allocations inside the block; blocks may nest.

    What torch allocates on its own account (uploads, ``torch.zeros``) is not seen.
    """
    found = Counts()

    def launched(record: LaunchRecord) -> None:
        found.launches += 1
        found.by_op[record.op] += 1

    def waited(record: SyncRecord) -> None:
        found.waits += record.kind == "synchronize"

    def allocated(nbytes: int) -> None:
        found.allocations += 1
        found.allocated_bytes += nbytes

    _allocation_listeners.append(allocated)
    try:
        with listening(launched, waited):
            yield found
    finally:
        _allocation_listeners.remove(allocated)


def has_sync_listeners() -> bool:
    """Whether anyone watches operations on streams, so that records need to be built at all."""
    return bool(_sync_listeners)


def has_listeners() -> bool:
    """Whether anyone watches launches, so that records need to be built at all."""
    return bool(_listeners)


@functools.cache
def triton_available() -> bool:
    """Whether triton can be imported; on some platforms it is absent and that is supported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def cuda_available() -> bool:
    """Whether torch sees a CUDA (or HIP) device."""
    import torch

    return bool(torch.cuda.is_available())


def backend() -> str:
    """Return what computes on CPU storage: ``"numpy"``, ``"triton"`` or ``"ptx"``.

    Read from ``ENTRENAR_BACKEND`` on every call. ``triton`` interprets the kernels' source and sets
    ``TRITON_INTERPRET=1`` where triton is not imported yet.

    Raises:
        ConfigError: The variable has another value, or triton was imported without interpreting.
    """
    name = os.environ.get("ENTRENAR_BACKEND", "") or "numpy"
    if name not in BACKENDS:
        raise ConfigError(
            f"ENTRENAR_BACKEND is {name!r}, wanted one of {', '.join(BACKENDS)}",
            "unset it to compute with NumPy on the CPU",
        )
    if name == "triton" and not interpreting_requested():
        if "triton" in sys.modules:
            raise ConfigError(
                "ENTRENAR_BACKEND=triton interprets kernels, but triton was imported without it",
                "set TRITON_INTERPRET=1 before the first import of triton",
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return name


def interpreting_requested() -> bool:
    """Whether ``TRITON_INTERPRET`` asks triton to interpret, by the values triton itself accepts."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def ptx_target() -> str:
    """Return the target ``ENTRENAR_BACKEND=ptx`` compiles for: ``ENTRENAR_PTX_TARGET``, or sm_80.

    Raises:
        ConfigError: ``ENTRENAR_PTX_TARGET`` is not of the form ``sm_NN``.
    """
    name = os.environ.get("ENTRENAR_PTX_TARGET", "") or "sm_80"
    if not (name.startswith("sm_") and name[3:].isdigit()):
        raise ConfigError(
            f"ENTRENAR_PTX_TARGET is {name!r}, wanted sm_ and a compute capability",
            "use sm_80, sm_90 or sm_120",
        )
    return name


def resolve_device(device: str = "auto") -> str:
    """Return ``"cpu"`` or ``"cuda:N"`` for a device setting.

    Raises:
        ConfigError: The setting is not ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        CudaNotAvailableError: A GPU was asked for and torch sees none.
    """
    if device == "cpu":
        return "cpu"
    if device == "auto":
        return "cuda:0" if cuda_available() else "cpu"
    name, _, index = device.partition(":")
    if name != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device is {device!r}, wanted auto, cpu, cuda or cuda:N", "")
    if not cuda_available():
        import torch

        raise CudaNotAvailableError(
            f"device {device!r} was asked for, but torch {torch.__version__} sees no GPU",
            "use device='cpu' or 'auto', or install a CUDA build of torch",
        )
    return f"cuda:{index or 0}"


def require(package: str, *, extra: str, feature: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingExtraError: It is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise MissingExtraError(feature, package.partition(".")[0], extra) from error


def peak_memory_bytes(device: str = "cpu") -> int:
    """Return the most memory used so far: resident bytes of this process, or allocated on a GPU."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    # getrusage reports the peak of the parent too, where this process was started from a larger one
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes(device: str = "cpu") -> int:
    """Return the bytes that can still be allocated: MemAvailable of the host, or free on the GPU.

    A control group's limit counts where it is lower. Where the system does not tell, 4 GiB.
    """
    if device.startswith("cuda"):
        import torch

        # what torch has freed it keeps, and hands out again
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    found = []
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = int(file.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            found.append(max(limit - int(file.read()), 0))
    return min(found, default=4 << 30)


def total_memory_bytes(device: str) -> int:
    """Return all memory of a GPU, or of the part of it that this process sees."""
    import torch

    return int(torch.cuda.mem_get_info(device)[1])
