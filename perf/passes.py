"""The calls that a case's forward and backward pass consist of, and the gate they pass before any is timed.

A backward call is whatever the row's own gradient calls, with the arguments it gives: results of the real
forward pass, so that values are those of a training step. The gate holds results and gradients to the
reference in float64 with the tolerance of the op's row, as the op suite does. Where that would take too long,
a smaller case of the same op is gated whole, and of each product also some rows of the very call that is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from entrenar import optable
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import Op, dispatch
from entrenar.reference.nf4 import NF4Weight as ReferenceNF4Weight
from entrenar.testing import assert_close, to_float64
from perf.calls import Maker
from perf.oracle import as_tuple, on_backend, oracle, run, tolerance
from perf.shapes import Case
from perf.timing import Variant

__all__ = ["Pass", "Work", "build", "described", "feasible", "gate", "gate_rows"]

Arguments = dict[str, Any]
# What the reference may cost in float64: a few seconds on two cores.
MOST_FLOPS, MOST_ELEMENTS, ROWS_ELEMENTS = 2e10, 3e7, 3e8
LEAST_TOKENS, SOME_ROWS = 32, 16
# Products whose result has a row for each row of one argument: that argument, whether it is its columns
# instead, and which result.
# Arguments of backward calls that a fine-tuning step sets, where norms are frozen: timed beside the rest.
FROZEN: dict[str, Arguments] = {
    "rms_norm_backward": {"need_grad_weight": False},
    "layer_norm_backward": {"need_grad_weight": False, "need_grad_bias": False},
}
ROWWISE: dict[str, tuple[str, bool, int]] = {
    "gemm_forward": ("a", False, 0),
    "gemm_backward_a": ("grad_c", False, 0),
    "gemm_backward_b": ("a", True, 0),
    "matmul": ("a", False, 0),
    "nf4_gemm_forward": ("x", False, 0),
    "nf4_gemm_backward": ("grad_y", False, 0),
    "lora_forward": ("x", False, 0),
}


def fresh(function: str, given: Arguments) -> Arguments:
    """Return the arguments of a call with copies of those it writes."""
    written = {id(t) for t in dispatch.written(function, (), given)}
    return {k: v.clone() if id(v) in written else v for k, v in given.items()}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call that is timed.

    Attributes:
        name: ``"forward"``, or ``"backward"`` and the arguments whose gradients it computes.
        function: What is called.
        given: Its arguments, as they were before the call.
        gradients: Forward arguments whose gradients it returns.
        result: What it returned.
    """

    name: str
    function: str
    given: Arguments
    gradients: tuple[str, ...]
    result: Any

    def variant(self) -> Variant:
        """Return the call to be timed; what it overwrites is restored before each run."""
        own = fresh(self.function, self.given)
        pairs = [(own[k], v) for k, v in self.given.items() if own[k] is not v]

        def restore() -> None:
            for target, source in pairs:
                target.copy_(source)

        call = functools.partial(optable.call, self.function, **own)
        return Variant(call, restore if pairs else None)


@dataclasses.dataclass(frozen=True)
class Work:
    """Both passes of one case, run once.

    Attributes:
        op: Its row.
        given: Arguments of the forward function.
        outputs: Its results, then what it wrote.
        grads: Gradients of the results that have one.
        gradient: What the row's gradient returned, by argument.
        passes: The calls, the forward one first.
    """

    op: Op
    given: Arguments
    outputs: tuple[Any, ...]
    grads: tuple[torch.Tensor, ...]
    gradient: Mapping[str, Any]
    passes: tuple[Pass, ...]


def build(op: Op, given: Arguments, maker: Maker) -> Work:
    """Run a case forward and backward on the backend of its storage; return the calls and results.

    Args:
        op: Its row.
        given: Arguments of the forward function.
        maker: Makes the gradients that come from above.
    """
    outputs = run(on_backend, op, fresh(op.forward.name, given))
    passes = [Pass("forward", op.forward.name, given, (), outputs)]
    if op.vjp is None:
        return Work(op, given, outputs, (), {}, tuple(passes))
    grads = tuple(  # a loss has the gradient 1
        maker.floats(*outputs[i].shape, dtype=outputs[i].dtype)
        if outputs[i].ndim
        else torch.ones_like(outputs[i])
        for i in op.grad_outputs
    )
    calls: list[tuple[str, Arguments, Any]] = []

    def recording(function: str, /, **arguments: Any) -> Any:
        kept = fresh(function, arguments)
        result = optable.call(function, **arguments)
        calls.append((function, kept, result))
        return result

    gradient = op.vjp(recording, dict(given), outputs, tuple(g.clone() for g in grads))
    forward = {id(v) for v in given.values()}
    for function, arguments, result in calls:
        tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
        if function == op.forward.name and sum(id(t) in forward for t in tensors) > 1:
            continue  # the forward call again: it computes the gradient with the result
        mine = {id(r) for r in as_tuple(result)}
        names = tuple(name for name, g in gradient.items() if id(g) in mine)
        passes.append(Pass(f"backward to {', '.join(names)}", function, arguments, names, result))
        if function in FROZEN:
            frozen = {**arguments, **FROZEN[function]}
            names = tuple(n for n in names if n not in ("weight", "bias"))
            title = f"backward to {', '.join(names)}, frozen"
            passes.append(Pass(title, function, frozen, names, optable.call(function, **frozen)))
    return Work(op, given, outputs, grads, gradient, tuple(passes))


