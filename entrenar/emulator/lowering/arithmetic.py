"""Arithmetic, conversions, comparisons, moves: whatever computes registers from registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import LOCAL_WINDOW, NO_REGISTER, SHARED_WINDOW
from entrenar.emulator.lowering.lanes import pair_of_destinations
from entrenar.emulator.operations import OPERATIONS, WIDTH
from entrenar.emulator.syntax import TYPE_BITS, Opcode, elements

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["ARITHMETIC", "lower_arithmetic"]

_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_FLOAT_MODIFIERS = {"rn", "approx", "full", "ftz", "sat", "NaN", "xorsign", "abs"}
_INTEGER_MODIFIERS = {"lo", "hi", "wide", "relu"}
# In the order of the core's conversion types.
_CONVERTED = (
    "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64",
)  # fmt: skip
_ROUNDING = {"rn": 1, "rz": 2, "rm": 3, "rp": 4, "rni": 5, "rzi": 6, "rmi": 7, "rpi": 8, "rna": 9}
_COMBINED = ("and", "or", "xor")
_MOVES = {1: "mov.pred", 16: "mov.u16", 32: "mov.u32", 64: "mov.u64"}


def lower_arithmetic(program: Program, opcode: Opcode, operands: list[str]) -> None:
    """Append the operation of the table with this name.

    Raises:
        EmulatorError: The table has no such operation, or a modifier is not known.
    """
    name = _float_name(opcode) if opcode.type in _FLOATS else _integer_name(opcode)
    if len(operands) == 4 and opcode.base in ("min", "max") and f"{name}3" in OPERATIONS:
        name += "3"  # the three-operand forms of sm_100 and later
    _emit(program, name, opcode, operands)


def _by_text(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.base == "prmt" and len(opcode.parts) != 2:
        raise EmulatorError("the modes of prmt are not supported")
    _emit(program, opcode.text, opcode, operands)


def _emit(program: Program, name: str, opcode: Opcode, operands: list[str]) -> None:
    if name not in OPERATIONS:
        raise EmulatorError(f"instruction {opcode.text} is not known")
    operation = OPERATIONS[name]
    if len(operands) - 1 != len(operation.operands):
        raise EmulatorError(f"{opcode.text} with {len(operands) - 1} operands is not known")
    sources = zip("abcx", operands[1:], operation.operands, strict=False)
    fields = {field: program.source(text, WIDTH[kind]) for field, text, kind in sources}
    program.emit(name, d=program.destination(operands[0], WIDTH[operation.result]), **fields)


def _float_name(opcode: Opcode) -> str:
    modifiers = set(opcode.parts[1:-1])
    if opcode.type in ("f16", "bf16") and opcode.parts[1:-1] == ("rn", "f32"):
        return f"{opcode.base}.f32.{opcode.type}"  # 16-bit operands into float32 (sm_100 and later)
    if modifiers & {"rz", "rm", "rp"}:
        raise EmulatorError("arithmetic rounded other than to nearest even is not supported")
    if unknown := modifiers - _FLOAT_MODIFIERS:
        raise EmulatorError(f"modifier {', '.join(sorted(unknown))} is not known")
    base = "fma" if opcode.base == "mad" else opcode.base
    names = [base]
    if "xorsign" in modifiers:
        names.append("xorsign.abs")
    names += [name for name in ("NaN", "sat") if name in modifiers]
    if "ftz" in modifiers and opcode.type == "f32":
        names.append("ftz")
    return ".".join([*names, opcode.type])


def _integer_name(opcode: Opcode) -> str:
    if unknown := set(opcode.parts[1:-1]) - _INTEGER_MODIFIERS:
        raise EmulatorError(f"modifier {', '.join(sorted(unknown))} is not known")
    return opcode.text


def _convert_address(program: Program, opcode: Opcode, operands: list[str]) -> None:
    """Lower cvta: an address of a space as a generic one, or back with ``.to``."""
    back = opcode.has("to")
    space = opcode.parts[2 if back else 1].split("::")[0]
    windows = {
        "shared": SHARED_WINDOW,
        "local": LOCAL_WINDOW,
        "param": program.declared.parameter_address,
    }
    window = windows.get(space, 0)
    program.emit(
        "cvta.w", d=program.destination(operands[0], 64), a=program.source(operands[1], 64),
        imm=-window if back else window,
    )  # fmt: skip


def _move(program: Program, opcode: Opcode, operands: list[str]) -> None:
    width = TYPE_BITS[opcode.type]
    if operands[0].startswith("{"):
        names = elements(operands[0])
        parts: list[int] = []
        for name in names:
            parts += [NO_REGISTER, 0] if name == "_" else list(program.register(name))
        program.emit(
            "UNPACK", a=program.source(operands[1], width), k0=width // len(names), k1=width,
            n=len(names), x=program.operands(*parts),
        )  # fmt: skip
    elif operands[1].startswith("{"):
        names = elements(operands[1])
        each = width // len(names)
        parts = [word for name in names for word in (program.source(name, each), each)]
        program.emit(
            "PACK", d=program.destination(operands[0], width), k0=each, k1=width, n=len(names),
            x=program.operands(*parts),
        )  # fmt: skip
    else:
        program.emit(
            _MOVES[width], d=program.destination(operands[0], width), a=program.source(operands[1], width)
        )  # fmt: skip


def _convert(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.has("relu"):
        raise EmulatorError("cvt with relu is not supported")
    to, source = opcode.parts[-2:]
    if source.endswith("x2") or to in ("e4m3x2", "e5m2x2"):
        _emit(program, f"cvt.{to}.{source}", opcode, operands)
    elif len(operands) == 3:
        if not opcode.has("rn", "rz") or opcode.has("satfinite"):
            raise EmulatorError("this form of cvt is not supported")
        truncating = "rz." if opcode.has("rz") else ""
        _emit(program, f"cvt.{truncating}{to}.f32", opcode, operands)
    else:
        _convert_one(program, opcode, operands)


def _convert_one(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.type == "f32" and opcode.has("tf32"):
        to, source, rounding = "f32", "f32", _ROUNDING["rna"]
    else:
        types = [part for part in opcode.parts[1:] if part in _CONVERTED]
        if len(types) != 2:
            raise EmulatorError("this form of cvt is not supported")
        to, source = types
        rounding = next((_ROUNDING[part] for part in opcode.parts[1:] if part in _ROUNDING), 0)
    if rounding in (_ROUNDING["rm"], _ROUNDING["rp"]) and to in ("f16", "bf16"):
        raise EmulatorError("cvt to 16 bits rounded up or down is not supported")
    destination, to_width = program.register(operands[0])
    found = program.registers.lookup(operands[1])
    if found is None:
        width = max(16, TYPE_BITS[source])
        found = (program.source(operands[1], width), width)
    program.emit(
        "CVT",
        d=destination,
        a=found[0],
        k0=_CONVERTED.index(to),
        k1=_CONVERTED.index(source),
        k2=rounding
        | int(opcode.has("ftz")) << 4
        | int(opcode.has("sat")) << 5
        | to_width << 8
        | found[1] << 16,
    )


def _compare(program: Program, opcode: Opcode, operands: list[str]) -> None:
    name = f"setp.{opcode.parts[1]}.{opcode.type}"
    combined = next((part for part in opcode.parts[2:-1] if part in _COMBINED), None)
    packed = opcode.type.endswith("x2")
    if name not in OPERATIONS or opcode.has("ftz") or (packed and combined):
        raise EmulatorError("this form of setp is not supported")
    width = TYPE_BITS[opcode.type]
    first, second = pair_of_destinations(operands[0])
    fields = {}
    if combined:
        fields = {
            "k0": 1 + _COMBINED.index(combined),
            "c": program.source(operands[3].lstrip("!"), 1),
            "k1": int(operands[3].startswith("!")),
        }
    program.emit(
        name,
        d=program.destination(first, 1),
        x=NO_REGISTER if second is None else program.destination(second, 1),
        a=program.source(operands[1], width),
        b=program.source(operands[2], width),
        **fields,
    )


def _select(program: Program, opcode: Opcode, operands: list[str]) -> None:
    width = TYPE_BITS[opcode.type]
    program.emit(
        f"selp.b{width}", d=program.destination(operands[0], width),
        a=program.source(operands[1], width), b=program.source(operands[2], width),
        c=program.source(operands[3], 1),
    )  # fmt: skip


def _three_input_logic(program: Program, opcode: Opcode, operands: list[str]) -> None:
    if opcode.text != "lop3.b32":
        raise EmulatorError("lop3 with a predicate is not supported")
    sources = {field: program.source(t, 32) for field, t in zip("abc", operands[1:4], strict=True)}
    program.emit(
        "lop3.b32", d=program.destination(operands[0], 32), **sources, k0=int(operands[4], 0)
    )  # fmt: skip


def _insert_bits(program: Program, opcode: Opcode, operands: list[str]) -> None:
    _emit(program, f"bfi.b{TYPE_BITS[opcode.type]}", opcode, operands)


ARITHMETIC = {
    "cvta": _convert_address,
    "mov": _move,
    "cvt": _convert,
    "setp": _compare,
    "selp": _select,
    "lop3": _three_input_logic,
    "bfi": _insert_bits,
    **dict.fromkeys(("shf", "dp4a", "prmt", "set"), _by_text),
}
