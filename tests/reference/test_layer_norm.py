"""Layer normalisation in NumPy against written numbers."""

from __future__ import annotations

import numpy as np

from entrenar.reference.layer_norm import layer_norm_backward, layer_norm_forward


def test_one_two_three() -> None:
    x = np.array([[1.0, 2.0, 3.0]])
    y, mean, rstd = layer_norm_forward(x, np.array([1.0, 1.0, 2.0]), np.array([0.0, 0.5, 0.0]), 0.0)
    np.testing.assert_allclose(y, [[-np.sqrt(1.5), 0.5, 2 * np.sqrt(1.5)]], rtol=1e-15)
    np.testing.assert_array_equal(mean, [2.0])
    np.testing.assert_allclose(rstd, [np.sqrt(1.5)])


def test_shifting_a_row_changes_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((4, 33))
    y, mean, rstd = layer_norm_forward(x, np.ones(33), None, 1e-5)
    shifted, moved, same = layer_norm_forward(x + 3, np.ones(33), None, 1e-5)
    np.testing.assert_allclose(shifted, y, atol=1e-13)
    np.testing.assert_allclose(moved, mean + 3)
    np.testing.assert_allclose(same, rstd, rtol=1e-13)


def test_gradient_of_a_row_sums_to_zero() -> None:
    """Neither shifting a row nor, without eps, scaling it changes y."""
    rng = np.random.default_rng(1)
    x, grad = rng.standard_normal((2, 5, 40))
    weight = rng.standard_normal(40)
    _, mean, rstd = layer_norm_forward(x, weight, None, 0.0)
    grad_x, of_weight, of_bias = layer_norm_backward(grad, x, weight, mean, rstd)
    np.testing.assert_allclose(grad_x.sum(1), np.zeros(5), atol=1e-12)
    np.testing.assert_allclose((grad_x * x).sum(1), np.zeros(5), atol=1e-12)
    assert of_weight is not None
    np.testing.assert_allclose(of_bias, grad.sum(0))


def test_residual_is_added_both_ways() -> None:
    x, residual, grad = np.random.default_rng(2).standard_normal((3, 3, 10))
    weight = np.ones(10)
    y, mean, rstd, total = layer_norm_forward(x, weight, None, 1e-6, residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, layer_norm_forward(x + residual, weight, None, 1e-6)[0])
    alone = layer_norm_backward(grad, total, weight, mean, rstd, None, False, False)
    fused = layer_norm_backward(grad, total, weight, mean, rstd, residual, False, False)
    np.testing.assert_allclose(fused[0], alone[0] + residual, rtol=1e-14)
    assert fused[1:] == (None, None)
