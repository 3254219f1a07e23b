"""Read tensors of a ``.safetensors`` file one at a time, trusting nothing the file says.

The layout is an 8-byte little-endian header length, a JSON header of dtype, shape and byte range
per tensor, and the bytes. Every range is checked against the shape, the dtype, the file's size and
the other ranges before a byte is read, so that a damaged or hostile file is an error that names the
file and the tensor. Tensors are read into fresh memory, not mapped: a file may be replaced while
its tensors are in use, and peak memory is one tensor.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from entrenar.errors import CheckpointError, UnsupportedModelError

__all__ = ["SafetensorsFile", "TensorEntry"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: dtype as the file names it, shape, byte range within the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file whose header has been read and checked.

    Args:
        path: The file.

    Attributes:
        entries: Each tensor's :class:`TensorEntry` by name.

    Raises:
        CheckpointError: The file is missing, is not a safetensors file, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = os.stat(path).st_size
            with open(path, "rb") as file:
                start = file.read(512)
                length = self._header_length(start, size)
                file.seek(8)
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "") from error
        self.entries = self._entries(self._parse(header), 8 + length, size)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, in the dtype it is stored in.

        Raises:
            CheckpointError: There is no such tensor, or its bytes cannot be read.
            UnsupportedModelError: Its dtype is not one of torch's plain types.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}", "")
        if entry.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is {entry.dtype}, wanted {', '.join(_DTYPES)}",
                "use a checkpoint in bfloat16, float16 or float32",
            )
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        if tensor.numel() == 0:
            return tensor
        raw = tensor.view(-1).view(torch.uint8).numpy().data
        with open(self.path, "rb") as file:
            file.seek(entry.begin)
            got = file.readinto(raw)
        if got != len(raw):
            raise CheckpointError(
                f"{self.path}: tensor {name} has {got} of {len(raw)} bytes", "download it again"
            )
        return tensor

    def _refuse(self, reason: str, hint: str = "download the file again") -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}", hint)

    def _header_length(self, start: bytes, size: int) -> int:
        if not start:
            raise self._refuse("is empty, wanted a safetensors file")
        if start.startswith(b"version https://git-lfs"):
            raise self._refuse(
                "is a git-lfs pointer, not the weights", "fetch the file with: git lfs pull"
            )
        if start.lstrip()[:1] == b"<":
            raise self._refuse("is a web page (HTML), not the weights")
        if len(start) < 8:
            raise self._refuse(f"has {len(start)} bytes, too few for a safetensors file")
        length = int.from_bytes(start[:8], "little")
        if length > min(size - 8, _LARGEST_HEADER):
            raise self._refuse(
                f"is not a safetensors file or is cut short: header of {length} bytes in a file "
                f"of {size}"
            )
        return length

    def _parse(self, header: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise self._refuse("has a header that is not JSON") from error
        if not isinstance(parsed, dict):
            raise self._refuse("has a header that is not a JSON object")
        parsed.pop("__metadata__", None)
        return parsed

    def _entries(self, header: dict[str, Any], data: int, size: int) -> dict[str, TensorEntry]:
        entries = {name: self._entry(name, value, data, size) for name, value in header.items()}
        end = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < end:
                raise self._refuse(f"tensor {name} overlaps another")
            end = entry.end
        return entries

    def _entry(self, name: str, value: Any, data: int, size: int) -> TensorEntry:
        try:
            dtype, shape = str(value["dtype"]), tuple(value["shape"])
            begin, end = value["data_offsets"]
            numbers = [*shape, begin, end]
            good = all(type(n) is int and n >= 0 for n in numbers) and begin <= end
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise self._refuse(f"tensor {name} has a malformed entry")
        if dtype in _DTYPES:
            wanted = math.prod(shape) * _DTYPES[dtype].itemsize
            if wanted != end - begin:
                raise self._refuse(
                    f"tensor {name} of shape {list(shape)} {dtype} needs {wanted} bytes, its "
                    f"entry spans {end - begin}"
                )
        if data + end > size:
            raise self._refuse(
                f"is cut short: tensor {name} ends at byte {data + end} of a file of {size}"
            )
        return TensorEntry(dtype, shape, data + begin, data + end)
