"""SwiGLU on a CPU: a piece at a time, so that every pass but the first finds it in the cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entrenar.cpu import threads
from entrenar.reference import swiglu as plain

__all__ = ["silu_backward", "silu_forward", "swiglu_backward", "swiglu_forward"]

# elements a piece: five float32 arrays of it fit a second-level cache of 1 MiB
_PIECE = 32_768
# below these exp is finite, by bytes of the dtype
_FAR = {4: 88.0, 8: 709.0}


def swiglu_forward(gate: np.ndarray, up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``silu(gate) * up``; as ``entrenar.reference.swiglu.swiglu_forward``."""
    arrays = [gate, up] if out is None else [gate, up, out]
    if not _flat(arrays):
        return plain.swiglu_forward(gate, up, out)
    y = np.empty_like(gate) if out is None else out

    def piece(g: np.ndarray, u: np.ndarray, target: np.ndarray) -> None:
        np.multiply(_silu(g), u, out=target)

    _each_piece(piece, gate, up, y)
    return y


def swiglu_backward(
    grad_y: np.ndarray, gate: np.ndarray, up: np.ndarray, inplace: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up; as ``entrenar.reference.swiglu.swiglu_backward``."""
    if not _flat([gate, up, grad_y]):
        return plain.swiglu_backward(grad_y, gate, up, inplace)
    grad_gate, grad_up = (gate, up) if inplace else (np.empty_like(gate), np.empty_like(up))
    _each_piece(_swiglu_gradients, grad_y, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


def _swiglu_gradients(
    dy: np.ndarray, g: np.ndarray, u: np.ndarray, dg: np.ndarray, du: np.ndarray
) -> None:
    sigmoid = _sigmoid(g)
    silu = threads.scratch("silu", g.shape, g.dtype)
    slope = threads.scratch("slope", g.shape, g.dtype)
    np.multiply(g, sigmoid, out=silu)
    np.subtract(1, sigmoid, out=slope)
    slope *= silu
    slope += sigmoid
    slope *= u
    np.multiply(slope, dy, out=dg)
    np.multiply(silu, dy, out=du)


def silu_forward(x: np.ndarray) -> np.ndarray:
    """Return ``x * sigmoid(x)``; as ``entrenar.reference.swiglu.silu_forward``."""
    if not _flat([x]):
        return plain.silu_forward(x)
    y = np.empty_like(x)

    def piece(values: np.ndarray, target: np.ndarray) -> None:
        target[...] = _silu(values)

    _each_piece(piece, x, y)
    return y


def silu_backward(grad_y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of SiLU; as ``entrenar.reference.swiglu.silu_backward``."""
    if not _flat([x, grad_y]):
        return plain.silu_backward(grad_y, x)
    grad_x = np.empty_like(x)

    def piece(dy: np.ndarray, values: np.ndarray, target: np.ndarray) -> None:
        sigmoid = _sigmoid(values)
        slope = 1 - sigmoid
        slope *= values
        slope *= sigmoid
        slope += sigmoid
        np.multiply(slope, dy, out=target)

    _each_piece(piece, grad_y, x, grad_x)
    return grad_x


def _flat(arrays: list[np.ndarray]) -> bool:
    """Whether all are alike and contiguous; what is not, the plain form computes or refuses."""
    first = arrays[0]
    return first.dtype in (np.float32, np.float64) and all(
        a.shape == first.shape and a.dtype == first.dtype and a.flags.c_contiguous for a in arrays
    )


def _each_piece(work: Callable[..., None], *arrays: np.ndarray) -> None:
    flat = [array.reshape(-1) for array in arrays]

    def some(part: slice) -> None:
        for start in range(part.start, part.stop, _PIECE):
            piece = slice(start, min(start + _PIECE, part.stop))
            work(*(array[piece] for array in flat))

    threads.spread(some, flat[0].size, threads.LEAST_VALUES, 16)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    scratch, far = _one_plus_exp(x)
    np.reciprocal(scratch, out=scratch)
    if far is not None:
        scratch[far] = np.exp(x[far])
    return scratch


def _silu(x: np.ndarray) -> np.ndarray:
    scratch, far = _one_plus_exp(x)
    np.divide(x, scratch, out=scratch)
    if far is not None:
        scratch[far] = x[far] * np.exp(x[far])
    return scratch


def _one_plus_exp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``1 + exp(-x)``, and where it is infinite: left of -88 (float32), seldom anywhere.

    The sigmoid is exp(x) there, which times x is no zero yet. Scratch, overwritten by the next call.
    """
    scratch = threads.scratch("one_plus_exp", x.shape, x.dtype)
    np.negative(x, out=scratch)
    near = float(scratch.max(initial=0)) < _FAR[x.dtype.itemsize]
    with np.errstate(over="ignore"):
        np.exp(scratch, out=scratch)
    scratch += 1
    return scratch, None if near else np.isinf(scratch)
