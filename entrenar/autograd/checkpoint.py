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
    """Return ``fn(*xs)``, saving only ``xs``; backward runs ``fn`` again.

    Parameters that ``fn`` reads, in whatever way, receive their gradients too, also where none of
    ``xs`` requires one.

    Args:
        fn: Maps tensors to a tensor or a tuple of tensors; it computes the same each time it is
            called, its dropout seeds included.
        *xs: Its inputs. Every tensor made on the tape that ``fn`` reads must be among them.

    Raises:
        AutogradError: ``fn`` reads a tensor made on the tape that is not among ``xs``, returns
            something else than tensors, or returned another number of them when run again.
    """
    tape = active()
    if not isinstance(tape, Tape):
        return fn(*xs)
    probe = Probe()
    with activated(probe):
        result = fn(*(_shadow(x) for x in xs))
    outputs = _as_tuple(result)
    made = tuple(y.view(y.data) for y in outputs)
    if probe.wanted or any(x.requires_grad for x in xs):
        # a trainable parameter inside is reason enough, so the node is added even with frozen inputs
        tape.add("checkpoint", xs, made, xs, _backward, {"fn": fn, "stream": tape.stream})
    return made if isinstance(result, tuple) else made[0]


def _shadow(x: Tensor) -> Tensor:
    return x.view(x.data, requires_grad=x.requires_grad)


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if not isinstance(output, Tensor):
            raise AutogradError(
                f"checkpoint: the function returned a {type(output).__name__}, wanted Tensors", ""
            )
    return outputs


def _backward(node: Node, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    fn = node.settings["fn"]
    inputs = tuple(
        Tensor(x, requires_grad=needed) for x, needed in zip(node.saved, node.needs, strict=True)
    )
    # nothing outside holds what is made here, so backward may overwrite it
    inner = Tape(node.settings["stream"], overwrite_activations=True)
    with inner:
        outputs = _as_tuple(fn(*inputs))
    if len(outputs) != len(grads):
        raise AutogradError(
            f"checkpoint: the function returned {len(outputs)} tensors when run again, "
            f"{len(grads)} the first time",
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
