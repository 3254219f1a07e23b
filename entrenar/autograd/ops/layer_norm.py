"""Differentiable layer normalisation, alone and fused with the residual sum."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor

__all__ = ["layer_norm", "layer_norm_residual"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    Args:
        x: [..., D].
        weight: [D]; its gradient is computed only where it requires one.
        bias: [D] or None; likewise.
        eps: Added to the biased variance.
    """
    y, mean, rstd = run("layer_norm_forward", x, weight, bias, eps)
    record(
        "layer_norm", (x, weight, bias), y, _backward, saved=(x, weight, mean.data, rstd.data),
    )  # fmt: skip
    return y


def _backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, mean, rstd = node.saved
    return node.call(
        "layer_norm_backward", grad.contiguous(), x.contiguous(), weight, mean, rstd,
        need_grad_weight=node.needs[1], need_grad_bias=node.needs[2],
    )  # fmt: skip


def layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``layer_norm(x + residual)`` and ``x + residual``, in one pass.

    Args:
        x: [T, D].
        residual: [T, D].
        weight: [D].
        bias: [D] or None.
        eps: Added to the biased variance.

    Returns:
        The normalised rows and the sum, which the next residual connection takes.
    """
    y, mean, rstd, total = run("layer_norm_forward", x, weight, bias, eps, residual=residual)
    record(
        "layer_norm_residual", (x, residual, weight, bias), (y, total), _residual_backward,
        saved=(total, weight, mean.data, rstd.data),
    )  # fmt: skip
    return y, total


def _residual_backward(
    node: Node, grad_y: torch.Tensor | None, grad_total: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if grad_y is None:
        return grad_total, grad_total, None, None
    total, weight, mean, rstd = node.saved
    grad_x, grad_weight, grad_bias = node.call(
        "layer_norm_backward", grad_y.contiguous(), total, weight, mean, rstd,
        grad_residual=None if grad_total is None else grad_total.contiguous(),
        need_grad_weight=node.needs[2], need_grad_bias=node.needs[3],
    )  # fmt: skip
    return grad_x, grad_x, grad_weight, grad_bias
