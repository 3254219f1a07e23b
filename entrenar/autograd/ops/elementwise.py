"""Differentiable sums, products, scaling and casts, with operands broadcast against each other."""

from __future__ import annotations

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.stream import current_stream
from entrenar.autograd.tape import overwriting, record, recording, run
from entrenar.autograd.tensor import Tensor
from entrenar.errors import AutogradError, ShapeMismatchError

__all__ = ["add", "add_", "bias_add", "cast", "multiply", "scale"]


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + b``, shapes broadcast as NumPy does.

    Raises:
        ShapeMismatchError: The shapes do not broadcast.
        DTypeError: The dtypes differ.
    """
    y = run("add", *_broadcast("add", a, b))
    record("add", (a, b), y, _add_backward)
    return y


def _add_backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if edge is None else _reduce(node, grad, edge.shape) for edge in node.edges)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a * b``, shapes broadcast as NumPy does.

    Raises:
        ShapeMismatchError: The shapes do not broadcast.
        DTypeError: The dtypes differ.
    """
    y = run("multiply", *_broadcast("multiply", a, b))
    saved = (b if a.requires_grad else None, a if b.requires_grad else None)
    record("multiply", (a, b), y, _multiply_backward, saved=saved)
    return y


def _multiply_backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad = grad.contiguous()
    results: list[torch.Tensor | None] = []
    for edge, other in zip(node.edges, node.saved, strict=True):
        if edge is None:
            results.append(None)
            continue
        product = node.call("multiply", grad, other.expand(grad.shape).contiguous())
        results.append(_reduce(node, product, edge.shape))
    return tuple(results)


def scale(x: Tensor, s: float) -> Tensor:
    """Return ``s * x`` for a plain number."""
    y = run("scale", x, s)
    record("scale", (x,), y, _scale_backward, s=s)
    return y


def _scale_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    grad = grad.contiguous()
    return node.call("scale", grad, node.settings["s"], out=grad if node.grads_owned[0] else None)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """Return ``x + bias``: x [T, n], bias [n]."""
    y = run("bias_add", x, bias)
    record("bias_add", (x, bias), y, _bias_add_backward)
    return y


def _bias_add_backward(node: Node, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_bias = node.call("bias_backward", grad.contiguous()) if node.needs[1] else None
    return (grad if node.needs[0] else None), grad_bias


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` rounded to another dtype; its gradient is cast back."""
    y = run("cast", x, dtype)
    record("cast", (x,), y, _cast_backward, dtype=x.dtype)
    return y


def _cast_backward(node: Node, grad: torch.Tensor) -> torch.Tensor:
    return node.call("cast", grad.contiguous(), node.settings["dtype"])


def add_(x: Tensor, other: Tensor) -> Tensor:
    """Add to ``x`` in place and return it.

    On a tape that follows one of the two, ``x`` must have been made by one of its ops, and no
    backward may read it: the tape knows both. Without a tape, or under ``no_grad``, it just writes;
    a backward that still needs the old values then raises.

    Raises:
        AutogradError: The tape cannot allow it.
        ShapeMismatchError: The shapes differ.
        DTypeError: The dtypes differ.
    """
    follow = recording(x, other)
    if follow and x.slot is None:
        raise AutogradError(
            f"add_: a tensor of shape {x.shape} that this tape did not make cannot be written in "
            "place",
            "use add, or call it under no_grad()",
        )
    with overwriting("add_", (x,), beside=(other,)):
        _in_place("add_", x, other)
    if follow:
        record("add_", (x, other), x, _add_backward)
    return x


def _in_place(function: str, x: Tensor, other: Tensor) -> None:
    if x.data.is_contiguous():
        run(function, x, other)
        return
    # a kernel writes contiguous storage; the strided destination gets its result by a copy
    stream = current_stream(x.device)
    x.state.writing(stream, x.data)
    whole = Tensor(x.data.contiguous())
    run(function, whole, other)
    x.data.copy_(whole.data)
    x.written(stream)


def _broadcast(op: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape == b.shape:
        return a, b
    shape = []
    longest = max(a.ndim, b.ndim)
    padded = [(1,) * (longest - t.ndim) + t.shape for t in (a, b)]
    for m, n in zip(*padded, strict=True):
        if m != n and 1 not in (m, n):
            raise ShapeMismatchError(
                f"{op}: shapes {a.shape} and {b.shape} do not broadcast",
                "sizes must be equal or 1, counted from the last dimension",
            )
        shape.append(n if m == 1 else m)
    return a.view(a.data.expand(shape)), b.view(b.data.expand(shape))


def _reduce(node: Node, grad: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Sum ``grad`` over the dimensions along which ``shape`` was broadcast."""
    if tuple(grad.shape) == shape:
        return grad
    padded = (1,) * (grad.ndim - len(shape)) + shape
    summed = [d for d in range(grad.ndim) if padded[d] == 1 and grad.shape[d] != 1]
    kept = [d for d in range(grad.ndim) if d not in summed]
    columns = 1
    for d in kept:
        columns *= grad.shape[d]
    rows = 1
    for d in summed:
        rows *= grad.shape[d]
    flat = grad.permute(*summed, *kept).contiguous().view(rows, columns)
    return node.call("bias_backward", flat).view(shape)
