"""A kernel's PTX text turned into instructions for the core.

An instruction whose form is not known becomes one that raises, by name, when it is reached: what is never
executed does not matter, and nothing is guessed.
"""

from __future__ import annotations

import re

from entrenar.emulator.declarations import Declarations
from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import NO_REGISTER, Instruction
from entrenar.emulator.lowering import lower
from entrenar.emulator.operations import OPCODES
from entrenar.emulator.registers import Register, RegisterFile
from entrenar.emulator.syntax import (
    TYPE_BITS,
    Close,
    Label,
    Location,
    Opcode,
    Open,
    Statement,
    blank_comments,
    immediate,
    split_operands,
    statements,
)

__all__ = ["Address", "Program"]

Address = tuple[int, bool, int]  # register, whether it is 64 bits wide, offset
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOCAL = re.compile(r"\.local\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\S+?)(?:\[(\d+)\])?")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_ADDRESS = (
    re.compile(r"([^+\s]+)\s*(?:\+\s*(-?\w+))?"),
    re.compile(r"([^+\s-]+)(-\d+)"),
)
_WORDS = ("k0", "k1", "k2", "d", "a", "b", "c", "x")


class Program:
    """A parsed kernel, which any number of launches can run.

    Args:
        ptx: The text of a module with one kernel.
        name: The kernel's name, for messages.

    Attributes:
        instructions: What the core executes.
        text: The PTX of each instruction.
        locations: Per instruction, (file number, line) of its source, or None.
        files: Source files by number.
        extra: Operands that do not fit an instruction.
        declared: Arrays and parameters.
        registers: The register file.
        local_bytes: Local memory of a thread.

    Raises:
        EmulatorError: The text has no kernel, calls device functions, or branches nowhere.
    """

    def __init__(self, ptx: str, name: str) -> None:
        self.name, self.ptx = name, ptx
        text = blank_comments(ptx)
        self.files = {int(m[1]): m[2] for m in _FILE.finditer(text)}
        self.declared = Declarations(text)
        self.registers = RegisterFile()
        self.instructions: list[Instruction] = []
        self.text: list[str] = []
        self.locations: list[tuple[int, int] | None] = []
        self.extra: list[int] = []
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        self._guard = (NO_REGISTER, 0)
        self._current, self._line = "", 0
        self._location: tuple[int, int] | None = None
        self._labels: dict[tuple[int, str], int] = {}
        self._branches: list[tuple[int, str, tuple[int, ...]]] = []
        self._scopes, self._last_scope = [0], 0
        self._parse(text)

    def _parse(self, text: str) -> None:
        for item in statements(text, self.declared.body):
            match item:
                case Open():
                    self._last_scope += 1
                    self._scopes.append(self._last_scope)
                    self.registers.scopes.append({})
                case Close():
                    self._scopes.pop()
                    self.registers.scopes.pop()
                case Label(name):
                    self._labels[(self._scopes[-1], name)] = len(self.instructions)
                case Location(file, line):
                    self._location = (file, line)
                case Statement(statement, line):
                    self._line = line
                    self._statement(statement)
        for position, label, scopes in self._branches:
            found = next((k for s in reversed(scopes) if (k := (s, label)) in self._labels), None)
            if found is None:
                raise EmulatorError(f"{self.name}: a branch to {label}, which is nowhere")
            self.instructions[position].k0 = self._labels[found]
        self._current, self._guard = "ret", (NO_REGISTER, 0)
        self.emit("RET")

    def _statement(self, statement: str) -> None:
        self._current = statement
        if statement.startswith(".reg"):
            self._declare_registers(statement)
        elif statement.startswith(".local"):
            self._declare_local(statement)
        elif statement.startswith(".shared"):
            raise EmulatorError(f"{self.name}: a shared array inside the kernel: {statement}")
        elif not statement.startswith("."):
            self._instruction(statement)

    def _declare_registers(self, statement: str) -> None:
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement).groups()  # type: ignore[union-attr]
        for name in (n.strip() for n in names.split(",")):
            if many := re.fullmatch(r"(\S+?)<(\d+)>", name):
                for i in range(int(many[2])):
                    self.registers.declare(f"{many[1]}{i}", TYPE_BITS[kind])
            else:
                self.registers.declare(name, TYPE_BITS[kind])

    def _declare_local(self, statement: str) -> None:
        alignment, kind, name, count = _LOCAL.fullmatch(statement).groups()  # type: ignore[union-attr]
        align = int(alignment or 1)
        self.local[name] = -(-self.local_bytes // align) * align
        self.local_bytes = self.local[name] + int(count or 1) * TYPE_BITS[kind] // 8

    def _instruction(self, statement: str) -> None:
        self._guard = (NO_REGISTER, 0)
        if guard := _GUARD.match(statement):
            self._guard = (self.source(guard[2], 1), int(bool(guard[1])))
            statement = statement[guard.end() :]
        opcode, operands = re.match(r"(\S+)\s*(.*)", statement).groups()  # type: ignore[union-attr]
        try:
            lower(self, Opcode.of(opcode), split_operands(operands))
        except EmulatorError as error:
            self._unsupported(error.message)
        except (KeyError, IndexError, StopIteration, ValueError) as error:
            self._unsupported(f"form not understood ({type(error).__name__}: {error})")

    def _unsupported(self, why: str) -> None:
        self.emit("UNSUP")
        self.text[-1] = f"{self._current}   <- {why}"

    # What lowering builds instructions from.

    def emit(self, operation: str, **fields: int) -> None:
        """Append an instruction, under the guard of the statement at hand."""
        made = Instruction()
        made.op = OPCODES[operation]
        made.pred, made.pneg = self._guard
        made.d = made.a = made.b = made.c = made.x = NO_REGISTER
        for name, value in fields.items():
            setattr(made, name, value & 0xFFFFFFFF if name in _WORDS else value)
        made.line = self._line
        self.instructions.append(made)
        self.text.append(self._current)
        self.locations.append(self._location)

    def branch(self, label: str) -> None:
        """Append a branch, whose target is found at the end."""
        self._branches.append((len(self.instructions), label, tuple(self._scopes)))
        self.emit("BRA")

    def operands(self, *words: int) -> int:
        """Store operands that do not fit an instruction, and return where."""
        start = len(self.extra)
        self.extra += [word & 0xFFFFFFFF for word in words]
        return start

    def source(self, text: str, width: int) -> int:
        """Return the register of an operand: a register, a constant or the address of an array.

        Raises:
            EmulatorError: It is nothing known, or a register of another width.
        """
        found = self.registers.lookup(text)
        if found is not None:
            if found[1] != width:
                raise EmulatorError(f"operand {text} is {found[1]} bits wide, wanted {width}")
            return found[0]
        if text.startswith("%"):
            return self.registers.of_special(text[1:])
        value = self._constant(text, width)
        if value is None:
            raise EmulatorError(f"operand {text!r} is not known")
        return self.registers.constant(value, width)

    def _constant(self, text: str, width: int) -> int | None:
        if text == "WARP_SZ":
            return 32
        for addresses in (
            self.declared.shared, self.local, self.declared.data, self.declared.parameter_offset
        ):  # fmt: skip
            if text in addresses:
                return addresses[text]  # a parameter's is made an address by cvta.param
        if width == 1 and text in ("true", "false"):
            return int(text == "true")
        return immediate(text, width)

    def register(self, text: str) -> Register:
        """Return (offset, bits) of a register.

        Raises:
            EmulatorError: It was not declared.
        """
        found = self.registers.lookup(text)
        if found is None:
            raise EmulatorError(f"{text!r} is not a register")
        return found

    def destination(self, text: str, width: int) -> int:
        """Return the register of a result; ``_`` is one that nobody reads.

        Raises:
            EmulatorError: It was not declared, or has another width.
        """
        if text == "_":
            return self.registers.sink(width)
        offset, found = self.register(text)
        if found != width:
            raise EmulatorError(f"destination {text} is {found} bits wide, wanted {width}")
        return offset

    def address(self, text: str, space: str) -> Address:
        """Return register, whether it is 64 bits wide, and offset of ``[base+offset]``.

        Raises:
            EmulatorError: The form is not known.
        """
        inner = text.strip()[1:-1].strip()
        found = next((m for pattern in _ADDRESS if (m := pattern.fullmatch(inner))), None)
        if found is None:
            raise EmulatorError(f"address [{inner}] is not understood")
        base, offset = found[1], int(found[2], 0) if found[2] else 0
        register = self.registers.lookup(base)
        if register is not None:
            return register[0], register[1] == 64, offset
        parameters = self.declared.parameter_offset
        if space == "param" or base in parameters:
            start = self.declared.parameter_address + parameters[base]
        else:
            known = self.declared.address(base)
            start = known if known is not None else self.local.get(base, -1)
            if start < 0:
                value = immediate(base, 64)
                if value is None:
                    raise EmulatorError(f"address [{inner}] is not known")
                start = value
        return self.registers.constant(start + offset, 64), True, 0

    def where(self, position: int) -> str:
        """Return ``file:line`` of an instruction's source; empty where the PTX does not tell."""
        location = self.locations[position]
        if location is None:
            return ""
        return f"{self.files.get(location[0], '?').rsplit('/', 1)[-1]}:{location[1]}"

    def describe(self, position: int) -> str:
        """Return an instruction as messages name it."""
        source = self.where(position)
        place = f"PTX line {self.instructions[position].line}" + (f" ({source})" if source else "")
        return f"{place} `{self.text[position][:90]}`"

    @property
    def max_threads(self) -> int | None:
        """Threads of a block, where the PTX states them."""
        return self.declared.max_threads
