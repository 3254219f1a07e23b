"""The walk of a tape in reverse: check everything first, then run each node once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from entrenar.autograd.node import ACCUMULATED, Edge, Node, storage_address
from entrenar.autograd.stream import Stream, current_stream
from entrenar.autograd.tensor import Hook, Slot, Tensor
from entrenar.errors import AutogradError
from entrenar.optable import call
from entrenar.optable.storage import state_of

__all__ = ["walk"]

Seed = tuple[Slot, torch.Tensor, bool]
# Gradients of leaves with hooks, gathered until the outermost backward has run all ops.
_HOOKED: ContextVar[dict[Tensor, Slot] | None] = ContextVar("entrenar_hooked", default=None)


def walk(nodes: dict[int, Node], seeds: Sequence[Seed], *, retain: bool, overwrite: bool) -> None:
    """Run backward from ``seeds`` over ``nodes``, which are in execution order.

    Execution order is a topological order, so when a node is reached every consumer of its outputs
    has added its share.

    Args:
        nodes: Recorded ops by serial number; consumed ones are removed unless ``retain``.
        seeds: (slot, gradient, whether it is the implicit 1) of each tensor to start from.
        retain: Keep what was saved.
        overwrite: Backward functions may overwrite dead activations.

    Raises:
        AutogradError: Part of the graph was freed, or a saved tensor modified in place; raised
            before any gradient changes.
    """
    plan = _plan(nodes, [slot for slot, _, _ in seeds])
    home = current_stream(seeds[0][0].device) if seeds else current_stream("cpu")
    others = {node.stream for _, node in plan} - {home}
    for stream in others:
        stream.wait_stream(home)
    for slot, grad, _ in seeds:
        _add_to_slot(slot, grad, owned=False, stream=home)
    with _gathering(home):
        _run_all(nodes, plan, seeds, retain=retain, overwrite=overwrite)
    for stream in others:
        home.wait_stream(stream)
    if others:
        _keep_for(home, plan)


@contextlib.contextmanager
def _gathering(home: Stream) -> Iterator[None]:
    """Run the hooks of leaves behind the block, where it is not inside another backward's."""
    if _HOOKED.get() is not None:
        yield
        return
    hooked: dict[Tensor, Slot] = {}
    token = _HOOKED.set(hooked)
    try:
        yield
    finally:
        _HOOKED.reset(token)
    for leaf, slot in hooked.items():
        if slot.grad is not None:
            state_of(slot.grad).reading(home, slot.grad)
            grad = run_hooks(f"leaf {leaf.name}".rstrip(), leaf.hooks, slot.grad)
            owned = slot.owned and grad is slot.grad
            _add_to_leaf(leaf, grad, owned=owned, stream=home)


def _run_all(
    nodes: dict[int, Node],
    plan: Sequence[tuple[int, Node]],
    seeds: Sequence[Seed],
    *,
    retain: bool,
    overwrite: bool,
) -> None:
    unit = next((grad for _, grad, implicit in seeds if implicit and len(seeds) == 1), None)
    try:
        for serial, node in plan:
            _run(node, unit, retain=retain, overwrite=overwrite)
            if not retain:
                node.release()
                del nodes[serial]
    finally:
        for _, node in plan:
            for slot in node.outputs:
                slot.grad = None


