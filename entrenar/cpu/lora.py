"""The linear layer with a low-rank adapter on a CPU, without copies of the activations.

The base product is written where the result goes and the adapter's is added to it piece by piece
while it is in cache, on the threads of :mod:`entrenar.cpu.threads`. The dropout mask is made in pieces
too, in preallocated integer buffers.
"""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_same_dtype, check_shape
from entrenar.cpu import threads
from entrenar.cpu.nf4 import check_storage
from entrenar.cpu.nf4_gemm import add_product, times_weight, times_weight_t
from entrenar.cpu.threads import scratch
from entrenar.reference import lora as plain
from entrenar.reference.nf4 import NF4Weight

__all__ = ["lora_backward", "lora_forward"]

# Counters per piece: nine 64-bit buffers of it fit in a second-level cache.
PIECE = 1 << 13
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def _first_words(seed: int, counter: np.ndarray) -> np.ndarray:
    """Return the first Philox word of each counter; scratch, overwritten by the next call."""
    size = counter.size
    c0, c1, c2, c3, p0, p1 = (scratch(f"philox{i}", (size,), np.uint64) for i in range(6))
    np.bitwise_and(counter, LOW, out=c0)
    np.right_shift(counter, SHIFT, out=c1)
    c2.fill(0)
    c3.fill(0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(plain.PHILOX_ROUNDS):
        np.multiply(c0, plain.PHILOX_MULTIPLIERS[0], out=p0)
        np.multiply(c2, plain.PHILOX_MULTIPLIERS[1], out=p1)
        np.right_shift(p1, SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.bitwise_and(p1, LOW, out=c1)
        np.right_shift(p0, SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(p0, LOW, out=c3)
        k0 = (k0 + plain.PHILOX_KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + plain.PHILOX_KEY_STEPS[1]) & 0xFFFFFFFF
    return c0


def _drop(x: np.ndarray, dropout_p: float, seed: int, out: np.ndarray) -> np.ndarray:
    """Write ``x`` with its dropped elements zeroed and the others scaled; ``out`` may be ``x``."""
    flat, result = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
    factor = x.dtype.type(1 / (1 - dropout_p))
    for start in range(0, flat.size, PIECE):
        stop = min(start + PIECE, flat.size)
        word = _first_words(seed, np.arange(start, stop, dtype=np.uint64)).astype(np.uint32)
        signed = word.view(np.int32)
        signed ^= signed >> 31  # -word - 1 where negative
        keep = signed.astype(np.float32) * plain.UNIFORM_SCALE > np.float32(dropout_p)
        np.multiply(flat[start:stop], factor, out=result[start:stop])
        result[start:stop] *= keep
    return out


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return threads.product(a, b, np.empty((a.shape[0], b.shape[1]), a.dtype))


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
    """Return the layer's output and the rank-r activations; see ``entrenar.reference.lora``.

    Args:
        x: [T, in], floating.
        w: [out, in], dense of ``x``'s dtype, or NF4.
        lora_a: [r, in].
        lora_b: [out, r], of ``lora_a``'s dtype.
        scale: The adapter's factor.
        bias: [out] of ``x``'s dtype, or None.
        dropout_p: Share of the adapter's input that is dropped, in [0, 1).
        seed: Of the dropout mask, in [0, 2**63); a number, or int64 [1].

    Returns:
        ``y`` [T, out] and ``s`` [T, r], both of ``x``'s dtype.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not floating or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
    """
    op = "lora_forward"
    seed = plain._number(op, seed)
    plain._check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, bias=bias)
    if isinstance(w, NF4Weight):
        check_storage(op, w)
    if bias is not None:
        check_shape(op, "bias", bias, (w.shape[0],))
    dtype = x.dtype
    y = np.empty((x.shape[0], w.shape[0]), dtype)
    dropped = _drop(x, dropout_p, seed, scratch("drop", x.shape, dtype)) if dropout_p else x
    s = _product(dropped, lora_a.astype(dtype, copy=False).T)
    update, factor = s * dtype.type(scale), lora_b.astype(dtype, copy=False).T

    def finish(columns: slice) -> None:
        add_product(y[:, columns], update, factor[:, columns])
        if bias is not None:
            y[:, columns] += bias[columns]

    times_weight_t(x, w, y, finish)
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
    """Return the gradients of the input and of both factors; see ``entrenar.reference.lora``.

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
        ``grad_x`` [T, in] or None, ``grad_a`` and ``grad_b``, or the arrays they were added to.

    Raises:
        ShapeMismatchError: The sizes do not fit together.
        DTypeError: A dtype is not floating or not that of its peers.
        ConfigError: ``dropout_p`` or ``seed`` is out of range.
    """
    op = "lora_backward"
    seed = plain._number(op, seed)
    plain._check(op, x, w, lora_a, lora_b, dropout_p, seed)
    check_same_dtype(op, x=x, grad_y=grad_y, s=s)
    check_shape(op, "grad_y", grad_y, (x.shape[0], w.shape[0]))
    check_shape(op, "s", s, (x.shape[0], lora_a.shape[0]))
    dtype = x.dtype
    factor = dtype.type(scale)
    grad_s = _product(grad_y, lora_b.astype(dtype, copy=False))
    grad_s *= factor
    dropped = _drop(x, dropout_p, seed, scratch("drop", x.shape, dtype)) if dropout_p else x
    grad_a = plain._add_to(
        op, "grad_a_out", grad_a_out, _product(grad_s.T, dropped).astype(lora_a.dtype)
    )
    grad_b = _product(grad_y.T, s * factor).astype(lora_b.dtype)
    grad_b = plain._add_to(op, "grad_b_out", grad_b_out, grad_b)
    grad_x = _grad_x(grad_y, w, grad_s, lora_a, dropout_p, seed) if need_grad_x else None
    return grad_x, grad_a, grad_b


def _grad_x(
    grad_y: np.ndarray,
    w: np.ndarray | NF4Weight,
    grad_s: np.ndarray,
    lora_a: np.ndarray,
    dropout_p: float,
    seed: int,
) -> np.ndarray:
    dtype = grad_y.dtype
    a = lora_a.astype(dtype, copy=False)
    grad_x = np.empty((grad_y.shape[0], w.shape[1]), dtype)
    if dropout_p:
        threads.product(grad_s, a, grad_x)
        _drop(grad_x, dropout_p, seed, grad_x)
    if isinstance(w, NF4Weight):
        times_weight(grad_y, w, grad_x, accumulate=bool(dropout_p))
    elif dropout_p:
        add_product(grad_x, grad_y, w)
    else:
        threads.product(grad_y, w, grad_x)
    if not dropout_p:
        add_product(grad_x, grad_s, a)
    return grad_x
