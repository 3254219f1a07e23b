"""Instructions across the lanes of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import NO_REGISTER
from entrenar.emulator.syntax import Opcode

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["LANES", "pair_of_destinations"]

_SHUFFLES = ("up", "down", "bfly", "idx")
_REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
_FLOAT_MIN, _FLOAT_MAX = 6, 7
_VOTES = ("all", "any", "ballot")


def pair_of_destinations(text: str) -> tuple[str, str | None]:
    """Split ``d|p``; the second is None where there is one alone."""
    first, _, second = text.partition("|")
    return first.strip(), second.strip() or None


def _shuffle(program: Program, opcode: Opcode, operands: list[str]) -> None:
    value, predicate = pair_of_destinations(operands[0])
    program.emit(
        "SHFL",
        d=program.destination(value, 32),
        x=NO_REGISTER if predicate is None else program.destination(predicate, 1),
        a=program.source(operands[1], 32),
        b=program.source(operands[2], 32),
        c=program.source(operands[3], 32),
        k0=next(i for i, mode in enumerate(_SHUFFLES) if opcode.has(mode)),
    )


def _reduce(program: Program, opcode: Opcode, operands: list[str]) -> None:
    name = next(n for n in _REDUCTIONS if opcode.has(n))
    kind = _REDUCTIONS.index(name)
    if opcode.type == "f32":
        kind = _FLOAT_MIN if name == "min" else _FLOAT_MAX
    program.emit(
        "REDUX",
        d=program.destination(operands[0], 32),
        a=program.source(operands[1], 32),
        k0=kind,
        k1=int(opcode.type == "s32"),
    )


def _vote(program: Program, opcode: Opcode, operands: list[str]) -> None:
    kind = next((i for i, name in enumerate(_VOTES) if opcode.has(name)), None)
    if kind is None:
        raise EmulatorError("this form of vote is not supported")
    program.emit(
        "VOTE",
        d=program.destination(operands[0], 32 if _VOTES[kind] == "ballot" else 1),
        a=program.source(operands[1].lstrip("!"), 1),
        k0=kind,
        k1=int(operands[1].startswith("!")),
    )


def _elect(program: Program, opcode: Opcode, operands: list[str]) -> None:
    leader, predicate = pair_of_destinations(operands[0])
    if predicate is None:
        raise EmulatorError("elect without a predicate is not supported")
    program.emit(
        "ELECT",
        d=NO_REGISTER if leader == "_" else program.destination(leader, 32),
        x=program.destination(predicate, 1),
    )


def _active_mask(program: Program, opcode: Opcode, operands: list[str]) -> None:
    program.emit("ACTIVEMASK", d=program.destination(operands[0], 32))


LANES = {
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "elect": _elect,
    "activemask": _active_mask,
}
