"""What a PTX module declares before its code: shared arrays, constants, kernel parameters."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.syntax import TYPE_BITS, Parameter, immediate

__all__ = ["Declarations"]

_ENTRY = re.compile(r"\.entry\s+(\S+?)\s*\((.*?)\)(.*?)\{", re.S)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d*)\])?$")
_DATA = re.compile(
    r"\.(?:global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
    r"(?:\s*=\s*\{?([^}]*)\}?)?$"
)
_PACK = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Declarations:
    """Everything that has an address before the kernel runs.

    Attributes:
        shared: Offset of each shared array.
        static_shared: Bytes of those whose size is declared.
        dynamic_shared: Offset of the array whose size the launch decides.
        data: Host address of each constant array.
        parameters: The kernel's parameters, in order.
        parameter_offset: Offset of each by name.
        parameter_bytes: Bytes of all.
        parameter_address: Where the launcher writes them.
        max_threads: ``.reqntid`` or ``.maxntid``; None where there is none.
        body: Where the kernel's code begins in the text.

    Raises:
        EmulatorError: There is no kernel.
    """

    def __init__(self, text: str) -> None:
        entry = _ENTRY.search(text)
        if entry is None:
            raise EmulatorError("the PTX has no .entry", "pass the text of a compiled kernel")
        self.shared: dict[str, int] = {}
        self.static_shared = 0
        self.data: dict[str, int] = {}
        self._keep: list[Any] = []
        dynamic: list[str] = []
        for statement in text[: entry.start()].split(";"):
            self._declare(" ".join(statement.split()), dynamic)
        self.dynamic_shared = _round_up(self.static_shared, 1024)
        self.shared |= dict.fromkeys(dynamic, self.dynamic_shared)
        self._lay_out(entry[2])
        limit = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
        self.max_threads = int(limit[1]) if limit else None
        self.body = entry.end()

    def _declare(self, statement: str, dynamic: list[str]) -> None:
        if found := _SHARED.search(statement):
            alignment, kind, name, count = found.groups()
            if ".extern" in statement:
                dynamic.append(name)
                return
            self.static_shared = _round_up(self.static_shared, int(alignment or 1))
            self.shared[name] = self.static_shared
            self.static_shared += int(count or 1) * TYPE_BITS[kind] // 8
        elif found := _DATA.search(statement):
            _, kind, name, count, given = found.groups()
            size = TYPE_BITS[kind] // 8
            values = (
                [immediate(v.strip(), size * 8) or 0 for v in given.split(",")] if given else []
            )
            buffer = (
                ctypes.c_uint8 * ((int(count) if count else max(1, len(values))) * size + 16)
            )()
            for i, value in enumerate(values):
                struct.pack_into(_PACK[size], buffer, i * size, value & ((1 << 8 * size) - 1))
            self._keep.append(buffer)
            self.data[name] = ctypes.addressof(buffer)

    def _lay_out(self, declared: str) -> None:
        self.parameters: list[Parameter] = []
        offset = 0
        for parameter in (p for p in declared.split(",") if p.strip()):
            words = parameter.split()
            size = TYPE_BITS[next(w[1:] for w in words if w[1:] in TYPE_BITS)] // 8
            name, count, alignment = words[-1], 1, size
            if array := re.fullmatch(r"(\S+?)\[(\d+)\]", name):
                name, count = array[1], int(array[2])
            if ".align" in words and ".ptr" not in words:
                alignment = int(words[words.index(".align") + 1])
            offset = _round_up(offset, alignment)
            self.parameters.append(Parameter(name, offset, size * count))
            offset += size * count
        self.parameter_offset = {p.name: p.offset for p in self.parameters}
        self.parameter_bytes = offset
        buffer = (ctypes.c_uint8 * (offset + 128))()
        self._keep.append(buffer)
        self.parameter_address = _round_up(ctypes.addressof(buffer), 64)

    def address(self, name: str) -> int | None:
        """Return the address of an array by name, within its space; None where there is none."""
        for arrays in (self.shared, self.data):
            if name in arrays:
                return arrays[name]
        return None
