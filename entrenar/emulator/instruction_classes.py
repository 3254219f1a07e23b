"""The class of a PTX instruction, as a profiler would name it, and the work of a matrix instruction."""

from __future__ import annotations

import functools
import re

from entrenar.emulator.syntax import TYPE_BITS, Opcode, opcode_of, split_operands

__all__ = ["CLASSES", "access_bits", "access_kind", "classify", "matrix_work"]

CLASSES = (
    "integer", "fp32", "fp64", "fp16/bf16", "conversion", "special function", "matrix", "shared memory",
    "global memory", "local memory", "control", "shuffle", "barrier", "other",
)  # fmt: skip
_MEMORY = ("ld", "ldu", "st", "atom", "red")
_BY_BASE = {
    **dict.fromkeys(("ldmatrix", "stmatrix"), "shared memory"),
    **dict.fromkeys(("bar", "barrier", "mbarrier"), "barrier"),
    **dict.fromkeys(("bra", "ret", "exit", "trap", "brkpt", "call"), "control"),
    **dict.fromkeys(("shfl", "redux", "vote", "match", "activemask", "elect"), "shuffle"),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "rsqrt"), "special function"),
    **dict.fromkeys(
        ("mov", "cvta", "membar", "fence", "prefetch", "prefetchu", "createpolicy", "tensormap",
         "griddepcontrol", "setmaxnreg", "nanosleep", "discard", "applypriority", "pmevent"),
        "other",
    ),
    "cvt": "conversion",
    "mma": "matrix",
}  # fmt: skip
_BY_SPACE = {
    "shared": "shared memory", "local": "local memory", "param": "other", "const": "other",
}  # fmt: skip
_BY_TYPE = {
    "f32": "fp32", "f32x2": "fp32", "f64": "fp64",
    **dict.fromkeys(("f16", "bf16", "f16x2", "bf16x2"), "fp16/bf16"),
}  # fmt: skip
_MATRIX_TYPES = ("f16", "bf16", "tf32", "s8", "u8", "f64", "f32", "s32", "e4m3", "e5m2")


@functools.lru_cache(maxsize=1 << 16)
def classify(text: str) -> str:
    """Return the class of an instruction, one of ``CLASSES``."""
    opcode = opcode_of(text)
    if opcode.base in _MEMORY:
        space = opcode.space("global", "shared", "local", "param", "const")
        return _BY_SPACE.get(space, "global memory")
    if opcode.base == "wgmma":
        return "matrix" if opcode.has("mma_async") else "other"
    if opcode.base == "cp":
        ordering = opcode.has("commit_group", "wait_group", "wait_all")
        return "other" if ordering else "global memory"
    if opcode.base == "div" and opcode.type.startswith("f"):
        return "special function"
    return _BY_BASE.get(opcode.base) or _BY_TYPE.get(opcode.type, "integer")


def access_kind(opcode: Opcode) -> str:
    """Return what an instruction of the class global or shared memory does, as counters name it."""
    if opcode.has("bulk"):
        return "tma_load" if "mbarrier" in opcode.text else "tma_store"
    kinds = {
        "cp": "cp_async", "atom": "atomic", "red": "atomic", "st": "store", "ldmatrix": "ldmatrix",
        "stmatrix": "stmatrix",
    }  # fmt: skip
    return kinds.get(opcode.base, "load")


def access_bits(text: str) -> int:
    """Return the bits a lane loads, stores or copies with one instruction."""
    opcode = opcode_of(text)
    if opcode.base == "cp":
        return int(split_operands(text[text.index("[") :])[2].rstrip(";"), 0) * 8
    return TYPE_BITS[opcode.type] * opcode.vector


def matrix_work(opcode: Opcode) -> tuple[str, int]:
    """Return a matrix instruction's shape and type, and the operations of one warp's instruction."""
    found = re.search(r"m(\d+)n(\d+)k(\d+)", opcode.text)
    if found is None:
        raise ValueError(f"{opcode.text} has no shape")
    m, n, k = map(int, found.groups())
    types = [part for part in opcode.parts if part in _MATRIX_TYPES]
    warps = 4 if opcode.base == "wgmma" else 1
    return f"{opcode.base} {found[0]} {types[1]}", 2 * m * n * k // warps
