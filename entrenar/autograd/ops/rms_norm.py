"""Differentiable root-mean-square normalisation, alone and fused with the residual sum."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor

__all__ = ["rms_norm", "rms_norm_residual"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension.

    Args:
        x: [..., D]; [T, heads, D] normalises each head.
        weight: [D]; its gradient is computed only where it requires one.
        eps: Added to the mean square.
    """
    y, rstd = run("rms_norm_forward", x, weight, eps)
    record("rms_norm", (x, weight), y, _backward, saved=(x, weight, rstd.data))
    return y


def _backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, rstd = node.saved
    return node.call(
        "rms_norm_backward", grad.contiguous(), x.contiguous(), weight, rstd,
        need_grad_weight=node.needs[1],
    )  # fmt: skip


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x + residual)`` and ``x + residual``, in one pass.

    Args:
        x: [T, D].
        residual: [T, D].
        weight: [D].
        eps: Added to the mean square.

    Returns:
        The normalised rows and the sum, which the next residual connection takes.
    """
    y, rstd, total = run("rms_norm_forward", x, weight, eps, residual=residual)
    record(
        "rms_norm_residual", (x, residual, weight), (y, total), _residual_backward,
        saved=(total, weight, rstd.data),
    )  # fmt: skip
    return y, total


def _residual_backward(
    node: Node, grad_y: torch.Tensor | None, grad_total: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if grad_y is None:
        return grad_total, grad_total, None
    total, weight, rstd = node.saved
    grad_x, grad_weight = node.call(
        "rms_norm_backward", grad_y.contiguous(), total, weight, rstd,
        grad_residual=None if grad_total is None else grad_total.contiguous(),
        need_grad_weight=node.needs[2],
    )  # fmt: skip
    return grad_x, grad_x, grad_weight
