"""Compile every kernel for GPUs offline and read what the compiler made of it; no GPU is needed.

    python -m perf static --targets sm_80,sm_90,gfx942 --json -

Launchers are called on storage of a model's sizes (perf.calls) and the kernels they would launch are
taken in place of a launch, with the constants, specialisation and options they chose. Each is compiled
for each target in a worker process. A row is a fault where a register spills to memory, where an fp64
instruction appears, or where a product of 16-bit operands goes without matrix instructions: wgmma on
sm_90 for tiles of at least 64 rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from entrenar.emulator.targets import shared_memory_bytes
from perf.output import write_json

__all__ = ["Spec", "collect", "faults", "main", "rows"]

Row = dict[str, Any]
TARGETS = "sm_80,sm_90,gfx942"
_MATRIX = re.compile(r"\b([HIQO]MMA|DMMA|[HIQ]GMMA|UTC\w*MMA)\b")
_WGMMA = re.compile(r"\b[HIQ]GMMA\b")
_FP64 = re.compile(r"\bD(?:ADD|MUL|FMA|SETP|MNMX)\b|\.F64\b")
_GLOBAL = re.compile(r"\b(?:LDG|STG|LDGSTS|RED|ATOMG)(?:\.[\w.]+)?")
_AMD_MATRIX = re.compile(r"\bv_(?:mfma|wmma|smfmac)_")
_AMD_FP64 = re.compile(r"\bv_(?!mfma|cndmask)\w+_f64\b")
_AMD_GLOBAL = re.compile(r"\b(?:global|buffer|flat)_(?:load|store)_\w+")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A kernel with everything that decides its code but the target.

    Attributes:
        module: Module of the kernel.
        kernel: Its name.
        op: The launcher that launches it.
        dtype: ``"fp32"``, ``"fp16"`` or ``"bf16"``: that of the call.
        shape: Sizes of the call.
        signature: Triton's type of each parameter.
        constants: Values of constexpr parameters, of those that are None and those that are 1.
        aligned: Positions of parameters that divide by 16.
        options: Warps, stages and the like.
    """

    module: str
    kernel: str
    op: str
    dtype: str
    shape: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for two calls that compile to the same code."""
        parts = (self.module, self.kernel, self.signature, self.constants, self.aligned)
        return repr((*parts, sorted(self.options.items())))

    @property
    def config(self) -> str:
        """Constants in capitals and options, readable."""
        shown = {k: v for k, v in self.constants.items() if k.isupper()} | self.options
        return " ".join(f"{k}={v}" for k, v in shown.items())


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
        signature[name] = infer_type(value)
        size = value.data_ptr() if is_array(value) else value if type(value) is int else 1
        if size % 16 == 0 and not plain:
            aligned.append(position)
    names = {p.name for p in kernel.params}
    options = {k: v for k, v in given.items() if k not in names}
    return Spec(
        kernel.fn.__module__, kernel.fn.__name__, op, dtype, shape,
        signature, constants, tuple(aligned), options,
    )  # fmt: skip


def compile_row(spec: Spec, target: str) -> Row:
    """Compile for one target and read the result; runs in a worker process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from entrenar.kernels import _launch  # noqa: F401  settles fp fusion for every compilation

    kernel = getattr(importlib.import_module(spec.module), spec.kernel)
    attributes = {(i,): [["tt.divisibility", 16]] for i in spec.aligned}
    source = ASTSource(kernel, spec.signature, constexprs=spec.constants, attrs=attributes)
    if target.startswith("sm_"):
        machine = GPUTarget("cuda", int(target[3:]), 32)
    else:
        machine = GPUTarget("hip", target, 32 if target.startswith(("gfx11", "gfx12")) else 64)
    row: Row = {
        "kernel": spec.kernel,
        "op": spec.op,
        "dtype": spec.dtype,
        "config": spec.config,
        "shape": spec.shape,
        "target": target,
    }
    try:
        compiled = triton.compile(source, target=machine, options=spec.options)
    except Exception as error:  # whatever a compiler raises is this row's finding
        return {**row, "error": f"{type(error).__name__}: {error}"[:500]}
    row |= _read_nvidia(compiled) if target.startswith("sm_") else _read_amd(compiled)
    heights = [
        int(n) for n in re.findall(r"tt\.dot .*-> tensor<(?:\d+x)??(\d+)x\d+x", _ttir(compiled))
    ]
    row["shared_bytes"] = int(compiled.metadata.shared)
    row["has_dot"], row["tile_m"] = bool(heights), max(heights, default=None)
    return row


def _ttir(compiled: Any) -> str:
    text = compiled.asm["ttir"]
    return text if isinstance(text, str) else text.decode()


