"""Timing shared by the commands that take times: turns with cold caches, roofs, and what they were taken with.

Variants of one thing take turns, forwards and then backwards, so that a clock that drifts or a neighbour on
the machine meets all of them alike. Before each run the caches are overwritten, since in a training step
other work comes between. On a GPU a run is timed between two events on the stream; the stream is kept busy
before the first, so that the host's own time is hidden as it is in a step. On a CPU it is the clock's time.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

__all__ = [
    "CpuTimer", "CudaTimer", "Roofs", "Timer", "Variant", "environment", "measure_roofs", "quantiles",
    "take_turns", "timer_of", "version",
]  # fmt: skip

CACHE_BYTES = 256 << 20
LEAST_ROUNDS, WARM_UPS = 5, 2
HIDE_CYCLES = 500_000  # about a quarter of a millisecond, longer than any launcher takes
PACKAGES = ("torch", "triton", "numpy", "liger-kernel", "bitsandbytes", "unsloth")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One of the things that take turns.

    Attributes:
        run: What is timed.
        before: Restores what ``run`` overwrites; not timed.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None


class Timer(Protocol):
    """Times one run on a device."""

    def flush(self) -> None:
        """Overwrite the caches."""

    def time(self, run: Callable[[], Any]) -> float:
        """Return the milliseconds a run takes."""


class CpuTimer:
    """The clock, and caches overwritten by a buffer of twice their size, 64 to 256 MiB."""

    def __init__(self) -> None:
        size = min(max(2 * _last_cache_bytes(), 64 << 20), CACHE_BYTES)
        self.dirty = np.zeros(size // 8)

    def flush(self) -> None:
        """Overwrite the caches."""
        self.dirty += 1.0

    def time(self, run: Callable[[], Any]) -> float:
        """Return the milliseconds a run takes by the clock."""
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)


class CudaTimer:
    """Events on the current stream, and a second-level cache overwritten by 256 MiB."""

    def __init__(self) -> None:
        self.dirty = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        """Overwrite the cache, then keep the stream busy while the host launches."""
        self.dirty.zero_()
        torch.cuda._sleep(HIDE_CYCLES)

    def time(self, run: Callable[[], Any]) -> float:
        """Return the milliseconds between events around a run."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))


def timer_of(device: str) -> Timer:
    """Return the timer of ``"cpu"`` or ``"cuda:N"``."""
    return CudaTimer() if device.startswith("cuda") else CpuTimer()


def _last_cache_bytes() -> int:
    """Return the size of the CPU's last cache, or 0 where the system does not tell."""
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found.append(int(text.rstrip("KM")) * unit)
    return max(found)


def take_turns(
    variants: Mapping[str, Variant],
    timer: Timer,
    rounds: int = 30,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time variants in turn; return the milliseconds of each by name.

    Args:
        variants: What to time; each runs twice untimed first.
        timer: Of the device.
        rounds: Most rounds.
        seconds: Rounds end early after this long, but not before five.
        clock: Seconds that rise.
    """
    for variant in variants.values():
        for _ in range(WARM_UPS):
            if variant.before is not None:
                variant.before()
            variant.run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = clock()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and clock() - start > seconds:
            break
        order = list(variants.items())
        for name, variant in reversed(order) if turn % 2 else order:
            if variant.before is not None:
                variant.before()
            timer.flush()
            times[name].append(timer.time(variant.run))
    return times


def quantiles(times: list[float]) -> dict[str, float]:
    """Return the median and the 20th and 80th percentile of times in milliseconds."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return {"ms": statistics.median(times), "p20_ms": cuts[1], "p80_ms": cuts[7]}


@dataclasses.dataclass(frozen=True)
class Roofs:
    """What a device was seen to do in this run, at its best.

    Attributes:
        copy_bytes_per_s: Bytes read and written by a copy of 256 MiB (1 GiB on a GPU).
        product_flops_per_s: Operations of a square product in the dtype that products have.
        product: Which product that was.
    """

    copy_bytes_per_s: float
    product_flops_per_s: float
    product: str

    def floor_ms(self, moved: int, flops: int | None) -> float:
        """Return the least milliseconds for these bytes and operations at the roofs."""
        work = (flops or 0) / self.product_flops_per_s
        return 1e3 * max(moved / self.copy_bytes_per_s, work)


def measure_roofs(timer: Timer, device: str, dtype: torch.dtype) -> Roofs:
    """Measure copy bandwidth and the vendor's product.

    Args:
        timer: Of the device.
        device: ``"cpu"`` or ``"cuda:N"``. A CPU computes in float32 whatever the storage; there the
            better of NumPy and torch counts.
        dtype: Of the product's operands.
    """
    on_gpu = device.startswith("cuda")
    size, n = (1 << 30, 8192) if on_gpu else (256 << 20, 1536)
    kind = dtype if on_gpu else torch.float32
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    variants = {"copy": Variant(lambda: target.copy_(source)), "product": Variant(lambda: a @ b)}
    if not on_gpu:
        variants["numpy copy"] = Variant(lambda: np.copyto(target.numpy(), source.numpy()))
        variants["numpy product"] = Variant(lambda: a.numpy() @ b.numpy())
    times = take_turns(variants, timer)
    # a GPU's clock settles, so its median is what lasts; on a CPU only neighbours make a run slower
    best = statistics.median if on_gpu else min
    copy = min(best(t) for name, t in times.items() if "copy" in name)
    product = min(best(t) for name, t in times.items() if "product" in name)
    return Roofs(
        2e3 * size / copy,
        2e3 * n**3 / product,
        f"{str(kind).removeprefix('torch.')} {n}^3",
    )


def version(package: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def environment(device: str) -> dict[str, Any]:
    """Return what a row must say of the machine: device, threads, versions, commit and date."""
    where: dict[str, Any]
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        where = {"device": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
    else:
        blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        threads = {"torch": torch.get_num_threads(), "blas": int(blas or os.cpu_count() or 1)}
        where = {"device": f"{_cpu_name()}, {os.cpu_count()} cores", "threads": threads}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).resolve().parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        **where,
        "versions": {
            "python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := version(name)) is not None},
        },
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