def run_hooks(of: str, hooks: Sequence[Hook], grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient that a tensor's hooks make of ``grad``.

    Raises:
        AutogradError: One returned something of another form.
    """
    for hook in hooks:
        result = hook(grad)
        if result is None:
            continue
        wanted = (tuple(grad.shape), grad.dtype, grad.device)
        got = (
            (tuple(result.shape), result.dtype, result.device)
            if isinstance(result, torch.Tensor)
            else (type(result).__name__,)
        )
        if got != wanted:
            raise AutogradError(
                f"a hook on the gradient of {of} returned {' '.join(map(str, got))}, wanted "
                f"{' '.join(map(str, wanted))}",
                "return torch storage of the form it was given, or None",
            )
        grad = result
    return grad


def _keep_for(home: Stream, plan: Sequence[tuple[int, Node]]) -> None:
    """Keep leaf gradients that side streams allocated alive for the work of the home stream."""
    leaves = {edge for _, node in plan for edge in node.edges if isinstance(edge, Tensor)}
    for leaf in leaves:
        if leaf.grad is not None:
            home.keep(leaf.grad)


def _plan(nodes: dict[int, Node], seeds: Sequence[Slot]) -> list[tuple[int, Node]]:
    """Return the nodes that the seeds depend on, latest first, after checking each."""
    wanted: set[Slot] = set()

    def want(slot: Slot) -> None:
        if slot.serial not in nodes:
            raise AutogradError(
                f"backward: the graph behind {slot.op} was already freed by an earlier backward",
                "pass retain_graph=True to the earlier backward, or run forward again",
            )
        wanted.add(slot)

    for slot in seeds:
        want(slot)
    plan = []
    for serial in reversed(nodes):
        node = nodes[serial]
        if wanted.isdisjoint(node.outputs):
            continue
        node.check()
        plan.append((serial, node))
        for edge in node.edges:
            if isinstance(edge, Slot):
                want(edge)
    return plan


def _run(node: Node, unit: torch.Tensor | None, *, retain: bool, overwrite: bool) -> None:
    """Consume the gradients of a node's outputs and hand on those of its inputs."""
    grads = tuple(slot.grad for slot in node.outputs)
    if all(grad is None for grad in grads):
        return
    with contextlib.ExitStack() as stack:
        if current_stream(node.outputs[0].device) != node.stream:
            stack.enter_context(node.stream.entered())
        for slot in node.outputs:
            _complete(slot, node.stream)
        grads = tuple(slot.grad for slot in node.outputs)
        node.grads_owned = tuple(slot.owned for slot in node.outputs)
        node.unit = unit is not None and grads[0] is unit
        for slot in node.outputs:
            slot.grad = None
        results = node.run(grads, overwrite=overwrite)
        _hand_on(node, grads, results, retain=retain)


def _complete(slot: Slot, stream: Stream) -> None:
    """Make a gradient that is complete ready for work on ``stream``, and run its hooks."""
    if slot.grad is None:
        return
    state_of(slot.grad).reading(stream, slot.grad)
    if slot.hooks:
        grad = run_hooks(f"a result of {slot.op}", slot.hooks, slot.grad)
        slot.owned = slot.owned and grad is slot.grad
        slot.grad = grad


def _hand_on(
    node: Node, grads: tuple[torch.Tensor | None, ...], results: tuple[Any, ...], *, retain: bool
) -> None:
    """Add each result to its input's slot or leaf.

    A result may be added to in place later only where nothing else views its memory: not the
    other results, not a gradient that somebody else holds, not a saved tensor that is kept.
    """
    kept = {
        storage_address(g)
        for g, owned in zip(grads, node.grads_owned, strict=True)
        if g is not None and not owned
    }
    addresses = [storage_address(r) for r in results if isinstance(r, torch.Tensor)]
    for edge, result in zip(node.edges, results, strict=True):
        if edge is None or result is None or result is ACCUMULATED:
            continue
        _check_form(node, edge, result)
        address = storage_address(result)
        owned = address not in kept and addresses.count(address) == 1
        owned = owned and not node.holds(address, retain=retain)
        state = state_of(result)
        if state.stream is None:  # made by other than an op
            state.written(node.stream)
        hooked = _HOOKED.get()
        if isinstance(edge, Tensor) and edge.hooks and hooked is not None:
            edge = hooked.setdefault(edge, Slot(edge, "leaf", 0, None))
        if isinstance(edge, Slot):
            _add_to_slot(edge, result, owned=owned, stream=node.stream)
        else:
            _add_to_leaf(edge, result, owned=owned, stream=node.stream)


def _check_form(node: Node, edge: Edge, result: torch.Tensor) -> None:
    if edge is not None and tuple(result.shape) != edge.shape:
        raise AutogradError(
            f"{node.op}: backward returned a gradient of shape {tuple(result.shape)} for an input "
            f"of shape {edge.shape}",
            "",
        )


def _add_to_slot(slot: Slot, grad: torch.Tensor, *, owned: bool, stream: Stream) -> None:
    if slot.grad is None:
        slot.grad, slot.owned = grad, owned
        return
    state_of(slot.grad).reading(stream, slot.grad)
    if slot.owned and slot.grad.is_contiguous():
        call("add_", slot.grad, grad.contiguous(), stream=stream)
    elif owned and grad.is_contiguous():
        call("add_", grad, slot.grad.contiguous(), stream=stream)
        slot.grad = grad
    else:
        slot.grad = call("add", slot.grad.contiguous(), grad.contiguous(), stream=stream)
    slot.owned = True


def _add_to_leaf(leaf: Tensor, grad: torch.Tensor, *, owned: bool, stream: Stream) -> None:
    if leaf.grad is None:
        adopt = owned and grad.is_contiguous() and grad.dtype == leaf.dtype
        if not adopt:
            copy = torch.empty(leaf.shape, dtype=leaf.dtype, device=grad.device)
            grad = copy.copy_(grad)
        leaf.grad = grad
        return
    if grad.dtype != leaf.grad.dtype:
        grad = call("cast", grad.contiguous(), leaf.grad.dtype, stream=stream)
    if leaf.grad.is_contiguous():
        call("add_", leaf.grad, grad.contiguous(), stream=stream)
    else:
        state = state_of(leaf.grad)
        state.writing(stream, leaf.grad)
        total = call("add", leaf.grad.contiguous(), grad.contiguous(), stream=stream)
        leaf.grad.copy_(total)
        state.written(stream)