def _for_oracle(value: Any, dtype: str) -> Any:
    """Return an argument as the reference takes it: float64, integers copied, NF4 decoding to ``dtype``."""
    if isinstance(value, NF4Weight):
        fields = {
            k: v.cpu().numpy().copy() if isinstance(v, torch.Tensor) else v
            for k, v in value.fields().items()
        }
        return ReferenceNF4Weight(**{**fields, "dtype": dtype})
    if isinstance(value, torch.Tensor):
        return to_float64(value).copy() if value.is_floating_point() else value.cpu().numpy().copy()
    return value


def _inputs(given: Mapping[str, Any], dtype: str) -> Arguments:
    return {name: _for_oracle(value, dtype) for name, value in given.items()}


def _share(got: Any, wanted: Any, bound: Any, what: str) -> float:
    """Return the largest error as a share of its tolerance.

    Raises:
        AssertionError: It is more than one.
    """
    assert_close(got, wanted, bound, what)
    exact, found = np.asarray(wanted, np.float64), to_float64(got)
    compared = np.isfinite(exact) & (bound.bound(exact) > 0)
    error = np.abs(np.where(compared, found, 0) - np.where(compared, exact, 0))
    shares = error / np.where(compared, bound.bound(exact), 1)
    return float(shares.max(initial=0.0))


def gate(work: Work, dtype: str) -> float:
    """Hold results and gradients to the reference; return the largest error as a share of its tolerance.

    Args:
        work: What ran.
        dtype: Name of the storage dtype, ``"float32"`` and so on.

    Raises:
        AssertionError: One is off by more than its tolerance.
    """
    op, inputs = work.op, _inputs(work.given, dtype)
    wanted = run(oracle, op, _inputs(work.given, dtype) if op.forward.mutates else inputs)
    shares = [
        _share(g, w, tolerance(op, inputs, g, dtype), f"{op.forward.name}, result {i}")
        for i, (g, w) in enumerate(zip(work.outputs, wanted, strict=True))
    ]
    if op.vjp is not None:
        saved = tuple(_for_oracle(g, dtype) for g in work.outputs)
        grads = tuple(to_float64(g).copy() for g in work.grads)
        exact = op.vjp(oracle, _inputs(work.given, dtype), saved, grads)
        for name in op.differentiable:
            if work.given.get(name) is not None:
                got = work.gradient[name]
                bound = tolerance(op, inputs, got, dtype)
                shares.append(_share(got, exact[name], bound, f"{op.name}, gradient of {name}"))
    return max(shares)


def gate_rows(work: Work, dtype: str) -> float | None:
    """Hold some rows of each product that is timed to the reference; return the largest share, or None.

    Raises:
        AssertionError: One is off by more than its tolerance.
    """
    shares = []
    inputs = None
    for call in work.passes:
        if call.function not in ROWWISE:
            continue
        name, columns, index = ROWWISE[call.function]
        columns = columns or bool(call.given.get("trans_a"))
        axis = call.given[name].ndim - (1 if columns else 2)
        rows = np.unique(np.linspace(0, call.given[name].shape[axis] - 1, SOME_ROWS).astype(int))
        at = torch.from_numpy(rows).to(call.given[name].device)
        given = {**call.given, name: call.given[name].index_select(axis, at)}
        elements = sum(v.numel() for v in given.values() if isinstance(v, torch.Tensor))
        if elements > ROWS_ELEMENTS:
            continue
        got = as_tuple(call.result)[index]
        wanted = as_tuple(oracle(call.function, **_inputs(given, dtype)))[index]
        inputs = inputs or _inputs(work.given, dtype)
        bound = tolerance(work.op, inputs, got, dtype)
        got = got.index_select(got.ndim - 2, at)
        shares.append(_share(got, wanted, bound, f"rows of {call.function}"))
    return max(shares, default=None)


def described(given: Mapping[str, Any]) -> Arguments:
    """Return arguments whose arrays have a shape and integers but no floating values: for a row's costs."""
    return {name: _described(value) for name, value in given.items()}


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() or value.device.type == "meta":
        return np.broadcast_to(np.zeros((), np.float32), tuple(value.shape))
    return value.cpu().numpy()


def feasible(
    op: Op, case: Case, letters: dict[str, int], costs: Callable[[Arguments], Arguments]
) -> dict[str, int]:
    """Return sizes at which the reference is affordable: these, or with fewer tokens, then less of the rest.

    Args:
        op: The row.
        case: The case.
        letters: Its sizes.
        costs: Adds a function's defaults to arguments.
    """
    letters = dict(letters)
    while True:
        given = case.make(Maker(torch.float32, device="meta"), letters)
        flops = op.flops(described(costs(given)))
        sizes = [
            math.prod(v.shape) for v in given.values() if isinstance(v, torch.Tensor | NF4Weight)
        ]
        if flops <= MOST_FLOPS and sum(sizes) <= MOST_ELEMENTS:
            return letters
        if letters["T"] > LEAST_TOKENS:
            for name in "TRP":
                letters[name] = -(-letters[name] // 2)
        else:
            largest = max("VNFP", key=lambda name: letters[name])
            letters[largest] //= 2
