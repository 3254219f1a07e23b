"""Compare a backend with its oracle: error model, sample storage, poisoned memory, finite differences.

The tolerance of an output element is derived, not tuned. With ``u`` the unit roundoff of the dtype it
is stored in, ``u_acc`` that of the accumulator (float32, or the storage dtype where a row says that
intermediates are rounded to it), ``K`` the longest sum behind an element and ``scale`` the largest
magnitude in the output, or the row's own bound where terms may cancel to a small result:

    tol = a * u * |ref| + b * u_acc * sqrt(K) * scale + tiny

The first term is the rounding of the result, the second the random walk of the sum's roundings
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.8), ``tiny`` the spacing of
subnormals. ``a`` and ``b`` are constants of the op's row, with their reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from entrenar.errors import NumericsError
from entrenar.kernels import _launch
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.reference.nf4 import NF4Weight as ReferenceNF4Weight

__all__ = [
    "Tolerance",
    "assert_close",
    "directional_derivative",
    "error_of",
    "poisoned",
    "rng",
    "round_to",
    "to_float64",
    "to_storage",
    "torch_dtype",
    "unit_roundoff",
]

_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
}
_GUARD = 64
_GUARD_BYTE = 0xA7


def unit_roundoff(dtype: str) -> float:
    """Return half the distance from 1 to the next number of a floating dtype; 0 for integers."""
    return _ROUNDOFF.get(dtype, 0.0)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name such as ``"bfloat16"``."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an output may be from its oracle, and why.

    Attributes:
        dtype: dtype the output is stored in.
        accumulator: dtype whose roundoff the second term has.
        reduction: Longest sum behind one element.
        a, b: The row's constants.
        reason: The row's reason for them.
        scale: Least magnitude of the terms behind an element; the largest result counts anyway.
    """

    dtype: str
    accumulator: str = "float32"
    reduction: int = 1
    a: float = 1.0
    b: float = 2.0
    reason: str = ""
    scale: float = 0.0

    def bound(self, wanted: np.ndarray) -> np.ndarray:
        """Return the largest error allowed at each element of the oracle's result."""
        wanted = np.asarray(wanted, np.float64)
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = float(finite.max(initial=self.scale))
        walk = self.b * unit_roundoff(self.accumulator) * math.sqrt(max(self.reduction, 1)) * scale
        rounding = (
            self.a * unit_roundoff(self.dtype) * np.where(np.isfinite(wanted), np.abs(wanted), 0)
        )
        return rounding + walk + _SMALLEST.get(self.dtype, 0.0)


def assert_close(got: Any, wanted: Any, tolerance: Tolerance, what: str = "result") -> None:
    """Hold an array to its oracle element by element; NaN and infinities must agree exactly.

    Raises:
        AssertionError: Names the worst element, the largest and the RMS error, and where the
            tolerance comes from.
    """
    got, wanted = to_float64(got), np.asarray(wanted, np.float64)
    if got.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {got.shape}, wanted {wanted.shape}")
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    comparable = np.isfinite(got) & np.isfinite(wanted)
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.where(comparable, np.abs(got - wanted), np.inf))
    excess = error > tolerance.bound(wanted)
    if not excess.any():
        return
    bound = tolerance.bound(wanted)
    ratio = np.where(excess, error / bound, 0.0)
    worst = np.unravel_index(int(np.argmax(ratio)), got.shape)
    finite = error[np.isfinite(error)]
    rms = float(np.sqrt(np.mean(finite**2))) if finite.size else math.nan
    raise AssertionError(
        f"{what}: {int(excess.sum())} of {got.size} elements off, worst at "
        f"{tuple(int(i) for i in worst)}: got {got[worst]:.9g}, wanted {wanted[worst]:.9g}, error "
        f"{error[worst]:.3g} over {bound[worst]:.3g}; largest error {error.max(initial=0.0):.3g}, RMS "
        f"{rms:.3g}; tolerance {tolerance.a:g}*u({tolerance.dtype})*|ref| + "
        f"{tolerance.b:g}*u({tolerance.accumulator})*sqrt({tolerance.reduction})*max|ref| "
        f"({tolerance.reason})"
    )


