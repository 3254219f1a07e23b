"""Differentiable rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.stream import current_stream
from entrenar.autograd.tape import record, run, wrap
from entrenar.autograd.tensor import Tensor, as_storage
from entrenar.errors import AutogradError

__all__ = ["rope"]


def rope(
    q: Tensor, k: Tensor, cos: Any, sin: Any, positions: Any, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate each pair ``(i, i + R/2)`` of ``q`` and ``k`` by the angle of its position.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        cos: [P, R/2] float32, R at most D.
        sin: As ``cos``.
        positions: [T] int32 or int64, each below P.
        inplace: Rotate the storage of ``q`` and ``k`` themselves; they must not be read afterwards,
            and must not be leaves that require a gradient.

    Returns:
        The rotated queries and keys.

    Raises:
        AutogradError: ``inplace`` with a leaf that requires a gradient.
    """
    stream = current_stream(q.device)
    turned = []
    for name, x in (("q", q), ("k", k)):
        x.ready_on(stream)
        if not inplace or not x.data.is_contiguous():
            copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            turned.append(wrap(copy.copy_(x.data), stream))
            continue
        if x.requires_grad and x.is_leaf:
            raise AutogradError(
                f"rope: {name} is a leaf that requires a gradient and cannot be rotated in place",
                "pass inplace=False",
            )
        turned.append(x.view(x.data))
    tables = {"cos": as_storage(cos), "sin": as_storage(sin), "positions": as_storage(positions)}
    run("rope_forward", *turned, **tables)
    for x in turned:
        x.written(stream)
    record("rope", (q, k), turned, _backward, **tables)
    return turned[0], turned[1]


def _backward(node: Node, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    turned = []
    for output, grad in enumerate(grads):
        if grad is None:
            turned.append(node.zeros(output))
        elif node.grads_owned[output] and grad.is_contiguous():
            turned.append(grad)
        else:
            copy = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            turned.append(copy.copy_(grad))
    node.call("rope_backward", *turned, **node.settings)
    return tuple(g if needed else None for g, needed in zip(turned, node.needs, strict=True))
