"""Execute every kernel in the emulator, counted as a profiler would and checked as a sanitizer would.

    python -m perf counters --target sm_90 --json -

Each call of perf.calls runs at few tokens, compiled for the target. A row holds the warp instructions by
class, how much of the memory sectors asked for was wanted, and wavefronts lost to bank conflicts.
Reported, and a failure: races in shared memory, shared memory or results read before they were written,
two programs that touch one byte unordered. Calls of more than two billion operations are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

Row = dict[str, Any]
MOST_FLOPS = 2_000_000_000
CHECKS = {"racecheck": True, "initcheck": True, "gracecheck": True}


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _summary(history: list[Any]) -> Row:
    """Add up the counters of a call's launches."""
    counters = [launch.counters for launch in history]
    classes: dict[str, int] = {}
    for counted in counters:
        for name, n in counted["by_class"].items():
            classes[name] = classes.get(name, 0) + n

    def total(kinds: tuple[str, ...], field: str) -> int:
        return sum(int(c["global_memory"][kind][field]) for c in counters for kind in kinds)

    def efficiency(*kinds: str) -> float | None:
        return _ratio(total(kinds, "ideal_sectors"), total(kinds, "sectors"))

    waves = sum(kind["wavefronts"] for c in counters for kind in c["shared_memory"].values())
    return {
        "launches": len(history),
        "warp_instructions": sum(c["warp_instructions"] for c in counters),
        "by_class": {name: n for name, n in classes.items() if n},
        "matrix_flops": sum(c["matrix_flops"] for c in counters),
        "load_efficiency": efficiency("load", "cp_async", "tma_load"),
        "store_efficiency": efficiency("store", "tma_store"),
        "bank_conflicts": _ratio(sum(c["bank_conflict_excess"] for c in counters), waves),
        "reports": [str(report) for launch in history for report in launch.reports],
    }


def measure(
    target: str = "sm_80",
    only: str = "",
    dtypes: tuple[str, ...] = ("bf16",),
    tokens: int = 64,
    checks: bool = True,
) -> list[Row]:
    """Run every call whose launcher's name contains ``only``; return a row each."""
    os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", target
    from entrenar.emulator import install_driver
    from entrenar.optable import OPS
    from perf.calls import CALLS, DTYPES, Maker
    from perf.traffic import complete, flops_of

    options = CHECKS if checks else {}
    driver = install_driver(target, strict=False, counters=True, **options)
    rows = []
    for call in CALLS:
        launcher = getattr(
            importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
        )
        for dtype in (d for d in dtypes if d in call.dtypes and only in call.function):
            given = complete(launcher, call.make(Maker(DTYPES[dtype], tokens, values=True)))
            where = {"op": call.function, "dtype": dtype, "shape": f"{call.shape}, T={tokens}"}
            if flops_of(OPS[call.op], given) > MOST_FLOPS:
                print(f"{where}: left out, too much to emulate", file=sys.stderr)
                continue
            driver.history = []
            launcher(**given)
            rows.append({**where, "target": target, **_summary(driver.history)})
    return rows


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a check reports."""
    parser = argparse.ArgumentParser(
        prog="python -m perf counters",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--only", default="", help="part of a launcher's name")
    parser.add_argument("--dtypes", default="bf16", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="rows of activations")
    parser.add_argument(
        "--no-checks", action="store_true", help="count alone, several times faster"
    )
    parser.add_argument("--json", default="-", help="a path, or - for standard output")
    options = parser.parse_args(arguments)
    rows = measure(
        options.target,
        options.only,
        tuple(options.dtypes.split(",")),
        options.tokens,
        not options.no_checks,
    )
    text = json.dumps(rows, indent=1)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).write_text(text + "\n")
    bad = [row for row in rows if row["reports"]]
    for row in bad:
        for report in row["reports"]:
            print(f"{row['op']} ({row['dtype']}, {row['shape']}): {report}", file=sys.stderr)
    return 1 if bad else 0
