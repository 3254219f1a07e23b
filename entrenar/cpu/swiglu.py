"""SwiGLU on a CPU: a piece at a time, so that every pass but the first finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from entrenar.reference import swiglu as plain

__all__ = ["silu_backward", "silu_forward", "swiglu_backward", "swiglu_forward"]

# elements a piece: five float32 arrays of it fit a second-level cache of 1 MiB
_PIECE = 32_768


def swiglu_forward(gate: np.ndarray, up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``silu(gate) * up``; as ``entrenar.reference.swiglu.swiglu_forward``."""
    arrays = [gate, up] if out is None else [gate, up, out]
    if not _flat(arrays):
        return plain.swiglu_forward(gate, up, out)
    y = np.empty_like(gate) if out is None else out
    for g, u, target in _pieces(gate, up, y):
        silu = _silu(g)
        np.multiply(silu, u, out=target)
    return y


def swiglu_backward(
    grad_y: np.ndarray, gate: np.ndarray, up: np.ndarray, inplace: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up; as ``entrenar.reference.swiglu.swiglu_backward``."""
    if not _flat([gate, up, grad_y]):
        return plain.swiglu_backward(grad_y, gate, up, inplace)
    grad_gate, grad_up = (gate, up) if inplace else (np.empty_like(gate), np.empty_like(up))
    for dy, g, u, dg, du in _pieces(grad_y, gate, up, grad_gate, grad_up):
        sigmoid = _sigmoid(g)
        silu = g * sigmoid
        slope = 1 - sigmoid
        slope *= silu
        slope += sigmoid
        slope *= u
        np.multiply(slope, dy, out=dg)
        np.multiply(silu, dy, out=du)
    return grad_gate, grad_up


def silu_forward(x: np.ndarray) -> np.ndarray:
    """Return ``x * sigmoid(x)``; as ``entrenar.reference.swiglu.silu_forward``."""
    if not _flat([x]):
        return plain.silu_forward(x)
    y = np.empty_like(x)
    for piece, target in _pieces(x, y):
        target[...] = _silu(piece)
    return y


def silu_backward(grad_y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of SiLU; as ``entrenar.reference.swiglu.silu_backward``."""
    if not _flat([x, grad_y]):
        return plain.silu_backward(grad_y, x)
    grad_x = np.empty_like(x)
    for dy, piece, target in _pieces(grad_y, x, grad_x):
        sigmoid = _sigmoid(piece)
        slope = 1 - sigmoid
        slope *= piece
        slope *= sigmoid
        slope += sigmoid
        np.multiply(slope, dy, out=target)
    return grad_x


def _flat(arrays: list[np.ndarray]) -> bool:
    """Whether all are alike and contiguous; what is not, the plain form computes or refuses."""
    first = arrays[0]
    return first.dtype in (np.float32, np.float64) and all(
        a.shape == first.shape and a.dtype == first.dtype and a.flags.c_contiguous for a in arrays
    )


def _pieces(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _PIECE):
        yield tuple(array[start : start + _PIECE] for array in flat)


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

    The sigmoid is exp(x) there, which times x is no zero yet.
    """
    scratch = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(scratch, out=scratch)
    scratch += 1
    far = np.isinf(scratch)
    return scratch, far if far.any() else None
