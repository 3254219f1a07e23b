"""Gradient norm and clipping in NumPy, plain and fast, against written numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.cpu import clip as fast
from entrenar.errors import ConfigError
from entrenar.reference import clip as plain

BOTH = pytest.mark.parametrize("module", [plain, fast], ids=["plain", "fast"])


@BOTH
def test_three_four(module: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/31367: the usual case, and limits that make no sense."""
    flat = np.array([3.0, 4.0], np.float32)
    assert module.clip_grad_norm(flat, 1.0).tolist() == [5.0]
    np.testing.assert_allclose(flat, [0.6, 0.8], rtol=1e-6)
    for limit in (-1.0, 0.0, float("nan")):
        with pytest.raises(ConfigError, match="max_norm is"):
            module.clip_grad_norm(flat, limit)
    for none in (None, float("inf")):
        assert module.clip_factor(np.array([3.0, 4.0]), none)[1].tolist() == [1.0]


@BOTH
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_gradients_are_left_and_flagged(module: Any, bad: float) -> None:
    """https://github.com/pytorch/pytorch/issues/46849: the rest became 0 and inf became NaN."""
    flat = np.array([1.0, 2.0, bad, 1.0])
    norm, factor, skip = module.clip_factor(flat, 1.0)
    assert (factor[0], skip[0]) == (0.0, 1)
    np.testing.assert_array_equal(norm, [abs(bad)])
    before = flat.copy()
    module.clip_grad_norm(flat, 1.0)
    np.testing.assert_array_equal(flat, before)


@BOTH
def test_squares_past_half_precision(module: Any) -> None:
    """https://github.com/facebookresearch/fairscale/issues/263: 5000 squared is past float16."""
    flat = np.array([5000.0, 5000.0], np.float16)
    np.testing.assert_allclose(module.clip_grad_norm(flat, 1.0), [7071.0678], rtol=1e-6)
    np.testing.assert_allclose(flat, [0.70710678] * 2, rtol=1e-3)
    many = np.full(2**20, 0.010009766, np.float32)
    np.testing.assert_allclose(module.grad_norm(many), [10.25], rtol=1e-5)


@BOTH
def test_zeros_and_nothing(module: Any) -> None:
    """https://github.com/kozistr/pytorch_optimizer/issues/431, NVIDIA/Megatron-LM/issues/5529."""
    with np.errstate(all="raise"):
        for flat in (np.zeros(4, np.float32), np.zeros(0, np.float32)):
            norm, factor, skip = module.clip_factor(flat, 1.0)
            assert (norm[0], factor[0], skip[0]) == (0.0, 1.0, 0)
        tiny = np.array([1e-30], np.float32)
        np.testing.assert_allclose(module.clip_grad_norm(tiny, 1.0), [1e-30])
        assert tiny[0] == np.float32(1e-30)


@BOTH
@pytest.mark.parametrize("size", [1e30, 3e37, 1e-30, 1e-44])
def test_norm_neither_overflows_nor_vanishes(module: Any, size: float) -> None:
    flat = np.full(100, size, np.float32)
    np.testing.assert_allclose(module.grad_norm(flat), [10.0 * float(flat[0])], rtol=1e-6)


@BOTH
def test_one_clip_of_the_accumulated_gradient(module: Any) -> None:
    """https://github.com/huggingface/transformers/issues/1563: clipping each micro-batch turns it."""
    flat = np.array([3.0, 0.0]) + np.array([0.0, 4.0])
    module.clip_grad_norm(flat, 1.0)
    np.testing.assert_allclose(flat, [0.6, 0.8])
