"""Compare result files of the tree with those of a revision: each measure as a ratio, regressions first.

    python -m perf report --base HEAD~20

Every file of perf/results that both have is read, JSON or JSON lines. Rows are matched by what names them (op,
shape, dtype, device and the like; where a file holds several runs, the last counts), and of each the measures
are compared whose direction is known. ``worse`` is the factor by which a measure got worse: above 1 is a
regression. Times of two runs differ by what else the machine did; ratio and share_of_floor, taken within one
run, differ less.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from entrenar.errors import ConfigError, DataError
from perf.output import write_json

__all__ = ["HIGHER", "LOWER", "compare", "main", "measures", "parse", "table"]

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
FOLDER = "perf/results"
NAMES = (
    "kind", "what", "op", "pass", "function", "kernel", "config", "sample", "model", "mode", "who", "layers",
    "tokens", "shape", "dtype", "device", "target", "selection", "peer",
)  # fmt: skip
LOWER = frozenset({
    "ms", "ratio", "step_s", "emulated_s", "model_us", "median_us", "peak_rss_bytes", "launches", "syncs",
    "allocations", "registers", "spill_bytes", "shared_bytes", "fp64", "loaded_bytes", "stored_bytes",
    "loaded_sector_bytes", "stored_sector_bytes", "instructions", "bank_conflict_excess", "failed",
})  # fmt: skip
HIGHER = frozenset(
    {"share_of_floor", "tokens_per_s", "gb_s", "tflop_s", "ldst128_share", "passed", "share"}
)


def parse(text: str, name: str) -> list[Row]:
    """Return the rows of a result file: an array's, a single object, or JSON lines.

    Raises:
        DataError: It is none of these.
    """
    try:
        if name.endswith(".jsonl"):
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{name}: {error}", "a result file is JSON or JSON lines") from error
    rows = value if isinstance(value, list) else [value]
    return [row for row in rows if isinstance(row, dict)]


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif name == "failed" and isinstance(value, list):
            yield f"{prefix}{name}", float(len(value))
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ):
            yield f"{prefix}{name}", float(value)


def measures(rows: list[Row]) -> dict[tuple[str, str], float]:
    """Return each measure whose direction is known, by (what names its row, its name)."""
    found = {}
    for row in rows:
        named = {k: row[k] for k in NAMES if row.get(k) is not None}
        if "peer" in named:
            named["peer"] = str(named["peer"]).split(" ")[0]  # without its version
        title = ", ".join(f"{v}" if isinstance(v, str) else f"{k} {v}" for k, v in named.items())
        for name, value in _leaves(row):
            if name not in named and name.rpartition(".")[2] in LOWER | HIGHER:
                found[title, name] = value
    return found


def _worse(name: str, base: float, now: float) -> float:
    if base == now:
        return 1.0
    old, new = (base, now) if name.rpartition(".")[2] in LOWER else (now, base)
    if old <= 0 or new <= 0:
        return math.inf if new > old else 0.0
    return new / old


def compare(base: list[Row], now: list[Row]) -> tuple[list[Row], list[str], list[str]]:
    """Return what changed, worst first; titles of rows that are gone; titles of rows that are new."""
    old, new = measures(base), measures(now)
    changed: list[Row] = [
        {"row": key[0], "measure": key[1], "base": old[key], "now": new[key],
         "worse": _worse(key[1], old[key], new[key])}
        for key in old.keys() & new.keys()
    ]  # fmt: skip
    changed.sort(key=lambda r: (-r["worse"], r["row"], r["measure"]))
    titles = [list(dict.fromkeys(title for title, _ in found)) for found in (old, new)]
    gone = [t for t in titles[0] if t not in titles[1]]
    return changed, gone, [t for t in titles[1] if t not in titles[0]]


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            f"git {arguments[0]}: {done.stderr.strip()[-300:]}",
            "give --base a revision of this repository",
        )
    return done.stdout


def _files(base: str, pattern: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text at the revision, text of the tree) of each result file that both have."""
    for path in _git("ls-tree", "--name-only", base, f"{FOLDER}/").splitlines():
        name, here = path.rpartition("/")[2], ROOT / path
        if here.suffix in (".json", ".jsonl") and here.exists() and fnmatch.fnmatch(name, pattern):
            yield name, _git("show", f"{base}:{path}"), here.read_text(encoding="utf-8")


def table(rows: list[Row], over: float) -> str:
    """Return the changes of more than ``over`` as text, regressions first."""
    shown = [r for r in rows if not 1 / (1 + over) <= r["worse"] <= 1 + over]
    head = ["worse", "base", "now", "measure", "file", "row"]
    lines = [head] + [
        [
            f"{r['worse']:.3f}",
            f"{r['base']:.5g}",
            f"{r['now']:.5g}",
            r["measure"],
            r["file"],
            r["row"],
        ]
        for r in shown
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    same = len(rows) - len(shown)
    return "\n".join(
        [*(text if shown else []), f"{same} of {len(rows)} measures within {over:.0%}"]
    )


def main(arguments: list[str]) -> int:
    """Run the command; 1 where ``--fail-over`` is given and a measure got worse by more."""
    parser = argparse.ArgumentParser(
        prog="python -m perf report",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--base", required=True, metavar="REV", help="the revision to compare with")
    parser.add_argument("--files", default="*", help="pattern of file names, such as 'kernels_*'")
    parser.add_argument("--over", type=float, default=0.02, help="changes to show, as a share")
    parser.add_argument(
        "--fail-over", type=float, metavar="SHARE", help="exit 1 for a regression above it"
    )
    parser.add_argument(
        "--json", metavar="PATH", help="write every measure there; - is standard output"
    )
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    notes = []
    for name, base, now in _files(options.base, options.files):
        changed, gone, new = compare(parse(base, name), parse(now, name))
        rows += [{"file": name, **row} for row in changed]
        notes += [f"gone from {name}: {title}" for title in gone]
        notes += [f"new in {name}: {title}" for title in new]
    rows.sort(key=lambda r: -r["worse"])
    if options.json:
        finite = [{**r, "worse": r["worse"] if math.isfinite(r["worse"]) else None} for r in rows]
        write_json(finite, options.json)
    if options.json != "-":
        print("\n".join([table(rows, options.over), *notes]))
    limit = math.inf if options.fail_over is None else 1 + options.fail_over
    return 1 if any(row["worse"] > limit for row in rows) else 0
