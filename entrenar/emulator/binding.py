"""Arguments of a Triton kernel bound and specialised as Triton's own launcher does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar.emulator.errors import EmulatorError

__all__ = ["Bound", "bind", "infer_type", "is_array", "storage"]

_TYPES = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "int8": "i8",
    "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32",
    "uint64": "u64", "bool": "i1", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
_ALIGNMENT = 16
_INTEGERS = ("i32", "i64", "u32", "u64")


def is_array(value: Any) -> bool:
    """Whether a value is an ndarray or torch storage."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def storage(array: Any) -> tuple[int, int, int]:
    """Return (address of the storage, its bytes, address of the array).

    Raises:
        EmulatorError: A torch tensor that is not on the CPU.
    """
    if hasattr(array, "untyped_storage"):
        if array.device.type != "cpu":
            raise EmulatorError(f"an argument lies on {array.device}, wanted cpu", "move it there")
        whole = array.untyped_storage()
        return whole.data_ptr(), whole.nbytes(), array.data_ptr()
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    return low, high - low, array.ctypes.data


def infer_type(value: Any) -> str:
    """Return Triton's type of an argument.

    Raises:
        EmulatorError: Triton has none for it.
    """
    if is_array(value):
        return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool | np.bool_):
        return "i1"
    if isinstance(value, int | np.integer):
        if -(2**31) <= value < 2**31:
            return "i32"
        return "i64" if value < 2**63 else "u64"
    if isinstance(value, float | np.floating):
        return "fp32"
    raise EmulatorError(f"Triton has no type for a {type(value).__name__}")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A kernel's arguments, ready to compile for and to launch with.

    Attributes:
        signature: Triton's type by name; ``constexpr`` for what is compiled in.
        constants: What is compiled in.
        attributes: Divisibility by 16, by position.
        values: Arguments at run time, by name, in order.
    """

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], Any]
    values: dict[str, Any]


def bind(
    kernel: Any,
    signature: Mapping[str, str] | None,
    constants: Mapping[str, Any] | None,
    arguments: Sequence[Any] | Mapping[str, Any],
    attributes: dict[tuple[int, ...], Any] | None = None,
    specialize: bool = True,
) -> Bound:
    """Bind arguments to a kernel's parameters.

    Args:
        kernel: A ``@triton.jit`` function.
        signature: Types that are not to be inferred.
        constants: Values of constexpr parameters.
        arguments: The others, in order or by name; None is compiled in.
        attributes: Divisibility, where it is not to be inferred.
        specialize: Whether to compile in a 1 and note what divides by 16, as Triton does.

    Raises:
        EmulatorError: Another number of arguments than parameters.
    """
    names = list(kernel.arg_names)
    given, compiled_in = dict(signature or {}), dict(constants or {})
    free = [n for n in names if n not in compiled_in and given.get(n) != "constexpr"]
    if not isinstance(arguments, Mapping):
        if len(arguments) != len(free):
            raise EmulatorError(f"{len(arguments)} arguments for the parameters {', '.join(free)}")
        arguments = dict(zip(free, arguments, strict=True))
    types = {}
    for name in names:
        value = arguments.get(name)
        if name in compiled_in or value is None:
            compiled_in.setdefault(name, None)
            types[name] = "constexpr"
            continue
        types[name] = given[name] if name in given else infer_type(value)
        if specialize and attributes is None and types[name] in ("i32", "i64") and int(value) == 1:
            compiled_in[name], types[name] = 1, "constexpr"
    if attributes is None:
        attributes = _divisible(names, types, arguments) if specialize else {}
    values = {n: arguments[n] for n in names if types[n] != "constexpr"}
    return Bound(types, compiled_in, attributes, values)


def _divisible(
    names: Sequence[str], types: Mapping[str, str], arguments: Mapping[str, Any]
) -> dict[tuple[int, ...], Any]:
    found: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(names):
        value, kind = arguments.get(name), types[name]
        if kind.startswith("*") and is_array(value):
            aligned = storage(value)[2] % _ALIGNMENT == 0
        else:
            aligned = kind in _INTEGERS and int(value or 0) % _ALIGNMENT == 0
        if aligned:
            found[(i,)] = [["tt.divisibility", _ALIGNMENT]]
    return found
