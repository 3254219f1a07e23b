"""Branches, barriers, calls, and what has no effect here: fences, prefetches, hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.syntax import Opcode, immediate

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["CONTROL"]

_WITHOUT_EFFECT = (
    "membar", "fence", "prefetch", "prefetchu", "griddepcontrol", "setmaxnreg", "nanosleep", "discard",
    "applypriority", "pmevent",
)  # fmt: skip


def _branch(program: Program, opcode: Opcode, operands: list[str]) -> None:
    program.branch(operands[0])


def _return(program: Program, opcode: Opcode, operands: list[str]) -> None:
    program.emit("RET")


def _trap(program: Program, opcode: Opcode, operands: list[str]) -> None:
    program.emit("TRAP")


def _nothing(program: Program, opcode: Opcode, operands: list[str]) -> None:
    program.emit("NOP")


def _barrier(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.has("warp"):
        program.emit("SYNCWARP")
    elif opcode.has("cluster"):
        raise EmulatorError("barriers of clusters are not supported")
    elif opcode.has("sync") and (
        len(operands) < 2 or immediate(operands[1], 32) == program.max_threads
    ):
        program.emit("BAR")
    else:
        raise EmulatorError("barriers of a part of the block are not supported")


def _policy(program: Program, opcode: Opcode, operands: list[str]) -> None:
    destination = program.destination(operands[0], 64)
    program.emit("mov.u64", d=destination, a=program.registers.constant(0, 64))


def _call(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if any("vprintf" in operand for operand in operands):
        program.emit("NOP")  # nothing is printed
    elif any("__assertfail" in operand for operand in operands):
        program.emit("TRAP")
    else:
        raise EmulatorError("calls are not supported")


CONTROL = {
    "bra": _branch,
    "ret": _return,
    "exit": _return,
    "trap": _trap,
    "brkpt": _trap,
    "bar": _barrier,
    "barrier": _barrier,
    "createpolicy": _policy,
    "call": _call,
    **dict.fromkeys(_WITHOUT_EFFECT, _nothing),
}
