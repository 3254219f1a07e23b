"""A model of time: the least that a launch's counted work takes at a device's published rates.

    python -m perf model --device h200 --op rms_norm
    python -m perf model --device a100 --op nf4 --measured perf/results/gpu.jsonl --json -

Nothing here is measured. The emulator counts what a kernel asks for (perf counters); each count over the
rate of the unit that serves it is a time, and the largest is the bound: no schedule of this code is faster,
if the counts are right. What it leaves out makes a device slower, never faster: latency, caches that miss,
launches, schedulers that find no warp ready. Work of a multiprocessor is that of the one with most blocks.

Counts are of PTX. The assembler joins and drops instructions, above all of the class "other", which is
therefore left out of the issue slots; where it drops more, the bound is too high by as much. Use it to rank
variants of one kernel and to name what limits each, and no further. ``--measured`` puts times beside it that
``perf gpu`` or ``perf kernels`` took, with the error of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrenar.errors import ConfigError, KernelError
from perf.devices import DEVICES, Device
from perf.output import write_json

__all__ = ["Occupancy", "bounds", "launch_model", "main", "measure", "occupancy", "registers_of"]

Row = dict[str, Any]
WARP, SECTOR = 32, 32
REGISTER_UNIT, WARP_UNIT = 256, 4  # registers are handed out in units a warp, warps in fours
RESERVED_SHARED = 1 << 10  # of each block, by the system, since compute capability 8.0


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many blocks a multiprocessor holds at a time, and what stops it from holding more.

    Attributes:
        blocks: Blocks of a multiprocessor.
        warps: Share of the warps it could hold.
        limit: ``"registers"``, ``"shared memory"``, ``"warps"`` or ``"blocks"``.
    """

    blocks: int
    warps: float
    limit: str


