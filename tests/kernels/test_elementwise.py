"""Elementwise kernels compiled: rounding by bits, aliasing, offsets past 2^31, fixed order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from entrenar.errors import LayoutError
from entrenar.kernels import elementwise
from entrenar.testing import poisoned, to_float64


@triton.jit
def first_offset_kernel(out_ptr, pid, BLOCK: tl.constexpr):
    offsets = elementwise._block_offsets(pid, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), offsets)


def test_offsets_past_two_to_the_31_stay_positive(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/832: int32 offsets turned negative."""
    from entrenar.kernels._launch import launch

    out = torch.zeros(1024, dtype=torch.int64, device=device)
    launch(
        first_offset_kernel, (1,), op="offsets", stream=None, reads=(), writes=(out,),
        out_ptr=out, pid=2_097_152, BLOCK=1024,
    )  # fmt: skip
    assert out[0].item() == 2_147_483_648
    assert out[5].item() == 2_147_483_653


def test_casts_to_bf16_round_to_nearest_even(device: str) -> None:
    """https://github.com/tenstorrent/tt-metal/issues/19882: truncation biased training."""
    values = [3.14, 1e-8, 1.00390625, 1.01171875, np.inf, -0.0, 3.4e38]
    wanted = [3.140625, 1.0011717677116394e-8, 1.0, 1.015625, np.inf, -0.0, np.inf]
    x = torch.tensor(values, dtype=torch.float32, device=device)
    got = to_float64(elementwise.cast(x, torch.bfloat16))
    np.testing.assert_array_equal(got, wanted)
    assert np.signbit(got[5])
    nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32).to(device)
    assert np.isnan(to_float64(elementwise.cast(nan, torch.bfloat16))).all()


def test_every_cast_agrees_with_the_standard_to_the_bit(device: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        got, wanted = elementwise.cast(x.to(device), dtype).cpu(), x.to(dtype)
        number = ~x.isnan()
        assert torch.equal(got[number], wanted[number])
        assert got[~number].isnan().all()


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 12289])
def test_whole_and_partial_blocks(n: int, device: str) -> None:
    x = torch.arange(n, dtype=torch.float32).to(torch.bfloat16).to(device)
    y = torch.ones(n, dtype=torch.bfloat16, device=device)
    with poisoned():
        got = elementwise.add(x, y)
    assert torch.equal(got.cpu(), x.cpu() + y.cpu())


def test_bf16_sums_are_of_values_not_of_bits(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/11584: 2.5 + 2.0 gave -2.9e-39."""
    a = torch.tensor([2.5], dtype=torch.bfloat16, device=device)
    b = torch.tensor([2.0], dtype=torch.bfloat16, device=device)
    assert elementwise.add(a, b).item() == 4.5


def test_an_update_in_place_is_applied_once(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/6547: autotuning repeated updates in place."""
    dst = torch.ones(5, device=device)
    assert elementwise.add_(dst, torch.ones(5, dtype=torch.bfloat16, device=device)) is dst
    assert (to_float64(dst) == 2).all()


def test_operands_may_be_the_result(device: str) -> None:
    a = torch.arange(5000, dtype=torch.float32, device=device)
    b = torch.full((5000,), 3.0, device=device)
    wanted = to_float64(a) * 3
    assert elementwise.multiply(a, b, out=b) is b
    np.testing.assert_array_equal(to_float64(b), wanted)
    elementwise.scale(b, 0.5, out=b)
    elementwise.add(b, b, out=b)
    np.testing.assert_array_equal(to_float64(b), wanted)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 700])
def test_bias_gradient_is_the_same_to_the_bit_every_time(rows: int, device: str) -> None:
    """https://github.com/ByteDance-Seed/Triton-distributed/issues/182: no unzeroed atomics."""
    values = np.random.default_rng(rows).standard_normal((rows, 37))
    grad = torch.from_numpy(values).float().to(device)
    with poisoned():
        first = elementwise.bias_backward(grad)
    second = elementwise.bias_backward(grad)
    assert torch.equal(first, second)
    np.testing.assert_allclose(to_float64(first), to_float64(grad).sum(0), rtol=1e-5, atol=1e-5)


def test_storage_with_gaps_is_refused(device: str) -> None:
    x = torch.zeros(4, 6, device=device)
    with pytest.raises(LayoutError, match="a of shape"):
        elementwise.add(x.transpose(0, 1), x.transpose(0, 1))
    with pytest.raises(LayoutError, match="dst of shape"):
        elementwise.add_(x[:, ::2], torch.zeros(4, 3, device=device))


@pytest.mark.parametrize("value", [0.1, float("inf"), -0.0])
def test_fill_rounds_once(value: float, device: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.empty(4099, dtype=dtype, device=device)
        elementwise.fill_(x, value)
        wanted = torch.full((4099,), value, dtype=dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(x.cpu().view(bits), wanted.view(bits))
