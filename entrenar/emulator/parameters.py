"""Launch arguments as the bytes of a kernel's parameters, and the memory behind them."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.memory import InPlace, Region
from entrenar.emulator.program import Program

__all__ = ["Arguments", "Storage", "TensorMap"]

# Returns (address of the storage, its bytes, address of the array) of an array.
Storage = Callable[[Any], tuple[int, int, int]]
_FORMATS = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I",
    "i64": "q", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d", "fp16": "e",
}  # fmt: skip
_LARGEST_COPY = 1 << 30
_PADDED = ("i1", "u1", "i8", "u8")


@dataclasses.dataclass
class TensorMap:
    """A tensor descriptor made on the host.

    Attributes:
        base: The array.
        shape, strides: Of the array, in elements, outermost first.
        meta: ``block_size``, ``swizzle`` and ``elem_size`` as Triton's compiler states them.
        nan: Whether elements outside are NaN.
    """

    base: Any
    shape: list[int]
    strides: list[int]
    meta: dict[str, Any]
    nan: bool


class Arguments:
    """The arguments of one launch, copied between guard pages.

    Args:
        program: The kernel.
        values: Numbers, arrays, addresses, :class:`TensorMap` or None, in the order of its parameters.
        types: Triton's type of each.
        names: Names for messages.
        storage: Tells where an array lies.
        guard: Whether memory gets guard pages.

    Attributes:
        regions: Memory by address of the storage.
        names: Names of the arguments that lie in each.
        data: The parameters' bytes.

    Raises:
        EmulatorError: A value's size is not the parameter's.
    """

    def __init__(
        self,
        program: Program,
        values: Sequence[Any],
        types: Sequence[str],
        names: Sequence[str] | None,
        storage: Storage,
        guard: bool,
    ) -> None:
        self.regions: dict[int, Region] = {}
        self.names: dict[int, list[str]] = {}
        self._storage, self._guard = storage, guard
        data = bytearray(program.declared.parameter_bytes)
        for i, (value, kind) in enumerate(zip(values, types, strict=True)):
            name = names[i] if names else f"parameter {i}"
            word = self._word(value, kind, name)
            parameter = program.declared.parameters[i]
            if kind in _PADDED:
                word = word.ljust(parameter.size, b"\0")
            if len(word) != parameter.size:
                raise EmulatorError(
                    f"{program.name}: {name} is {len(word)} bytes as {kind}, the PTX has "
                    f"{parameter.size}"
                )
            data[parameter.offset : parameter.offset + parameter.size] = word
        self.data = bytes(data)

    def _word(self, value: Any, kind: str, name: str) -> bytes:
        if kind == "nvTmaDesc":
            return self._tensor_map(value, name)
        if kind.startswith("*"):
            if value is None:
                return bytes(8)
            return struct.pack("<Q", value if isinstance(value, int) else self._place(value, name))
        if kind == "bf16":
            bits = int(np.float32(value).view(np.uint32))
            return struct.pack("<H", (bits + 0x8000 >> 16) & 0xFFFF)
        return struct.pack("<" + _FORMATS[kind], value)

    def _place(self, array: Any, name: str) -> int:
        """Return the address of an array in its copy, which is made once a storage."""
        root, nbytes, address = self._storage(array)
        if root not in self.regions:
            large = nbytes > _LARGEST_COPY
            made = InPlace(root, nbytes) if large else Region(root, nbytes, self._guard)
            self.regions[root] = made
        self.names.setdefault(root, []).append(name)
        return self.regions[root].start + address - root

    def _tensor_map(self, value: TensorMap, name: str) -> bytes:
        """Return the 128 bytes of ``TMap`` in core/tensor_map.h; dimensions go innermost first there."""
        shape, strides = value.shape[::-1], value.strides[::-1]
        box, size = list(value.meta["block_size"])[::-1], value.meta["elem_size"]
        missing = 5 - len(shape)
        return struct.pack(
            "<Q5I5I4Q5I5I2I",
            self._place(value.base, name),
            *(shape + [1] * missing),
            *(box + [1] * missing),
            *([stride * size for stride in strides[1:]] + [0] * missing)[:4],
            *(len(shape) - 1, value.meta["swizzle"], size, int(value.nan), 0),
            *([1] * 5 + [0, 0]),
        )

    def locate(self, address: int) -> str:
        """Say which argument an address is near; empty where it is near none."""
        for root, region in self.regions.items():
            if region.holds(address):
                names = "/".join(dict.fromkeys(self.names[root]))
                return f"byte {address - region.start} of {names}, which has {region.nbytes} bytes"
        return ""

    def copy_back(self) -> list[str]:
        """Copy results to their storages; return a sentence for each write outside of one."""
        return [
            f"{'/'.join(dict.fromkeys(self.names[root]))}, an array of {region.nbytes} bytes, was "
            f"written {where}"
            for root, region in self.regions.items()
            for where in region.copy_back()
        ]

    def close(self) -> None:
        """Let the memory be freed."""
        for region in self.regions.values():
            region.close()