def error_of(got: Any, wanted: Any) -> float:
    """Return the largest absolute error over elements that are finite in both."""
    got, wanted = to_float64(got), np.asarray(wanted, np.float64)
    comparable = np.isfinite(got) & np.isfinite(wanted)
    return float(
        np.abs(np.where(comparable, got, 0) - np.where(comparable, wanted, 0)).max(initial=0.0)
    )


def rng(*names: str) -> np.random.Generator:
    """Return a generator seeded by names: the same on every backend, machine and run order."""
    digest = hashlib.sha256("/".join(names).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def round_to(value: np.ndarray, dtype: str) -> np.ndarray:
    """Round a float64 array to a storage dtype, to nearest even, and return it in float64."""
    return to_float64(torch.from_numpy(np.ascontiguousarray(value)).to(torch_dtype(dtype))).reshape(
        value.shape
    )


def to_float64(value: Any) -> np.ndarray:
    """Return an array, torch storage or number as a float64 ndarray; integers stay exact to 2^53."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to(torch.float64).numpy()
    return np.asarray(value, np.float64)


def to_storage(value: Any, dtype: str = "float32", device: str = "cpu") -> Any:
    """Turn a sample's argument into what a launcher takes.

    Floating arrays become torch storage of ``dtype``, integer arrays keep theirs, reference NF4
    weights become ``NF4Weight`` that decode to ``dtype``; all else is passed through.
    """
    if isinstance(value, ReferenceNF4Weight):
        fields: dict[str, Any] = {
            k: torch.from_numpy(np.array(v)).to(device) if isinstance(v, np.ndarray) else v
            for k, v in vars(value).items()
        }
        fields["dtype"] = torch_dtype(dtype)
        return NF4Weight(**fields)
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.array(value, copy=True, order="C"))
        return (tensor.to(torch_dtype(dtype)) if tensor.is_floating_point() else tensor).to(device)
    return value


@contextlib.contextmanager
def poisoned() -> Iterator[list[torch.Tensor]]:
    """Give kernels' results NaN-filled storage between guard bytes; check the guards at the end.

    Yields:
        The list of storage handed out inside the block.

    Raises:
        NumericsError: A guard was overwritten.
    """
    arenas: list[tuple[torch.Tensor, int]] = []
    given: list[torch.Tensor] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        arena = torch.full((size + 2 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8, device=device)
        body = arena[_GUARD : _GUARD + size].view(dtype).view(shape)
        body.fill_(math.nan if dtype.is_floating_point else 77)
        arenas.append((arena, size))
        given.append(body)
        return body

    with _launch.allocating(allocate):
        yield given
    for arena, size in arenas:
        guards = arena.cpu().numpy()
        outside = np.concatenate([guards[:_GUARD], guards[_GUARD + size :]])
        if (outside != _GUARD_BYTE).any():
            raise NumericsError(
                f"a kernel wrote outside its result of {size} bytes",
                "look for a store whose mask is missing or off by one",
            )


def directional_derivative(
    function: Callable[[Mapping[str, Any]], tuple[np.ndarray, ...]],
    inputs: Mapping[str, Any],
    direction: Mapping[str, np.ndarray],
    step: float = 1e-4,
) -> tuple[np.ndarray, ...]:
    """Return the derivative of every result along ``direction``, by central differences of order 4.

    ``(8(f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h`` in float64: the truncation error is of order h^4,
    the rounding error of order eps/h, both under 1e-11 of the result's scale at h = 1e-4.
    """

    def at(amount: float) -> tuple[np.ndarray, ...]:
        moved = {k: inputs[k] + amount * d for k, d in direction.items()}
        return function({**inputs, **moved})

    far_plus, plus, minus, far_minus = at(2 * step), at(step), at(-step), at(-2 * step)
    return tuple(
        (8 * (p - m) - (pp - mm)) / (12 * step)
        for pp, p, m, mm in zip(far_plus, plus, minus, far_minus, strict=True)
    )
