"""Instructions of PTX as the core's: one function for each kind of opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from entrenar.emulator.lowering.arithmetic import ARITHMETIC, lower_arithmetic
from entrenar.emulator.lowering.control import CONTROL
from entrenar.emulator.lowering.lanes import LANES
from entrenar.emulator.lowering.matrix import MATRIX
from entrenar.emulator.lowering.memory import MEMORY
from entrenar.emulator.lowering.tensor_map import TENSOR_MAP
from entrenar.emulator.syntax import Opcode

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["lower"]

Lowering = Callable[["Program", Opcode, list[str]], None]
_BY_BASE: dict[str, Lowering] = {**CONTROL, **MEMORY, **MATRIX, **LANES, **TENSOR_MAP, **ARITHMETIC}


def lower(program: Program, opcode: Opcode, operands: list[str]) -> None:
    """Append the instructions of one statement to ``program``.

    Raises:
        EmulatorError: The instruction, or this form of it, is not known.
        KeyError, IndexError, StopIteration, ValueError: Its operands are not of the form expected.
    """
    _BY_BASE.get(opcode.base, lower_arithmetic)(program, opcode, operands)
