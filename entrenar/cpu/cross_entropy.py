"""Cross entropy of :mod:`entrenar.reference.cross_entropy`, in place and in chunks of rows.

The linear form holds one chunk of logits, which becomes its own gradient before the second product
reads it. Rows that do not count take no part in the products. Products are cut by columns and the
passes between them by rows, for the threads of :mod:`entrenar.cpu.threads`.
"""

from __future__ import annotations

import numpy as np

from entrenar import checks
from entrenar.cpu import threads
from entrenar.reference.cross_entropy import (
    check_causal,
    check_cross_entropy,
    check_grad_scale,
    check_linear,
)

__all__ = [
    "causal_cross_entropy_backward",
    "causal_cross_entropy_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "linear_cross_entropy",
]


CHUNK_BYTES = 48 << 20
"""Most bytes of logits at a time: 250 rows of a vocabulary of 49152 in float32."""

ROW_BYTES = 1 << 20
"""Bytes of logits swept at a time between passes, so that the passes after the first hit cache."""


def cross_entropy_forward(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100
) -> tuple[np.ndarray, np.ndarray]:
    """Compute what :func:`entrenar.reference.cross_entropy.cross_entropy_forward` computes, fast."""
    counted = check_cross_entropy("cross_entropy_forward", logits, targets, ignore_index)
    return _forward(logits, targets, counted)


