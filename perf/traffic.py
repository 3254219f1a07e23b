"""Count the bytes each op loads and stores in the emulator, over the least that it must.

    python -m perf traffic --json -

Beside it stand the bytes that Triton's interpreter counts of the kernel's source, with fewer rows. There
the two must agree: distinct bytes of each program, added up, within two per cent.

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
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrenar.errors import KernelError
from perf.output import write_json

__all__ = ["complete", "floor_bytes", "flops_of", "main", "measure", "storages"]

Row = dict[str, Any]
SMALL = 64 << 10
AGREEMENT = 0.02
INTERPRETED_TOKENS = 16
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


def _of_programs(history: list[Any]) -> tuple[int, int]:
    """Return bytes (loaded, stored), distinct within each program, added up."""
    buffers = [b for launch in history for b in launch.counters["distinct"]["buffers"].values()]
    return sum(b["program_loaded"] for b in buffers), sum(b["program_stored"] for b in buffers)


def _moved(history: list[Any]) -> tuple[int, int]:
    """Return bytes (loaded, stored) by the launches of one call."""
    loaded = stored = 0
    for launch in history:
        for buffer in launch.counters["distinct"]["buffers"].values():
            small = buffer["size"] < SMALL
            loaded += buffer["loaded"] if small else buffer["requested_loaded"]
            stored += buffer["stored"] if small else buffer["requested_stored"]
    return loaded, stored


def storages(value: Any) -> list[Any]:
    """Return the torch storage that an argument or result, or a tuple of them, consists of."""
    if isinstance(value, tuple | list):
        return [t for item in value for t in storages(item)]
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

    read = [t for name, value in given.items() if name != "out" for t in storages(value)]
    written = [t for name in mutates for t in storages(given.get(name))]
    if "inplace" in given and not given["inplace"]:
        written = []
    return total(read) + total([*written, *storages(result)])


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
    of_programs = _of_programs(driver.history)
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
        "program_loaded_bytes": of_programs[0],
        "program_stored_bytes": of_programs[1],
    }


def chosen(only: str, dtypes: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Yield each call that moves memory rather than multiplies, with each of its dtypes asked for."""
    from entrenar.optable import OPS
    from perf.calls import CALLS

    for call in CALLS:
        if only in call.function and not OPS[call.op].has_dot:
            yield from ((call, dtype) for dtype in dtypes if dtype in call.dtypes)


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

    driver = install_driver(runtime.ptx_target(), counters=True)
    return [
        _count(OPS[call.op], call, dtype, tokens, driver) for call, dtype in chosen(only, dtypes)
    ]


def agreement(only: str, dtypes: tuple[str, ...], tokens: int) -> list[Row]:
    """Count in the emulator and, in a process of its own, in the interpreter; return a row each.

    Raises:
        KernelError: The interpreter's process failed.
    """
    command = [sys.executable, "-m", "perf.interpreted", "--only", only, "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, "--dtypes", ",".join(dtypes)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KernelError(f"interpreting the kernels failed: {done.stderr[-2000:]}")
    interpreted = {(r["op"], r["dtype"], r["shape"]): r for r in json.loads(done.stdout)}
    return [
        {
            **{key: row[key] for key in ("op", "dtype", "shape")},
            **{key: row[key] for key in ("program_loaded_bytes", "program_stored_bytes")},
            **interpreted[(row["op"], row["dtype"], row["shape"])],
        }
        for row in measure(only, dtypes, tokens)
    ]


def disagrees(row: Row) -> bool:
    """Whether emulator and interpreter differ by more than two per cent in a row of both."""
    return any(
        abs(row[f"program_{way}_bytes"] - row[f"interpreted_{way}_bytes"])
        > AGREEMENT * max(row[f"program_{way}_bytes"], row[f"interpreted_{way}_bytes"])
        for way in ("loaded", "stored")
    )


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
    parser.add_argument(
        "--interpreted-tokens",
        type=int,
        default=INTERPRETED_TOKENS,
        help="rows of the calls that are also interpreted; 0 for none",
    )
    options = parser.parse_args(arguments)
    dtypes = tuple(options.dtypes.split(","))
    rows = measure(options.only, dtypes, options.tokens)
    both = _interpreted(options.only, dtypes, options.interpreted_tokens)
    for row in rows:
        row["interpreted"] = both.get((row["op"], row["dtype"], row["shape"].rsplit(", T=", 1)[0]))
    write_json(rows, options.json)
    found = [*(_too_much(row) for row in rows if over(row))]
    found += [_differs(row) for row in both.values() if disagrees(row)]
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


def _interpreted(
    only: str, dtypes: tuple[str, ...], tokens: int
) -> dict[tuple[str, str, str], Row]:
    """Return the rows of both counts by op, dtype and shape; none for 0 tokens."""
    if not tokens:
        return {}
    rows = agreement(only, dtypes, tokens)
    return {(r["op"], r["dtype"], r["shape"].rsplit(", T=", 1)[0]): r for r in rows}


def _too_much(row: Row) -> str:
    return (
        f"{row['op']} ({row['dtype']}, {row['shape']}): {row['ratio']} times the floor, "
        f"wanted at most {row['bound']} ({row['why']})"
    )


def _differs(row: Row) -> str:
    counted = ", ".join(
        f"{row[f'program_{way}_bytes']} {way} emulated and {row[f'interpreted_{way}_bytes']} interpreted"
        for way in ("loaded", "stored")
    )
    return f"{row['op']} ({row['dtype']}, {row['shape']}): {counted}, wanted within 2 %"
