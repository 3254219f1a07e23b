"""Views: the same storage in another shape."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.stream import current_stream
from entrenar.autograd.tape import record, wrap
from entrenar.autograd.tensor import Tensor
from entrenar.errors import ShapeMismatchError

__all__ = ["reshape", "transpose"]


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` in another shape: a view where the strides allow it, else a copy.

    Args:
        x: Any shape.
        shape: As many elements; one size may be -1.

    Raises:
        ShapeMismatchError: The numbers of elements differ.
    """
    known = 1
    for size in shape:
        known *= size if size != -1 else 1
    count = x.data.numel()
    open_sizes = list(shape).count(-1)
    fits = known == count if open_sizes == 0 else known > 0 and count % known == 0
    if open_sizes > 1 or not fits:
        raise ShapeMismatchError(
            f"reshape: shape {x.shape} does not fit into {tuple(shape)}", "keep the element count"
        )
    stream = current_stream(x.device)
    x.ready_on(stream)
    if x.data.is_contiguous():
        y = x.view(x.data.view(shape))
    else:
        y = wrap(x.data.contiguous().view(shape), stream)
    record("reshape", (x,), y, _reshape_backward, shape=x.shape)
    return y


def _reshape_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    return grad.contiguous().view(node.settings["shape"])


def transpose(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Return a view of ``x`` with two dimensions swapped.

    Args:
        x: At least one dimension.
        dim0: The one, negative counting from the end.
        dim1: The other.

    Raises:
        ShapeMismatchError: There is no such dimension.
    """
    for dim in (dim0, dim1):
        if not -x.ndim <= dim < x.ndim:
            raise ShapeMismatchError(f"transpose: shape {x.shape} has no dimension {dim}", "")
    y = x.view(x.data.transpose(dim0, dim1))
    record("transpose", (x,), y, _transpose_backward, dims=(dim0, dim1))
    return y


def _transpose_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    return grad.transpose(*node.settings["dims"])
