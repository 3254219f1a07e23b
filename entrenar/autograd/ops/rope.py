"""Differentiable rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.stream import Stream, current_stream
from entrenar.autograd.tape import overwriting, record, run, wrap
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
        inplace: Rotate the storage of ``q`` and ``k`` themselves, which then are the results.

    Returns:
        The rotated queries and keys.

    Raises:
        AutogradError: ``inplace`` with a leaf that requires a gradient, with storage from outside of
            the tape, or with values that another op's backward reads.
    """
    stream = current_stream(q.device)
    for name, x in (("q", q), ("k", k)):
        if inplace and x.requires_grad and x.is_leaf:
            raise AutogradError(
                f"rope: {name} is a leaf that requires a gradient and cannot be rotated in place",
                "pass inplace=False",
            )
    own = [x for x in (q, k) if inplace and x.data.is_contiguous()]
    turned = [x.view(x.data) if x in own else _copy(x, stream) for x in (q, k)]
    tables = {"cos": as_storage(cos), "sin": as_storage(sin), "positions": as_storage(positions)}
    with overwriting("rope", own, beside=(q, k)):
        run("rope_forward", *turned, **tables)
    record("rope", (q, k), turned, _backward, **tables)
    for x, y in zip((q, k), turned, strict=True):
        if x in own:
            x.slot, x.requires_grad = y.slot, y.requires_grad
    return turned[0], turned[1]


def _copy(x: Tensor, stream: Stream) -> Tensor:
    x.ready_on(stream)
    return wrap(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x.data), stream)


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
