"""Norm and clip kernels compiled: range, order, memory that is not zero, what is left alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.errors import DTypeError
from entrenar.kernels import clip
from entrenar.optable import call
from entrenar.testing import poisoned


@pytest.mark.parametrize("size", [1e30, 3e36, 1e-30, 1e-40])
@pytest.mark.parametrize("n", [1, 100, 5000])
def test_norm_neither_overflows_nor_vanishes(device: str, size: float, n: int) -> None:
    flat = torch.full((n,), size, device=device)
    with poisoned():
        norm, factor, skip = clip.clip_factor(flat, 1.0)
    exact = float(flat[0].item()) * n**0.5
    assert norm.item() == pytest.approx(exact, rel=1e-5)
    assert factor.item() == pytest.approx(min(1.0, 1.0 / exact), rel=1e-5)
    assert skip.item() == 0


def test_sizes_mix(device: str) -> None:
    """Large, medium and small squares each have their sum; the large one decides."""
    generator = np.random.default_rng(0)
    values = (10.0 ** generator.uniform(-30, 25, 3000)).astype(np.float32)
    for keep in (values, values[values < 1e10], values[values < 1e-20]):
        got = clip.grad_norm(torch.from_numpy(keep.copy()).to(device)).item()
        assert got == pytest.approx(float(np.linalg.norm(keep.astype(np.float64))), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_non_finite_gradients_are_left_and_flagged(device: str, bad: float) -> None:
    """https://github.com/pytorch/pytorch/issues/46849: the rest became 0 and inf became NaN."""
    flat = torch.tensor([1.0, 2.0, bad, 1.0], device=device)
    norm, factor, skip = clip.clip_factor(flat, 1.0)
    assert (factor.item(), skip.item()) == (0.0, 1)
    assert not np.isfinite(norm.item())
    before = flat.clone()
    clip.clip_grad_norm(flat, 1.0)
    np.testing.assert_array_equal(flat.cpu(), before.cpu())


def test_squares_past_half_precision(device: str) -> None:
    """https://github.com/facebookresearch/fairscale/issues/263: 5000 squared is past float16."""
    flat = torch.tensor([5000.0, 5000.0], dtype=torch.float16, device=device)
    assert clip.clip_grad_norm(flat, 1.0).item() == pytest.approx(7071.0678, rel=1e-6)
    np.testing.assert_allclose(flat.float().cpu(), [0.70710678] * 2, rtol=1e-3)
    many = torch.full((1 << 20,), 0.01, dtype=torch.bfloat16, device=device)
    assert clip.grad_norm(many).item() == pytest.approx(10.25, rel=1e-6)  # 1024 x bf16(0.01)


def test_zeros_and_nothing(device: str) -> None:
    """https://github.com/kozistr/pytorch_optimizer/issues/431 and
    https://github.com/NVIDIA/Megatron-LM/issues/5529: no gradient at all crashed the clip.
    """
    for flat in (torch.zeros(4, device=device), torch.zeros(0, device=device)):
        with poisoned():
            norm, factor, skip = clip.clip_factor(flat, 1.0)
        assert (norm.item(), factor.item(), skip.item()) == (0.0, 1.0, 0)
        assert clip.clip_grad_norm(flat, 1.0).item() == 0.0


@pytest.mark.parametrize("function", ["grad_norm", "clip_factor", "clip_grad_norm"])
def test_gradients_come_as_one_storage(device: str, function: str) -> None:
    """https://github.com/pytorch/pytorch/issues/148259: the norm exhausted a generator of parameters,
    the scaling saw nothing, and clipping silently did nothing.
    """
    flat = torch.tensor([30.0, 40.0], device=device)
    limit = () if function == "grad_norm" else (1.0,)
    for given in ((t for t in [flat]), [flat]):
        for where in (getattr(clip, function), functools.partial(call, function)):
            with pytest.raises(DTypeError, match=rf"{function}: flat is a (generator|list)"):
                where(given, *limit)
    assert flat.tolist() == [30.0, 40.0]
    assert clip.clip_grad_norm(flat, 1.0).item() == pytest.approx(50.0, rel=1e-6)
    np.testing.assert_allclose(flat.cpu(), [0.6, 0.8], rtol=1e-6)


def test_twice_in_a_row_gives_the_same(device: str) -> None:
    """https://github.com/ByteDance-Seed/Triton-distributed/issues/182: sums into memory never zeroed."""
    flat = torch.tensor([3.0, 4.0], device=device)
    with poisoned():
        assert [clip.grad_norm(flat).item() for _ in range(2)] == [5.0, 5.0]


def test_order_of_the_sum_is_fixed(device: str) -> None:
    values = np.random.default_rng(2).standard_normal(30_000).astype(np.float32)
    flat = torch.from_numpy(values).to(device)
    first, second = clip.grad_norm(flat), clip.grad_norm(flat)
    assert torch.equal(first, second)
    assert first.item() == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-6)


def test_clipping_takes_three_launches_and_the_factor_two(device: str) -> None:
    flat = torch.tensor([3.0, 4.0], device=device)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        clip.clip_factor(flat, 1.0)
        assert len(launches) == 2
        clip.clip_grad_norm(flat, 1.0)
    assert len(launches) == 5
    np.testing.assert_allclose(flat.cpu(), [0.6, 0.8], rtol=1e-6)
