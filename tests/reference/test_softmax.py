"""The oracle of softmax: properties, extreme rows, masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar.reference import softmax


@given(st.integers(1, 5), st.integers(1, 40), st.floats(-50, 50), st.integers(0, 1000))
def test_rows_sum_to_one_and_do_not_see_a_shift(rows: int, n: int, shift: float, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, n))
    y = softmax.softmax_forward(x)
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(softmax.softmax_forward(x + shift), y, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([1e4, 1e4 - 1], [0.73105858, 0.26894142]),
        ([-1e30, -1e30], [0.5, 0.5]),
        ([3e38, 3e38], [0.5, 0.5]),
        ([-431.0, 279.0, 427.0], [0.0, 0.0, 1.0]),
    ],
)
def test_large_logits_do_not_overflow(row: list[float], wanted: list[float], dtype: type) -> None:
    """https://github.com/FluxML/NNlib.jl/issues/68."""
    with np.errstate(all="raise"):
        got = softmax.softmax_forward(np.array([row], dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got[0], wanted, atol=1e-7)


def test_masked_rows_are_zeros_and_hidden_values_do_not_matter() -> None:
    assert not softmax.softmax_forward(np.full((2, 5), -np.inf)).any()
    x = np.arange(36.0).reshape(9, 4)
    y = softmax.softmax_forward(x, causal=True)
    assert not y[:5].any()  # 9 rows over 4 columns: the first five see none
    np.testing.assert_allclose(y[5], [1, 0, 0, 0])
    np.testing.assert_allclose(y[8], softmax.softmax_forward(x[8:])[0])
    x[0] = np.nan
    np.testing.assert_array_equal(softmax.softmax_forward(x, causal=True), y)


def test_each_block_of_a_batch_has_its_own_mask() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 7))
    both = softmax.softmax_forward(x, causal=True)
    for block, alone in zip(x, both, strict=True):
        np.testing.assert_array_equal(softmax.softmax_forward(block, causal=True), alone)
    assert not both[:, 0, 3:].any()
    assert both[:, 0, 2].all()


def test_gradient_of_a_known_row() -> None:
    """d softmax of equal logits: (1/n)(g - mean g)."""
    y = softmax.softmax_forward(np.zeros((1, 4)), scale=3.0)
    grad = softmax.softmax_backward(np.array([[1.0, 0, 0, 0]]), y, scale=3.0)
    np.testing.assert_allclose(grad, [[3 * 0.1875, -3 * 0.0625, -3 * 0.0625, -3 * 0.0625]])


def test_results_may_overwrite_inputs() -> None:
    x = np.random.default_rng(1).standard_normal((3, 8))
    y = softmax.softmax_forward(x)
    assert softmax.softmax_forward(x, out=x) is x
    np.testing.assert_array_equal(x, y)
    grad = np.random.default_rng(2).standard_normal((3, 8))
    wanted = softmax.softmax_backward(grad, y)
    np.testing.assert_array_equal(softmax.softmax_backward(grad, y, out=grad), wanted)
