"""Differentiable products of dense matrices."""

from __future__ import annotations

import torch

from entrenar.autograd.node import ACCUMULATED, Gradient, Node
from entrenar.autograd.ops.shape import reshape
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor
from entrenar.errors import ShapeMismatchError

__all__ = ["linear", "matmul"]


def matmul(
    a: Tensor,
    b: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    precision: str = "ieee",
) -> Tensor:
    """Return ``scale * (op(a) @ op(b)) + bias``, ``op`` transposing the last two axes where asked.

    Args:
        a: [m, k] or [B, m, k] after ``op``; any strides.
        b: [k, n] after ``op``, shared by the batch, or [B, k, n]; any strides.
        trans_a: ``a`` is stored [.., k, m].
        trans_b: ``b`` is stored [.., n, k].
        bias: [n], or None.
        scale: Factor of the product, not of the bias.
        precision: ``"ieee"`` or ``"tf32"``, forward and backward.
    """
    settings = {"trans_a": trans_a, "trans_b": trans_b, "scale": scale, "precision": precision}
    y = run("matmul", a, b, bias=bias, strided=True, **settings)
    record("matmul", (a, b, bias), y, _matmul_backward, saved=(a, b), **settings)
    return y


def _matmul_backward(node: Node, grad: torch.Tensor) -> tuple[Gradient, ...]:
    a, b = node.saved
    trans_a, trans_b = node.settings["trans_a"], node.settings["trans_b"]
    options = {"scale": node.settings["scale"], "precision": node.settings["precision"]}
    grad_a = grad_b = None
    if node.needs[0]:
        grad_a = node.call("matmul", grad, b, trans_b=not trans_b, **options)
        grad_a = grad_a.transpose(-1, -2) if trans_a else grad_a
    if node.needs[1]:
        left, right = a, grad
        if a.ndim == 3 and b.ndim == 2:
            # b is shared by the batch, whose rows then form one long product
            left = a.transpose(-1, -2) if trans_a else a
            left, right = left.reshape(-1, left.shape[-1]), grad.reshape(-1, grad.shape[-1])
            trans_a = False
        grad_b = node.call("matmul", left, right, trans_a=not trans_a, **options)
        grad_b = grad_b.transpose(-1, -2) if trans_b else grad_b
    return grad_a, grad_b, bias_gradient(node, 2, grad)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, precision: str = "ieee"
) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: [..., in].
        weight: [out, in]; frozen or trainable.
        bias: [out], or None.
        precision: ``"ieee"`` or ``"tf32"``, forward and backward.

    Returns:
        [..., out].

    Raises:
        ShapeMismatchError: The shapes do not fit.
    """
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ShapeMismatchError(
            f"linear: x has shape {x.shape} and weight {weight.shape}, wanted [..., in] and [out, in]",
            "",
        )
    if x.ndim != 2:
        flat = linear(reshape(x, (-1, x.shape[-1])), weight, bias, precision)
        return reshape(flat, (*x.shape[:-1], weight.shape[0]))
    y = run("matmul", x, weight, trans_b=True, bias=bias, precision=precision, strided=True)
    saved = (x if weight.requires_grad else None, weight)
    record("linear", (x, weight, bias), y, _linear_backward, saved=saved, precision=precision)
    return y


def _linear_backward(node: Node, grad: torch.Tensor) -> tuple[Gradient, ...]:
    x, weight = node.saved
    precision = node.settings["precision"]
    grad_x: Gradient = None
    grad_weight: Gradient = None
    if node.needs[0]:
        grad_x = node.call("matmul", grad, weight, precision=precision)
    if node.needs[1]:
        out = node.grad_target(1)
        grad_weight = node.call(
            "matmul",
            grad,
            x,
            trans_a=True,
            precision=precision,
            out=out,
            accumulate=out is not None,
        )
        grad_weight = grad_weight if out is None else ACCUMULATED
    return grad_x, grad_weight, bias_gradient(node, 2, grad)


def bias_gradient(node: Node, position: int, grad: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the bias at ``position`` among the inputs, or None if not wanted."""
    if not node.needs[position]:
        return None
    return node.call("bias_backward", grad.reshape(-1, grad.shape[-1]).contiguous())
