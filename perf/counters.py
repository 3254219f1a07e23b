"""Execute every kernel in the emulator, counted as a profiler would and checked as a sanitizer would.

    python -m perf counters --op rms_norm --target sm_90
    python -m perf counters --op attention --lines 20 --json -
    python -m perf counters --peers /path/to/environment/bin/python

Each call of perf.calls runs compiled for the target, with as many tokens as emulation affords: a row that
is smaller than the model's own says what it was scaled down from. A row holds, in all, per launch and per
element, the warp instructions by class, memory sectors asked for over the least possible, bytes, lost
wavefronts of shared memory, active lanes and barriers; perf.tally says what each is. Reported, and a
failure: races in shared memory, shared memory or results read before they were written, two programs
that touch one byte unordered.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from entrenar.errors import ConfigError
from perf.output import write_json
from perf.tally import hottest, tally

__all__ = ["element_of", "main", "measure", "table"]

Row = dict[str, Any]
MODEL_TOKENS = 4096
SMALLEST_TOKENS = 64
MOST_FLOPS = 4_500_000_000
MOST_BYTES = 64 << 20
VOCABULARY = 8_192  # of calls whose product with the full one is too much at any number of tokens
CHECKS = {"racecheck": True, "initcheck": True, "gracecheck": True}


@contextlib.contextmanager
def _vocabulary(n: int | None) -> Iterator[None]:
    """Make calls with ``n`` words: they read the sizes of perf.calls when they are made."""
    from perf import calls

    with mock.patch.object(calls, "VOCAB", n) if n else contextlib.nullcontext():
        yield


def _count(value: Any) -> int:
    """Return how many elements an argument holds; a quantised weight counts what it decodes to."""
    if isinstance(value, tuple | list):
        return max((_count(item) for item in value), default=0)
    if hasattr(value, "shape"):
        return math.prod(value.shape)
    return 0


def element_of(op: Any, given: Row, result: Any) -> tuple[str, int]:
    """Return what a call's counts are divided by, by name and number.

    A product or a look-up is divided by the elements of its largest result, any other call by those of
    its largest argument.
    """
    if op.has_dot or op.family == "embedding":
        size = _count(result) or _count(given.get("out"))
        if size:
            return "result", size
    return max(((name, _count(value)) for name, value in given.items()), key=lambda pair: pair[1])


def _fits(op: Any, call: Any, kind: Any, tokens: int) -> bool | None:
    """Whether emulation affords a call; None where the row cannot count its operations."""
    from perf.calls import Maker
    from perf.traffic import complete, flops_of, storages

    launcher = getattr(importlib.import_module(f"entrenar.kernels.{call.family}"), call.function)
    given = complete(launcher, call.make(Maker(kind, tokens)))
    held = sum(t.numel() * t.element_size() for t in storages(tuple(given.values())))
    if held > MOST_BYTES and not op.has_dot:
        return False
    flops = flops_of(op, given)
    if op.has_dot and not flops:
        return None
    return flops <= MOST_FLOPS


def _sizes(op: Any, call: Any, kind: Any, chosen: dict[str, int]) -> tuple[int, int | None] | None:
    """Return tokens and vocabulary of a call, the most that emulation affords; None where none is."""
    for words in (None, VOCABULARY):
        tokens = MODEL_TOKENS
        while tokens >= SMALLEST_TOKENS:
            with _vocabulary(words):
                fits = _fits(op, call, kind, tokens)
            if fits is None:  # a backward pass: as small as the forward pass had to be
                return min(chosen.get(call.op, SMALLEST_TOKENS), MODEL_TOKENS), words
            if fits:
                chosen[call.op] = min(tokens, chosen.get(call.op, tokens))
                return tokens, words
            tokens //= 2
    return None


def _scaled_from(call: Any, tokens: int, words: int | None) -> str | None:
    """Say what the model's own sizes are, where a call does not have them."""
    from perf import calls

    own = []
    if tokens != MODEL_TOKENS and "T" in call.shape:
        own.append(f"T={MODEL_TOKENS}")
    if words:
        own.append(f"V={calls.VOCAB}")
    return ", ".join(own) or None


