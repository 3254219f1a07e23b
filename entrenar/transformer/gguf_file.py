"""Read a GGUF file: its metadata, and its tensors one at a time.

The header is parsed here, with every length checked against the file's size, because such files
come from strangers; the ``gguf`` package decodes the block formats. Arrays of strings (a vocabulary
of 50 000 tokens) are read in a tenth of a second.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from entrenar import runtime
from entrenar.errors import CheckpointError, UnsupportedModelError

__all__ = ["GGUFFile", "GGUFTensor"]

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor: block format, shape with the longest-strided dimension first, byte range."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class _Reader:
    """Little-endian values from a file, none of which may reach past its end."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path = file, size, path

    def refuse(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}", "download the file again")

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise self.refuse("is cut short inside its header")
        return self.file.read(count)

    def integer(self, form: str = "<Q") -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.integer()).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        read, unpack, end = self.file.read, struct.Struct("<Q").unpack, self.size
        found = []
        for _ in range(count):
            head = read(8)
            if len(head) < 8:
                raise self.refuse("is cut short inside its header")
            (length,) = unpack(head)
            if length > end:
                raise self.refuse("is cut short inside its header")
            found.append(read(length).decode("utf-8", errors="replace"))
        if self.file.tell() > end:
            raise self.refuse("is cut short inside its header")
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[
                0
            ].item()
        if kind != _ARRAY or depth > 2:
            raise self.refuse(f"has a metadata value of unknown type {kind}")
        inner, count = self.integer("<I"), self.integer()
        if count > self.size:
            raise self.refuse(f"has a metadata array of {count} entries")
        if inner == _STRING:
            return self.strings(count)
        if inner in _SCALARS:
            raw = self.take(count * np.dtype(_SCALARS[inner]).itemsize)
            return np.frombuffer(raw, _SCALARS[inner]).tolist()
        return [self.value(inner, depth + 1) for _ in range(count)]


class GGUFFile:
    """A file whose header has been read and checked.

    Args:
        path: The file.

    Attributes:
        metadata: Values by key.
        tensors: Each :class:`GGUFTensor` by name.

    Raises:
        CheckpointError: The file is missing, is not GGUF, is cut short or contradicts itself.
        UnsupportedModelError: It is of a version or block format that is not read.
        MissingExtraError: The ``gguf`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = runtime.require("gguf", extra="gguf", feature="reading a GGUF file")
        try:
            size = os.stat(path).st_size
            with open(path, "rb") as file:
                self._parse(_Reader(file, size, path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "") from error

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, decoded: float32 of its shape.

        Raises:
            CheckpointError: There is no such tensor or its bytes cannot be read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}", "")
        raw = np.empty(tensor.nbytes, dtype=np.uint8)
        with open(self.path, "rb") as file:
            file.seek(tensor.begin)
            got = file.readinto(raw.data)
        if got != tensor.nbytes:
            raise CheckpointError(
                f"{self.path}: tensor {name} has {got} of {tensor.nbytes} bytes",
                "download the file again",
            )
        if tensor.kind in _PLAIN:
            return (
                raw.view(_PLAIN[tensor.kind]).astype(np.float32, copy=False).reshape(tensor.shape)
            )
        kind = self._gguf.GGMLQuantizationType[tensor.kind]
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return self._gguf.quants.dequantize(rows, kind).reshape(tensor.shape)

    def _parse(self, reader: _Reader) -> None:
        if reader.size < 24 or reader.take(4) != b"GGUF":
            raise CheckpointError(
                f"{self.path}: is not a GGUF file (it does not begin with 'GGUF')",
                "pass a Hugging Face model folder or a GGUF file",
            )
        version = reader.integer("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path}: is GGUF version {version}, wanted 2 or 3, little-endian",
                "convert the model again with a current llama.cpp",
            )
        n_tensors, n_values = reader.integer(), reader.integer()
        self.metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = reader.string()
            self.metadata[key] = reader.value(reader.integer("<I"))
        infos = [self._info(reader) for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise reader.refuse(f"has alignment {alignment!r}, wanted a multiple of 8")
        data = -(-reader.file.tell() // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            self._place(reader, name, shape, kind, data + offset)

    def _info(self, reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
        name, ndim = reader.string(), reader.integer("<I")
        if ndim > _MOST_DIMENSIONS:
            raise reader.refuse(f"tensor {name} has {ndim} dimensions")
        shape = tuple(reader.integer() for _ in range(ndim))[::-1]
        return name, shape, reader.integer("<I"), reader.integer()

    def _place(
        self, reader: _Reader, name: str, shape: tuple[int, ...], kind: int, begin: int
    ) -> None:
        try:
            known = self._gguf.GGMLQuantizationType(kind)
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[known]
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is of unknown block format {kind}",
                "update the gguf package, or use another quantisation of the model",
            ) from error
        if not shape or shape[-1] % block:
            raise reader.refuse(f"tensor {name} of shape {shape} is not whole {known.name} blocks")
        nbytes = math.prod(shape) // block * block_bytes
        if begin + nbytes > reader.size:
            raise reader.refuse(
                f"is cut short: tensor {name} ends at byte {begin + nbytes} of {reader.size}"
            )
        if name in self.tensors:
            raise reader.refuse(f"has two tensors named {name}")
        self.tensors[name] = GGUFTensor(known.name, shape, begin, nbytes)
