"""Differentiable products with a frozen 4-bit weight."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Gradient, Node
from entrenar.autograd.ops.gemm import bias_gradient
from entrenar.autograd.ops.shape import reshape
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["nf4_linear"]


def nf4_linear(x: Tensor, weight: NF4Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` with a 4-bit weight, which has no gradient.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [..., out].
    """
    if x.ndim != 2:
        flat = nf4_linear(reshape(x, (-1, x.shape[-1])), weight, bias)
        return reshape(flat, (*x.shape[:-1], weight.shape[0]))
    y = run("nf4_gemm_forward", x, weight, bias=bias)
    record("nf4_linear", (x, bias), y, _backward, weight=weight)
    return y


def _backward(node: Node, grad: torch.Tensor) -> tuple[Gradient, ...]:
    grad = grad.contiguous()
    grad_x = None
    if node.needs[0]:
        grad_x = node.call("nf4_gemm_backward", grad, node.settings["weight"])
    return grad_x, bias_gradient(node, 1, grad)