def _measure(call: Any, dtype: str, tokens: int, words: int | None, driver: Any, lines: int) -> Row:
    from entrenar.optable import OPS
    from perf.calls import DTYPES, Maker
    from perf.traffic import complete

    op = OPS[call.op]
    launcher = getattr(importlib.import_module(f"entrenar.kernels.{call.family}"), call.function)
    with _vocabulary(words):
        given = complete(launcher, call.make(Maker(DTYPES[dtype], tokens, values=True)))
    driver.history = []
    result = launcher(**given)
    name, elements = element_of(op, given, result)
    row = {
        "op": call.function,
        "dtype": dtype,
        "shape": f"{call.shape}, T={tokens}" + (f", V={words}" if words else ""),
        "scaled_from": _scaled_from(call, tokens, words),
        "target": driver.target,
        "element": name,
        **tally(driver.history, elements),
    }
    return {**row, "lines": hottest(driver.history, lines)} if lines else row


def measure(
    target: str = "sm_80",
    only: str = "",
    dtypes: tuple[str, ...] = ("bf16",),
    tokens: int | None = None,
    checks: bool = True,
    lines: int = 0,
) -> list[Row]:
    """Run every call whose launcher's name contains ``only``; return a row each, see :func:`runs`."""
    return [row for row, _ in runs(target, only, dtypes, tokens, checks, lines)]


def runs(
    target: str = "sm_80",
    only: str = "",
    dtypes: tuple[str, ...] = ("bf16",),
    tokens: int | None = None,
    checks: bool = False,
    lines: int = 0,
) -> Iterator[tuple[Row, list[Any]]]:
    """Run every call whose launcher's name contains ``only``; yield a row and its launches each.

    Args:
        target: Such as ``"sm_90"``.
        only: Part of a launcher's name.
        dtypes: Names of the dtypes of the calls.
        tokens: Rows of activations; as many as emulation affords where None.
        checks: Look for races and for reads of memory nothing wrote, which takes twice as long.
        lines: Instructions to list in each row, most executed first.
    """
    os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", target
    from entrenar.emulator import install_driver
    from entrenar.optable import OPS
    from perf.calls import CALLS, DTYPES

    driver = install_driver(target, strict=False, counters=True, **(CHECKS if checks else {}))
    chosen: dict[str, int] = {}
    for dtype in dtypes:
        for call in (c for c in CALLS if dtype in c.dtypes and only in c.function):
            sizes = _sizes(OPS[call.op], call, DTYPES[dtype], chosen)
            if sizes is None:
                print(f"{call.function} {call.shape} {dtype}: left out, too much", file=sys.stderr)
                continue
            given = (sizes[0] if tokens is None else min(tokens, sizes[0]), sizes[1])
            yield _measure(call, dtype, *given, driver, lines), driver.history


_COLUMNS = ("integer", "fp32", "fp16/bf16", "conversion", "special function", "matrix")
_HEAD = (
    "op", "dtype", "shape", "instr", "int", "float", "conv", "special", "matrix", "global",
    "shared", "shuffle", "barrier", "control", "other", "lanes", "load B", "store B", "coalesced",
    "conflicts", "launches",
)  # fmt: skip


def _cells(name: str, row: Row, side: Row) -> list[str]:
    each = side["per_element"]
    classes = each["by_class"]

    def number(*names: str) -> str:
        return f"{sum(classes.get(n, 0.0) for n in names):.2f}"

    coalesced = [side[k] for k in ("load_efficiency", "store_efficiency") if side[k] is not None]
    conflicts = side["bank_conflicts"]
    return [
        name, row["dtype"], row["shape"], f"{each['instructions']:.2f}", number("integer"),
        number("fp32", "fp64", "fp16/bf16"), number("conversion"), number("special function"),
        number("matrix"), number("global memory", "local memory"), number("shared memory"),
        number("shuffle"), number("barrier"), number("control"), number("other"),
        f"{side['lanes_per_instruction'] or 0:.1f}", f"{each['loaded_sector_bytes']:.2f}",
        f"{each['stored_sector_bytes']:.2f}", f"{min(coalesced):.2f}" if coalesced else "-",
        "-" if conflicts is None else f"{conflicts:.2f}", str(side["launches"]),
    ]  # fmt: skip


