"""Plant faults in every compiled kernel and report whether the emulator's checks or the oracle notice.

    python -m perf mutate --op rms_norm --kinds barrier,wait --json -
    python -m perf mutate --target sm_90 --op gemm --limit 20

Each barrier and wait of a kernel's PTX is deleted in turn, each comparison moved by one, each mask on
global memory dropped (perf.mutants). The op that launches the kernel then runs on a small sample with the
checks of a sanitizer on, and its results and gradients are held to the oracle in float64. A mutant is
noticed if a check reports, the emulator stops, or a result is off by more than its tolerance. A comparison
or mask that this sample does not notice is tried on other samples that launch the same compiled kernel; if
on all of them every instruction ran on the same lanes and asked for the same bytes, and all results had
the same bits, it is ``idle``: no sample reaches the lane where it would matter.

A deleted barrier or wait also runs unchecked in five ways (warps in order, reversed and at random,
asynchronous copies as early and as late as allowed): ``changed`` is how many of them gave other bits. One
that changed a result and was not noticed would be a hole in the race check; the exit code is then 1.
Survivors are listed. Of barriers and waits they are redundant ones: the same ordering stands beside
them, or no other warp touches those bytes.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from perf.mutants import KINDS, Mutant, mutants
from perf.output import write_json

__all__ = ["Target", "main", "plan", "summary", "try_all"]

Row = dict[str, Any]
Target = tuple[str, tuple[str, ...], str, str]  # op, samples, dtype, kernel
MOST_SAMPLES = 5
ORDERINGS = ("barrier", "wait")
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"wave_order": "reverse"},
    {"wave_order": "random"},
    {"late_async": False},
    {"late_async": False, "wave_order": "reverse"},
)
CHECKS = {"racecheck": True, "initcheck": True, "gracecheck": True}
IDLE = "idle"
SLACK = 20  # a mutant may run this many times as long as the kernel before it is stopped


def plan(target: str, only: str = "", dtypes: Sequence[str] = ("float32",)) -> list[Target]:
    """Choose for every kernel and dtype the sample that gives it most warps and most to do.

    Launchers are called and their launches taken in place of running, so that nothing is compiled.
    """
    os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", target
    from entrenar.kernels import _launch
    from entrenar.optable import OPS
    from perf.oracle import everything

    found: dict[tuple[str, str], dict[Any, list[Any]]] = {}
    for op in OPS.values():
        for sample in (s for s in op.samples if s.grid):
            for dtype in (d for d in dtypes if d in op.dtypes):

                def keep(_: str, kernel: Any, grid: Any, given: Row) -> None:
                    name = kernel.fn.__name__
                    numbers = {k: v for k, v in given.items() if not hasattr(v, "numel")}
                    compiled = (op.name, *(kv for kv in numbers.items() if kv[0].isupper()))  # noqa: B023
                    compiled += tuple(numbers.get(k) for k in ("num_warps", "num_stages"))
                    size = sum(v.numel() for v in given.values() if hasattr(v, "numel"))
                    rank = (int(given.get("num_warps", 4)), size, sample.id)  # noqa: B023
                    found.setdefault((name, dtype), {}).setdefault(repr(compiled), []).append(  # noqa: B023
                        (rank, op.name)  # noqa: B023
                    )

                with _launch.launching(keep):
                    everything(op, sample, dtype)
    return sorted(
        place
        for (name, dtype), forms in found.items()
        if only in (place := _largest(name, dtype, list(forms.values())))[0]
    )


def _largest(name: str, dtype: str, forms: list[list[Any]]) -> Target:
    """Return the form of a kernel that the sample with most warps and elements launches."""
    form = sorted(max(forms, key=max), reverse=True)
    samples = dict.fromkeys(rank[-1] for rank, _ in form)
    return form[0][1], tuple(samples)[:MOST_SAMPLES], dtype, name


class _Bench:
    """One sample of an op, run over and over with this or that PTX in place of a kernel's own."""

    def __init__(self, place: Target, target: str) -> None:
        os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", target
        from entrenar.emulator import install_driver
        from entrenar.optable import OPS

        self.op = OPS[place[0]]
        self.samples = [next(s for s in self.op.samples if s.id == name) for name in place[1]]
        self.sample = self.samples[0]
        self.dtype, self.kernel = place[2:]
        self.driver = install_driver(target, strict=False)
        self.driver.history = []
        self.limit = 4_000_000_000

    def programs(self) -> dict[str, Any]:
        """Return the compiled forms of the kernel that the sample launches, by their hash."""
        found = {}
        self.go(CHECKS)
        reports = [str(r) for info in self.driver.history for r in info.reports]
        if reports:
            raise RuntimeError(f"{self.op.name} {self.sample.id} as it is: {reports[0]}")
        for info in self.driver.history:
            if info.metadata.name == self.kernel:
                found[info.metadata.hash] = info.program
        # a launch may be stopped long before the whole op's instructions times the slack
        self.limit = SLACK * max(i.instructions for i in self.driver.history) + 1_000_000
        return found

    def close(self) -> None:
        """Leave the emulator as any other launch finds it."""
        from entrenar.emulator import install_driver

        install_driver(self.driver.target)

    @contextlib.contextmanager
    def instead(self, hash_: str, original: Any, ptx: str) -> Iterator[None]:
        """Run ``ptx`` wherever the kernel of this hash is launched."""
        from entrenar.emulator import Program, driver

        driver.programs[hash_] = Program(ptx, original.name)
        try:
            yield
        finally:
            driver.programs[hash_] = original

    def go(self, options: Row) -> None:
        """Run the sample forward and backward and hold it to the oracle."""
        from perf.oracle import check, reporting_unset

        self.driver.opts = {"limit": self.limit, **options}
        self.driver.history = []
        with reporting_unset(self.driver) if options else contextlib.nullcontext():
            check(self.op, self.sample, self.dtype)

    def bits(self, options: Row) -> list[bytes]:
        """Return the bytes of every result and gradient, from inputs that are always the same."""
        from perf.oracle import everything

        self.driver.opts = {"limit": self.limit, **options}
        self.driver.history = []
        return everything(self.op, self.sample, self.dtype)

    def trace(self) -> tuple[Any, Any]:
        """Return what every instruction asked for, and the bits of every result."""
        bits = self.bits({"counters": True})
        asked = [
            [{k: v for k, v in row.items() if k != "text"} for row in info.per_instruction]
            for info in self.driver.history
        ]
        return asked, bits

    def on_others(self, traces: dict[str, Any]) -> str:
        """Say what the checks notice on any other sample, or that the change is idle on all."""
        idle = True
        try:
            for sample in self.samples:
                self.sample = sample
                if sample is not self.samples[0] and (found := self.noticed()):
                    return found
                idle = idle and self.trace() == traces[sample.id]
        finally:
            self.sample = self.samples[0]
        return IDLE if idle else ""

    def noticed(self) -> str:
        """Say what a checked run notices; empty if nothing."""
        from entrenar.emulator import EmulatorError
        from entrenar.errors import NumericsError

        try:
            self.go(CHECKS)
        except EmulatorError as error:
            return f"stopped: {str(error).split(':')[0][:60]}"
        except (AssertionError, NumericsError, FloatingPointError) as error:
            reports = self._kinds()
            return reports or f"wrong: {str(error).split(':')[0][:40]}"
        return self._kinds()

    def _kinds(self) -> str:
        kinds = {r.kind for info in self.driver.history for r in info.reports}
        warnings = [w for info in self.driver.history for w in info.warnings]
        guards = {"guard" for w in warnings if w.startswith("array of")}
        return ", ".join(sorted(kinds | guards))

    def changed(self, wanted: list[list[bytes]]) -> int:
        """Return in how many ways of running the results have other bits than the kernel's own."""
        from entrenar.emulator import EmulatorError

        other = 0
        for way, bits in zip(WAYS, wanted, strict=True):
            try:
                other += self.bits(way) != bits
            except (EmulatorError, ValueError, IndexError):
                other += 1
        return other


