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
import inspect
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["complete", "floor_bytes", "flops_of", "main", "measure"]

Row = dict[str, Any]
SMALL = 64 << 10
# Bounds of calls that their row, which speaks of the forward pass on usual sizes, does not bound.
BOUNDS: tuple[tuple[str, str, float, str], ...] = (
    ("cross_entropy_backward", "", 1.55, "the logits are read for their sum, then once more"),
    ("softmax_backward", "65536", 1.7, "both operands of a row past a block are read twice"),
    ("rms_norm_forward", "24576", 2.0, "a row past a block is read twice, and with it its weight"),
    ("rms_norm_backward", "24576", 3.2, "operands past a block are read three times, the weight twice"),
    ("rms_norm_backward", "TxH", 1.35, "a float32 partial sum of the weight's gradient for four rows"),
    ("layer_norm_forward", "24576", 2.5, "a row past a block is read twice, and with it weight and bias"),
    ("layer_norm_backward", "24576", 3.2, "operands past a block are read three times, the weight twice"),
    ("layer_norm_backward", "Tx", 1.35, "float32 partial sums of weight and bias for eight rows"),
    ("bias_backward", "", 1.15, "float32 partial sums, so that a few hundred rows fill a device"),
    ("clip_grad_norm", "", 1.51, "two reads and one write, and three floats a program"),
)  # fmt: skip


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


def floor_bytes(
    op: Any, call: Any, given: dict[str, Any], size: int, mutates: Any, result: Any
) -> int:
    """Return the bytes of every input, once, and of every output, once; from the row if one is given."""
    if op is not None and call.function == op.forward.name:
        arrays = {k: _array(v) for k, v in given.items()}
        return int(op.bytes_moved(arrays, size))

    def total(tensors: list[Any]) -> int:
        once = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}
        return sum(once.values())

    read = [t for name, value in given.items() if name != "out" for t in _storages(value)]
    written = [t for name in mutates for t in _storages(given.get(name))]
    if "inplace" in given and not given["inplace"]:
        written = []
    return total(read) + total([*written, *_storages(result)])


def flops_of(op: Any, given: dict[str, Any]) -> int:
    """Return the row's count of the forward pass's operations; 0 for arguments of another pass."""
    try:
        return int(op.flops({k: _array(v) for k, v in given.items()}))
    except KeyError:
        return 0


def complete(launcher: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Add a launcher's defaults to the arguments of a call, its stream left out."""
    bound = inspect.signature(launcher).bind(**given)
    bound.apply_defaults()
    return {k: v for k, v in bound.arguments.items() if k != "stream"}


def _array(value: Any) -> Any:
    """Return storage as an ndarray, as rows take it, and anything else as it is."""
    if not hasattr(value, "untyped_storage"):
        return value
    return (value.float() if value.is_floating_point() else value).cpu().numpy()


def _bound(op: Any, function: str, shape: str) -> tuple[float | None, str]:
    for name, part, bound, why in BOUNDS:
        if function.endswith(name) and part in shape:
            return bound, why
    return op.traffic_bound, op.traffic_reason


def _count(op: Any, call: Any, dtype: str, tokens: int, driver: Any) -> Row:
    """Execute one call and return its row."""
    from entrenar.optable import FUNCTIONS
    from perf.calls import DTYPES, Maker

    launcher = getattr(importlib.import_module(f"entrenar.kernels.{call.family}"), call.function)
    given = complete(launcher, call.make(Maker(DTYPES[dtype], tokens, values=True)))
    driver.history = []
    result = launcher(**given)
    loaded, stored = _moved(driver.history)
    mutates = FUNCTIONS[call.function].mutates
    floor = floor_bytes(op, call, given, DTYPES[dtype].itemsize, mutates, result)
    limit, why = _bound(op, call.function, call.shape)
    return {
        "op": call.function,
        "dtype": dtype,
        "shape": f"{call.shape}, T={tokens}",
        "loaded_bytes": loaded,
        "stored_bytes": stored,
        "floor_bytes": floor,
        "ratio": round((loaded + stored) / floor, 4) if floor else math.nan,
        "bound": limit,
        "why": why,
        "launches": len(driver.history),
    }


def measure(
    only: str = "", dtypes: tuple[str, ...] = ("fp32", "bf16"), tokens: int = 256
) -> list[Row]:
    """Run every call whose launcher's name contains ``only``; return a row each.

    The process must not interpret kernels. Storage lies on the CPU.
    """
    os.environ["ENTRENAR_BACKEND"] = "ptx"
    from entrenar import runtime
    from entrenar.emulator import install_driver
    from entrenar.optable import OPS
    from perf.calls import CALLS

    driver = install_driver(runtime.ptx_target(), counters=True)
    return [
        _count(OPS[call.op], call, dtype, tokens, driver)
        for call in CALLS
        if only in call.function and not OPS[call.op].has_dot
        for dtype in dtypes
        if dtype in call.dtypes
    ]


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
    parser.add_argument("--tokens", type=int, default=256, help="rows of activations")
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
