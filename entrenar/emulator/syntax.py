"""PTX text taken apart: opcodes, operands, immediates, declarations and statements."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
import struct
from collections.abc import Iterator

from entrenar.emulator.errors import EmulatorError

__all__ = [
    "TYPE_BITS", "Close", "Label", "Location", "Opcode", "Open", "Parameter", "Statement", "blank_comments",
    "elements", "immediate", "opcode_of", "split_operands", "statements",
]  # fmt: skip

TYPE_BITS = {
    "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32,
    "f32x2": 64, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1, "b128": 128,
}  # fmt: skip
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_DIRECTIVE = re.compile(r"\.(loc|file)\s")
_GUARD = re.compile(r"^@!?%?[\w$]+\s+")


@dataclasses.dataclass(frozen=True)
class Opcode:
    """An opcode with its modifiers, such as ``ld.global.v4.b32``.

    Attributes:
        text: All of it.
        parts: Split at the dots.
    """

    text: str
    parts: tuple[str, ...]

    @property
    def base(self) -> str:
        """The first part: what is done."""
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last part: mostly the type."""
        return self.parts[-1]

    def has(self, *modifiers: str) -> bool:
        """Whether any of these modifiers is there."""
        return any(m in self.parts[1:] for m in modifiers)

    @property
    def vector(self) -> int:
        """Elements of a vector access."""
        return next((n for n in (8, 4, 2) if self.has(f"v{n}")), 1)

    def space(self, *known: str) -> str:
        """Return the state space named, without its ``::cta``; ``generic`` where none of ``known`` is."""
        names = (part.split("::")[0] for part in self.parts[1:])
        return next((name for name in names if name in known), "generic")

    @classmethod
    def of(cls, text: str) -> Opcode:
        """Take an opcode apart."""
        return cls(text, tuple(text.split(".")))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its name, offset and size in bytes."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Statement:
    """What stands before a semicolon, and its line."""

    text: str
    line: int


@dataclasses.dataclass(frozen=True)
class Label:
    """A place to branch to."""

    name: str


@dataclasses.dataclass(frozen=True)
class Location:
    """``.loc``: file number and line of the source that follows."""

    file: int
    line: int


class Open:
    """A scope begins."""


class Close:
    """A scope ends."""


Item = Statement | Label | Location | Open | Close


@functools.lru_cache(maxsize=1 << 16)
def opcode_of(text: str) -> Opcode:
    """Return the opcode of an instruction's text, its guard left out."""
    return Opcode.of(_GUARD.sub("", text).split()[0].rstrip(";"))


def split_operands(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    if current.strip():
        found.append(current.strip())
    return found


def elements(operand: str) -> list[str]:
    """Return the registers of a vector operand, or the one of a scalar."""
    operand = operand.strip()
    return [r.strip() for r in operand[1:-1].split(",")] if operand.startswith("{") else [operand]


def immediate(text: str, width: int) -> int | None:
    """Return the bits of a constant, sign and all; None where the text is none."""
    prefix = text[:2].lower()
    if prefix == "0f":
        bits = int(text[2:], 16)
        if width == 32:
            return bits
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if prefix == "0d":
        return int(text[2:], 16)
    text = text.rstrip("U")
    try:
        return int(text, 0)
    except ValueError:
        return int(text, 8) if re.fullmatch(r"-?0[0-7]+", text) else None


def blank_comments(ptx: str) -> str:
    """Remove comments and external functions, and keep every line where it was."""

    def lines_of(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"/\*.*?\*/", lines_of, ptx, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    debug = re.search(r"\n\s*\.section\b", text)
    if debug:
        text = text[: debug.start()]
    text = re.sub(r"\.extern\s+\.func.*?;", lines_of, text, flags=re.S)
    if re.search(r"\.func\b", text):
        raise EmulatorError("device functions (.func) are not supported", "inline them")
    return text


def statements(text: str, start: int) -> Iterator[Item]:
    """Yield what the body that begins at ``start``, after its brace, is made of."""
    newlines = [m.start() for m in re.finditer("\n", text)]
    position, depth = start, 1
    while True:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            return
        if text[position] in "{}":
            opened = text[position] == "{"
            depth += 1 if opened else -1
            position += 1
            if depth == 0:
                return
            yield Open() if opened else Close()
        elif label := _LABEL.match(text, position):
            position = label.end()
            yield Label(label[1])
        elif _DIRECTIVE.match(text, position):
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            found = re.match(r"\.loc\s+(\d+)\s+(\d+)", text[position:end])
            position = end
            if found and int(found[2]):
                yield Location(int(found[1]), int(found[2]))
        else:
            end = text.find(";", position)
            if end < 0:
                return
            line = bisect.bisect_left(newlines, position) + 1
            statement = " ".join(text[position:end].split())
            position = end + 1
            if statement:
                yield Statement(statement, line)
