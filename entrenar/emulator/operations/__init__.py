"""The instruction set: arithmetic as tables of C expressions, the rest as names the core knows.

``OPCODES`` numbers every operation; the core is compiled with the same numbers.
"""

from __future__ import annotations

from entrenar.emulator.operations.comparison import comparison_operations
from entrenar.emulator.operations.floating import floating_operations
from entrenar.emulator.operations.integer import integer_operations
from entrenar.emulator.operations.operation import WIDTH, Operation

__all__ = ["BUILT_IN", "OPCODES", "OPERATIONS", "WIDTH", "Operation"]

# Operations the core implements itself; each is OP_<name> there.
BUILT_IN = (
    "BRA", "RET", "BAR", "SYNCWARP", "SHFL", "REDUX", "MMA", "LDMATRIX", "STMATRIX", "WGMMA", "VOTE",
    "ELECT", "LD", "ST", "ATOM", "CPASYNC", "CPCOMMIT", "CPWAIT", "CPWAITALL", "CVT", "NOP", "TRAP",
    "UNSUP", "PACK", "UNPACK", "ACTIVEMASK", "MBAR", "TRYWAIT", "TMALD", "TMAST", "TMREP", "TMCP",
)  # fmt: skip
OPERATIONS: dict[str, Operation] = {
    **integer_operations(),
    **floating_operations(),
    **comparison_operations(),
}
OPCODES = {name: number for number, name in enumerate((*BUILT_IN, *OPERATIONS))}
