"""Count the bytes each op loads and stores in the emulator, over the least that it must.

    python -m perf traffic --json -

A call at a model's sizes (perf.calls, with few rows) is compiled for sm_80 and executed, and the bytes
that its programs ask memory for are counted: distinct bytes within a warp's request, summed. An argument
under 64 KiB, such as a weight row or a table, counts once a launch, since caches hold it. The floor is
every input read once and every output written once. Products are left out: they read their operands
once per tile, and their bound is arithmetic.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

Row = dict[str, Any]
SMALL = 64 << 10
# Backward launchers whose floor their row, which is about the forward one, does not bound.
BOUNDS = {
    "cross_entropy_backward": (1.55, "the logits are read for their sum, then for the gradient"),
    "causal_cross_entropy_backward": (1.55, "as cross_entropy_backward"),
}


def _moved(history: list[Any]) -> tuple[int, int]:
    """Return bytes (loaded, stored) by the launches of one call."""
    loaded = stored = 0
    for launch in history:
        for buffer in launch.counters["distinct"]["buffers"].values():
            small = buffer["size"] < SMALL
            loaded += buffer["loaded"] if small else buffer["requested_loaded"]
            stored += buffer["stored"] if small else buffer["requested_stored"]
    return loaded, stored


def _storages(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [t for item in value for t in _storages(item)]
    if hasattr(value, "tensors"):
        return list(value.tensors())
    return [value] if hasattr(value, "untyped_storage") else []


def _floor(given: dict[str, Any], mutates: tuple[str, ...], result: Any) -> int:
    """Return the bytes of every input, once, and of every output, once."""

    def total(tensors: list[Any]) -> int:
        once = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}
        return sum(once.values())

    read = [t for name, value in given.items() if name != "out" for t in _storages(value)]
    written = [t for name in mutates for t in _storages(given.get(name))]
    if "inplace" in given and not given["inplace"]:
        written = []
    return total(read) + total([*written, *_storages(result)])


def measure(
    only: str = "", dtypes: tuple[str, ...] = ("fp32", "bf16"), tokens: int = 64
) -> list[Row]:
    """Run every call whose launcher's name contains ``only``; return a row each.

    The process must not interpret kernels. Storage lies on the CPU.
    """
    os.environ["ENTRENAR_BACKEND"] = "ptx"
    from entrenar import runtime
    from entrenar.emulator import install_driver
    from entrenar.optable import FUNCTIONS, OPS
    from perf.calls import CALLS, DTYPES, Maker

    driver = install_driver(runtime.ptx_target(), counters=True)
    rows: list[Row] = []
    for call in CALLS:
        op = OPS[call.op]
        if op.has_dot or only not in call.function:
            continue
        launcher = getattr(
            importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
        )
        for dtype in (d for d in dtypes if d in call.dtypes):
            given = call.make(Maker(DTYPES[dtype], tokens, values=True))
            driver.history = []
            result = launcher(**given)
            loaded, stored = _moved(driver.history)
            floor = _floor(given, FUNCTIONS[call.function].mutates, result)
            bound, why = BOUNDS.get(call.function, (op.traffic_bound, op.traffic_reason))
            rows.append(
                {
                    "op": call.function,
                    "dtype": dtype,
                    "shape": f"{call.shape}, T={tokens}",
                    "loaded_bytes": loaded,
                    "stored_bytes": stored,
                    "floor_bytes": floor,
                    "ratio": round((loaded + stored) / floor, 4) if floor else math.nan,
                    "bound": bound,
                    "why": why,
                    "launches": len(driver.history),
                }
            )
    return rows


def over(row: Row) -> bool:
    """Whether a row moves more than its bound allows."""
    return row["bound"] is not None and row["ratio"] > row["bound"]


def main(arguments: list[str]) -> int:
    """Run the command; 1 where a row is over its bound."""
    parser = argparse.ArgumentParser(
        prog="python -m perf traffic",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", default="", help="part of a launcher's name")
    parser.add_argument("--dtypes", default="fp32,bf16", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="rows of activations")
    parser.add_argument("--json", default="-", help="a path, or - for standard output")
    options = parser.parse_args(arguments)
    rows = measure(options.only, tuple(options.dtypes.split(",")), options.tokens)
    text = json.dumps(rows, indent=1)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).write_text(text + "\n")
    bad = [row for row in rows if over(row)]
    for row in bad:
        print(
            f"{row['op']} ({row['dtype']}, {row['shape']}): {row['ratio']} times the floor, "
            f"wanted at most {row['bound']} ({row['why']})",
            file=sys.stderr,
        )
    return 1 if bad else 0
