"""A linear layer with a low-rank adapter: ``y = x @ W.T + bias + scale * drop(x) @ A.T @ B.T``.

B is stored unscaled, and ``scale`` enters the forward and both gradients: folded into B it would
cancel under Adam, whose steps do not depend on the gradient's size. Dropout acts on the adapter's
input alone, with a mask that is a function of the seed and the element's index, so that backward
makes it again instead of reading it.

Source: Hu et al., "LoRA", equation 3; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(Philox 4x32-10), laid out as ``triton.language.rand(seed, row * in_features + column)``.
"""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError
from entrenar.reference.nf4 import NF4Weight, nf4_dequantize

__all__ = ["lora_backward", "lora_forward"]

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
UNIFORM_SCALE = np.float32(4.6566127342e-10)


def _philox(seed: int, counter: np.ndarray) -> np.ndarray:
    """Return the first uint32 word of Philox 4x32-10 for each 64-bit counter."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = counter & low, counter >> shift
    c2 = c3 = np.zeros_like(counter)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> shift) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> shift) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0 = (k0 + PHILOX_KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + PHILOX_KEY_STEPS[1]) & 0xFFFFFFFF
    return c0.astype(np.uint32)


def _uniform(seed: int, counter: np.ndarray) -> np.ndarray:
    """Return float32 numbers in [0, 1), one per counter."""
    word = _philox(seed, counter).view(np.int32)
    return np.where(word < 0, -word - 1, word).astype(np.float32) * UNIFORM_SCALE


def _keep(shape: tuple[int, int], dropout_p: float, seed: int) -> np.ndarray:
    """Return the bool mask of the elements that dropout keeps."""
    counter = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape)
    return _uniform(seed, counter) > np.float32(dropout_p)


def _drop(x: np.ndarray, dropout_p: float, seed: int) -> np.ndarray:
    """Zero the dropped elements and scale the others by ``1 / (1 - p)``."""
    if dropout_p == 0:
        return x
    return np.where(_keep(x.shape, dropout_p, seed), x * x.dtype.type(1 / (1 - dropout_p)), 0)


def _number(op: str, seed: int | np.ndarray) -> int:
    if not isinstance(seed, np.ndarray):
        return seed
    check_dtype(op, "seed", seed, "int64")
    check_shape(op, "seed", seed, (1,))
    return int(seed[0])


def _check(
    op: str,
    x: np.ndarray,
    w: np.ndarray | NF4Weight,
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    dropout_p: float,
    seed: int,
) -> None:
    check_dtype(op, "x", x)
    check_dtype(op, "lora_a", lora_a)
    check_same_dtype(op, lora_a=lora_a, lora_b=lora_b)
    if not isinstance(w, NF4Weight):
        check_same_dtype(op, x=x, w=w)
    check_ndim(op, "w", w, 2)
    n_out, n_in = w.shape
    check_shape(op, "x", x, (-1, n_in), f"w is {tuple(w.shape)}")
    check_ndim(op, "lora_a", lora_a, 2)
    rank = lora_a.shape[0]
    check_shape(op, "lora_a", lora_a, (-1, n_in), f"w is {tuple(w.shape)}")
    check_shape(op, "lora_b", lora_b, (n_out, rank), f"w is {tuple(w.shape)}, rank is {rank}")
    if not 0 <= dropout_p < 1:
        raise ConfigError(f"{op}: dropout_p is {dropout_p}, wanted at least 0 and below 1", "")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{op}: seed is {seed}, wanted at least 0 and below 2**63", "")


def _dense(w: np.ndarray | NF4Weight, dtype: np.dtype) -> np.ndarray:
    return nf4_dequantize(w, dtype) if isinstance(w, NF4Weight) else w


def lora_forward(
    x: np.ndarray,
    w: np.ndarray | NF4Weight,
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    scale: float,
    bias: np.ndarray | None = None,
    dropout_p: float = 0.0,
    seed: int | np.ndarray = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the layer's output and the rank-r activations that backward reads.

    Args:
        x: [T, in], floating.
        w: [out, in], dense of ``x``'s dtype, or NF4.
        lora_a: [r, in].
        lora_b: [out, r], of ``lora_a``'s dtype.
        scale: The adapter's factor, such as ``lora_alpha / r``.
        bias: [out] of ``x``'s dtype, or None.
        dropout_p: Share of the adapter's input that is dropped, in [0, 1).
        seed: Of the dropout mask, in [0, 2**63); a number, or int64 [1].

    Returns:
        ``y`` [T, out] and ``s`` [T, r] = ``drop(x) @ A.T``, unscaled, both of ``x``'s dtype.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not floating or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
    """
    op = "lora_forward"
    seed = _number(op, seed)
    _check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, bias=bias)
    dtype = x.dtype
    s = _drop(x, dropout_p, seed) @ lora_a.astype(dtype, copy=False).T
    y = x @ _dense(w, dtype).T + dtype.type(scale) * (s @ lora_b.astype(dtype, copy=False).T)
    if bias is not None:
        check_shape(op, "bias", bias, (w.shape[0],))
        y = y + bias
    return y, s


