"""RMS norm kernels compiled: half precision, poisoned padding, order of sums, long rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.errors import DTypeError, LayoutError
from entrenar.kernels import rms_norm
from entrenar.optable import call
from entrenar.reference import rms_norm as reference
from entrenar.testing import Tolerance, assert_close, poisoned


@pytest.mark.parametrize("value", [300.0, -300.0, 60000.0])
def test_squares_do_not_overflow_in_half(device: str, value: float) -> None:
    """https://github.com/pytorch/pytorch/issues/133085: 300 squared is past float16."""
    x = torch.full((1, 8), value, dtype=torch.float16, device=device)
    weight = torch.full((8,), 1.0, dtype=torch.float16, device=device)
    y, _ = rms_norm.rms_norm_forward(x, weight, 1e-6)
    np.testing.assert_allclose(y.float().cpu(), np.full((1, 8), np.sign(value)), atol=1e-3)


def test_small_squares_do_not_vanish_in_half(device: str) -> None:
    """https://github.com/jingyaogong/minimind/issues/301: 1e-4 squared is 0 in float16."""
    x = torch.full((1, 8), 1e-4, dtype=torch.float16, device=device)
    weight = torch.full((8,), 1.0, dtype=torch.float16, device=device)
    y, _ = rms_norm.rms_norm_forward(x, weight, 1e-6)
    np.testing.assert_allclose(y.float().cpu(), np.full((1, 8), 0.0995), atol=2e-4)


