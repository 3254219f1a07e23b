"""Gated and plain activations, elementwise: SwiGLU, SiLU, GELU, ReLU."""

from __future__ import annotations

import math

import numpy as np

from entrenar.checks import check_alike
from entrenar.errors import ConfigError
from entrenar.reference._results import store

__all__ = [
    "gelu_backward",
    "gelu_forward",
    "relu_backward",
    "relu_forward",
    "silu_backward",
    "silu_forward",
    "swiglu_backward",
    "swiglu_forward",
]

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def swiglu_forward(gate: np.ndarray, up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``silu(gate) * up``.

    Args:
        gate: Any shape, any floating dtype.
        up: Shape and dtype of ``gate``.
        out: Where to write, or None for new storage; may be ``gate`` or ``up``.

    Returns:
        ``out``, or a new array of the shape and dtype of ``gate``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not floating.

    Source: Shazeer, arXiv:2002.05202, equation 6.
    """
    check_alike("swiglu_forward", gate=gate, up=up, out=out)
    return store(gate * _sigmoid(gate) * up, out)


def swiglu_backward(
    grad_y: np.ndarray, gate: np.ndarray, up: np.ndarray, inplace: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of ``gate`` and ``up``.

    With ``s = sigmoid(gate)``: ``grad_gate = grad_y * up * s * (1 + gate * (1 - s))`` and
    ``grad_up = grad_y * gate * s``.

    Args:
        grad_y: Shape of ``gate``.
        gate: As in the forward pass.
        up: As in the forward pass.
        inplace: Overwrite ``gate`` and ``up`` with their gradients and return them.

    Returns:
        ``(grad_gate, grad_up)``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not floating.
    """
    check_alike("swiglu_backward", gate=gate, up=up, grad_y=grad_y)
    sigmoid = _sigmoid(gate)
    grad_gate = grad_y * up * _silu_slope(gate)
    grad_up = grad_y * (gate * sigmoid)
    if not inplace:
        return grad_gate, grad_up
    gate[...] = grad_gate
    up[...] = grad_up
    return gate, up


def silu_forward(x: np.ndarray) -> np.ndarray:
    """Return ``x * sigmoid(x)``.

    Raises:
        DTypeError: ``x`` is not floating.

    Source: Elfwing et al., arXiv:1702.03118.
    """
    check_alike("silu_forward", x=x)
    return x * _sigmoid(x)


def silu_backward(grad_y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return ``grad_y * s * (1 + x * (1 - s))`` with ``s = sigmoid(x)``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not floating.
    """
    check_alike("silu_backward", x=x, grad_y=grad_y)
    return grad_y * _silu_slope(x)


def gelu_forward(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    """Return ``x * Phi(x)``, Phi the normal distribution function or its tanh approximation.

    Args:
        x: Any shape, any floating dtype.
        approximate: ``"none"`` for erf, ``"tanh"`` for ``(1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2``.

    Raises:
        DTypeError: ``x`` is not floating.
        ConfigError: ``approximate`` is another word.

    Source: Hendrycks and Gimpel, arXiv:1606.08415, section 2.
    """
    check_alike("gelu_forward", x=x)
    return x * _gelu_gate("gelu_forward", x, approximate)


def gelu_backward(grad_y: np.ndarray, x: np.ndarray, approximate: str = "none") -> np.ndarray:
    """Return ``grad_y * (Phi(x) + x * Phi'(x))``.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not floating.
        ConfigError: ``approximate`` is neither ``"none"`` nor ``"tanh"``.
    """
    check_alike("gelu_backward", x=x, grad_y=grad_y)
    gate = _gelu_gate("gelu_backward", x, approximate)
    if approximate == "none":
        slope = np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi)
    else:
        rest = _gelu_gate("gelu_backward", -x, approximate)
        slope = 2 * gate * rest * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * np.square(x))
    return (grad_y * (gate + x * slope)).astype(x.dtype)


def relu_forward(x: np.ndarray) -> np.ndarray:
    """Return ``max(x, 0)``; a NaN stays one.

    Raises:
        DTypeError: ``x`` is not floating.
    """
    check_alike("relu_forward", x=x)
    return np.maximum(x, 0)


def relu_backward(grad_y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return ``grad_y`` where ``x > 0``, else 0.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not floating.
    """
    check_alike("relu_backward", x=x, grad_y=grad_y)
    return np.where(x > 0, grad_y, 0).astype(x.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp(-|x|) never overflows, whichever sign x has
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def _silu_slope(x: np.ndarray) -> np.ndarray:
    # sigmoid(-x) is 1 - sigmoid(x) without the cancellation
    return _sigmoid(x) * (1 + x * _sigmoid(-x))


def _gelu_gate(op: str, x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel in the left tail
        return _sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBIC * x * x * x)).astype(x.dtype)
    if approximate == "none":
        # erfc keeps the relative precision of the left tail, where 1 + erf cancels
        tail = [math.erfc(-value * math.sqrt(0.5)) / 2 for value in x.ravel().tolist()]
        return np.array(tail, dtype=x.dtype).reshape(x.shape)
    raise ConfigError(f"{op}: approximate is {approximate!r}, wanted 'none' or 'tanh'", "")
