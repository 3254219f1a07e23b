"""Differentiable losses: cross entropy of logits, and of a projection that never forms them all."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, recording, run
from entrenar.autograd.tensor import Tensor, as_storage
from entrenar.errors import AutogradError

__all__ = ["causal_cross_entropy", "cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor, targets: Any, ignore_index: int = -100, counted: int | None = None
) -> tuple[Tensor, int]:
    """Return the summed cross entropy of the rows that count, and their number.

    On a tape with ``overwrite_activations`` the gradient takes the place of the logits.

    Args:
        logits: [n, V].
        targets: [n] int64.
        ignore_index: Target of a row that does not count.
        counted: The number of counting rows where the caller knows it, which on a GPU saves a wait.

    Returns:
        The sum, float32 of shape (), and the number of rows.
    """
    targets = as_storage(targets)
    loss, rows = run("cross_entropy_forward", logits, targets, ignore_index=ignore_index)
    record(
        "cross_entropy", (logits,), loss, _backward, saved=(logits,),
        function="cross_entropy_backward", args=(targets,), options={"ignore_index": ignore_index},
    )  # fmt: skip
    return loss, _count(rows, counted)


def causal_cross_entropy(
    logits: Tensor, tokens: Any, loss_start: int, loss_end: int, counted: int | None = None
) -> tuple[Tensor, int]:
    """Return the summed next-token cross entropy of positions in a window, and their number.

    Args:
        logits: [S, V]; row p predicts ``tokens[p + 1]``.
        tokens: [S] int64.
        loss_start: First position that counts.
        loss_end: One past the last.
        counted: As in :func:`cross_entropy`.
    """
    args = (as_storage(tokens), loss_start, loss_end)
    loss, rows = run("causal_cross_entropy_forward", logits, *args)
    record(
        "causal_cross_entropy", (logits,), loss, _backward, saved=(logits,),
        function="causal_cross_entropy_backward", args=args, options={},
    )  # fmt: skip
    return loss, _count(rows, counted)


def _backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    (logits,) = node.saved
    settings = node.settings
    out = logits if logits.is_contiguous() and node.may_overwrite(0) else None
    # the incoming gradient stays on the device
    return node.call(
        settings["function"], logits.contiguous(), *settings["args"],
        grad_scale=1.0 if node.unit else grad, out=out, **settings["options"],
    )  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Any,
    ignore_index: int = -100,
    grad_scale: float | torch.Tensor = 1.0,
    chunk_rows: int = 256,
    counted: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, int]:
    """Return the summed cross entropy of ``hidden @ weight.T`` in chunks of rows, and the row count.

    The gradient of ``hidden`` is computed in the same pass, so the logits of more than one chunk
    never exist.

    Args:
        hidden: [n, H].
        weight: [V, H], frozen.
        targets: [n] int64.
        ignore_index: Target of a row that does not count.
        grad_scale: Factor of the gradient, not of the loss: 1/rows for a mean. A number or a
            float32 [1].
        chunk_rows: Rows whose logits exist at once.
        counted: As in :func:`cross_entropy`.
        softcap: c of logits ``c * tanh(logit / c)``, which then are what the loss is of; 0 for none.

    Raises:
        AutogradError: ``weight`` requires a gradient.
    """
    if recording(weight):
        raise AutogradError(
            "linear_cross_entropy: the weight requires a gradient, but is taken as frozen",
            "use linear and cross_entropy to train it",
        )
    targets = as_storage(targets)
    loss, rows, grad_hidden = run(
        "linear_cross_entropy", hidden, weight, targets, ignore_index=ignore_index,
        grad_scale=grad_scale, chunk_rows=chunk_rows, need_grad=recording(hidden), softcap=softcap,
    )  # fmt: skip
    saved = (None if grad_hidden is None else grad_hidden.data,)
    record("linear_cross_entropy", (hidden,), loss, _linear_backward, saved=saved)
    return loss, _count(rows, counted)


def _linear_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    (grad_hidden,) = node.saved
    if node.unit:
        return grad_hidden
    return node.call("scale", grad_hidden, node.scalar(grad))


def _count(rows: Any, counted: int | None) -> int:
    if counted is not None:
        return counted
    return int(rows.item())
