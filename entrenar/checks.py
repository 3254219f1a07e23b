"""Argument checks that kernels and reference both make, on anything with a shape and a dtype.

Each raises before any work starts and says what was found, what was wanted and what to do.
"""

from __future__ import annotations

import functools
from typing import Any

from entrenar.errors import ConfigError, DTypeError, ShapeMismatchError

__all__ = [
    "check_alike",
    "check_array",
    "check_dtype",
    "check_ndim",
    "check_positive",
    "check_same_dtype",
    "check_shape",
    "check_softcap",
    "dtype_name",
]

FLOATS = ("float32", "float16", "bfloat16", "float64")


def dtype_name(array: Any) -> str:
    """Return the bare name of an array's dtype, such as ``"float32"``."""
    return _bare_name(array.dtype)


def check_array(op: str, name: str, array: Any) -> None:
    """Refuse what has no shape and dtype: None, a number, a list."""
    if _is_array(type(array)):
        return
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        got = "None" if array is None else f"a {type(array).__name__}"
        raise DTypeError(f"{op}: {name} is {got}, wanted an array", f"pass storage for {name}")


_ARRAYS: dict[type, bool] = {}


def _is_array(kind: type) -> bool:
    """Whether all objects of a class are arrays: found out once a class and not at every check."""
    known = _ARRAYS.get(kind)
    if known is None:
        known = _ARRAYS[kind] = hasattr(kind, "shape") and hasattr(kind, "dtype")
    return known


@functools.cache
def _bare_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def check_ndim(op: str, name: str, array: Any, *ndims: int) -> None:
    """Refuse an array whose number of dimensions is none of ``ndims``."""
    check_array(op, name, array)
    if len(array.shape) not in ndims:
        wanted = " or ".join(str(n) for n in ndims)
        raise ShapeMismatchError(
            f"{op}: {name} has shape {tuple(array.shape)}, wanted {wanted} dimensions",
            f"reshape {name}",
        )


def check_shape(op: str, name: str, array: Any, wanted: tuple[int, ...], hint: str = "") -> None:
    """Refuse an array of another shape; -1 in ``wanted`` matches any size."""
    check_array(op, name, array)
    if array.shape == wanted:
        return
    got = tuple(array.shape)
    fits = len(got) == len(wanted) and all(w in (-1, g) for g, w in zip(got, wanted, strict=True))
    if not fits:
        sizes = ", ".join("any" if w == -1 else str(w) for w in wanted)
        raise ShapeMismatchError(f"{op}: {name} has shape {got}, wanted ({sizes})", hint)


def check_dtype(op: str, name: str, array: Any, *wanted: str) -> None:
    """Refuse an array whose dtype is none of ``wanted``; the floating types where none is given."""
    check_array(op, name, array)
    wanted = wanted or FLOATS
    if dtype_name(array) not in wanted:
        raise DTypeError(
            f"{op}: {name} is {dtype_name(array)}, wanted {' or '.join(wanted)}",
            f"cast {name} first",
        )


def check_same_dtype(op: str, **arrays: Any) -> None:
    """Refuse arrays of different dtypes; None is passed over."""
    kinds = set()
    for name, array in arrays.items():
        if array is not None:
            check_array(op, name, array)
            kinds.add(array.dtype)
    if len(kinds) < 2:
        return
    given = {name: array for name, array in arrays.items() if array is not None}
    names = {name: dtype_name(array) for name, array in given.items()}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in names.items())
        raise DTypeError(f"{op}: got {listed}, wanted one dtype for all", "cast them to one dtype")


def check_alike(op: str, **arrays: Any) -> None:
    """Refuse arrays that differ from the first in shape or dtype; None is passed over."""
    first = next(iter(arrays))
    check_dtype(op, first, arrays[first])
    for name, array in arrays.items():
        if array is not None:
            check_shape(op, name, array, tuple(arrays[first].shape))
    check_same_dtype(op, **arrays)


def check_positive(op: str, name: str, value: float) -> None:
    """Refuse a setting that is not above zero."""
    if not value > 0:
        raise ShapeMismatchError(f"{op}: {name} is {value}, wanted more than 0", "")


def check_softcap(op: str, value: float) -> None:
    """Refuse a soft cap that is negative, infinite or not a number; 0 stands for none."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{op}: softcap is {value}, wanted a finite number, 0 for none", "")