def test_weight_gradient_is_summed_in_float32(device: str) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/950: a bf16 sum of ones stops at 256."""
    x = torch.full((512, 2), 1.0, dtype=torch.bfloat16, device=device)
    grad = torch.tensor([[1.0, 2.0**-9]] * 512, dtype=torch.bfloat16, device=device)
    weight = torch.full((2,), 1.0, dtype=torch.bfloat16, device=device)
    rstd = torch.full((512,), 1.0, device=device)
    _, grad_weight = rms_norm.rms_norm_backward(grad, x, weight, rstd)
    assert grad_weight is not None
    assert grad_weight.float().tolist() == [512.0, 1.0]


@pytest.mark.parametrize("columns", [1, 3, 5, 63, 65, 100])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_padding_is_never_read(device: str, columns: int, poison: float) -> None:
    """https://github.com/triton-lang/triton/issues/737: masked lanes without a value joined sums."""
    memory = torch.full((2 * columns + 256,), poison, device=device)
    x = memory[: 2 * columns].view(2, columns)
    values = np.random.default_rng(columns).standard_normal((2, columns)).astype(np.float32)
    x.copy_(torch.from_numpy(values))
    weight = torch.full((columns,), 1.0, device=device)
    with poisoned():
        y, rstd = rms_norm.rms_norm_forward(x, weight, 1e-6)
        grad_x, grad_weight = rms_norm.rms_norm_backward(x, x, weight, rstd)
    ones = np.ones(columns)
    wanted, statistics = reference.rms_norm_forward(values.astype(np.float64), ones, 1e-6)
    gradient, of_weight = reference.rms_norm_backward(
        values.astype(np.float64), values.astype(np.float64), ones, statistics
    )
    assert grad_weight is not None
    for got, want in zip((y, grad_x, grad_weight), (wanted, gradient, of_weight), strict=True):
        np.testing.assert_allclose(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_no_rows_give_zero_weight_gradient(device: str) -> None:
    """https://github.com/pytorch/pytorch/issues/34202: zero rows dropped the weight's gradient."""
    x = torch.empty((0, 8), device=device)
    weight = torch.full((8,), 1.0, device=device)
    with poisoned():
        y, rstd = rms_norm.rms_norm_forward(x, weight, 1e-6)
        _, grad_weight = rms_norm.rms_norm_backward(x, x, weight, rstd)
    assert tuple(y.shape) == (0, 8)
    assert grad_weight is not None
    assert grad_weight.tolist() == [0.0] * 8


def test_rows_lie_on_the_first_grid_axis() -> None:
    """https://github.com/NVIDIA/apex/issues/411: axes past the first hold 65535 blocks."""
    rows, block, _ = rms_norm._tile(4, rms_norm._MAX_BLOCK_FORWARD)
    assert (rows, block) == (32, 4)
    assert -(-(2**31 - 1) // rows) < 2**31


@pytest.mark.parametrize("shape", [(300, 64), (7, 130), (3, 9000)])
def test_weight_gradient_repeats_to_the_bit(device: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x = torch.from_numpy(values).to(device)
    weight = torch.full((shape[1],), 1.0, device=device)
    _, rstd = rms_norm.rms_norm_forward(x, weight, 1e-6)
    first, second = (rms_norm.rms_norm_backward(x, x, weight, rstd)[1] for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    exact = (values.astype(np.float64) ** 2 * rstd.cpu().double().numpy()[:, None]).sum(0)
    np.testing.assert_allclose(first.cpu(), exact, rtol=1e-5)


def test_frozen_weight_costs_one_launch(device: str) -> None:
    x = torch.full((4, 64), 1.0, device=device)
    weight = torch.full((64,), 1.0, device=device)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        _, rstd = rms_norm.rms_norm_forward(x, weight, 1e-6)
        rms_norm.rms_norm_backward(x, x, weight, rstd, x, False)
    assert [record.op for record in launches] == ["rms_norm_forward", "rms_norm_backward"]


def test_strided_rows_are_refused(device: str) -> None:
    x = torch.full((4, 64), 1.0, device=device)[:, ::2]
    with pytest.raises(LayoutError, match=r"x .*has strides.*contiguous"):
        rms_norm.rms_norm_forward(x, torch.full((32,), 1.0, device=device), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [48, 9000])
def test_a_float32_weight_beside_16_bit_rows(device: str, dtype: torch.dtype, columns: int) -> None:
    """https://github.com/huggingface/transformers/pull/29402: 1 + w in 16 bits loses the low bits of w."""
    rng = np.random.default_rng(0)
    x, grad = (
        torch.from_numpy(rng.standard_normal((3, columns))).to(device=device, dtype=dtype)
        for _ in range(2)
    )
    weight = torch.from_numpy(1 + 2.0**-12 * rng.standard_normal(columns)).float().to(device)
    y, rstd = rms_norm.rms_norm_forward(x, weight, 1e-6)
    grad_x, grad_weight = rms_norm.rms_norm_backward(grad, x, weight, rstd)
    assert (y.dtype, grad_x.dtype) == (dtype, dtype)
    assert grad_weight is not None
    assert grad_weight.dtype == torch.float32
    wide = [t.double().cpu().numpy() for t in (x, weight, grad)]
    wanted, statistics = reference.rms_norm_forward(wide[0], wide[1], 1e-6)
    of_x, of_weight = reference.rms_norm_backward(wide[2], wide[0], wide[1], statistics)
    half, single = (
        Tolerance("float16" if dtype == torch.float16 else "bfloat16", reduction=columns),
        Tolerance("float32", reduction=columns),
    )
    assert_close(y, wanted, half)
    assert_close(grad_x, of_x, half)
    assert_close(grad_weight, of_weight, single)


def test_a_weight_of_another_16_bit_dtype_is_refused(device: str) -> None:
    x = torch.ones((2, 8), dtype=torch.bfloat16, device=device)
    with pytest.raises(DTypeError, match="weight"):
        rms_norm.rms_norm_forward(x, torch.ones(8, dtype=torch.float16, device=device), 1e-6)
    with pytest.raises(DTypeError, match="weight"):
        call("rms_norm_forward", x, torch.ones(8, dtype=torch.float16, device=device), 1e-6)
    with pytest.raises(DTypeError, match="weight"):
        rms_norm.rms_norm_forward(x.float(), x[0], 1e-6)
