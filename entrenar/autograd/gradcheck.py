"""Compare the tape's gradients with central finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from entrenar.autograd.tape import Tape, no_grad
from entrenar.autograd.tensor import Tensor
from entrenar.errors import AutogradError, DTypeError

__all__ = ["gradcheck"]


def gradcheck(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
) -> bool:
    """Check every element of every gradient of ``fn`` in float64.

    Compares ``d(v · fn(x))/dx`` for fixed random ``v`` by the tape and by
    ``(f(x + eps) - f(x - eps)) / (2 eps)``.

    Args:
        fn: Maps tensors to a tensor or a tuple of tensors. It must not keep or change its inputs.
        inputs: ndarrays, Tensors, or anything else, which is handed through. Gradients are checked
            for float64 ndarrays and for float64 Tensors that require one.
        eps: Step of the difference.
        rtol: Tolerance relative to the difference quotient.
        atol: Absolute tolerance.
        seed: Of ``v``.

    Returns:
        True.

    Raises:
        AutogradError: A gradient differs; the message names input, position and both values. Or
            there is nothing to check.
        DTypeError: An input to check is of a narrower floating dtype.
    """
    values = [_value(i, x) for i, x in enumerate(inputs)]
    checked = [i for i, x in enumerate(inputs) if _is_checked(x)]
    if not checked:
        raise AutogradError("gradcheck: no input is a float64 array to check", "pass an ndarray")
    rng = np.random.default_rng(seed)
    with Tape() as tape:
        leaves = [
            Tensor(v.copy(), requires_grad=i in checked) if isinstance(v, np.ndarray) else v
            for i, v in enumerate(values)
        ]
        outputs = _as_tuple(fn(*leaves))
        weights = [rng.standard_normal(y.shape).astype(_numpy_dtype(y)) for y in outputs]
        on_tape = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.slot is not None]
        if on_tape:
            tape.backward([y for y, _ in on_tape], [w for _, w in on_tape])

    def objective() -> float:
        with no_grad():
            arguments = [Tensor(v.copy()) if isinstance(v, np.ndarray) else v for v in values]
            results = _as_tuple(fn(*arguments))
            pairs = zip(results, weights, strict=True)
            return float(sum(np.sum(w * y.numpy().astype(np.float64)) for y, w in pairs))

    for i in checked:
        grad = leaves[i].grad
        got = np.zeros(values[i].shape) if grad is None else Tensor(grad).numpy()
        _compare(i, values[i], got, objective, eps, rtol, atol)
    return True


def _compare(
    which: int,
    value: np.ndarray,
    got: np.ndarray,
    objective: Callable[[], float],
    eps: float,
    rtol: float,
    atol: float,
) -> None:
    for position in np.ndindex(value.shape):
        kept = value[position]
        value[position] = kept + eps
        above = objective()
        value[position] = kept - eps
        below = objective()
        value[position] = kept
        want = (above - below) / (2 * eps)
        if not abs(got[position] - want) <= atol + rtol * abs(want):
            raise AutogradError(
                f"gradcheck: input {which} at {position}: the tape's gradient is "
                f"{got[position]:.9g}, finite differences give {want:.9g}",
                f"the difference is past {atol:g} + {rtol:g} * |finite difference|",
            )


def _is_checked(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.requires_grad
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def _value(which: int, x: Any) -> Any:
    """Return a private float64 ndarray of an array to check or vary, and anything else as it is."""
    array = x.numpy() if isinstance(x, Tensor) and x.dtype != torch.bfloat16 else x
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return x
    if array.dtype != np.float64:
        if _is_checked(x):
            raise DTypeError(
                f"gradcheck: input {which} is {array.dtype}, wanted float64",
                "finite differences need float64",
            )
        return x
    return np.array(array)


def _numpy_dtype(y: Tensor) -> np.dtype:
    return y.numpy().dtype


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    outputs = result if isinstance(result, tuple) else (result,)
    return tuple(y for y in outputs if isinstance(y, Tensor))