def nvidia_tool(name: str) -> str:
    """Return the path of a tool that triton brings, such as ``"cuobjdump"``."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_nvidia(compiled: Any) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def run(*options: str) -> str:
            command = [nvidia_tool("cuobjdump"), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = run("-res-usage")
        code = run("-sass")
    registers, stack, local = (
        max((int(n) for n in re.findall(rf"\b{field}:(\d+)", usage)), default=0)
        for field in ("REG", "STACK", "LOCAL")
    )
    return {
        "registers": registers,
        "spill_bytes": max(stack, local),
        "wgmma": len(_WGMMA.findall(code)),
        **_count(code, _MATRIX, _FP64, _GLOBAL, ".128"),
    }


def _read_amd(compiled: Any) -> Row:
    code = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", code)), default=0)

    return {
        "registers": field("vgpr_count"),
        "spill_bytes": 4 * field("vgpr_spill_count"),
        "wgmma": 0,
        **_count(code, _AMD_MATRIX, _AMD_FP64, _AMD_GLOBAL, "x4"),
    }


def _count(
    code: str,
    matrix: re.Pattern[str],
    fp64: re.Pattern[str],
    accesses: re.Pattern[str],
    widest: str,
) -> Row:
    found = accesses.findall(code)
    wide = sum(widest in access for access in found)
    return {
        "matrix_instructions": len(matrix.findall(code)),
        "ldst128_share": round(wide / len(found), 3) if found else None,
        "fp64": len(fp64.findall(code)),
    }


def shared_limit(target: str) -> int:
    """Return the bytes of shared memory a program may use on a target."""
    if target.startswith("gfx"):
        return 64 << 10
    return shared_memory_bytes(target)


def faults(row: Row) -> list[str]:
    """Return what a row must not show, a phrase each."""
    if "error" in row:
        return [row["error"]]
    found = []
    if row["spill_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes")
    limit = shared_limit(row["target"])
    if row["shared_bytes"] > limit:
        found.append(f"needs {row['shared_bytes']} bytes of shared memory where {limit} are")
    if row["fp64"]:
        found.append(f"has {row['fp64']} fp64 instructions")
    if row["has_dot"] and row["dtype"] in ("fp16", "bf16") and not row["matrix_instructions"]:
        found.append("multiplies without matrix instructions")
    elif (
        row["target"] == "sm_90"
        and row["has_dot"]
        and row["dtype"] in ("fp16", "bf16")
        and row["tile_m"] >= 64
        and not row["wgmma"]
    ):
        found.append(f"has a tile of {row['tile_m']} rows and no wgmma")
    return found


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    # spawn: a fresh interpreter each, in which kernels were not imported yet
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def rows(
    targets: Sequence[str],
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16"),
    only: str = "",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    one_each: bool = False,
) -> list[Row]:
    """Compile every kernel for every target; return one row each, in a fixed order.

    Args:
        targets: Such as ``"sm_90"`` or ``"gfx942"``.
        dtypes: Dtypes of the calls.
        only: Part of a launcher's name, to compile its kernels alone.
        workers: Processes; the cores of the machine where None.
        progress: Called with (rows done, rows in all).
        one_each: Compile each kernel in the first configuration it is launched in alone.
    """
    work: list[tuple[Spec, str]] = []
    for target in targets:
        with _pool(1) as pool:
            specs = pool.submit(collect, target, list(dtypes), only).result()
        if one_each:
            specs = list({(s.module, s.kernel): s for s in reversed(specs)}.values())
        work += [(spec, target) for spec in specs]
    done: list[Row] = []
    with _pool(workers or os.cpu_count() or 1) as pool:
        for row in pool.map(compile_row, *zip(*work, strict=True), chunksize=4) if work else ():
            done.append(row)
            if progress:
                progress(len(done), len(work))
    return done


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
    parser.add_argument("--targets", default=TARGETS, help=f"comma-separated; default {TARGETS}")
    parser.add_argument("--dtypes", default="fp32,fp16,bf16", help="comma-separated")
    parser.add_argument("--only", default="", help="part of a launcher's name")
    parser.add_argument("--workers", type=int, default=None, help="processes")
    parser.add_argument("--json", default="-", help="a path, or - for standard output")
    options = parser.parse_args(arguments)
    # each worker compiles alone; threads under it would only contend
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}", end="", file=sys.stderr, flush=True)

    found = rows(
        _split(options.targets), _split(options.dtypes), options.only, options.workers, progress
    )
    write_json(found, options.json)
    bad = _report(found)
    print(f"{len(found)} kernels compiled, {bad} with a fault", file=sys.stderr)
    return 1 if bad else 0
