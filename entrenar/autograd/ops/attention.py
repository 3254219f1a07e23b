"""Differentiable attention over packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor, as_storage

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return scaled dot-product attention of grouped heads within each packed segment.

    Args:
        q: [T, Hq, D].
        k: [Tk, Hkv, D]; Hkv divides Hq.
        v: [Tk, Hkv, D].
        cu_seqlens_q: int32 [B + 1], bounds of the segments of ``q``; None is one segment.
        cu_seqlens_k: The same of ``k`` and ``v``; None takes ``cu_seqlens_q``'s meaning.
        scale: Factor of the scores; 1/sqrt(D) where None.
        causal: A query sees keys up to its own position, aligned at the end of the segment.
        window: Where above 0, a query sees only that many keys back.
        softcap: Where above 0, scores s become ``softcap * tanh(s / softcap)``.

    Returns:
        [T, Hq, D]; a row that sees no key gives zeros.
    """
    settings = {
        "cu_seqlens_q": as_storage(cu_seqlens_q),
        "cu_seqlens_k": as_storage(cu_seqlens_k),
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
    }
    out, lse = run("attention_forward", q, k, v, **settings)
    record("attention", (q, k, v), out, _backward, saved=(q, k, v, out, lse.data), **settings)
    return out


def _backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *saved, lse = node.saved
    grads = node.call(
        "attention_backward",
        grad.contiguous(),
        *(t.contiguous() for t in saved),
        lse,
        **node.settings,
    )
    return tuple(g if needed else None for g, needed in zip(grads, node.needs, strict=True))