def cross_entropy_backward(
    logits: np.ndarray,
    targets: np.ndarray,
    grad_scale: float | np.ndarray = 1.0,
    ignore_index: int = -100,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Compute what :func:`entrenar.reference.cross_entropy.cross_entropy_backward` computes, fast."""
    op = "cross_entropy_backward"
    counted = check_cross_entropy(op, logits, targets, ignore_index)
    return _backward(op, logits, targets, counted, grad_scale, out)


def causal_cross_entropy_forward(
    logits: np.ndarray, tokens: np.ndarray, loss_start: int, loss_end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute what the reference's function of this name computes, fast."""
    op = "causal_cross_entropy_forward"
    targets, counted = check_causal(op, logits, tokens, loss_start, loss_end)
    return _forward(logits, targets, counted)


def causal_cross_entropy_backward(
    logits: np.ndarray,
    tokens: np.ndarray,
    loss_start: int,
    loss_end: int,
    grad_scale: float | np.ndarray = 1.0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Compute what the reference's function of this name computes, fast."""
    op = "causal_cross_entropy_backward"
    targets, counted = check_causal(op, logits, tokens, loss_start, loss_end)
    return _backward(op, logits, targets, counted, grad_scale, out)


def linear_cross_entropy(
    hidden: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    ignore_index: int = -100,
    grad_scale: float | np.ndarray = 1.0,
    chunk_rows: int = 256,
    need_grad: bool = True,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Compute what :func:`entrenar.reference.cross_entropy.linear_cross_entropy` computes, fast.

    Numerics: the loss sums rows in order. At most ``chunk_rows`` rows of logits, and at most
    ``CHUNK_BYTES`` of them, exist at a time.
    """
    op = "linear_cross_entropy"
    counted = check_linear(op, hidden, weight, targets, ignore_index, chunk_rows)
    checks.check_softcap(op, softcap)
    column = check_grad_scale(op, grad_scale, hidden)
    scale = np.broadcast_to(column, (len(hidden), 1))
    rows = np.flatnonzero(counted)
    buffers = 2 if softcap and need_grad else 1
    fitting = max(CHUNK_BYTES // max(buffers * len(weight) * hidden.itemsize, 1), 1)
    step = _even_step(len(rows), min(chunk_rows, fitting))
    buffer = np.empty((step, len(weight)), hidden.dtype)
    slopes = np.empty_like(buffer) if buffers == 2 else None
    losses = np.empty(len(rows), hidden.dtype)
    grad_hidden = np.zeros(hidden.shape, hidden.dtype) if need_grad else None
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        logits = threads.product(hidden[chunk], weight.T, buffer[: len(chunk)])
        if softcap:
            _cap_in_place(logits, softcap, None if slopes is None else slopes[: len(chunk)])
        losses[start : start + step] = _softmax_in_place(logits, targets[chunk])
        if grad_hidden is not None:
            logits[np.arange(len(chunk)), targets[chunk]] -= 1
            with np.errstate(under="ignore"):
                if slopes is not None:
                    logits *= slopes[: len(chunk)]
                made = np.empty((len(chunk), hidden.shape[1]), hidden.dtype)
                made = threads.product(logits, weight, made)
                made *= scale[chunk]
                grad_hidden[chunk] = made
    loss = np.asarray(losses.sum(), hidden.dtype)
    return loss, np.asarray(len(rows), np.int64), grad_hidden


def _cap_in_place(logits: np.ndarray, cap: float, slopes: np.ndarray | None) -> None:
    """Cap logits softly; ``slopes``, where given, take the derivative, 1 - tanh²."""
    step = max(ROW_BYTES // max(logits.shape[1] * logits.itemsize, 1), 1)
    for start in range(0, len(logits), step):
        part = logits[start : start + step]
        part *= 1 / cap
        np.tanh(part, out=part)
        if slopes is not None:
            slope = slopes[start : start + step]
            np.square(part, out=slope)
            np.subtract(1, slope, out=slope)
        part *= cap


def _even_step(n_rows: int, most: int) -> int:
    """Return a chunk size that splits the rows evenly, rather than into full chunks and a rest."""
    chunks = -(-n_rows // most)
    return max(-(-n_rows // max(chunks, 1)), 1)


def _softmax_in_place(
    logits: np.ndarray, targets: np.ndarray, probabilities: bool = True
) -> np.ndarray:
    """Turn logits into softmax, or into scratch without ``probabilities``; return each row's loss."""
    losses = np.empty(len(logits), logits.dtype)
    step = max(ROW_BYTES // max(logits.shape[1] * logits.itemsize, 1), 1)

    def some(rows: slice) -> None:
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            _softmax_of_part(logits[part], targets[part], losses[part], probabilities)

    with np.errstate(all="ignore"):  # inf and NaN in a row are meant to reach its result
        threads.spread(some, len(logits), threads.LEAST_VALUES // max(logits.shape[1], 1))
    return losses


def _softmax_of_part(
    part: np.ndarray, targets: np.ndarray, losses: np.ndarray, probabilities: bool
) -> None:
    index = np.arange(len(part)), targets
    part -= part.max(axis=1, keepdims=True, initial=-np.inf)
    at_target = part[index]
    np.exp(part, out=part)
    total = part.sum(axis=1, keepdims=True)
    np.subtract(np.log(total[:, 0]), at_target, out=losses)
    if probabilities:
        part *= 1 / total


def _forward(
    logits: np.ndarray, targets: np.ndarray, counted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.flatnonzero(counted)
    step = max(ROW_BYTES // max(logits.shape[1] * logits.itemsize, 1), 1)
    losses = np.empty(len(rows), logits.dtype)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        losses[start : start + step] = _softmax_in_place(logits[part], targets[part], False)
    return np.asarray(losses.sum(), logits.dtype), np.asarray(len(rows), np.int64)


def _backward(
    op: str,
    logits: np.ndarray,
    targets: np.ndarray,
    counted: np.ndarray,
    grad_scale: float | np.ndarray,
    out: np.ndarray | None,
) -> np.ndarray:
    column = check_grad_scale(op, grad_scale, logits)
    scale = np.broadcast_to(column, (len(logits), 1))
    if out is None:
        out = np.empty(logits.shape, logits.dtype)
    checks.check_shape(op, "out", out, logits.shape, "it has the shape of logits")
    rows = np.flatnonzero(counted)
    step = max(ROW_BYTES // max(logits.shape[1] * logits.itemsize, 1), 1)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        grad = logits[part]
        _softmax_in_place(grad, targets[part])
        grad[np.arange(len(part)), targets[part]] -= 1
        with np.errstate(under="ignore"):
            grad *= scale[part]
        out[part] = grad
    out[~counted] = 0
    return out
