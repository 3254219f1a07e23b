"""Compile every kernel for GPUs offline and read what the compiler made of it; no GPU is needed.

    python -m perf static                              a table for sm_80, sm_90 and gfx942
    python -m perf static --targets all --json PATH    rows, all targets

Launchers are called on storage of a model's sizes (perf.calls) and the kernels they would launch are
taken in place of a launch, with the constants, specialisation and options they chose. Each is compiled
for each target in a worker process; rows are kept (perf.static_cache), so that a second run compiles what
changed alone. A row is a fault where a register spills to memory, where more shared memory is asked for
than the target has, where an fp64 instruction appears, or where a product of 16-bit operands goes without
matrix instructions: wgmma on sm_90 for tiles of at least 64 rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from perf.output import write_json
from perf.static_cache import RowCache, cache_folder
from perf.static_rows import Spec, compile_row, faults

__all__ = ["ALL_TARGETS", "collect", "main", "rows", "table"]

Row = dict[str, Any]
TARGETS = "sm_80,sm_90,gfx942"
ALL_TARGETS = (
    "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100",
)  # fmt: skip
# bf16 needs sm_80.
_DTYPES_OF = {"sm_75": ("fp32", "fp16")}


def collect(target: str, dtypes: Sequence[str], only: str = "") -> list[Spec]:
    """Call every launcher whose name contains ``only``; return the kernels it would launch there.

    The process must not have imported kernels before: launchers ask once whether the device is AMD's.
    """
    os.environ["ENTRENAR_BACKEND"] = "ptx"
    import torch

    if target.startswith("gfx"):
        torch.version.hip = f"offline {target}"
    else:
        os.environ["ENTRENAR_PTX_TARGET"] = target
    from entrenar.kernels import _launch
    from perf.calls import CALLS, DTYPES, Maker

    found: dict[str, Spec] = {}

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    for call in CALLS:
        for dtype in (d for d in dtypes if d in call.dtypes and only in call.function):
            launcher = getattr(
                importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
            )

            def keep(op: str, kernel: Any, grid: Any, given: dict[str, Any]) -> None:
                spec = _spec(op, dtype, call.shape, kernel, given)  # noqa: B023
                found.setdefault(spec.key, spec)

            with _launch.launching(keep), _launch.allocating(empty):
                launcher(**call.make(Maker(DTYPES[dtype])))
    return list(found.values())


def _spec(op: str, dtype: str, shape: str, kernel: Any, given: dict[str, Any]) -> Spec:
    """Bind a launch's arguments as Triton's own launcher specialises them."""
    from entrenar.emulator import infer_type, is_array

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        value = given.get(name, parameter.default if parameter.has_default else None)
        plain = parameter.do_not_specialize
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not plain)
        ):
            signature[name], constants[name] = "constexpr", value
            continue
        if hasattr(value, "block_shape"):  # a tensor descriptor
            element = infer_type(value.base).removeprefix("*")
            signature[name] = f"tensordesc<{element}{list(value.block_shape)}>"
            continue
        signature[name] = infer_type(value)
        size = value.data_ptr() if is_array(value) else value if type(value) is int else 1
        if size % 16 == 0 and not plain:
            aligned.append(position)
    names = {p.name for p in kernel.params}
    options = {k: v for k, v in given.items() if k not in names}
    return Spec(
        kernel.fn.__module__, kernel.fn.__name__, op, dtype, shape,
        signature, constants, tuple(aligned), options, kernel.cache_key,
    )  # fmt: skip


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    # spawn: a fresh interpreter each, in which kernels were not imported yet
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def _specs(
    targets: Sequence[str], dtypes: Sequence[str], only: str, workers: int
) -> list[tuple[Spec, str]]:
    """Collect what each target would be launched with; a process of its own for each."""
    asked = [[d for d in dtypes if d in _DTYPES_OF.get(t, dtypes)] for t in targets]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(targets) or 1), mp_context=context, max_tasks_per_child=1
    ) as pool:
        found = list(pool.map(collect, targets, asked, [only] * len(targets)))
    return [(spec, target) for target, specs in zip(targets, found, strict=True) for spec in specs]


def rows(
    targets: Sequence[str],
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16"),
    only: str = "",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    one_each: bool = False,
    cache: Path | None = None,
) -> list[Row]:
    """Compile every kernel for every target; return one row each, in a fixed order.

    Args:
        targets: Such as ``"sm_90"`` or ``"gfx942"``.
        dtypes: Dtypes of the calls; bf16 is left out on sm_75, which has none.
        only: Part of a launcher's name, to compile its kernels alone.
        workers: Processes; the cores of the machine where None.
        progress: Called with (rows done, rows in all).
        one_each: Compile each kernel in the first configuration it is launched in alone.
        cache: Folder of rows from earlier runs; None compiles all.
    """
    count = workers or os.cpu_count() or 1
    work = _specs(targets, dtypes, only, count)
    if one_each:
        work = list({(s.module, s.kernel, t): (s, t) for s, t in reversed(work)}.values())[::-1]
    kept = RowCache(cache)
    identities = [f"{target}\0{spec.key}" for spec, target in work]
    found: dict[int, Row] = {}
    for index, (identity, (spec, target)) in enumerate(zip(identities, work, strict=True)):
        row = kept.get(identity)
        if row is not None:
            found[index] = {**row, **spec.describe(target)}
    missing = [index for index in range(len(work)) if index not in found]
    if missing:
        with _pool(count) as pool:
            arguments = zip(*(work[index] for index in missing), strict=True)
            for index, row in zip(
                missing, pool.map(compile_row, *arguments, chunksize=4), strict=True
            ):
                found[index] = row
                kept.put(identities[index], row)
                if progress:
                    progress(len(found), len(work))
    return [found[index] for index in range(len(work))]


_COLUMNS = (
    "kernel", "target", "rows", "registers", "spilled", "shared", "of limit", "matrix", "wgmma",
    "128-bit", "async", "fp64", "faults",
)  # fmt: skip


def table(found: Iterable[Row]) -> str:
    """Return the rows as text, a line for each kernel and target: the worst of its configurations.

    Registers, spilled bytes, shared memory and fp64 instructions are the most of any configuration;
    matrix instructions, asynchronous copies and the share of 128-bit global accesses the least.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["kernel"].strip("_").removesuffix("_kernel"), row["target"]), [])
        groups[row["kernel"].strip("_").removesuffix("_kernel"), row["target"]].append(row)
    lines = [_COLUMNS]
    for (kernel, target), members in sorted(groups.items()):
        good = [row for row in members if "error" not in row]
        lines.append((kernel, target, str(len(members)), *_worst(good), _faulty(members)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _worst(members: list[Row]) -> tuple[str, ...]:
    if not members:
        return ("-",) * 9

    def most(field: str) -> int:
        return max(row[field] for row in members)

    def least(field: str, among: list[Row]) -> str:
        values = [row[field] for row in among if row[field] is not None]
        return f"{min(values):g}" if values else "-"

    # products of fp32 operands go without the matrix units, so they say nothing of the others
    dots = [row for row in members if row["has_dot"] and row["dtype"] != "fp32"]
    share = max(row["shared_bytes"] / row["shared_limit"] for row in members)
    return (
        str(most("registers")),
        str(most("spill_bytes")),
        str(most("shared_bytes")),
        f"{share:.0%}",
        least("matrix_instructions", dots),
        least("wgmma", dots),
        least("ldst128_share", members),
        least("async_copies", members),
        str(most("fp64")),
    )


def _faulty(members: list[Row]) -> str:
    return str(sum(bool(faults(row)) for row in members))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _report(found: Iterable[Row]) -> int:
    """Print each fault; return how many rows have one."""
    bad = 0
    for row in found:
        wrong = faults(row)
        bad += bool(wrong)
        for fault in wrong:
            where = (
                f"{row['kernel']} ({row['op']}, {row['dtype']}, {row['target']}, {row['config']})"
            )
            print(f"{where}: {fault}", file=sys.stderr)
    return bad


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a row has a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m perf static",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--targets", default=TARGETS, help=f"comma-separated, or all; default {TARGETS}"
    )
    parser.add_argument("--dtypes", default="fp32,fp16,bf16", help="comma-separated")
    parser.add_argument("--only", default="", help="part of a launcher's name")
    parser.add_argument("--workers", type=int, default=None, help="processes")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    parser.add_argument("--json", help="write rows to a path, or to standard output with -")
    options = parser.parse_args(arguments)
    targets = list(ALL_TARGETS) if options.targets == "all" else _split(options.targets)
    unknown = [target for target in targets if target not in ALL_TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]}; there are {', '.join(ALL_TARGETS)}")
    # each worker compiles alone; threads under it would only contend
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}", end="", file=sys.stderr, flush=True)

    cache = None if options.no_cache else cache_folder()
    found = rows(
        targets, _split(options.dtypes), options.only, options.workers, progress, cache=cache
    )
    if options.json:
        write_json(found, options.json)
    else:
        print(table(found))
    bad = _report(found)
    print(f"{len(found)} kernels compiled, {bad} with a fault", file=sys.stderr)
    return 1 if bad else 0
