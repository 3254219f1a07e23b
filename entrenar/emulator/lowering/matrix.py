"""Matrix instructions: mma.sync and wgmma."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import NO_REGISTER
from entrenar.emulator.syntax import Opcode, elements, immediate

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["MATRIX"]

_MMA_TYPES = ("f16", "bf16", "tf32", "s8", "u8", "f64", "f32", "s32", "e4m3", "e5m2")
# (shape, type of A, type of B) in the order of the core's M_* constants.
_MMA_KINDS = (
    ("m16n8k16", "f16", "f16"), ("m16n8k16", "bf16", "bf16"), ("m16n8k8", "tf32", "tf32"),
    ("m16n8k8", "f16", "f16"), ("m16n8k8", "bf16", "bf16"), ("m16n8k32", "s8", "s8"),
    ("m16n8k16", "s8", "s8"), ("m16n8k32", "u8", "u8"), ("m8n8k4", "f64", "f64"),
    ("m16n8k4", "tf32", "tf32"), ("m16n8k32", "e4m3", "e4m3"), ("m16n8k32", "e5m2", "e5m2"),
    ("m16n8k32", "e4m3", "e5m2"), ("m16n8k32", "e5m2", "e4m3"),
)  # fmt: skip
_WGMMA_TYPES = ("f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2")
_WGMMA_ORDER = {"fence": 0, "commit_group": 1, "wait_group": 2}


def _mma(program: Program, opcode: Opcode, operands: list[str]) -> None:
    types = [part for part in opcode.parts if part in _MMA_TYPES]
    shape = next(part for part in opcode.parts if re.fullmatch(r"m\d+n\d+k\d+", part))
    kind = (shape, types[1], types[2])
    if kind not in _MMA_KINDS:
        raise EmulatorError(f"mma of {' '.join(kind)} is not supported")
    width = 64 if types[1] == "f64" else 32
    result = [program.destination(name, width) for name in elements(operands[0])]
    inputs = [program.source(name, width) for text in operands[1:4] for name in elements(text)]
    program.emit(
        "MMA", n=len(result), k0=_MMA_KINDS.index(kind), k1=int(types[0] == "f16"),
        k2=int(opcode.has("satfinite")), x=program.operands(*result, *inputs),
    )  # fmt: skip


def _wgmma(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.parts[1] in _WGMMA_ORDER:
        # Computed at issue; what orders it is kept for the checks.
        waits = opcode.parts[1] == "wait_group"
        kept = int(operands[0], 0) if waits else 0
        program.emit("NOP", k0=_WGMMA_ORDER[opcode.parts[1]], k1=kept)
        return
    shape = next(part for part in opcode.parts if re.fullmatch(r"m64n\d+k\d+", part))
    columns = int(re.findall(r"n(\d+)", shape)[0])
    types = [part for part in opcode.parts if part in (*_WGMMA_TYPES, "f32", "s32")]
    result = [program.destination(name, 32) for name in elements(operands[0])]
    in_registers = operands[1].startswith("{")
    a = (
        [program.source(name, 32) for name in elements(operands[1])]
        if in_registers
        else [program.source(operands[1], 64)]
    )
    signs, transposed = _wgmma_flags(operands, in_registers)
    program.emit(
        "WGMMA",
        n=len(result),
        c=_scale_predicate(program, operands[3]),
        k0=_WGMMA_TYPES.index(types[1]) | _WGMMA_TYPES.index(types[2]) << 4,
        k1=columns
        | int(types[0] == "f16") << 16
        | int(in_registers) << 17
        | int(opcode.has("satfinite")) << 18,
        k2=transposed[0] | transposed[1] << 1 | (signs[0] < 0) << 2 | (signs[1] < 0) << 3,
        x=program.operands(*result, *a, program.source(operands[2], 64)),
    )


def _wgmma_flags(operands: list[str], in_registers: bool) -> tuple[list[int], list[int]]:
    """Return the signs of A and B, and whether each is transposed."""
    flags = [int(text, 0) for text in operands[4:]]
    signs = [*flags[:2], 1, 1][:2]
    if any(sign not in (1, -1) for sign in signs):
        raise EmulatorError("this form of wgmma is not supported")
    transposed = [0, *flags[2:]] if in_registers else flags[2:]
    return signs, [*transposed, 0, 0][:2]


def _scale_predicate(program: Program, text: str) -> int:
    """Return the predicate that keeps the accumulator; none where it is always kept."""
    always = program.registers.lookup(text) is None and immediate(text, 1) not in (0, None)
    return NO_REGISTER if always else program.source(text, 1)


MATRIX = {"mma": _mma, "wgmma": _wgmma}