def lora_backward(
    grad_y: np.ndarray,
    x: np.ndarray,
    w: np.ndarray | NF4Weight,
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    s: np.ndarray,
    scale: float,
    dropout_p: float = 0.0,
    seed: int | np.ndarray = 0,
    need_grad_x: bool = True,
    grad_a_out: np.ndarray | None = None,
    grad_b_out: np.ndarray | None = None,
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the gradients of the input and of both factors; the weight and bias are frozen.

    With ``dS = scale * grad_y @ B``: ``grad_b = scale * grad_y.T @ s``, ``grad_a = dS.T @ drop(x)``
    and ``grad_x = grad_y @ W + drop'(dS @ A)``, where ``drop'`` applies the forward's mask and scale.

    Args:
        grad_y: [T, out] of ``x``'s dtype.
        x: As in forward, like ``w``, ``lora_a``, ``lora_b``, ``scale``, ``dropout_p`` and ``seed``.
        w: [out, in].
        lora_a: [r, in].
        lora_b: [out, r].
        s: [T, r] that forward returned.
        scale: The adapter's factor.
        dropout_p: Share dropped.
        seed: Of the mask.
        need_grad_x: Whether the input's gradient is wanted.
        grad_a_out: [r, in] that the gradient of A is added to, or None.
        grad_b_out: [out, r] that the gradient of B is added to, or None.

    Returns:
        ``grad_x`` [T, in] of ``x``'s dtype, or None; ``grad_a`` and ``grad_b`` of ``lora_a``'s
        dtype, or the arrays they were added to.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not floating or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
    """
    op = "lora_backward"
    seed = _number(op, seed)
    _check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, grad_y=grad_y, s=s)
    check_shape(op, "grad_y", grad_y, (x.shape[0], w.shape[0]))
    check_shape(op, "s", s, (x.shape[0], lora_a.shape[0]))
    dtype = x.dtype
    factor = dtype.type(scale)
    grad_s = factor * (grad_y @ lora_b.astype(dtype, copy=False))
    grad_a = grad_s.T @ _drop(x, dropout_p, seed)
    grad_b = factor * (grad_y.T @ s)
    grad_x = None
    if need_grad_x:
        through_adapter = _drop(grad_s @ lora_a.astype(dtype, copy=False), dropout_p, seed)
        grad_x = grad_y @ _dense(w, dtype) + through_adapter
    return (
        grad_x,
        _add_to(op, "grad_a_out", grad_a_out, grad_a.astype(lora_a.dtype, copy=False)),
        _add_to(op, "grad_b_out", grad_b_out, grad_b.astype(lora_b.dtype, copy=False)),
    )


def _add_to(op: str, name: str, out: np.ndarray | None, grad: np.ndarray) -> np.ndarray:
    if out is None:
        return grad
    check_shape(op, name, out, grad.shape)
    out += grad
    return out
