"""RMS normalisation in NumPy, plain and fast, against written numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.cpu import rms_norm as fast
from entrenar.reference import rms_norm as plain

BOTH = pytest.mark.parametrize("module", [plain, fast], ids=["plain", "fast"])


@BOTH
def test_three_four(module: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/42379: Llama's form has no offset of the weight."""
    x, weight = np.array([[3.0, 4.0]]), np.ones(2)
    y, rstd = module.rms_norm_forward(x, weight, 0.0)
    np.testing.assert_allclose(y, [[0.84852814, 1.13137085]], rtol=1e-8)
    np.testing.assert_allclose(rstd, [1 / np.sqrt(12.5)])


@BOTH
@pytest.mark.parametrize("value", [300.0, -300.0, 60000.0])
def test_squares_do_not_overflow_in_half(module: Any, value: float) -> None:
    """https://github.com/pytorch/pytorch/issues/133085: 300 squared is past float16."""
    with np.errstate(all="raise"):
        x = np.full((1, 8), value, np.float16)
        y, _ = module.rms_norm_forward(x, np.ones(8, np.float16), 1e-6)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, np.sign(value), atol=1e-3)


@BOTH
def test_small_squares_do_not_vanish_in_half(module: Any) -> None:
    """https://github.com/jingyaogong/minimind/issues/301: 1e-4 squared is 0 in float16."""
    x = np.full((1, 8), 1e-4, np.float16)
    y, _ = module.rms_norm_forward(x, np.ones(8, np.float16), 1e-6)
    np.testing.assert_allclose(y.astype(float), 0.0995, atol=2e-4)


@BOTH
def test_eps_is_the_one_given(module: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/190828: eps came from the dtype, not the config."""
    x = 1e-3 * np.sin(np.arange(32.0))[None]
    for eps in (1e-6, 1e-5):
        y, _ = module.rms_norm_forward(x, np.ones(32), eps)
        np.testing.assert_allclose(y, x / np.sqrt(np.mean(x**2) + eps), rtol=1e-14)


@BOTH
def test_many_rows_are_each_normalised(module: Any) -> None:
    """https://github.com/NVIDIA/apex/issues/411: wrong from 65536 rows on."""
    x = np.tile([0.0, 1.0, 2.0, 3.0], (65_537, 1)).astype(np.float32)
    x[:, 0] = np.arange(65_537) % 7
    y, rstd = module.rms_norm_forward(x, np.ones(4, np.float32), 1e-6)
    alone, _ = module.rms_norm_forward(x[-1:], np.ones(4, np.float32), 1e-6)
    np.testing.assert_array_equal(y[-1:], alone)
    assert rstd.shape == (65_537,)


@BOTH
def test_no_rows_give_zero_weight_gradient(module: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/34202: zero rows dropped the weight's gradient."""
    x = np.zeros((0, 8), np.float32)
    y, rstd = module.rms_norm_forward(x, np.ones(8, np.float32), 1e-6)
    assert y.shape == (0, 8)
    assert rstd.shape == (0,)
    _, grad_weight = module.rms_norm_backward(x, x, np.ones(8, np.float32), rstd)
    np.testing.assert_array_equal(grad_weight, np.zeros(8))


@BOTH
def test_frozen_weight_has_no_gradient(module: Any) -> None:
    x = np.ones((2, 4))
    _, grad_weight = module.rms_norm_backward(x, x, np.ones(4), np.ones(2), need_grad_weight=False)
    assert grad_weight is None


@BOTH
def test_residual_is_added_both_ways(module: Any) -> None:
    generator = np.random.default_rng(0)
    x, residual, grad = (generator.standard_normal((3, 10)) for _ in range(3))
    weight = generator.standard_normal(10)
    y, rstd, total = module.rms_norm_forward(x, weight, 1e-6, residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, module.rms_norm_forward(x + residual, weight, 1e-6)[0])
    plain_grad, _ = module.rms_norm_backward(grad, total, weight, rstd)
    grad_x, _ = module.rms_norm_backward(grad, total, weight, rstd, residual)
    np.testing.assert_allclose(grad_x, plain_grad + residual, rtol=1e-14)
