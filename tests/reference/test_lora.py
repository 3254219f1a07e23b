"""LoRA in NumPy: dropout's numbers, the scale, and the faults that others reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.cpu import lora as fast
from entrenar.reference import lora as plain
from entrenar.reference.nf4 import nf4_quantize


@pytest.fixture(params=[plain, fast], ids=["reference", "cpu"])
def lora(request: pytest.FixtureRequest) -> Any:
    return request.param


def make(rows: int = 6, n_in: int = 10, n_out: int = 7, rank: int = 3, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, n_in)),
        rng.standard_normal((n_out, n_in)),
        rng.standard_normal((rank, n_in)),
        rng.standard_normal((n_out, rank)),
    )


class TestDropout:
    def test_philox_known_answers(self) -> None:
        """Random123's kat_vectors, philox4x32 10: counter and key zero."""
        counter = np.zeros(1, np.uint64)
        assert plain._philox(0, counter)[0] == 0x6627E8D5
        assert fast._first_words(0, counter)[0] == 0x6627E8D5

    @pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**63 - 1])
    @pytest.mark.parametrize("start", [0, 2**32 - 50, 2**40])
    def test_fast_words_are_the_plain_ones(self, seed: int, start: int) -> None:
        counter = np.arange(start, start + 100, dtype=np.uint64)
        wanted = plain._philox(seed, counter)
        np.testing.assert_array_equal(fast._first_words(seed, counter).astype(np.uint32), wanted)

    @pytest.mark.parametrize("size", [1, 100, fast.PIECE, fast.PIECE + 5])
    def test_fast_mask_is_the_plain_one(self, size: int) -> None:
        x = np.random.default_rng(size).standard_normal((1, size))
        out = np.empty_like(x)
        np.testing.assert_array_equal(fast._drop(x, 0.3, 11, out), plain._drop(x, 0.3, 11))

    def test_acts_on_the_adapter_in_training_only(self, lora: Any) -> None:
        """https://github.com/paiml/aprender/issues/2170: accepted but never applied."""
        x, a = np.ones((1, 1000)), np.full((1, 1000), 1e-3)
        w, b = np.zeros((1, 1000)), np.ones((1, 1))
        still, _ = lora.lora_forward(x, w, a, b, 1.0)
        assert still[0, 0] == pytest.approx(1.0, abs=1e-12)
        seen = [lora.lora_forward(x, w, a, b, 1.0, None, 0.5, s)[0][0, 0] for s in range(200)]
        assert len(set(seen)) > 20
        assert np.mean(seen) == pytest.approx(1.0, abs=0.02)

    def test_leaves_the_base_alone(self, lora: Any) -> None:
        x, w, a, b = make()
        y, _ = lora.lora_forward(x, w, a, np.zeros_like(b), 1.0, None, 0.9, 3)
        np.testing.assert_array_equal(y, x @ w.T)

    def test_backward_has_the_same_mask(self, lora: Any) -> None:
        x, w, a, b = make()
        w = np.zeros_like(w)
        _, s = lora.lora_forward(x, w, a, b, 1.0, None, 0.5, 3)
        kept = plain._keep(x.shape, 0.5, 3)
        grad_x, grad_a, _ = lora.lora_backward(np.ones((6, 7)), x, w, a, b, s, 1.0, 0.5, 3)
        assert (grad_x[~kept] == 0).all()
        assert (grad_x[kept] != 0).all()
        wanted = (np.ones((6, 7)) @ b).T @ np.where(kept, 2 * x, 0)
        np.testing.assert_allclose(grad_a, wanted, rtol=1e-12)


class TestScale:
    def test_is_not_alpha(self, lora: Any) -> None:
        """https://github.com/Blaizzy/mlx-vlm/issues/986: r=8 and alpha=16 make 2, not 16."""
        a, b = np.full((8, 1), 1 / 8), np.ones((1, 8))
        y, _ = lora.lora_forward(np.ones((1, 1)), np.zeros((1, 1)), a, b, 16 / 8)
        assert y.item() == 2.0

    def test_enters_forward_and_both_gradients(self, lora: Any) -> None:
        x, w, a, b = make()
        grad_y = np.random.default_rng(1).standard_normal((6, 7))
        y1, s1 = lora.lora_forward(x, w, a, b, 1.0)
        y3, s3 = lora.lora_forward(x, w, a, b, 3.0)
        np.testing.assert_array_equal(s1, s3)
        np.testing.assert_allclose(y3 - x @ w.T, 3 * (y1 - x @ w.T), rtol=1e-10, atol=1e-12)
        one = lora.lora_backward(grad_y, x, w, a, b, s1, 1.0)
        three = lora.lora_backward(grad_y, x, w, a, b, s1, 3.0)
        np.testing.assert_allclose(three[1], 3 * one[1], rtol=1e-12)
        np.testing.assert_allclose(three[2], 3 * one[2], rtol=1e-12)


class TestFreshAdapter:
    """https://github.com/Lightning-AI/litgpt/issues/1229: both factors zero, or neither."""

    @pytest.mark.parametrize("quantized", [False, True])
    def test_output_is_the_base_and_only_b_has_a_gradient(self, lora: Any, quantized: bool) -> None:
        x, w, a, b = (v.astype(np.float32) for v in make(n_in=64))
        weight = nf4_quantize(w) if quantized else w
        zero = np.zeros_like(b)
        base, _ = lora.lora_forward(x, weight, np.zeros_like(a), zero, 2.0)
        y, s = lora.lora_forward(x, weight, a, zero, 2.0)
        np.testing.assert_array_equal(y, base)
        _, grad_a, grad_b = lora.lora_backward(
            np.ones((6, 7), np.float32), x, weight, a, zero, s, 2
        )
        assert (grad_a == 0).all()
        assert (grad_b != 0).any()


class TestBackward:
    def test_adds_to_what_the_arena_holds(self, lora: Any) -> None:
        x, w, a, b = make()
        grad_y = np.random.default_rng(1).standard_normal((6, 7))
        _, s = lora.lora_forward(x, w, a, b, 2.0)
        _, grad_a, grad_b = lora.lora_backward(grad_y, x, w, a, b, s, 2.0)
        arena = np.ones(a.size + b.size)
        into_a, into_b = arena[: a.size].reshape(a.shape), arena[a.size :].reshape(b.shape)
        for times in (1, 2):
            given = lora.lora_backward(
                grad_y, x, w, a, b, s, 2.0, grad_a_out=into_a, grad_b_out=into_b
            )
            assert given[1] is into_a
            assert given[2] is into_b
            np.testing.assert_allclose(into_a, 1 + times * grad_a, rtol=1e-12)
            np.testing.assert_allclose(into_b, 1 + times * grad_b, rtol=1e-12)

    def test_skips_the_input_gradient(self, lora: Any) -> None:
        x, w, a, b = make()
        _, s = lora.lora_forward(x, w, a, b, 2.0)
        assert lora.lora_backward(np.ones((6, 7)), x, w, a, b, s, 2.0, need_grad_x=False)[0] is None
