"""Backward launchers on strided storage: the right result or LayoutError, for each of their arguments."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from entrenar.errors import LayoutError
from entrenar.optable import FUNCTIONS, OPS, Op
from entrenar.optable import call as dispatched
from entrenar.testing import assert_close, to_float64, to_storage
from perf.oracle import case, grad_outputs, on_backend, run, stored, tolerance

LAYOUTS = ("transposed", "sliced", "expanded", "offset")
# the gradients of a sum are the incoming one
NAMES = [name for name, op in OPS.items() if op.vjp is not None and name != "add"]


def strided(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values in other strides with NaN in the gaps; ``expanded`` repeats the first row."""
    if layout == "expanded":
        return tensor[:1].clone().expand(tensor.shape)
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    gap = float("nan") if tensor.is_floating_point() else 0
    if layout == "offset":  # contiguous, one element past an aligned address
        wide = torch.full((tensor.numel() + 1,), gap, dtype=tensor.dtype, device=tensor.device)
        view = wide[1:].view(tensor.shape)
    else:
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        view = torch.full(shape, gap, dtype=tensor.dtype, device=tensor.device)[..., ::2]
    view.copy_(tensor)
    return view


def backward_calls(op: Op, device: str) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Return the inputs of an op's first sample, and its backward calls with copies of their arguments."""
    sample = op.samples[0]
    inputs = case(op, sample, "float32")
    results = run(on_backend, op, stored(op, inputs, "float32", device))
    grads = tuple(to_storage(g, "float32", device) for g in grad_outputs(op, sample, results))
    found: list[tuple[str, dict[str, Any]]] = []

    def noted(function: str, /, **arguments: Any) -> Any:
        found.append((function, copy.deepcopy(arguments)))
        return on_backend(function, **arguments)

    assert op.vjp is not None
    op.vjp(noted, stored(op, inputs, "float32", device), results, grads)
    return inputs, found


def outcome(function: str, arguments: dict[str, Any], kept: str) -> list[np.ndarray]:
    """Return what a call gives: its results, else the arguments it writes.

    Arguments are copied, but for ``kept``, whose strides a copy would lose.
    """
    given = {n: v if n == kept else copy.deepcopy(v) for n, v in arguments.items()}
    results = dispatched(function, **given)
    results = results if isinstance(results, tuple) else (results,)
    tensors = [t for t in results if isinstance(t, torch.Tensor)]
    tensors = tensors or [given[n] for n in FUNCTIONS[function].mutates if given.get(n) is not None]
    return [to_float64(t) for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["numpy", "kernels"])
def test_each_argument(
    name: str,
    layout: str,
    backend: str,
    device: str,
    counts: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels: one layout of each op that a hash of its name picks, all of them under ``make prove``."""
    picked = LAYOUTS[zlib.crc32(name.encode()) % len(LAYOUTS)]
    if backend == "kernels" and not counts(0, 1) and layout != picked:
        pytest.skip("runs in make prove")
    if backend == "numpy":
        monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
        device = "cpu"
    op = OPS[name]
    inputs, calls = backward_calls(op, device)
    assert calls
    for function, arguments in calls:
        for argument, value in arguments.items():
            if not isinstance(value, torch.Tensor) or value.ndim < 1 or value.numel() < 2:
                continue
            if layout in ("transposed", "expanded") and value.ndim < 2:
                continue
            other = strided(value, layout)
            plain = {**arguments, argument: other.clone(memory_format=torch.contiguous_format)}
            wanted = outcome(function, plain, argument)
            try:
                got = outcome(function, {**arguments, argument: other}, argument)
            except LayoutError:
                assert layout != "offset", (function, argument)
                continue
            for g, w in zip(got, wanted, strict=True):
                tol = tolerance(op, inputs, torch.zeros(1), "float32")
                # both sides may be off by a tolerance
                twice = dataclasses.replace(tol, a=2 * tol.a, b=2 * tol.b)
                assert_close(g, w, twice, f"{function}: {layout} {argument}")
