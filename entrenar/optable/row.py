"""What the table holds of an op: its functions, samples, error cases, costs and tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

__all__ = ["Call", "ErrorCase", "Function", "Op", "Sample"]

Arguments = dict[str, Any]


class Call(Protocol):
    """Runs a function of the table on one backend, by name, and returns what it returns."""

    def __call__(self, function: str, /, **arguments: Any) -> Any:
        """Run ``function`` with keyword arguments."""


@dataclasses.dataclass(frozen=True)
class Function:
    """One public function that kernels and reference both have.

    Attributes:
        name: Its name in ``entrenar.kernels.<family>`` and ``entrenar.reference.<family>``.
        family: The file it lives in.
        results: For each result, the argument whose dtype it has, or a dtype's name; an argument
            that holds quantised weights stands for the dtype they decode to. A name in
            parentheses, ``"(weight)"``, may be None. Empty where the result is an object of its own.
        mutates: Arguments whose storage it writes, ``out`` included.
        override: An argument that, when not None, names the result dtype instead (``dtype``).
        alike: Arguments that must share one dtype. Dispatch checks it where NumPy computes, which
            would not see that one of them was 16-bit storage; launchers check it themselves.
        or_float32: Those of them that may be float32 beside 16-bit ones.
    """

    name: str
    family: str
    results: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    override: str | None = None
    alike: tuple[str, ...] = ()
    or_float32: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """One input of an op, made from a seeded generator.

    Attributes:
        id: Readable, such as ``"T7_D123"``; unique within the op.
        make: Returns keyword arguments of the forward function. Floating arrays are float64; the
            suite rounds those named in ``Op.floats`` to the dtype under test, in every backend.
        small: Small enough for finite differences, interpreted and emulated execution.
        grid: Programs launched are few (under about 200), so that interpreting is affordable.
    """

    id: str
    make: Callable[[np.random.Generator], Arguments]
    small: bool = True
    grid: bool = True


@dataclasses.dataclass(frozen=True)
class ErrorCase:
    """A call that must be refused before any work starts.

    Attributes:
        id: Readable and unique within the op.
        function: Name of the function to call.
        make: Returns its keyword arguments, as ndarrays; floats are converted to float32 storage.
        error: The class raised.
        match: A regular expression the message must match.
    """

    id: str
    function: str
    make: Callable[[np.random.Generator], Arguments]
    error: type[Exception]
    match: str


@dataclasses.dataclass(frozen=True)
class Op:
    """One differentiable operation: everything tests, perf and docs need to know of it.

    Attributes:
        name: Such as ``"rms_norm"``.
        family: The file it lives in, in kernels, reference, optable and autograd.
        forward: The forward function.
        backward: The functions its gradient uses; empty for an op without one.
        samples: Inputs; at least one odd size, one edge and one of several blocks.
        errors: Calls that must be refused.
        floats: Forward arguments that carry the dtype under test.
        differentiable: Forward arguments with gradients.
        vjp: ``vjp(call, inputs, outputs, grad_outputs)`` returns the gradient of each
            differentiable argument by name, computed by ``call``, which runs functions of the table.
        reduction: Length of the longest sum behind one output element, for the tolerance.
        a, b: Tolerance ``a*u(dtype)*|ref| + b*u(accumulator)*sqrt(K)*scale``, see entrenar.testing.
        tolerance_reason: Why these constants, in a line.
        rounds_inside: Intermediate values are rounded to the storage dtype, so the second term uses
            its unit roundoff.
        scale: Magnitude of the terms behind a result, where they may cancel to a smaller one.
        bytes_moved: ``bytes_moved(inputs, itemsize)``: the floor, every input read once, every
            output written once.
        flops: ``flops(inputs)``.
        traffic_bound: Most bytes over the floor, or None where no bound is meant.
        traffic_reason: Why that bound.
        has_dot: Uses the matrix units.
        deterministic: Two runs agree to the bit.
        torch_baseline: The same function of the same keyword arguments in torch, for comparison.
        source: Paper and equation, or file whose behaviour it matches.
        grad_outputs: Which forward results receive gradients.
        dtypes: Storage dtypes it takes.
    """

    name: str
    family: str
    forward: Function
    samples: tuple[Sample, ...]
    floats: tuple[str, ...]
    reduction: Callable[[Arguments], int]
    bytes_moved: Callable[[Arguments, int], int]
    flops: Callable[[Arguments], int]
    source: str
    tolerance_reason: str
    a: float = 1.0
    b: float = 2.0
    backward: tuple[Function, ...] = ()
    errors: tuple[ErrorCase, ...] = ()
    differentiable: tuple[str, ...] = ()
    vjp: Callable[[Call, Arguments, tuple[Any, ...], tuple[Any, ...]], Mapping[str, Any]] | None = (
        None
    )
    rounds_inside: bool = False
    scale: Callable[[Arguments], float] | None = None
    traffic_bound: float | None = None
    traffic_reason: str = ""
    has_dot: bool = False
    deterministic: bool = True
    torch_baseline: Callable[..., Any] | None = None
    grad_outputs: tuple[int, ...] = (0,)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
