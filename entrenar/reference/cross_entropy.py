"""Cross entropy of logits against target ids, in plain NumPy.

    loss[r] = log sum_c exp(logits[r, c]) - logits[r, target[r]]
    grad[r, c] = grad_scale * (softmax(logits[r])[c] - [c == target[r]])

Rows whose target is ``ignore_index`` add nothing to the loss, are not counted, and get a gradient
of zeros whatever their logits hold. A logit of -inf is a probability of zero; a row with NaN, +inf
or nothing but -inf has a loss and a gradient of NaN, so that it is noticed.

Source: torch.nn.functional.cross_entropy with reduction="sum"; row chunks of the linear form after
Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.2.
"""

from __future__ import annotations

import numpy as np

from entrenar import checks
from entrenar.errors import DataError, ShapeMismatchError

__all__ = [
    "causal_cross_entropy_backward",
    "causal_cross_entropy_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "linear_cross_entropy",
]


def cross_entropy_forward(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the cross entropy of the rows that count.

    Args:
        logits: [n, V] floating.
        targets: [n] int64 in [0, V), or ``ignore_index``.
        ignore_index: Target of rows to leave out.

    Returns:
        The loss summed over counted rows, and how many were counted (int64), both of shape ();
        0.0 and 0 where none count.

    Raises:
        ShapeMismatchError: ``targets`` is not one id a row.
        DTypeError: ``logits`` are not floating or ``targets`` not int64.
        DataError: A target is out of range; the message names row, value and V.
    """
    counted = check_cross_entropy("cross_entropy_forward", logits, targets, ignore_index)
    return _loss_sum(logits, targets, counted), np.asarray(counted.sum(), np.int64)


def cross_entropy_backward(
    logits: np.ndarray,
    targets: np.ndarray,
    grad_scale: float | np.ndarray = 1.0,
    ignore_index: int = -100,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the gradient of ``grad_scale`` times the summed loss.

    Args:
        logits: [n, V] floating.
        targets: [n] int64 in [0, V), or ``ignore_index``.
        grad_scale: Gradient arriving at the loss: a number, an array of shape () or [1], or one
            value a row, [n].
        ignore_index: Target of rows to leave out.
        out: Where to write, [n, V]; may be ``logits``.

    Returns:
        grad_logits [n, V] of the dtype of ``logits``; zeros in rows left out.

    Raises:
        ShapeMismatchError: Sizes do not fit together.
        DTypeError: ``logits`` are not floating or ``targets`` not int64.
        DataError: A target is out of range; the message names row, value and V.
    """
    op = "cross_entropy_backward"
    counted = check_cross_entropy(op, logits, targets, ignore_index)
    return _gradient(op, logits, targets, counted, grad_scale, out)


def causal_cross_entropy_forward(
    logits: np.ndarray, tokens: np.ndarray, loss_start: int, loss_end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the cross entropy of predicting the next token, over a window of positions.

    Args:
        logits: [S, V] floating; row p predicts ``tokens[p + 1]``.
        tokens: [S] int64.
        loss_start: First position that counts.
        loss_end: One past the last position that counts; at most S - 1, as the last token has no
            successor.

    Returns:
        The loss summed over positions in [loss_start, loss_end), and their number (int64), both
        of shape (); 0.0 and 0 for an empty window.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or the window leaves [0, S - 1].
        DTypeError: ``logits`` are not floating or ``tokens`` not int64.
        DataError: A predicted token is out of range.
    """
    op = "causal_cross_entropy_forward"
    targets, counted = check_causal(op, logits, tokens, loss_start, loss_end)
    return _loss_sum(logits, targets, counted), np.asarray(counted.sum(), np.int64)


def causal_cross_entropy_backward(
    logits: np.ndarray,
    tokens: np.ndarray,
    loss_start: int,
    loss_end: int,
    grad_scale: float | np.ndarray = 1.0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the gradient of ``grad_scale`` times the summed next-token loss of a window.

    Args:
        logits: [S, V] floating; row p predicts ``tokens[p + 1]``.
        tokens: [S] int64.
        loss_start: First position that counts.
        loss_end: One past the last position that counts, at most S - 1.
        grad_scale: As in :func:`cross_entropy_backward`.
        out: Where to write, [S, V]; may be ``logits``.

    Returns:
        grad_logits [S, V]; zeros outside the window.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or the window leaves [0, S - 1].
        DTypeError: ``logits`` are not floating or ``tokens`` not int64.
        DataError: A predicted token is out of range.
    """
    op = "causal_cross_entropy_backward"
    targets, counted = check_causal(op, logits, tokens, loss_start, loss_end)
    return _gradient(op, logits, targets, counted, grad_scale, out)


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
    """Compute cross entropy of ``hidden @ weight.T`` and its gradient, without all the logits.

    Args:
        hidden: [n, H] floating.
        weight: [V, H], frozen: it gets no gradient.
        targets: [n] int64 in [0, V), or ``ignore_index``.
        ignore_index: Target of rows to leave out.
        grad_scale: As in :func:`cross_entropy_backward`.
        chunk_rows: Rows of logits that exist at a time.
        need_grad: Whether to compute the gradient.
        softcap: c of logits ``c * tanh(logit / c)``, which then are what the loss is of; 0 for none.

    Returns:
        The summed loss and the number of counted rows, both of shape (), and the gradient of
        ``grad_scale`` times the summed loss with respect to ``hidden`` [n, H], or None.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or ``chunk_rows`` is not positive.
        ConfigError: ``softcap`` is negative or not a number.
        DTypeError: Arrays are not floating, not of one dtype, or ``targets`` not int64.
        DataError: A target is out of range; the message names row, value and V.
    """
    op = "linear_cross_entropy"
    counted = check_linear(op, hidden, weight, targets, ignore_index, chunk_rows)
    checks.check_softcap(op, softcap)
    scale = np.broadcast_to(check_grad_scale(op, grad_scale, hidden), (len(hidden), 1))
    loss = np.zeros((), hidden.dtype)
    grad_hidden = np.zeros(hidden.shape, hidden.dtype) if need_grad else None
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        logits = hidden[rows] @ weight.T
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        loss += _loss_sum(logits, targets[rows], counted[rows])
        if grad_hidden is not None:
            grad = _gradient(op, logits, targets[rows], counted[rows], scale[rows, 0], None)
            if softcap:
                grad[counted[rows]] *= 1 - np.square(logits[counted[rows]] / softcap)
            grad_hidden[rows] = grad @ weight
    return loss, np.asarray(counted.sum(), np.int64), grad_hidden


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # inf and NaN in a row are meant to reach its result
        shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _loss_sum(logits: np.ndarray, targets: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Sum the loss of the counted rows; the other rows are never looked at."""
    rows = np.flatnonzero(counted)
    log_p = _log_softmax(logits[rows])
    return np.asarray(-log_p[np.arange(len(rows)), targets[rows]].sum(), logits.dtype)


def _gradient(
    op: str,
    logits: np.ndarray,
    targets: np.ndarray,
    counted: np.ndarray,
    grad_scale: float | np.ndarray,
    out: np.ndarray | None,
) -> np.ndarray:
    scale = np.broadcast_to(check_grad_scale(op, grad_scale, logits), (len(logits), 1))
    rows = np.flatnonzero(counted)
    with np.errstate(under="ignore"):
        grad = np.exp(_log_softmax(logits[rows]))
        grad[np.arange(len(rows)), targets[rows]] -= 1
        grad *= scale[rows]
    if out is None:
        out = np.empty(logits.shape, logits.dtype)
    checks.check_shape(op, "out", out, logits.shape, "it has the shape of logits")
    out[...] = 0
    out[rows] = grad
    return out


def check_grad_scale(op: str, grad_scale: float | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``grad_scale`` as a column, [1, 1] or [n, 1], in the dtype of ``rows``."""
    scale = np.asarray(grad_scale, rows.dtype)
    if scale.shape not in ((), (1,), rows.shape[:1]):
        raise ShapeMismatchError(
            f"{op}: grad_scale has shape {scale.shape}, wanted (), (1,) or ({len(rows)},)",
            "pass one number, or one a row",
        )
    return scale.reshape(-1, 1)


def check_cross_entropy(
    op: str, logits: np.ndarray, targets: np.ndarray, ignore_index: int
) -> np.ndarray:
    """Check logits and targets; return which rows count."""
    checks.check_ndim(op, "logits", logits, 2)
    checks.check_dtype(op, "logits", logits)
    n_rows, n_cols = logits.shape
    return check_targets(op, targets, n_rows, n_cols, targets != ignore_index)


def check_targets(
    op: str, targets: np.ndarray, n_rows: int, n_cols: int, counted: np.ndarray
) -> np.ndarray:
    """Check the targets of the rows that count, and return which do."""
    checks.check_dtype(op, "targets", targets, "int64")
    checks.check_shape(op, "targets", targets, (n_rows,), "one target a row")
    bad = np.flatnonzero(counted & ((targets < 0) | (targets >= n_cols)))
    if len(bad):
        raise DataError(
            f"{op}: the target of row {bad[0]} is {targets[bad[0]]}, "
            f"wanted 0 to {n_cols - 1} for {n_cols} columns",
            "mark rows to leave out with ignore_index",
        )
    return counted


def check_causal(
    op: str, logits: np.ndarray, tokens: np.ndarray, loss_start: int, loss_end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Check logits, tokens and window; return the target of each row and which rows count."""
    checks.check_ndim(op, "logits", logits, 2)
    checks.check_dtype(op, "logits", logits)
    checks.check_dtype(op, "tokens", tokens, "int64")
    n_rows, n_cols = logits.shape
    checks.check_shape(op, "tokens", tokens, (n_rows,), "one token a row of logits")
    if loss_start < 0 or loss_end > max(n_rows - 1, 0):
        raise ShapeMismatchError(
            f"{op}: the window is [{loss_start}, {loss_end}), wanted it in [0, {n_rows - 1}]",
            "position p predicts token p + 1, so the last position has nothing to predict",
        )
    targets = np.append(tokens[1:], 0)[:n_rows]
    position = np.arange(n_rows)
    counted = (position >= loss_start) & (position < loss_end)
    return targets, check_targets(op, targets, n_rows, n_cols, counted)


def check_linear(
    op: str,
    hidden: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    ignore_index: int,
    chunk_rows: int,
) -> np.ndarray:
    """Check the arguments of the linear form; return which rows count."""
    checks.check_ndim(op, "hidden", hidden, 2)
    checks.check_shape(op, "weight", weight, (-1, hidden.shape[1]), "weight is [V, H]")
    checks.check_dtype(op, "hidden", hidden)
    checks.check_same_dtype(op, hidden=hidden, weight=weight)
    checks.check_positive(op, "chunk_rows", chunk_rows)
    return check_targets(op, targets, len(hidden), len(weight), targets != ignore_index)