def try_all(place: Target, target: str, kinds: tuple[str, ...], limit: int = 0) -> list[Row]:
    """Try every mutant of one kernel; return a row each."""
    bench = _Bench(place, target)
    programs = bench.programs()
    wanted = [bench.bits(way) for way in WAYS]
    traces = {}
    for sample in reversed(bench.samples):  # and leaves the first in place
        bench.sample = sample
        traces[sample.id] = bench.trace()
    rows = []
    for hash_, program in programs.items():
        for mutant in mutants(program.ptx, kinds, limit):
            rows.append(_try(bench, hash_, program, mutant, (wanted, traces)))
            rows[-1] |= {"op": place[0], "dtype": place[2], "target": target}
    bench.close()
    return rows


def _apart(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a forked process, or None where it died: an address may be anything."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the emulator's warnings: they are the result
        torch.set_num_threads(
            1
        )  # a fork has none of the threads its parent had, and would wait for them
        try:
            sender.send(work())
        finally:
            os._exit(0)
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        receiver.close()
        os.waitpid(child, 0)


def _try(bench: _Bench, hash_: str, program: Any, mutant: Mutant, intact: Any) -> Row:
    def work() -> tuple[str, int | None]:
        with bench.instead(hash_, program, mutant.ptx):
            noticed = bench.noticed()
            if mutant.kind in ORDERINGS:
                return noticed, bench.changed(intact[0])
            return noticed or bench.on_others(intact[1]), None

    noticed, changed = _apart(work) or ("stopped: the process that emulated it died", None)
    return {
        "kernel": bench.kernel, "kind": mutant.kind, "line": mutant.line, "source": mutant.source,
        "instruction": mutant.instruction[:120], "changed": changed,
        "noticed": "" if noticed == IDLE else noticed, "idle": noticed == IDLE,
    }  # fmt: skip


def holes(rows: Sequence[Row]) -> list[Row]:
    """Return mutants that changed a result in some way of running and were not noticed."""
    return [row for row in rows if row["changed"] and not row["noticed"]]


def summary(rows: Sequence[Row]) -> Row:
    """Count what was noticed, by kind and by what noticed it; list the survivors that are not idle.

    ``share`` is that of the mutants that are not idle.
    """
    kinds: dict[str, Row] = {}
    for row in rows:
        count = kinds.setdefault(row["kind"], {"mutants": 0, "idle": 0, "noticed": 0, "by": {}})
        count["mutants"] += 1
        count["idle"] += row["idle"]
        count["noticed"] += bool(row["noticed"])
        if row["changed"] is not None:
            count["changed_a_result"] = count.get("changed_a_result", 0) + bool(row["changed"])
        if row["noticed"]:
            by = row["noticed"].split(":")[0].split(", ")[0]
            count["by"][by] = count["by"].get(by, 0) + 1
    for count in kinds.values():
        count["share"] = round(count["noticed"] / max(count["mutants"] - count["idle"], 1), 4)
    kernels = collections.Counter((r["kernel"], r["dtype"]) for r in rows)
    survivors = [row for row in rows if not row["noticed"] and not row["idle"]]
    return {
        "target": rows[0]["target"] if rows else None,
        "kernels": len(kernels),
        "kinds": kinds,
        "changed_and_not_noticed": len(holes(rows)),
        "survivors": [
            f"{r['kernel']} {r['dtype']} ({r['op']}): {r['kind']}, PTX line {r['line']}, "
            f"{r['source']}: {r['instruction'][:70]}"
            for r in survivors
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf mutate",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--op", default="", help="part of an op's name")
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--limit", type=int, default=0, help="mutants of a kind and kernel at most")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", help="a path, or - for standard output")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a change of results went unnoticed."""
    options = _parser().parse_args(arguments)
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        print(f"perf mutate: no kind {sorted(unknown)}, there are {sorted(KINDS)}", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        places = pool.submit(plan, options.target, options.op, options.dtypes.split(",")).result()
        waiting = {
            pool.submit(try_all, place, options.target, kinds, options.limit): place
            for place in places
        }
        for done in concurrent.futures.as_completed(waiting):
            rows += done.result()
            print(f"{waiting[done]}: {len(done.result())} mutants", file=sys.stderr, flush=True)
    rows.sort(key=lambda r: (r["kernel"], r["dtype"], r["line"], r["kind"]))
    report = summary(rows)
    write_json(report, options.json or "-")
    for hole in holes(rows):
        print(f"changed a result, not noticed: {hole}", file=sys.stderr)
    return 1 if holes(rows) else 0
