"""Activation checkpointing: forget what a function computed, compute it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from entrenar.autograd.node import Node
from entrenar.autograd.tape import Probe, Tape, activated, active
from entrenar.autograd.tensor import Tensor
from entrenar.errors import AutogradError

__all__ = ["checkpoint"]


def checkpoint(fn: Callable[..., Any], *xs: Tensor) -> Any:
    """Return ``fn(*xs)``, saving only ``xs``; backward runs ``fn`` again, on the stream it ran on.

    Parameters that ``fn`` reads, in whatever way, receive their gradients too, also where none of
    ``xs`` requires one. Checkpoints nest. Gradients are those without a checkpoint, to the bit.

    Args:
        fn: Maps tensors to a tensor or a tuple of tensors; it computes the same each time it is
            called. Ops draw no hidden random numbers: dropout has its seed as an argument.
        *xs: Its inputs, which it must not write to. Every tensor made on the tape that ``fn`` reads
            must be among them.

    Raises:
        AutogradError: ``fn`` reads a tensor made on the tape that is not among ``xs``, writes to one
            of ``xs``, returns something else than tensors, or other tensors when run again.
    """
    for i, x in enumerate(xs):
        if not isinstance(x, Tensor):
            raise AutogradError(
                f"checkpoint: argument {i} is of type {type(x).__name__}, wanted a Tensor",
                "bind what is not a tensor with functools.partial",
            )
    tape = active()
    if not isinstance(tape, Tape):
        return fn(*xs)
    probe = Probe(tape.token)
    versions = [x.version for x in xs]
    with activated(probe):
        result = fn(*(_shadow(x) for x in xs))
    outputs = _as_tuple(result)
    for i, (x, version) in enumerate(zip(xs, versions, strict=True)):
        if x.version != version:
            raise AutogradError(
                f"checkpoint: the function wrote to argument {i} of shape {x.shape} in place, which "
                "backward would have to give it again",
                "let it write to a copy",
            )
    made = tuple(y.view(y.data) for y in outputs)
    if probe.wanted or any(x.requires_grad for x in xs):
        # a trainable parameter inside is reason enough, so the node is added even with frozen inputs
        saved = (*xs, *probe.read.values())
        tape.add("checkpoint", xs, made, saved, _backward, {"fn": fn})
    return made if isinstance(result, tuple) else made[0]


def _shadow(x: Tensor) -> Tensor:
    return x.view(x.data, requires_grad=x.requires_grad)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    outputs = result if isinstance(result, tuple) else (result,)
    strange = [type(y).__name__ for y in outputs if not isinstance(y, Tensor)]
    if strange or not outputs:
        raise AutogradError(
            f"checkpoint: the function returned a {strange[0] if strange else 'tuple of nothing'}, "
            "wanted Tensors",
            "return a Tensor or a tuple of Tensors; compute numbers from them outside",
        )
    return outputs


def _backward(node: Node, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    fn = node.settings["fn"]
    inputs = tuple(
        Tensor(x, requires_grad=needed)
        for x, needed in zip(node.saved[: len(node.needs)], node.needs, strict=True)
    )
    # nothing outside holds what is made here, so backward may overwrite it
    inner = Tape(node.stream, overwrite_activations=True)
    with inner:
        outputs = _as_tuple(fn(*inputs))
    first = [(slot.shape, slot.dtype) for slot in node.outputs]
    again = [(output.shape, output.dtype) for output in outputs]
    if first != again:
        raise AutogradError(
            f"checkpoint: the function returned {_forms(again)} when run again, {_forms(first)} the "
            "first time",
            "make it depend on its arguments alone",
        )
    seeds = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.slot is not None
    ]
    passed = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.slot is None and output.requires_grad
    ]
    del outputs, grads
    for leaf, grad in passed:
        leaf.grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
    if seeds:
        inner.backward([output for output, _ in seeds], [grad for _, grad in seeds])
    return tuple(x.grad for x in inputs)


def _forms(forms: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    named = ", ".join(f"{str(d).removeprefix('torch.')} {s}" for s, d in forms)
    return f"{len(forms)} tensors ({named})"
