"""Seconds that ten kernels take emulated, compiled, beside interpreted by Triton; and what compiling costs.

    python -m perf emulation --json -

Each call runs in a process of its own per backend, since Triton decides at import whether kernels are
interpreted. A row holds the seconds of the first emulated call, which compiles unless Triton's cache has the
kernel, the least of five later ones, the least of two interpreted ones, and the instructions emulated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perf.output import write_json

__all__ = ["CASES", "main", "rows"]

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
# op, sample of its row, dtype; samples of several programs
CASES = (
    ("rms_norm", "T5_D576", "bfloat16"),
    ("softmax", "2x4099", "float32"),
    ("cross_entropy", "R3_V9001_past_one_block", "float32"),
    ("rope", "T67_H9_3_D64_several_blocks", "bfloat16"),
    ("swiglu", "5x1001_several_blocks", "bfloat16"),
    ("adamw", "n10007_several_blocks", "float32"),
    ("embedding", "T9_V20_H1100_several_blocks", "float32"),
    ("nf4_dequantize", "75x257_double", "bfloat16"),
    ("gemm", "65x130x71_several_blocks", "bfloat16"),
    ("attention", "S65_H2_kv1_D64", "bfloat16"),
)


def _seconds(op_name: str, sample_id: str, dtype: str, times: int) -> list[float]:
    """Return the seconds of each run of the forward function in this process's backend."""
    from entrenar.optable import OPS
    from perf.oracle import case, on_backend, run, stored

    op = OPS[op_name]
    sample = next(s for s in op.samples if s.id == sample_id)
    taken = []
    for _ in range(times):
        storage = stored(op, case(op, sample, dtype), dtype)
        started = time.perf_counter()
        run(on_backend, op, storage)
        taken.append(time.perf_counter() - started)
    return taken


def _child(backend: str) -> list[Row]:
    """Time every case in this process; the parent has set the environment."""
    found = []
    driver = None
    if backend == "ptx":
        from entrenar.emulator import install_driver

        driver = install_driver(os.environ["ENTRENAR_PTX_TARGET"])
    for op, sample, dtype in CASES:
        if driver is None:
            found.append({"interpreted_s": min(_seconds(op, sample, dtype, 2))})
            continue
        first = _seconds(op, sample, dtype, 1)[0]
        driver.history = []
        later = min(_seconds(op, sample, dtype, 5))
        instructions = sum(launch.instructions for launch in driver.history) // 5
        found.append({"first_s": first, "emulated_s": later, "warp_instructions": instructions})
    return found


def rows(target: str = "sm_80") -> list[Row]:
    """Time every case emulated and interpreted; return a row each."""
    parts = []
    for backend in ("ptx", "triton"):
        environment = os.environ | {"ENTRENAR_BACKEND": backend, "ENTRENAR_PTX_TARGET": target}
        environment.pop("TRITON_INTERPRET", None)
        if backend == "triton":
            environment["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "perf", "emulation", "--child", backend]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
        )
        parts.append(json.loads(done.stdout))
    found = []
    for (op, sample, dtype), emulated, interpreted in zip(CASES, *parts, strict=True):
        row = {
            "op": op,
            "sample": sample,
            "dtype": dtype,
            "target": target,
            **emulated,
            **interpreted,
        }
        row["interpreted_over_emulated"] = row["interpreted_s"] / row["emulated_s"]
        found.append({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in row.items()})
    return found


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf emulation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--json", help="a path, or - for standard output, in place of the table")
    parser.add_argument("--child", choices=("ptx", "triton"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(_child(options.child)))
        return 0
    found = rows(options.target)
    if options.json:
        write_json(found, options.json)
    else:
        print(
            f"{'op':16} {'sample':30} {'dtype':9} {'first':>8} {'emulated':>9} {'interpreted':>11}  times"
        )
        for row in found:
            print(
                f"{row['op']:16} {row['sample']:30} {row['dtype']:9} {row['first_s']:>7.2f}s "
                f"{row['emulated_s']:>8.4f}s {row['interpreted_s']:>10.3f}s "
                f"{row['interpreted_over_emulated']:>6.1f}"
            )
    return 0
