"""Cross entropy of logits against target ids, with its gradient, and fused with the output layer.

    loss[r] = log sum_c exp(x[r, c]) - x[r, t[r]];  grad[r, c] = grad_scale (softmax(x[r])[c] - [c == t[r]])

Shapes: logits [n, V] with any row stride, targets [n] int64, any n and V; row offsets are 64-bit.

Numerics: a row is reduced in one online pass over blocks of columns, in fp32: the running maximum
starts at -inf and is replaced by 0 as the shift while it is -inf, so a block of -inf cannot make a
NaN; partial sums stay one to a lane until the row ends. (p - 1) is formed in fp32 before the store.
Row losses go to a buffer that one program sums in a fixed order: no atomics, the same to the bit on
every run. Rows left out are selected away, not multiplied by zero. A target out of range reads
nothing and makes the loss, and the row's gradient, NaN; on the CPU it raises at once. A soft cap is
applied to each logit as it is read, in both passes: capped logits are stored nowhere.

Bytes: loss V * itemsize a row; gradient 3 V * itemsize, as a row is longer than the registers of a
program: two reads, the second of which may hit L2, and one write, which may be onto the logits.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867),
algorithm 3; row chunks of the linear form after "Liger Kernel" (arXiv:2410.10989), section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch

from entrenar import checks
from entrenar.errors import DataError, LayoutError, ShapeMismatchError
from entrenar.kernels import _cross_entropy_kernels as _kernels
from entrenar.kernels import _launch
from entrenar.kernels.gemm import matmul

__all__ = [
    "causal_cross_entropy_backward",
    "causal_cross_entropy_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "linear_cross_entropy",
]


def cross_entropy_forward(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, stream: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the cross entropy of the rows that count.

    Args:
        logits: [n, V] fp32, fp16 or bf16; columns contiguous, any row stride.
        targets: [n] int64 in [0, V), or ``ignore_index``; contiguous.
        ignore_index: Target of rows to leave out.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        The loss summed over counted rows (fp32) and their number (int64), both of shape () and on
        the device; 0.0 and 0 where none count, NaN where a target is out of range.

    Raises:
        ShapeMismatchError: ``targets`` is not one id a row.
        DTypeError: ``logits`` are not floating or ``targets`` not int64.
        LayoutError: Columns of ``logits`` or ``targets`` are not contiguous.
        DataError: A target on the CPU is out of range.
    """
    op = "cross_entropy_forward"
    _check(op, logits, targets)
    _check_targets_on_cpu(op, targets, logits.shape[1], ignore_index)
    return _forward(op, logits, targets, ignore_index, stream)


def cross_entropy_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    grad_scale: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Compute the gradient of ``grad_scale`` times the summed loss, reducing each row again.

    Args:
        logits: [n, V] fp32, fp16 or bf16; columns contiguous, any row stride.
        targets: [n] int64 in [0, V), or ``ignore_index``; contiguous.
        grad_scale: Gradient arriving at the loss: a number, or floating storage on the device of
            shape (), [1] or, one value a row, [n].
        ignore_index: Target of rows to leave out.
        out: Where to write, [n, V]; may be ``logits`` itself.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        grad_logits [n, V] of the dtype of ``logits``; zeros in rows left out, NaN in rows whose
        target is out of range.

    Raises:
        ShapeMismatchError: Sizes do not fit together.
        DTypeError: ``logits`` are not floating or ``targets`` not int64.
        LayoutError: Columns or ``targets`` are not contiguous.
        DataError: A target on the CPU is out of range.
    """
    op = "cross_entropy_backward"
    _check(op, logits, targets)
    _check_targets_on_cpu(op, targets, logits.shape[1], ignore_index)
    return _gradient(op, logits, targets, grad_scale, ignore_index, out, stream)


def causal_cross_entropy_forward(
    logits: torch.Tensor, tokens: torch.Tensor, loss_start: int, loss_end: int, stream: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the cross entropy of predicting the next token, over a window of positions.

    Args:
        logits: [S, V] fp32, fp16 or bf16; row p predicts ``tokens[p + 1]``. Rows outside the
            window are not read.
        tokens: [S] int64, contiguous.
        loss_start: First position that counts.
        loss_end: One past the last position that counts, at most S - 1.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        The loss summed over the window (fp32) and its number of rows (int64), both of shape ().

    Raises:
        ShapeMismatchError: Sizes do not fit together, or the window leaves [0, S - 1].
        DTypeError: ``logits`` are not floating or ``tokens`` not int64.
        LayoutError: Columns or ``tokens`` are not contiguous.
        DataError: A token of the window on the CPU is out of range.
    """
    op = "causal_cross_entropy_forward"
    _check(op, logits, tokens, "tokens")
    _check_window(op, logits, tokens, loss_start, loss_end)
    end = max(loss_start, loss_end)
    return _forward(op, logits[loss_start:end], tokens[loss_start + 1 : end + 1], None, stream)


