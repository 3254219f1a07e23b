"""Loads, stores, atomics, cp.async and bulk copies, and the matrix loads of shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import NO_REGISTER
from entrenar.emulator.syntax import TYPE_BITS, Opcode, elements, immediate

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["MEMORY"]

_SPACES = {"generic": 0, "global": 1, "param": 1, "const": 1, "shared": 2, "local": 3}
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ATOMIC_TYPES = {"f32": 2, "f64": 3, "f16": 4, "bf16": 5, "f16x2": 6, "bf16x2": 7}


def _access(program: Program, opcode: Opcode, operands: list[str]) -> None:
    store = opcode.base == "st"
    data, place = (operands[1], operands[0]) if store else (operands[0], operands[1])
    if opcode.has("param") and _of_a_call(program, place):
        program.emit("NOP")
        return
    space = opcode.space("global", "shared", "local", "param", "const")
    width = TYPE_BITS[opcode.type]
    if width == 128:
        raise EmulatorError("accesses of 128-bit types are not supported")
    register, wide, offset = program.address(place, space)
    program.emit(
        "ST" if store else "LD",
        a=register,
        imm=offset,
        n=opcode.vector,
        k0=_SPACES[space]
        | (width // 8) << 8
        | int(opcode.type[0] == "s") << 16
        | int(space in ("param", "const")) << 24,
        k2=int(wide),
        x=program.operands(*_data_registers(program, data, width, store)),
    )


def _of_a_call(program: Program, place: str) -> bool:
    """Whether a parameter access is for the arguments of a call, of which none is made."""
    name = place.strip("[] ").split("+")[0].strip()
    known = program.declared.parameter_offset
    return name not in known and program.registers.lookup(name) is None


def _data_registers(program: Program, data: str, width: int, store: bool) -> list[int]:
    """Return offset and bits of each register that is loaded or stored."""
    found = []
    for name in elements(data):
        if name == "_":
            found += [NO_REGISTER, 0]
        elif store and program.registers.lookup(name) is None:
            found += [program.source(name, max(width, 16)), max(width, 16)]
        else:
            found += list(program.register(name))
    return found


def _atomic(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.vector > 1:
        raise EmulatorError("atomics of vectors are not supported")
    name = next(part for part in opcode.parts[1:] if part in _ATOMICS)
    width = TYPE_BITS[opcode.type]
    kind = _ATOMIC_TYPES.get(opcode.type, int(opcode.type[0] == "s"))
    destination = NO_REGISTER
    if opcode.base == "atom":
        destination, operands = program.destination(operands[0], width), operands[1:]
    space = opcode.space("global", "shared")
    register, wide, offset = program.address(operands[0], space)
    values = []
    for text in operands[1:3]:
        if program.registers.lookup(text) or immediate(text, width) is not None:
            values += [program.source(text, width), width]
    program.emit(
        "ATOM",
        d=destination,
        a=register,
        imm=offset,
        n=len(values) // 2,
        k0=_SPACES[space] | (width // 8) << 8 | kind << 16,
        k1=_ATOMICS.index(name) | width << 8,
        k2=int(wide),
        x=program.operands(*values),
    )


def _copy(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if not opcode.has("async"):
        raise EmulatorError(f"{opcode.text} is not supported")
    if opcode.has("bulk"):
        _bulk_copy(program, opcode, operands)
    elif opcode.has("commit_group"):
        program.emit("CPCOMMIT")
    elif opcode.has("wait_group"):
        program.emit("CPWAIT", k0=int(operands[0], 0))
    elif opcode.has("wait_all"):
        program.emit("CPWAITALL")
    elif opcode.has("mbarrier"):
        raise EmulatorError("cp.async that signals an mbarrier is not supported")
    else:
        _async_copy(program, operands)


def _async_copy(program: Program, operands: list[str]) -> None:
    to, wide, offset = program.address(operands[0], "shared")
    source, source_wide, source_offset = program.address(operands[1], "global")
    if not source_wide:
        raise EmulatorError("cp.async from a 32-bit address is not supported")
    size = NO_REGISTER
    if len(operands) > 3:
        given = operands[3]
        register = program.registers.lookup(given)
        if immediate(given, 32) is not None or (register is not None and register[1] == 32):
            size = program.source(given, 32)
    program.emit(
        "CPASYNC", a=to, imm=offset, k2=int(wide), b=source, k1=source_offset,
        k0=int(operands[2], 0), c=size,
    )  # fmt: skip


_UNSUPPORTED_BULK = (
    "reduce", "multicast::cluster", "im2col", "tile::gather4", "tile::scatter4", "cta_group::2",
)  # fmt: skip


def _bulk_copy(program: Program, opcode: Opcode, operands: list[str]) -> None:
    # Bulk stores happen at once; what orders them is kept for the checks: 3 commits, 4 waits.
    if opcode.has("commit_group"):
        program.emit("NOP", k0=3)
        return
    if opcode.has("wait_group"):
        program.emit("NOP", k0=4, k1=int(operands[0], 0))
        return
    if not opcode.has("tensor") or opcode.has(*_UNSUPPORTED_BULK):
        raise EmulatorError("this form of bulk copy is not supported")
    load = opcode.has("mbarrier::complete_tx::bytes")
    shared, tensor = (operands[0], operands[1]) if load else (operands[1], operands[0])
    map_text, coordinates = tensor.strip()[1:-1].split(",", 1)
    tensor_map, map_wide, map_offset = program.address(f"[{map_text}]", "global")
    if not map_wide or map_offset:
        raise EmulatorError("a tensor map at an offset is not supported")
    position = [program.source(text, 32) for text in elements(coordinates)]
    register, wide, offset = program.address(shared, "shared")
    barrier = {}
    if load:
        where, barrier_wide, barrier_offset = program.address(operands[2], "shared")
        named = program.registers.lookup(operands[2].strip()[1:-1].strip())
        if barrier_offset or (barrier_wide and named):
            raise EmulatorError("an mbarrier at an offset is not supported")
        barrier = {"c": where}
    program.emit(
        "TMALD" if load else "TMAST", a=register, imm=offset, k2=int(wide), b=tensor_map,
        n=len(position), x=program.operands(*position), **barrier,
    )  # fmt: skip


def _matrix_access(program: Program, opcode: Opcode, operands: list[str]) -> None:
    """Lower ldmatrix and stmatrix."""
    count = next((n for n in (4, 2) if opcode.has(f"x{n}")), 1)
    if opcode.type != "b16" or not opcode.has("m8n8"):
        raise EmulatorError(f"this form of {opcode.base} is not supported")
    load = opcode.base == "ldmatrix"
    data, place = (operands[0], operands[1]) if load else (operands[1], operands[0])
    register, wide, offset = program.address(place, "shared")
    found: list[int] = []
    for name in elements(data):
        found += list(program.register(name)) if load else [program.source(name, 32), 32]
    program.emit(
        opcode.base.upper(), a=register, imm=offset, k2=int(wide), n=count,
        k0=int(opcode.has("trans")), x=program.operands(*found),
    )  # fmt: skip


MEMORY = {
    "ld": _access,
    "ldu": _access,
    "st": _access,
    "atom": _atomic,
    "red": _atomic,
    "cp": _copy,
    "ldmatrix": _matrix_access,
    "stmatrix": _matrix_access,
}
