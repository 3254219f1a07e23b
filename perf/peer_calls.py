"""What the same call is timed against: torch, Liger, bitsandbytes and Unsloth, on the same storage.

A peer's backward pass is its own, through autograd, from a forward pass that is not timed. A peer that is not
installed is stated as absent; one whose results differ from ours is stated as such and gets no ratio.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from perf.oracle import as_tuple
from perf.passes import Pass, Work
from perf.peer_ops import Implementation, implementations
from perf.timing import Variant, version

__all__ = ["AGREEMENT", "Peer", "disagreement", "peers"]

# As a share of the largest value. 16 bits: one side rounds a few times where the other rounds once. fp32:
# sums of thousands of terms in two orders.
AGREEMENT = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 2.0**-16}


@dataclasses.dataclass(frozen=True)
class Peer:
    """One other implementation of a call.

    Attributes:
        package: Where it comes from.
        variant: What to time; None where the package is absent.
        wanted: Our results in the order of the peer's, None where it has no such result.
        note: What a reader must know to compare.
    """

    package: str
    variant: Variant | None
    wanted: tuple[Any, ...]
    note: str = ""


def _forward(found: Implementation, work: Work) -> Variant:
    written = {*work.op.forward.mutates, *found.overwrites}
    own = {k: v.clone() if k in written and v is not None else v for k, v in work.given.items()}
    pairs = [(own[k], v) for k, v in work.given.items() if own[k] is not v]
    compute = found.prepare(work.op, own)

    def restore() -> None:
        for target, source in pairs:
            target.copy_(source)

    def run() -> Any:
        with torch.no_grad():
            result = compute(own)
        return tuple(target for target, _ in pairs) if result is None else result

    return Variant(run, restore if pairs else None)


def _backward(found: Implementation, work: Work, call: Pass) -> Variant:
    op = work.op
    if found.gradient is not None:
        copies = {k: v.clone() if k in found.overwrites else v for k, v in work.given.items()}
        compute = found.gradient(op, copies)

        def restore_inputs() -> None:
            for name in found.overwrites:
                copies[name].copy_(work.given[name])

        return Variant(lambda: compute(copies), restore_inputs)
    names = [n for n in op.differentiable if isinstance(work.given.get(n), torch.Tensor)]
    leaves = {n: work.given[n].clone().requires_grad_() for n in names}
    with torch.enable_grad():
        outputs = as_tuple(found.prepare(op, work.given)({**work.given, **leaves}))
    chosen = [outputs[i] for i in op.grad_outputs]
    grads = [g.clone() for g in work.grads]
    wanted = [leaves[n] for n in call.gradients]

    def restore() -> None:
        for target, source in zip(grads, work.grads, strict=True):
            target.copy_(source)
        if found.spends:
            for name, leaf in leaves.items():
                leaf.data.copy_(work.given[name])  # of which autograd counts no version

    return Variant(lambda: torch.autograd.grad(chosen, wanted, grads, retain_graph=True), restore)


def peers(work: Work, call: Pass, device: str) -> Iterator[Peer]:
    """Yield the peers of a call, those of absent packages too.

    A peer whose code raises while it is prepared is yielded with the error as its note.
    """
    forward = call.name == "forward"
    for found in implementations(work.op, device):
        if ("forward" if forward else "backward") not in found.passes or not (
            forward or call.gradients
        ):
            continue
        if not forward and found.frozen and not call.name.endswith("frozen"):
            continue
        if version(found.package) is None:
            yield Peer(found.package, None, (), "absent")
            continue
        wanted = (
            as_tuple(call.result) if forward else tuple(work.gradient[n] for n in call.gradients)
        )
        try:
            variant = _forward(found, work) if forward else _backward(found, work, call)
        except Exception as error:  # another package's fault must not lose our own times
            yield Peer(found.package, None, (), f"failed: {type(error).__name__}: {error}"[:300])
            continue
        yield Peer(found.package, variant, wanted, found.note if forward else found.backward_note)


def disagreement(theirs: Any, wanted: tuple[Any, ...]) -> float:
    """Return the largest difference from our results as a share of the largest value.

    What is equal, infinities included, does not differ; what is NaN or infinite on one side alone does so
    without bound. A result that is None on either side is left out.
    """
    worst = 0.0
    for got, ours in zip(as_tuple(theirs), wanted, strict=False):
        if got is None or ours is None or not ours.numel():
            continue
        a, b = got.detach().double(), ours.detach().double().reshape(got.shape)
        error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = float(torch.where(b.isfinite(), b.abs(), 0.0).max().clamp_min(math.ulp(0.0)))
        worst = max(worst, float(error.max()) / largest)
    return worst