def table(rows: list[Row], markdown: bool = False) -> str:
    """Return rows as text, a line each, two where a peer stands beside; numbers are per element."""
    lines = [list(_HEAD)]
    for row in rows:
        if "ours" not in row:
            lines.append(_cells(row["op"], row, row))
            continue
        lines.append(_cells(row["op"], row, row["ours"]))
        if "theirs" in row:
            lines.append(_cells(f"  {row['peer']}", row, row["theirs"]))
        elif row["peer"]:
            lines.append([f"  {row['peer']}", *[""] * (len(_HEAD) - 1)])
    if markdown:
        text = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([text[0], "|" + "---|" * len(_HEAD), *text[1:]])
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 3 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in lines
    )


def _peers(python: str, options: argparse.Namespace) -> list[Row]:
    """Compare with peers in the environment of ``python``."""
    command = [python, "-m", "perf.peer_kernels", "--target", options.target, "--op", options.op]
    command += ["--dtypes", options.dtypes]
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--peers {python}: {error.strerror}", "name the Python of an environment"
        ) from error
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed, see above", "run it alone to look closer")
    rows: list[Row] = json.loads(done.stdout)
    return rows


_KEPT = ("launches", "per_element", "load_efficiency", "store_efficiency", "bank_conflicts",
         "lanes_per_instruction")  # fmt: skip


def _brief(row: Row) -> Row:
    """Leave sums and single launches out of a row: what is on record beside a peer."""
    if "ours" not in row:
        where = ("op", "dtype", "shape", "scaled_from", "target", "elements", *_KEPT)
        return {key: row[key] for key in where}
    kept = {key: value for key, value in row.items() if key not in ("ours", "theirs")}
    sides = {
        side: {key: row[side][key] for key in _KEPT} for side in ("ours", "theirs") if side in row
    }
    return {**kept, **sides}


def _show(rows: list[Row], options: argparse.Namespace) -> None:
    if options.json is None:
        print(table(rows, options.markdown))
        for row in rows:
            for line in row.get("lines", ()):
                print(f"{row['op']:28} {line['executed']:>10} {line['source']:24} {line['text']}")
        for scale in sorted(
            {f"{r['op']}: {r['scaled_from']}" for r in rows if r.get("scaled_from")}
        ):
            print(f"scaled down from {scale}", file=sys.stderr)
        return
    write_json([_brief(row) for row in rows] if options.brief else rows, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf counters",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--op", "--only", default="", help="part of a launcher's name")
    parser.add_argument("--dtypes", default="bf16", help="comma-separated")
    parser.add_argument(
        "--tokens", type=int, help="rows of activations at most; as many as is affordable otherwise"
    )
    parser.add_argument("--no-checks", action="store_true", help="count alone, twice as fast")
    parser.add_argument("--lines", type=int, default=0, help="list the instructions executed most")
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="compare with Liger's and bitsandbytes' kernels, in the environment of PYTHON",
    )
    parser.add_argument("--brief", action="store_true", help="JSON of ratios and per element alone")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument("--json", help="a path, or - for standard output, in place of the table")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a check reports."""
    options = _parser().parse_args(arguments)
    if options.peers:
        _show(_peers(options.peers, options), options)
        return 0
    rows = measure(
        options.target,
        options.op,
        tuple(options.dtypes.split(",")),
        options.tokens,
        not options.no_checks,
        options.lines,
    )
    _show(rows, options)
    bad = [row for row in rows if row["reports"]]
    for row in bad:
        for report in row["reports"]:
            print(f"{row['op']} ({row['dtype']}, {row['shape']}): {report}", file=sys.stderr)
    return 1 if bad else 0
