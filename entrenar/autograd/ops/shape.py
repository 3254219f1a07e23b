"""Views: the same storage in another shape, parts of it, and the one that has to copy: joining."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.stream import current_stream
from entrenar.autograd.tape import record, wrap
from entrenar.autograd.tensor import Tensor
from entrenar.checks import check_same_dtype
from entrenar.errors import ShapeMismatchError

__all__ = ["concat", "narrow", "reshape", "split", "transpose"]


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
    try:
        y = x.view(x.data.view(shape))
    except RuntimeError:  # these strides have no view of that shape
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
        _dimension("transpose", x, dim)
    y = x.view(x.data.transpose(dim0, dim1))
    record("transpose", (x,), y, _transpose_backward, dims=(dim0, dim1))
    return y


def _transpose_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    return grad.transpose(*node.settings["dims"])


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a view of ``length`` places of one dimension, from ``start`` on.

    Its gradient is one of all of ``x``, zero elsewhere; to take all of ``x`` apart, :func:`split` needs no
    such zeros.

    Args:
        x: At least one dimension.
        dim: The dimension, negative counting from the end.
        start: The first place.
        length: How many; 0 is allowed.

    Raises:
        ShapeMismatchError: There is no such dimension, or it has no such places.
    """
    dim = _dimension("narrow", x, dim)
    if start < 0 or length < 0 or start + length > x.shape[dim]:
        raise ShapeMismatchError(
            f"narrow: shape {x.shape} has no places {start} to {start + length} in dimension {dim}",
            "start and length must lie within it",
        )
    y = x.view(x.data.narrow(dim, start, length))
    record("narrow", (x,), y, _narrow_backward, shape=x.shape, dim=dim, start=start)
    return y


def _narrow_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    dim, start = node.settings["dim"], node.settings["start"]
    whole = torch.zeros(node.settings["shape"], dtype=grad.dtype, device=grad.device)
    whole.narrow(dim, start, grad.shape[dim]).copy_(grad)
    return whole


def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> tuple[Tensor, ...]:
    """Return views of ``x``, which lie one after another along one dimension.

    Args:
        x: At least one dimension.
        sizes: Size of each part; together that of the dimension.
        dim: The dimension, negative counting from the end.

    Raises:
        ShapeMismatchError: There is no such dimension, or the sizes do not add up to it.
    """
    dim = _dimension("split", x, dim)
    sizes = tuple(sizes)
    if not sizes or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        raise ShapeMismatchError(
            f"split: sizes {sizes} do not add up to dimension {dim} of shape {x.shape}", ""
        )
    parts = tuple(x.view(part) for part in x.data.split(sizes, dim))
    record("split", (x,), parts, _split_backward, shape=x.shape, sizes=sizes, dim=dim)
    return parts


def _split_backward(node: Node, *grads: torch.Tensor | None) -> torch.Tensor:
    settings, slot = node.settings, node.outputs[0]
    whole = torch.empty(settings["shape"], dtype=slot.dtype, device=slot.device)
    for part, grad in zip(whole.split(settings["sizes"], settings["dim"]), grads, strict=True):
        part.zero_() if grad is None else part.copy_(grad)
    return whole


def concat(xs: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Return tensors joined along one dimension, in new storage; their gradients are views.

    Args:
        xs: At least one tensor, alike in dtype, device and all other dimensions.
        dim: The dimension, negative counting from the end.

    Raises:
        ShapeMismatchError: There is nothing to join, no such dimension, or shapes that do not fit.
        DTypeError: The dtypes differ.
    """
    xs = tuple(xs)
    if not xs:
        raise ShapeMismatchError("concat: no tensors, wanted at least one", "")
    first = xs[0]
    dim = _dimension("concat", first, dim)
    for x in xs:
        if x.ndim != first.ndim or _without(x.shape, dim) != _without(first.shape, dim):
            raise ShapeMismatchError(
                f"concat: shapes {first.shape} and {x.shape} differ elsewhere than in dimension {dim}",
                "",
            )
    check_same_dtype("concat", **{f"xs[{i}]": x for i, x in enumerate(xs)})
    stream = current_stream(first.device)
    sizes = tuple(x.shape[dim] for x in xs)
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    for part, x in zip(whole.split(sizes, dim), xs, strict=True):
        x.ready_on(stream)
        part.copy_(x.data)
    y = wrap(whole, stream)
    record("concat", xs, y, _concat_backward, sizes=sizes, dim=dim)
    return y


def _concat_backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    parts = grad.split(node.settings["sizes"], node.settings["dim"])
    return tuple(g if needed else None for g, needed in zip(parts, node.needs, strict=True))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _dimension(op: str, x: Tensor, dim: int) -> int:
    """Return ``dim`` counted from the front."""
    if not -x.ndim <= dim < x.ndim:
        raise ShapeMismatchError(f"{op}: shape {x.shape} has no dimension {dim}", "")
    return dim % x.ndim
