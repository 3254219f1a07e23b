"""Activations in NumPy, plain and fast, against written numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.cpu import swiglu as fast
from entrenar.reference import swiglu as plain

BOTH = pytest.mark.parametrize("module", [plain, fast], ids=["plain", "fast"])
EDGES = [-1000.0, -100.0, -89.0, -88.0, -20.0, 0.0, 20.0, 1000.0]
# left of -88 exp(-x) is infinite in float32, and the results are no zeros yet
SILU = [0.0, -3.720076e-42, -1.982354e-37, -5.328050e-37, -4.122307e-08, 0.0, 20.0, 1000.0]
SLOPE = [0.0, -3.682875e-42, -1.960080e-37, -5.267504e-37, -3.916192e-08, 0.5, 1.0, 1.0]
DENORMAL = 1.5e-43  # a step of 1.4e-45 in exp(-100), times 100


@BOTH
def test_large_gates_neither_overflow_nor_warn(module: Any) -> None:
    """https://github.com/antirez/ds4/issues/498: exp of a large negative gate gave NaN."""
    x = np.array(EDGES, np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        np.testing.assert_allclose(module.silu_forward(x), SILU, rtol=1e-5, atol=DENORMAL)
        slope = module.silu_backward(np.ones_like(x), x)
        product = module.swiglu_forward(x[:-1], np.full(7, 1e30, np.float32))
    np.testing.assert_allclose(slope, SLOPE, rtol=1e-5, atol=DENORMAL)
    assert np.isfinite(product).all()


@BOTH
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_not_swapped(module: Any, inplace: bool) -> None:
    """https://github.com/unslothai/unsloth/issues/3314: gate and up gradients in each other's place."""
    gate, up = np.array([1.0]), np.array([2.0])
    np.testing.assert_allclose(module.swiglu_forward(gate, up), [1.46211716])
    grad_gate, grad_up = module.swiglu_backward(np.array([3.0]), gate, up, inplace)
    np.testing.assert_allclose(grad_gate, [5.56602307])
    np.testing.assert_allclose(grad_up, [2.19317574])
    assert (grad_gate is gate, grad_up is up) == (inplace, inplace)


@BOTH
def test_halves_of_one_buffer(module: Any) -> None:
    generator = np.random.default_rng(0)
    both, grad = generator.standard_normal((3, 14)), generator.standard_normal((3, 7))
    gate, up = both[:, :7], both[:, 7:]
    y = module.swiglu_forward(gate.copy(), up.copy())
    np.testing.assert_allclose(module.swiglu_forward(gate, up), y, rtol=1e-14)
    wanted = module.swiglu_backward(grad, gate.copy(), up.copy())
    module.swiglu_backward(grad, gate, up, True)
    np.testing.assert_allclose(both, np.hstack(wanted), rtol=1e-14)


@BOTH
def test_result_may_overwrite_an_input(module: Any) -> None:
    gate, up = np.linspace(-3, 3, 70_000), np.linspace(2, -2, 70_000)
    wanted = module.swiglu_forward(gate, up)
    assert module.swiglu_forward(gate, up, gate) is gate
    np.testing.assert_array_equal(gate, wanted)


def test_gelu_left_tail_keeps_its_digits() -> None:
    np.testing.assert_allclose(
        plain.gelu_forward(np.array([-8.0, -5.0, 1.0])),
        [-4.976768459e-15, -1.433257859e-06, 0.8413447460685429],
        rtol=1e-9,
    )


def test_relu_passes_nan_and_stops_at_zero() -> None:
    x = np.array([np.nan, -1.0, 0.0, 2.0])
    np.testing.assert_array_equal(plain.relu_forward(x), [np.nan, 0.0, 0.0, 2.0])
    np.testing.assert_array_equal(plain.relu_backward(np.ones(4), x), [0.0, 0.0, 0.0, 1.0])
