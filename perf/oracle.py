"""Run a sample of an op on the backend in force and hold it to its oracle: shared by the op suite and perf.

Which backend is in force decides ``ENTRENAR_BACKEND``. Inputs are rounded to the dtype under test before
either side sees them, so only what a kernel computes is compared, not how its inputs were stored.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from entrenar import optable, runtime
from entrenar.optable import FUNCTIONS, Op, Sample
from entrenar.reference.nf4 import NF4Weight as ReferenceNF4Weight
from entrenar.testing import (
    Tolerance,
    assert_close,
    poisoned,
    rng,
    round_to,
    to_float64,
    to_storage,
)

__all__ = [
    "as_tuple",
    "case",
    "check",
    "check_backward",
    "check_forward",
    "everything",
    "grad_outputs",
    "on_backend",
    "oracle",
    "reporting_unset",
    "rounded",
    "run",
    "stored",
    "tolerance",
    "with_dtype",
]

NF4_TYPES = (ReferenceNF4Weight, optable.dispatch.NF4Weight)


def oracle(function: str, /, **arguments: Any) -> Any:
    """Call the reference of a function of the table."""
    family = FUNCTIONS[function].family
    return getattr(importlib.import_module(f"entrenar.reference.{family}"), function)(**arguments)


def on_backend(function: str, /, **arguments: Any) -> Any:
    """Call a function of the table on the backend of its arguments."""
    return optable.call(function, **arguments)


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return results one by one; a quantised weight as the arrays it consists of."""
    if isinstance(result, NF4_TYPES):
        fields = (
            getattr(result, n) for n in ("codes", "absmax", "absmax_codes", "absmax2", "offset")
        )
        return tuple(f for f in fields if f is not None)
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def run(call: Callable[..., Any], op: Op, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the results of the forward function, then the arguments it writes."""
    results = as_tuple(call(op.forward.name, **inputs))
    written = tuple(inputs[n] for n in op.forward.mutates if inputs.get(n) is not None)
    aliased = {id(r) for r in results}
    return (*results, *(w for w in written if id(w) not in aliased))


def rounded(op: Op, inputs: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Round what carries the dtype to it, every other floating array to float32."""
    out = {}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = round_to(value, dtype if name in op.floats else "float32")
        out[name] = value
    return out


def stored(op: Op, inputs: Mapping[str, Any], dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Turn the arguments of a case into what a launcher takes, on a device."""
    return {
        name: to_storage(value, dtype if name in op.floats else "float32", device)
        for name, value in inputs.items()
    }


def with_dtype(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Let NF4 weights decode to the dtype under test in the oracle, too."""
    return {
        k: type(v)(**{**vars(v), "dtype": dtype}) if isinstance(v, ReferenceNF4Weight) else v
        for k, v in inputs.items()
    }


def tolerance(op: Op, inputs: Mapping[str, Any], got: Any, dtype: str) -> Tolerance:
    """Return the tolerance of a result stored as ``got`` is, from the constants of the op's row."""
    return Tolerance(
        dtype=str(got.dtype).removeprefix("torch."),
        accumulator=dtype if op.rounds_inside else "float32",
        reduction=op.reduction(dict(inputs)),
        a=op.a,
        b=op.b,
        reason=op.tolerance_reason,
        scale=op.scale(dict(inputs)) if op.scale else 0.0,
    )


def case(op: Op, sample: Sample, dtype: str) -> dict[str, Any]:
    """Make the arguments of a sample, the same on every backend, rounded to the dtype under test."""
    return with_dtype(rounded(op, sample.make(rng(op.name, sample.id)), dtype), dtype)


def grad_outputs(op: Op, sample: Sample, outputs: tuple[Any, ...]) -> list[np.ndarray]:
    """Make the gradients that a backward pass is given."""
    generator = rng(op.name, sample.id, "grad")
    return [generator.standard_normal(tuple(outputs[i].shape)) for i in op.grad_outputs]


def check_forward(
    op: Op, inputs: dict[str, Any], storage: dict[str, Any], dtype: str
) -> tuple[Any, ...]:
    """Hold results in poisoned memory to the oracle's; return them.

    Raises:
        AssertionError: A result is off by more than its tolerance.
        NumericsError: A kernel wrote outside its result.
    """
    wanted = run(oracle, op, copy.deepcopy(inputs))
    with poisoned():
        got = run(on_backend, op, storage)
    assert len(got) == len(wanted), f"{len(got)} results, wanted {len(wanted)}"
    for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert_close(g, w, tolerance(op, inputs, g, dtype), f"result {i}")
    return got


def check_backward(
    op: Op,
    dtype: str,
    sample: Sample,
    device: str,
    inputs: dict[str, Any],
    got: tuple[Any, ...],
) -> None:
    """Hold gradients to the oracle's.

    Both passes are fed the results the backend gave, so only the backward pass is compared.

    Raises:
        AssertionError: A gradient is off by more than its tolerance.
        NumericsError: A kernel wrote outside its result.
    """
    assert op.vjp is not None
    storage = stored(op, inputs, dtype, device)
    grads = grad_outputs(op, sample, got)
    kinds = [str(got[i].dtype).removeprefix("torch.") for i in op.grad_outputs]
    grads = [round_to(g, kind) for g, kind in zip(grads, kinds, strict=True)]
    given = tuple(to_storage(g, kind, device) for g, kind in zip(grads, kinds, strict=True))
    saved = tuple(to_float64(g) if g.is_floating_point() else g.cpu().numpy() for g in got)
    wanted = op.vjp(oracle, copy.deepcopy(inputs), saved, tuple(copy.deepcopy(grads)))
    with poisoned():
        result = op.vjp(on_backend, storage, got, given)
    assert set(result) == set(wanted)
    for name in op.differentiable:
        if inputs.get(name) is None:
            continue
        g, w = result[name], wanted[name]
        assert tuple(g.shape) == np.shape(inputs[name]), f"gradient of {name}"
        assert_close(g, w, tolerance(op, inputs, g, dtype), f"gradient of {name}")


def check(op: Op, sample: Sample, dtype: str, device: str = "cpu") -> None:
    """Run a sample forward and backward and hold both to the oracle.

    Raises:
        AssertionError: A result or gradient is off by more than its tolerance.
        NumericsError: A kernel wrote outside its result.
    """
    inputs = case(op, sample, dtype)
    got = check_forward(op, copy.deepcopy(inputs), stored(op, inputs, dtype, device), dtype)
    if op.vjp is not None:
        check_backward(op, dtype, sample, device, inputs, got)


def everything(op: Op, sample: Sample, dtype: str) -> list[bytes]:
    """Return the bytes of each result and gradient of a sample on CPU storage.

    The backward pass is given the oracle's results, so that its inputs are the same whatever the forward
    pass made of them.
    """
    inputs = case(op, sample, dtype)
    with poisoned():
        results = run(on_backend, op, stored(op, inputs, dtype))
    made = list(results)
    if op.vjp is not None:
        kinds = [str(r.dtype).removeprefix("torch.") for r in results]
        exact = run(oracle, op, copy.deepcopy(inputs))
        saved = tuple(to_storage(np.asarray(w), k) for w, k in zip(exact, kinds, strict=True))
        grads = zip(op.grad_outputs, grad_outputs(op, sample, saved), strict=True)
        given = tuple(to_storage(g, kinds[i]) for i, g in grads)
        with poisoned():
            gradient = op.vjp(on_backend, stored(op, inputs, dtype), saved, given)
        made += [gradient[n] for n in op.differentiable if inputs.get(n) is not None]
    flat = (m.reshape(-1).clone(memory_format=torch.contiguous_format) for m in made)
    return [f.view(torch.uint8).numpy().tobytes() for f in flat]


@contextlib.contextmanager
def reporting_unset(driver: Any) -> Iterator[None]:
    """Have the emulator report reads of results that no launch has written yet.

    What a launcher declares to write and not to read counts as unset, up to its first launch in the block.
    """
    before = driver.opts
    seen: dict[int, Any] = {}  # holds the storage, so that no other gets its address meanwhile

    def launched(record: runtime.LaunchRecord) -> None:
        read = {t.untyped_storage().data_ptr() for t in record.reads if t is not None}
        places = {t.untyped_storage().data_ptr(): t for t in record.writes if t is not None}
        unset = [t for at, t in places.items() if at not in read and at not in seen and t.numel()]
        driver.opts = {**before, "uninit": unset}
        seen.update(places)

    with runtime.listening(launched):
        try:
            yield
        finally:
            driver.opts = before
