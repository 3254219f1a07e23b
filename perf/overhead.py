"""``python -m perf overhead``: what a launcher costs in Python, beside Triton's own launch.

Each launcher is called on storage of a model's sizes with nothing behind it, so that what is left is its
checks, its choice of tiles and the allocation of its results. The same kernels are then launched bare,
``kernel[grid](...)`` with the arguments the launcher chose, on a driver that does nothing: Triton's
binding, specialisation and cache look-up. Time is the processor's own, of this thread; medians of many,
the two in turns; needs no GPU. Calls are those that Python and its C functions make, which no noise of the
machine changes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from perf.output import write_json

__all__ = ["main", "measure"]

Row = dict[str, Any]
Launch = tuple[Any, tuple[int, ...], dict[str, Any]]
_REPEATS = 40


def _nothing(op: str, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Stand in for a device that takes no time."""


class _Reused:
    """Gives the same storage again and again, as a GPU's caching allocator does in a loop."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def __call__(self, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        if (shape, dtype) not in self._made:
            import torch

            self._made[shape, dtype] = torch.empty(shape, dtype=dtype, device=device)
        return self._made[shape, dtype]


def _median_us(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median time of each function in microseconds; they take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.thread_time_ns()
            function()
            taken.append((time.thread_time_ns() - start) / 1e3)
    return [statistics.median(taken) for taken in times]


def _count_calls(function: Callable[[], Any]) -> int:
    """Return how many functions, of Python or C, one call of ``function`` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def measure(only: str = "", dtype: str = "bf16", repeats: int = _REPEATS) -> list[Row]:
    """Return a row for each call of ``perf.calls`` whose launcher's name contains ``only``.

    The process must not interpret kernels. Kernels are compiled on first use.

    Args:
        only: Part of a launcher's name.
        dtype: Dtype of the calls; float32 where a call has it not.
        repeats: Calls to take the median of.
    """
    os.environ["ENTRENAR_BACKEND"] = "ptx"
    from entrenar import runtime
    from entrenar.emulator import install_driver
    from entrenar.kernels import _launch
    from perf.calls import CALLS, DTYPES, Maker

    driver: Any = install_driver(runtime.ptx_target())
    driver.run = lambda *launch: None
    rows = []
    for call in CALLS:
        if only not in call.function:
            continue
        name = dtype if dtype in call.dtypes else "fp32"
        given = call.make(Maker(DTYPES[name]))
        launcher = getattr(
            importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
        )
        launches: list[Launch] = []

        def keep(op: str, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
            launches.append((kernel, grid, arguments))  # noqa: B023

        with _launch.launching(keep):
            launcher(**given)

        def ours(run: Any = launcher, arguments: Any = given) -> None:
            run(**arguments)

        def bare(found: list[Launch] = launches) -> None:
            for kernel, grid, arguments in found:
                kernel[grid](**arguments)

        bare()  # compiles
        with _launch.launching(_nothing), _launch.allocating(_Reused()):
            ours()
            calls = _count_calls(ours)
            launcher_us, bare_us = _median_us([ours, bare], repeats)
        count = len(launches)
        rows.append(
            {
                "op": call.function,
                "dtype": name,
                "shape": call.shape,
                "launches": count,
                "launcher_us": round(launcher_us, 1),
                "bare_us": round(bare_us, 1),
                "launcher_us_per_launch": round(launcher_us / max(count, 1), 1),
                "calls_per_launch": round(calls / max(count, 1)),
                "ratio": round(launcher_us / bare_us, 2) if count else None,
            }
        )
    return rows


def environment() -> Row:
    """Return what the numbers were measured with."""
    import torch
    import triton

    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main(arguments: list[str]) -> int:
    """Print a table, or write rows as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m perf overhead",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--op", default="", help="part of a launcher's name")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--repeats", type=int, default=_REPEATS, help="calls to take the median of")
    parser.add_argument("--json", help="write rows to a path, or to standard output with -")
    options = parser.parse_args(arguments)
    rows = measure(options.op, options.dtype, options.repeats)
    if options.json:
        write_json({"environment": environment(), "rows": rows}, options.json)
        return 0
    print(f"{'launcher':<34} {'shape':<42} launches  calls  µs a launch  bare Triton  ratio")
    for row in rows:
        print(
            f"{row['op']:<34} {row['shape'][:42]:<42} {row['launches']:>8} "
            f"{row['calls_per_launch']:>6} "
            f"{row['launcher_us_per_launch']:>12} {row['bare_us'] / max(row['launches'], 1):>12.1f} "
            f"{row['ratio'] or 0:>6}"
        )
    return 0
