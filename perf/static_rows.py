"""Compile one kernel for one target offline and read what the compiler made of it."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from entrenar.emulator.targets import shared_memory_bytes

__all__ = ["Spec", "compile_row", "faults", "nvidia_tool", "shared_limit"]

Row = dict[str, Any]
_MATRIX = re.compile(r"\b([HIQO]MMA|DMMA|[HIQ]GMMA|UTC\w*MMA)\b")
_WGMMA = re.compile(r"\b[HIQ]GMMA\b")
_FP64 = re.compile(r"\bD(?:ADD|MUL|FMA|SETP|MNMX)\b|\.F64\b")
_GLOBAL = re.compile(r"\b(?:LDG|STG|LDGSTS|RED|ATOMG)(?:\.[\w.]+)?")
_ASYNC = re.compile(r"\b(?:LDGSTS|UBLKCP|UTMALDG|UTMASTG)\b")
_AMD_MATRIX = re.compile(r"\bv_(?:mfma|wmma|smfmac)_")
_AMD_FP64 = re.compile(r"\bv_(?!mfma|cndmask)\w+_f64\b")
_AMD_GLOBAL = re.compile(r"\b(?:global|buffer|flat)_(?:load|store)_\w+")
_AMD_ASYNC = re.compile(r"\b(?:global_load_lds_\w+|buffer_load_\w+[^\n]*\blds\b)")


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
        source: Triton's hash of the kernel's source and of all it calls.
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
    source: str

    @property
    def key(self) -> str:
        """Equal for two calls that compile to the same code."""
        parts = (self.module, self.kernel, self.signature, self.constants, self.aligned)
        return repr((*parts, sorted(self.options.items()), self.source))

    @property
    def config(self) -> str:
        """Constants in capitals and options, readable."""
        shown = {k: v for k, v in self.constants.items() if k.isupper()} | self.options
        return " ".join(f"{k}={v}" for k, v in shown.items())

    def describe(self, target: str) -> Row:
        """Return the fields of a row that the call and the target decide."""
        return {
            "kernel": self.kernel,
            "op": self.op,
            "dtype": self.dtype,
            "config": self.config,
            "shape": self.shape,
            "target": target,
            "shared_limit": shared_limit(target),
        }


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
    row = spec.describe(target)
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
        "async_copies": len(_ASYNC.findall(code)),
        **_count(code, _MATRIX, _FP64, _GLOBAL, (".128",)),
    }


def _read_amd(compiled: Any) -> Row:
    code = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", code)), default=0)

    return {
        "registers": field("vgpr_count"),
        "spill_bytes": 4 * field("vgpr_spill_count"),
        "wgmma": 0,
        "async_copies": len(_AMD_ASYNC.findall(code)),
        **_count(code, _AMD_MATRIX, _AMD_FP64, _AMD_GLOBAL, ("x4", "b128")),
    }


def _count(
    code: str,
    matrix: re.Pattern[str],
    fp64: re.Pattern[str],
    accesses: re.Pattern[str],
    widest: tuple[str, ...],
) -> Row:
    found = accesses.findall(code)
    wide = sum(any(word in access for word in widest) for access in found)
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
    """Return what a row must not show, a phrase each.

    Triton multiplies without the matrix units on sm_75, so none are asked for there.
    """
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
    if row["target"] == "sm_75" or not row["has_dot"] or row["dtype"] not in ("fp16", "bf16"):
        return found
    if not row["matrix_instructions"]:
        found.append("multiplies without matrix instructions")
    elif row["target"] == "sm_90" and row["tile_m"] >= 64 and not row["wgmma"]:
        found.append(f"has a tile of {row['tile_m']} rows and no wgmma")
    return found
