"""Differentiable activations: the gated SiLU of Llama's MLP, SiLU, GELU and ReLU."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor

__all__ = ["gelu", "relu", "silu", "swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``; backward recomputes the sigmoid.

    On a tape with ``overwrite_activations`` the gradients take the place of ``gate`` and ``up``.

    Args:
        gate: Any shape.
        up: Shape and dtype of ``gate``.
    """
    y = run("swiglu_forward", gate, up)
    record("swiglu", (gate, up), y, _swiglu_backward, saved=(gate, up))
    return y


def _swiglu_backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate, up = node.saved
    inplace = gate.is_contiguous() and up.is_contiguous() and node.may_overwrite(0, 1)
    grad_gate, grad_up = node.call(
        "swiglu_backward", grad.contiguous(), gate.contiguous(), up.contiguous(), inplace=inplace
    )
    return (grad_gate if node.needs[0] else None), (grad_up if node.needs[1] else None)


def silu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)``."""
    y = run("silu_forward", x)
    record("silu", (x,), y, _pointwise_backward, saved=(x,), function="silu_backward", options={})
    return y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU, by erf or, with ``approximate="tanh"``, by tanh."""
    options = {"approximate": approximate}
    y = run("gelu_forward", x, approximate=approximate)
    record(
        "gelu", (x,), y, _pointwise_backward, saved=(x,), function="gelu_backward", options=options
    )
    return y


def relu(x: Tensor) -> Tensor:
    """Return ``max(x, 0)``; the gradient at 0 is 0."""
    y = run("relu_forward", x)
    record("relu", (x,), y, _pointwise_backward, saved=(x,), function="relu_backward", options={})
    return y


def _pointwise_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    (x,) = node.saved
    return node.call(
        node.settings["function"], grad.contiguous(), x.contiguous(), **node.settings["options"]
    )
