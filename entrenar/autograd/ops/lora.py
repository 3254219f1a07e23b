"""The differentiable low-rank update of a frozen linear layer, fused with its product."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import ACCUMULATED, Gradient, Node
from entrenar.autograd.ops.gemm import bias_gradient
from entrenar.autograd.ops.nf4_gemm import decoded
from entrenar.autograd.ops.shape import reshape
from entrenar.autograd.prefetch import DecodeAhead
from entrenar.autograd.tape import record, recording, run
from entrenar.autograd.tensor import Tensor
from entrenar.errors import AutogradError
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["lora_linear"]


def lora_linear(
    x: Tensor,
    weight: Tensor | NF4Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor = 0,
    ahead: DecodeAhead | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias + scale * (dropout(x) @ lora_a.T) @ lora_b.T``.

    Where ``lora_a.grad`` or ``lora_b.grad`` is set, backward adds to that storage directly.

    Args:
        x: [..., in].
        weight: [out, in], frozen; dense or 4-bit.
        lora_a: [r, in].
        lora_b: [out, r], not scaled.
        scale: The adapter's factor.
        bias: [out], or None.
        dropout_p: Share of ``x`` dropped on the way into the adapter.
        seed: Of the dropout mask, which backward draws again; a number, or int64 [1] on the device.
        ahead: Decodes a 4-bit weight ahead of its use, as in :func:`nf4_linear`.

    Returns:
        [..., out].

    Raises:
        AutogradError: The weight requires a gradient.
    """
    if isinstance(weight, Tensor) and recording(weight):
        raise AutogradError(
            "lora_linear: the weight requires a gradient, but an adapter's base is frozen",
            "set requires_grad=False on it",
        )
    if x.ndim != 2:
        flat = lora_linear(
            reshape(x, (-1, x.shape[-1])),
            weight,
            lora_a,
            lora_b,
            scale,
            bias,
            dropout_p,
            seed,
            ahead,
        )
        return reshape(flat, (*x.shape[:-1], weight.shape[0]))
    settings: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "seed": seed}
    drawn = Tensor(seed) if isinstance(seed, torch.Tensor) else None  # so that a write is noticed
    with decoded(ahead, weight, x.data) as w:
        y, s = run("lora_forward", x, w, lora_a, lora_b, bias=bias, **settings)
    record(
        "lora_linear", (x, lora_a, lora_b, bias), y, _backward,
        saved=(x, weight, lora_a, lora_b, s.data, drawn), ahead=ahead, options=settings,
    )  # fmt: skip
    return y


def _backward(node: Node, grad: torch.Tensor) -> tuple[Gradient, ...]:
    x, weight, lora_a, lora_b, s, _ = node.saved
    grad = grad.contiguous()
    out_a, out_b = node.grad_target(1), node.grad_target(2)
    ahead = node.settings["ahead"] if node.needs[0] else None
    with decoded(ahead, weight, grad) as w:
        grad_x, grad_a, grad_b = node.call(
            "lora_backward", grad, x.contiguous(), w, lora_a, lora_b, s,
            need_grad_x=node.needs[0], grad_a_out=out_a, grad_b_out=out_b, **node.settings["options"],
        )  # fmt: skip
    return (
        grad_x,
        grad_a if out_a is None else ACCUMULATED,
        grad_b if out_b is None else ACCUMULATED,
        bias_gradient(node, 3, grad),
    )
