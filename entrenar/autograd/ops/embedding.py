"""Differentiable row lookup."""

from __future__ import annotations

from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor, as_storage

__all__ = ["embedding", "take_rows"]


def embedding(ids: Any, weight: Tensor) -> Tensor:
    """Return ``weight[ids]``; an id used twice receives the sum of both gradients.

    Args:
        ids: [T] int64 or int32.
        weight: [V, H]; frozen or trainable.

    Returns:
        [T, H].
    """
    return _take("embedding", ids, weight)


def take_rows(x: Tensor, index: Any) -> Tensor:
    """Return the rows of ``x`` at ``index``, such as those that carry loss.

    Args:
        x: [T, H].
        index: [n] int64 or int32; a row may be taken more than once.

    Returns:
        [n, H].
    """
    return _take("take_rows", index, x)


def _take(op: str, ids: Any, table: Tensor) -> Tensor:
    ids = as_storage(ids)
    y = run("embedding_forward", ids, table)
    record(op, (table,), y, _backward, ids=ids, n_rows=table.shape[0])
    return y


def _backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    return node.call(
        "embedding_backward", grad.contiguous(), node.settings["ids"], node.settings["n_rows"]
    )
