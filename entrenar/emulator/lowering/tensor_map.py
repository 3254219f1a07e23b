"""mbarriers, and tensor maps built on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import NO_REGISTER
from entrenar.emulator.syntax import TYPE_BITS, Opcode

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["TENSOR_MAP"]

_FIELDS = (
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
    "interleave_layout", "swizzle_mode", "fill_mode",
)  # fmt: skip
_BY_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")
_INIT, _ARRIVE, _ARRIVE_EXPECTING, _EXPECT, _INVALIDATE = range(5)


def _mbarrier(program: Program, opcode: Opcode, operands: list[str]) -> None:
    kind = opcode.parts[1]
    if kind in ("try_wait", "test_wait"):
        if not opcode.has("parity"):
            raise EmulatorError("waiting for an mbarrier's state is not supported, its parity is")
        register, wide, offset = program.address(operands[1], "shared")
        program.emit(
            "TRYWAIT", d=program.destination(operands[0], 1), a=register, imm=offset, k2=int(wide),
            b=program.source(operands[2], 32),
        )  # fmt: skip
        return
    if opcode.has("shared::cluster", "noComplete"):
        raise EmulatorError("this form of mbarrier is not supported")
    if kind == "arrive":
        if operands[0] != "_":
            raise EmulatorError("an mbarrier's state is not supported")
        operands = operands[1:]
    actions = {
        "init": _INIT,
        "arrive": _ARRIVE_EXPECTING if opcode.has("expect_tx") else _ARRIVE,
        "expect_tx": _EXPECT,
        "inval": _INVALIDATE,
    }
    if kind not in actions:
        raise EmulatorError(f"{opcode.text} is not supported")
    register, wide, offset = program.address(operands[0], "shared")
    program.emit(
        "MBAR", a=register, imm=offset, k2=int(wide), k0=actions[kind],
        b=program.source(operands[1], 32) if len(operands) > 1 else NO_REGISTER,
    )  # fmt: skip


def _tensor_map(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.has("replace"):
        field = next(name for name in _FIELDS if opcode.has(name))
        shared = any(part.startswith("shared") for part in opcode.parts)
        register, wide, offset = program.address(operands[0], "shared")
        indexed = field in _BY_DIMENSION
        width = TYPE_BITS[opcode.type]
        program.emit(
            "TMREP", a=register, imm=offset, k2=int(wide) | (2 if shared else 1) << 1,
            k0=_FIELDS.index(field), n=int(operands[1], 0) if indexed else 0, k1=width,
            b=program.source(operands[2 if indexed else 1], width),
        )  # fmt: skip
    elif opcode.has("cp_fenceproxy"):
        register, wide, offset = program.address(operands[1], "shared")
        to, to_wide, to_offset = program.address(operands[0], "global")
        if to_offset or not to_wide:
            raise EmulatorError("a tensor map at an offset is not supported")
        program.emit("TMCP", a=register, imm=offset, k2=int(wide), b=to)
    else:
        raise EmulatorError(f"{opcode.text} is not supported")


TENSOR_MAP = {"mbarrier": _mbarrier, "tensormap": _tensor_map}
