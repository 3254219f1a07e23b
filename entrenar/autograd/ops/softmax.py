"""Differentiable softmax over the last dimension."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor

__all__ = ["softmax"]


def softmax(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Return ``softmax(scale * x)`` over the last dimension.

    Args:
        x: [rows, n] or [B, rows, n].
        scale: Factor of the scores.
        causal: Row i sees columns up to ``i + n - rows``; a row that sees none gives zeros.
    """
    y = run("softmax_forward", x, scale=scale, causal=causal)
    record("softmax", (x,), y, _backward, saved=(y,), scale=scale)
    return y


def _backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    (y,) = node.saved
    grad = grad.contiguous()
    out = grad if node.grads_owned[0] else None
    return node.call("softmax_backward", grad, y, scale=node.settings["scale"], out=out)