def causal_cross_entropy_backward(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    loss_start: int,
    loss_end: int,
    grad_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Compute the gradient of ``grad_scale`` times the summed next-token loss of a window.

    Args:
        logits: [S, V] fp32, fp16 or bf16; row p predicts ``tokens[p + 1]``.
        tokens: [S] int64, contiguous.
        loss_start: First position that counts.
        loss_end: One past the last position that counts, at most S - 1.
        grad_scale: As in :func:`cross_entropy_backward`.
        out: Where to write, [S, V]; may be ``logits`` itself.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        grad_logits [S, V]; zeros outside the window.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or the window leaves [0, S - 1].
        DTypeError: ``logits`` are not floating or ``tokens`` not int64.
        LayoutError: Columns or ``tokens`` are not contiguous.
        DataError: A token of the window on the CPU is out of range.
    """
    op = "causal_cross_entropy_backward"
    _check(op, logits, tokens, "tokens")
    _check_window(op, logits, tokens, loss_start, loss_end)
    window = (loss_start, loss_end)
    return _gradient(op, logits, tokens[1:], grad_scale, None, out, stream, window)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    grad_scale: float | torch.Tensor = 1.0,
    chunk_rows: int = 256,
    need_grad: bool = True,
    softcap: float = 0.0,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute cross entropy of ``hidden @ weight.T`` and its gradient, without all the logits.

    One buffer of ``chunk_rows`` rows of logits is reused: a product fills it, one kernel turns it
    into its own gradient and yields the losses, a product reads it.

    Args:
        hidden: [n, H] fp32, fp16 or bf16.
        weight: [V, H] of the same dtype, frozen: it gets no gradient.
        targets: [n] int64 in [0, V), or ``ignore_index``; contiguous.
        ignore_index: Target of rows to leave out.
        grad_scale: As in :func:`cross_entropy_backward`.
        chunk_rows: Most rows of logits that exist at a time.
        need_grad: Whether to compute the gradient.
        softcap: c of logits ``c * tanh(logit / c)``, which then are what the loss is of; 0 for none.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        The summed loss (fp32) and the number of counted rows (int64), both of shape (), and the
        gradient of ``grad_scale`` times the loss with respect to ``hidden`` [n, H], or None.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or ``chunk_rows`` is not positive.
        ConfigError: ``softcap`` is negative or not a number.
        DTypeError: Arrays are not floating, not of one dtype, or ``targets`` not int64.
        LayoutError: ``targets`` is not contiguous.
        DataError: A target on the CPU is out of range.

    Numerics: logits and their gradient are rounded to the dtype of ``hidden`` between kernels; sums
    are fp32.
    """
    op = "linear_cross_entropy"
    _check_linear(op, hidden, weight, targets, chunk_rows)
    checks.check_softcap(op, softcap)
    _check_targets_on_cpu(op, targets, weight.shape[0], ignore_index)
    n_rows, n_cols = hidden.shape[0], weight.shape[0]
    step = _even_step(n_rows, chunk_rows)
    buffer = _launch.empty((step, n_cols), hidden.dtype, hidden)
    losses = _launch.empty((n_rows,), torch.float32, hidden)
    grad_hidden = _launch.empty(hidden.shape, hidden.dtype, hidden) if need_grad else None
    scale, stride_scale = _scale_storage(op, grad_scale, hidden)
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        logits = buffer[: rows.stop - start]
        matmul(hidden[rows], weight, trans_b=True, out=logits, stream=stream)
        if grad_hidden is None:
            _launch_loss(op, logits, targets[rows], losses[rows], ignore_index, stream, softcap)
            continue
        chunk_scale = scale[rows] if isinstance(scale, torch.Tensor) and stride_scale else scale
        given = (chunk_scale, stride_scale)
        _launch_gradient(
            op, logits, targets[rows], logits, losses[rows], given, ignore_index, None, stream,
            softcap,
        )  # fmt: skip
        matmul(logits, weight, out=grad_hidden[rows], stream=stream)
    loss_sum, counted = _launch_sum(op, losses, targets, ignore_index, stream)
    return loss_sum, counted, grad_hidden


def _even_step(n_rows: int, most: int) -> int:
    """Return a chunk size that splits the rows evenly, rather than into full chunks and a rest."""
    chunks = max(_launch.cdiv(n_rows, most), 1)
    return max(_launch.cdiv(n_rows, chunks), 1)


def _forward(
    op: str, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int | None, stream: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = _launch.empty((logits.shape[0],), torch.float32, logits)
    _launch_loss(op, logits, targets, losses, ignore_index, stream)
    return _launch_sum(op, losses, targets, ignore_index, stream)


def _gradient(
    op: str,
    logits: torch.Tensor,
    targets: torch.Tensor,
    grad_scale: float | torch.Tensor,
    ignore_index: int | None,
    out: torch.Tensor | None,
    stream: Any,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:
    scale = _scale_storage(op, grad_scale, logits)
    if out is None:
        out = _launch.empty(logits.shape, logits.dtype, logits)
    _launch.check_storage(op, out=out)
    checks.check_shape(op, "out", out, tuple(logits.shape), "it has the shape of logits")
    checks.check_same_dtype(op, logits=logits, out=out)
    _check_columns(op, "out", out)
    _launch.prepare(op, logits, targets, out)
    _launch_gradient(op, logits, targets, out, None, scale, ignore_index, window, stream)
    return out


def _launch_loss(
    op: str,
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    ignore_index: int | None,
    stream: Any,
    softcap: float = 0.0,
) -> None:
    n_rows, n_cols = logits.shape
    if n_rows == 0:
        return
    _launch.launch(
        _kernels._cross_entropy_loss_kernel,
        (n_rows,),
        op=op,
        stream=stream,
        reads=(logits, targets),
        writes=(losses,),
        logits_ptr=logits,
        targets_ptr=targets,
        losses_ptr=losses,
        stride_row=logits.stride(0),
        n_cols=n_cols,
        ignore_index=0 if ignore_index is None else ignore_index,
        softcap=float(softcap),
        HAS_IGNORE=ignore_index is not None,
        HAS_CAP=softcap > 0,
        **_row_tile(n_cols),
    )


def _launch_gradient(
    op: str,
    logits: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    losses: torch.Tensor | None,
    scale: tuple[float | torch.Tensor, int],
    ignore_index: int | None,
    window: tuple[int, int] | None,
    stream: Any,
    softcap: float = 0.0,
) -> None:
    n_rows, n_cols = logits.shape
    if n_rows == 0:
        return
    value, stride_scale = scale
    scale_ptr = value if isinstance(value, torch.Tensor) else None
    first_row, end_row = (0, n_rows) if window is None else window
    _launch.launch(
        _kernels._cross_entropy_gradient_kernel,
        (n_rows,),
        op=op,
        stream=stream,
        reads=(logits, targets) if scale_ptr is None else (logits, targets, scale_ptr),
        writes=(out,) if losses is None else (out, losses),
        logits_ptr=logits,
        targets_ptr=targets,
        grad_ptr=out,
        losses_ptr=losses,
        scale_ptr=scale_ptr,
        stride_row=logits.stride(0),
        stride_grad_row=out.stride(0),
        stride_scale=stride_scale,
        n_cols=n_cols,
        first_row=first_row,
        end_row=end_row,
        ignore_index=0 if ignore_index is None else ignore_index,
        scale=1.0 if isinstance(value, torch.Tensor) else float(value),
        softcap=float(softcap),
        HAS_IGNORE=ignore_index is not None,
        HAS_SCALE_PTR=scale_ptr is not None,
        HAS_CAP=softcap > 0,
        WITH_LOSS=losses is not None,
        **_row_tile(n_cols),
    )


def _launch_sum(
    op: str, losses: torch.Tensor, targets: torch.Tensor, ignore_index: int | None, stream: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    loss_sum = _launch.empty((), torch.float32, losses)
    counted = _launch.empty((), torch.int64, losses)
    _launch.launch(
        _kernels._loss_sum_kernel,
        (1,),
        op=op,
        stream=stream,
        reads=(losses, targets),
        writes=(loss_sum, counted),
        losses_ptr=losses,
        targets_ptr=targets,
        loss_sum_ptr=loss_sum,
        counted_ptr=counted,
        n_rows=losses.shape[0],
        ignore_index=0 if ignore_index is None else ignore_index,
        HAS_IGNORE=ignore_index is not None,
        BLOCK=1024,
        num_warps=4,
    )
    return loss_sum, counted


def _scale_storage(
    op: str, grad_scale: float | torch.Tensor, rows: torch.Tensor
) -> tuple[float | torch.Tensor, int]:
    """Return ``grad_scale`` and its stride from row to row, 0 where one value serves all."""
    if not isinstance(grad_scale, torch.Tensor):
        return float(grad_scale), 0
    checks.check_dtype(op, "grad_scale", grad_scale)
    shape = tuple(grad_scale.shape)
    if shape not in ((), (1,), (rows.shape[0],)):
        raise ShapeMismatchError(
            f"{op}: grad_scale has shape {shape}, wanted (), (1,) or ({rows.shape[0]},)",
            "pass one number, or one a row",
        )
    return grad_scale, grad_scale.stride(0) if shape not in ((), (1,)) else 0


def _check(op: str, logits: torch.Tensor, targets: torch.Tensor, name: str = "targets") -> None:
    _launch.check_storage(op, logits=logits, **{name: targets})
    checks.check_ndim(op, "logits", logits, 2)
    _launch.check_floating(op, logits=logits)
    checks.check_dtype(op, name, targets, "int64")
    checks.check_shape(op, name, targets, (logits.shape[0],), "one id a row of logits")
    _check_columns(op, "logits", logits)
    _launch.require_contiguous(op, **{name: targets})
    _launch.prepare(op, logits, targets)


def _check_linear(
    op: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_rows: int
) -> None:
    _launch.check_storage(op, hidden=hidden, weight=weight, targets=targets)
    checks.check_ndim(op, "hidden", hidden, 2)
    checks.check_shape(op, "weight", weight, (-1, hidden.shape[1]), "weight is [V, H]")
    _launch.check_floating(op, hidden=hidden, weight=weight)
    checks.check_same_dtype(op, hidden=hidden, weight=weight)
    checks.check_dtype(op, "targets", targets, "int64")
    checks.check_shape(op, "targets", targets, (hidden.shape[0],), "one target a row")
    checks.check_positive(op, "chunk_rows", chunk_rows)
    _launch.require_contiguous(op, targets=targets)
    _launch.prepare(op, hidden, weight, targets)


def _check_columns(op: str, name: str, rows: torch.Tensor) -> None:
    if rows.numel() > 1 and rows.shape[1] > 1 and rows.stride(1) != 1:
        raise LayoutError(
            f"{op}: {name} has strides {tuple(rows.stride())}, wanted contiguous columns",
            f"pass {name}.contiguous()",
        )


def _check_window(
    op: str, logits: torch.Tensor, tokens: torch.Tensor, loss_start: int, loss_end: int
) -> None:
    n_rows = logits.shape[0]
    if loss_start < 0 or loss_end > max(n_rows - 1, 0):
        raise ShapeMismatchError(
            f"{op}: the window is [{loss_start}, {loss_end}), wanted it in [0, {n_rows - 1}]",
            "position p predicts token p + 1, so the last position has nothing to predict",
        )
    predicted = tokens[loss_start + 1 : max(loss_start, loss_end) + 1]
    _check_targets_on_cpu(op, predicted, logits.shape[1], None, loss_start)


def _check_targets_on_cpu(
    op: str, targets: torch.Tensor, n_cols: int, ignore_index: int | None, first_row: int = 0
) -> None:
    """Refuse a target out of range where the host can read it without waiting for a device."""
    if targets.device.type != "cpu":
        return
    for row, target in enumerate(targets.tolist(), first_row):
        if target != ignore_index and not 0 <= target < n_cols:
            raise DataError(
                f"{op}: the target of row {row} is {target}, "
                f"wanted 0 to {n_cols - 1} for {n_cols} columns",
                "mark rows to leave out with ignore_index",
            )


def _row_tile(n_cols: int) -> dict[str, int]:
    """Choose the columns a program takes at a time, 32 to a thread in the widest tile.

    Chosen by registers on sm_90 (no spill, four programs a multiprocessor), not yet by timing.
    """
    block = min(_launch.next_power_of_2(max(n_cols, 1)), 8192)
    return {"BLOCK": block, "num_warps": 1 if block <= 256 else 4 if block <= 2048 else 8}