def occupancy(device: Device, warps: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return the occupancy of blocks of this size.

    Args:
        device: The device.
        warps: Warps of a block.
        registers: Of a thread.
        shared_bytes: Of a block.

    Raises:
        KernelError: Not even one block fits.
    """
    of_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = device.registers // of_warp // WARP_UNIT * WARP_UNIT // warps
    limits = {
        "warps": device.most_warps // warps,
        "blocks": device.most_blocks,
        "registers": by_registers,
        "shared memory": device.shared_bytes // (shared_bytes + RESERVED_SHARED),
    }
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] == 0:
        raise KernelError(
            f"a block of {warps} warps with {registers} registers a thread and {shared_bytes} bytes "
            f"of shared memory does not fit {device.name}: {limit}"
        )
    return Occupancy(limits[limit], round(limits[limit] * warps / device.most_warps, 4), limit)


def bounds(device: Device, launch: Row) -> dict[str, float]:
    """Return the seconds each unit needs for a launch's work, by name.

    Args:
        device: The device.
        launch: A launch as perf.tally counts it, ``matrix`` by shape with it.
    """
    classes = launch["by_class"]
    blocks = max(launch["blocks"], 1)
    # The busiest multiprocessor's share, in clocks of it.
    share = -(-blocks // device.multiprocessors) / blocks

    def clocks(amount: float) -> float:
        return amount * share / device.clock_hz

    def lanes(amount: float, rate: int) -> float:
        return clocks(amount * WARP / rate)

    issued = sum(n for name, n in classes.items() if name != "other")
    halves = classes.get("fp16/bf16", 0)
    sectors = sum(launch[kind]["sectors"] for kind in ("loads", "stores", "atomics"))
    found = {
        "issue slots": clocks(issued / device.issue),
        "integer": lanes(classes.get("integer", 0), device.integer_lanes),
        "float": lanes(classes.get("fp32", 0) + halves, device.fp32_lanes),
        "conversion": lanes(classes.get("conversion", 0), device.conversion_lanes),
        "special function": lanes(classes.get("special function", 0), device.special_lanes),
        "shuffle": lanes(classes.get("shuffle", 0), device.shuffle_lanes),
        "shared memory": clocks(launch["shared"]["wavefronts"]),
        "matrix": _matrix_seconds(device, launch["matrix"]) * share * device.multiprocessors,
        "dram": (launch["distinct_loaded_bytes"] + launch["distinct_stored_bytes"])
        / device.dram_bytes_per_s,
    }
    if device.l2_bytes_per_clock is not None:
        found["l2"] = SECTOR * sectors / (device.l2_bytes_per_clock * device.clock_hz)
    return found


def _matrix_seconds(device: Device, matrix: dict[str, Row]) -> float:
    """Return the seconds of matrix work spread evenly; operands of a type without a rate are refused."""
    seconds = 0.0
    for shape, row in matrix.items():
        kind = shape.rsplit(" ", 1)[1]
        if kind not in device.matrix_flops_per_s:
            raise KernelError(f"{device.name} has no published matrix rate for {kind}")
        seconds += row["flops"] / device.matrix_flops_per_s[kind]
    return seconds


def registers_of(cubin: bytes) -> int:
    """Return the registers of a thread that the assembler gave a kernel.

    Raises:
        KernelError: The object file does not tell.
    """
    from perf.static_rows import nvidia_tool

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvidia_tool("cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"\bREG:(\d+)", usage.stdout)
    if not found:
        raise KernelError(f"cuobjdump tells no registers: {usage.stderr[-500:]}")
    return max(int(n) for n in found)


def launch_model(device: Device, launch: Row, registers: int) -> Row:
    """Return the model of one launch: times by unit, the tightest, the bound, and occupancy."""
    times = bounds(device, launch)
    tightest = max(times, key=lambda name: times[name])
    held = occupancy(device, launch["warps"], registers, launch["shared_bytes"])
    rounds = -(-launch["blocks"] // (device.multiprocessors * held.blocks))
    return {
        "kernel": launch["kernel"],
        "registers": registers,
        "blocks": launch["blocks"],
        "blocks_at_a_time": held.blocks,
        "rounds": rounds,
        "warps_held": held.warps,
        "occupancy_limit": held.limit,
        "tightest": tightest,
        "model_us": round(1e6 * times[tightest], 4),
        "model_us_by_unit": {name: round(1e6 * s, 4) for name, s in times.items() if s},
    }


def measure(
    device: Device, only: str = "", dtypes: Sequence[str] = ("bf16",), tokens: int | None = None
) -> list[Row]:
    """Count every call whose launcher's name contains ``only``, and model it; return a row each.

    A call's launches follow one another, so their bounds add up.
    """
    from perf import counters

    rows = []
    for row, history in counters.runs(device.target, only, tuple(dtypes), tokens):
        launches = []
        for launch, counted in zip(history, row["kernels"], strict=True):
            counted = {**counted, "matrix": launch.counters["matrix"]}
            launches.append(launch_model(device, counted, registers_of(launch.asm["cubin"])))
        slowest = max(launches, key=lambda m: m["model_us"], default={"tightest": None})
        rows.append(
            {
                **{
                    k: row[k] for k in ("op", "dtype", "shape", "scaled_from", "target", "elements")
                },
                "device": device.name,
                "model_us": round(sum(m["model_us"] for m in launches), 4),
                "model_ps_per_element": round(
                    1e6 * sum(m["model_us"] for m in launches) / max(row["elements"], 1), 4
                ),
                "tightest": slowest["tightest"],
                "launches": launches,
            }
        )
    return rows


def beside(rows: list[Row], measured: Path) -> list[Row]:
    """Put measured times beside the model's, where op, dtype and shape agree.

    Raises:
        ConfigError: The file is not lines of JSON.
    """
    try:
        lines = [json.loads(line) for line in measured.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--measured {measured}: {error}", "give a results.jsonl of perf gpu"
        ) from error
    times = {(r.get("op"), r.get("dtype"), r.get("shape")): r.get("median_us") for r in lines}
    for row in rows:
        found = times.get((row["op"], row["dtype"], row["shape"]))
        row["measured_us"] = found
        row["model_error"] = None if not found else round(row["model_us"] / found - 1, 4)
    return rows


def _table(rows: list[Row]) -> str:
    head = ["op", "dtype", "shape", "model us", "ps/element", "tightest", "next", "warps held"]
    lines = [head]
    for row in rows:
        slowest = max(row["launches"], key=lambda m: m["model_us"], default=None)
        if slowest is None:
            continue
        times = sorted(slowest["model_us_by_unit"].items(), key=lambda pair: -pair[1])
        following = f"{times[1][0]} {times[1][1] / times[0][1]:.0%}" if len(times) > 1 else "-"
        lines.append(
            [row["op"], row["dtype"], row["shape"], f"{row['model_us']:.2f}",
             f"{row['model_ps_per_element']:.2f}", slowest["tightest"], following,
             f"{slowest['warps_held']:.0%} ({slowest['occupancy_limit']})"]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf model",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--device", default="h200", choices=sorted(DEVICES))
    parser.add_argument("--op", default="", help="part of a launcher's name")
    parser.add_argument("--dtypes", default="bf16", help="comma-separated")
    parser.add_argument("--tokens", type=int, help="rows of activations at most")
    parser.add_argument("--measured", type=Path, help="a results.jsonl to put beside it")
    parser.add_argument("--json", help="a path, or - for standard output, in place of the table")
    options = parser.parse_args(arguments)
    os.environ["ENTRENAR_BACKEND"] = "ptx"
    device = DEVICES[options.device]
    rows = measure(device, options.op, options.dtypes.split(","), options.tokens)
    if options.measured:
        rows = beside(rows, options.measured)
    if options.json is None:
        print(f"a model for {device.name}, not a measurement: the least time at published rates")
        print(_table(rows))
    else:
        write_json(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
