"""LoRA kernels, compiled and executed: the mask to the bit, high ranks, accumulation, mixed dtypes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("ENTRENAR_BACKEND") == "triton":
    pytest.skip("kernels of this process are interpreted", allow_module_level=True)
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

from entrenar.errors import ShapeMismatchError
from entrenar.kernels import lora
from entrenar.reference import lora as reference
from entrenar.testing import to_float64, to_storage


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")


def make(rows: int, n_in: int, n_out: int, rank: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rank)
    return (
        rng.standard_normal((rows, n_in)),
        rng.standard_normal((n_out, n_in)) * 0.1,
        rng.standard_normal((rank, n_in)) * 0.1,
        rng.standard_normal((n_out, rank)) * 0.1,
    )


@pytest.mark.parametrize("seed", [7, 2**40 + 1])
def test_mask_is_the_references_to_the_bit(seed: int) -> None:
    """With A the identity, s is the dropped input; with W zero, dX is the dropped dS."""
    rows, n, p = 21, 64, 0.3
    kept = reference._keep((rows, n), p, seed)
    x = torch.ones(rows, n)
    eye, zero = torch.eye(n), torch.zeros(n, n)
    _, s = lora.lora_forward(x, zero, eye, eye, 1.0, None, p, seed)
    np.testing.assert_array_equal(s.numpy() != 0, kept)
    np.testing.assert_array_equal(s.numpy()[kept], np.float32(1 / (1 - p)))
    grad_x, grad_a, _ = lora.lora_backward(x, x, zero, eye, eye, s, 1.0, p, seed)
    assert grad_x is not None
    np.testing.assert_array_equal(grad_x.numpy() != 0, kept)
    np.testing.assert_allclose(grad_a.numpy()[0], s.numpy().sum(0), rtol=1e-6)


@pytest.mark.parametrize("rank", [40, 130])
def test_high_ranks(rank: int, counts: Callable[[int, int], int]) -> None:
    if rank > counts(64, 256):
        pytest.skip("half a minute of compiling: run by make prove")
    arrays = make(33, 64, 48, rank)
    x, w, a, b = (to_storage(v) for v in arrays)
    exact = [to_float64(v) for v in (x, w, a, b)]
    y, s = lora.lora_forward(x, w, a, b, 0.5)
    wanted = reference.lora_forward(*exact, 0.5)
    np.testing.assert_allclose(to_float64(y), wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(to_float64(s), wanted[1], rtol=1e-4, atol=1e-4)
    grad = np.random.default_rng(0).standard_normal((33, 48))
    got = lora.lora_backward(to_storage(grad), x, w, a, b, s, 0.5)
    expected: Any = reference.lora_backward(
        to_float64(to_storage(grad)), *exact, to_float64(s), 0.5
    )
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(to_float64(g), e, rtol=1e-4, atol=1e-4)


def test_a_rank_beyond_registers_is_refused() -> None:
    x, w, a, b = (to_storage(v) for v in make(2, 16, 8, 257))
    with pytest.raises(ShapeMismatchError, match="rank is 257"):
        lora.lora_forward(x, w, a, b, 1.0)


def test_float32_factors_and_gradients_beside_bfloat16() -> None:
    """The arena is float32 while activations are 16-bit; gradients are added to what it holds."""
    x, w, a, b = make(70, 64, 48, 16)
    x16, w16 = to_storage(x, "bfloat16"), to_storage(w, "bfloat16")
    a32, b32 = to_storage(a), to_storage(b)
    grad = to_storage(np.random.default_rng(1).standard_normal((70, 48)), "bfloat16")
    y, s = lora.lora_forward(x16, w16, a32, b32, 2.0)
    assert y.dtype == s.dtype == torch.bfloat16
    into_a, into_b = torch.ones(16, 64), torch.ones(48, 16)
    grad_x, grad_a, grad_b = lora.lora_backward(
        grad, x16, w16, a32, b32, s, 2.0, grad_a_out=into_a, grad_b_out=into_b
    )
    assert grad_x is not None
    assert grad_x.dtype == torch.bfloat16
    assert grad_a is into_a
    assert grad_b is into_b
    exact = [to_float64(v) for v in (grad, x16, w16, a32, b32, s)]
    wanted: Any = reference.lora_backward(*exact, 2.0)
    scale = [np.abs(v).max() for v in wanted]
    np.testing.assert_allclose(to_float64(into_a) - 1, wanted[1], atol=0.01 * scale[1])
    np.testing.assert_allclose(to_float64(into_b) - 1, wanted[2], atol=0.01 * scale[2])


def test_frozen_input() -> None:
    x, w, a, b = (to_storage(v) for v in make(5, 16, 8, 2))
    _, s = lora.lora_forward(x, w, a, b, 1.0)
    assert lora.lora_backward(torch.ones(5, 8), x, w, a, b, s, 1.0, need_grad_x=False)[0] is None
