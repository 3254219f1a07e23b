"""Layer norm kernels compiled: rows far from zero, half precision, padding, order of sums, launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.errors import LayoutError
from entrenar.kernels import layer_norm
from entrenar.reference import layer_norm as reference
from entrenar.testing import poisoned


@pytest.mark.parametrize("width", [300, 20_000])
def test_a_row_far_from_zero_keeps_its_variance(device: str, width: int) -> None:
    """https://github.com/pytorch/pytorch/issues/51102: a large mean cancelled the variance.

    Numbers about 4096 with deviation 1: their squares differ in the 24th bit, past float32.
    """
    values = (4096 + np.random.default_rng(0).standard_normal((2, width))).astype(np.float32)
    x = torch.from_numpy(values).to(device)
    ones = torch.full((width,), 1.0, device=device)
    y, mean, rstd = layer_norm.layer_norm_forward(x, ones, None, 1e-5)
    exact = values.astype(np.float64)
    np.testing.assert_allclose(mean.cpu(), exact.mean(1), rtol=2e-7)
    # an error of half a unit in the last place of the mean, 2.4e-4, is what the row itself can tell
    np.testing.assert_allclose(rstd.cpu(), 1 / np.sqrt(exact.var(1) + 1e-5), rtol=1e-5)
    wanted = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.cpu(), wanted, atol=1e-3)


def test_constant_rows_give_the_bias(device: str) -> None:
    x = torch.full((3, 100), 0.1, device=device)
    bias = torch.arange(100, dtype=torch.float32, device=device)
    y, _, _ = layer_norm.layer_norm_forward(x, bias, bias, 1e-5)
    # what rounding leaves of x - mean, times 1/sqrt(eps)
    np.testing.assert_allclose(y.cpu(), bias.cpu().expand(3, 100), rtol=1e-5)


@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_squares_do_not_overflow_in_half(device: str, value: float) -> None:
    """https://github.com/pytorch/pytorch/issues/133085: 300 squared is past float16."""
    x = torch.tensor([[value, -value] * 4], dtype=torch.float16, device=device)
    ones = torch.full((8,), 1.0, dtype=torch.float16, device=device)
    y, _, _ = layer_norm.layer_norm_forward(x, ones, None, 1e-6)
    np.testing.assert_allclose(y.float().cpu(), [[1.0, -1.0] * 4], atol=1e-3)


def test_parameter_gradients_are_summed_in_float32(device: str) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/950: a bf16 sum of ones stops at 256."""
    x = torch.tensor([[1.0, -1.0]] * 512, dtype=torch.bfloat16, device=device)
    grad = torch.tensor([[1.0, 2.0**-9]] * 512, dtype=torch.bfloat16, device=device)
    weight = torch.full((2,), 1.0, dtype=torch.bfloat16, device=device)
    mean, rstd = (torch.full((512,), v, device=device) for v in (0.0, 1.0))
    _, of_weight, of_bias = layer_norm.layer_norm_backward(grad, x, weight, mean, rstd)
    assert of_weight is not None
    assert of_bias is not None
    assert of_weight.float().tolist() == [512.0, -1.0]
    assert of_bias.float().tolist() == [512.0, 1.0]


@pytest.mark.parametrize("columns", [1, 3, 65, 100])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_padding_is_never_read(device: str, columns: int, poison: float) -> None:
    """https://github.com/triton-lang/triton/issues/737: masked lanes without a value joined sums."""
    memory = torch.full((2 * columns + 256,), poison, device=device)
    x = memory[: 2 * columns].view(2, columns)
    values = np.random.default_rng(columns).standard_normal((2, columns)).astype(np.float32)
    x.copy_(torch.from_numpy(values))
    ones = torch.full((columns,), 1.0, device=device)
    with poisoned():
        y, mean, rstd = layer_norm.layer_norm_forward(x, ones, ones, 0.1)
        got = layer_norm.layer_norm_backward(x, x, ones, mean, rstd)
    exact, weight = values.astype(np.float64), np.ones(columns)
    wanted, *statistics = reference.layer_norm_forward(exact, weight, weight, 0.1)
    gradients = reference.layer_norm_backward(exact, exact, weight, *statistics)
    for result, want in zip((y, *got), (wanted, *gradients), strict=True):
        assert result is not None
        assert want is not None
        np.testing.assert_allclose(result.cpu(), want, rtol=1e-4, atol=1e-5)


def test_no_rows_give_zero_gradients(device: str) -> None:
    """https://github.com/pytorch/pytorch/issues/34202: zero rows dropped the weight's gradient."""
    x = torch.empty((0, 8), device=device)
    weight = torch.full((8,), 1.0, device=device)
    with poisoned():
        _, mean, rstd = layer_norm.layer_norm_forward(x, weight, weight, 1e-5)
        _, of_weight, of_bias = layer_norm.layer_norm_backward(x, x, weight, mean, rstd)
    assert of_weight is not None
    assert of_bias is not None
    assert of_weight.tolist() == of_bias.tolist() == [0.0] * 8


@pytest.mark.parametrize("shape", [(300, 64), (7, 130), (3, 9000)])
def test_parameter_gradients_repeat_to_the_bit(device: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x = torch.from_numpy(values).to(device)
    weight = torch.full((shape[1],), 1.0, device=device)
    _, mean, rstd = layer_norm.layer_norm_forward(x, weight, None, 1e-5)
    first, second = (layer_norm.layer_norm_backward(x, x, weight, mean, rstd) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("of_weight", "of_bias", "launches"), [(False, False, 1), (True, False, 2), (False, True, 2)]
)
def test_frozen_parameters_have_no_gradient(
    device: str, of_weight: bool, of_bias: bool, launches: int
) -> None:
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32))
    x = x.to(device)
    weight = torch.full((64,), 1.0, device=device)
    _, mean, rstd = layer_norm.layer_norm_forward(x, weight, None, 1e-5)
    whole = layer_norm.layer_norm_backward(x, x, weight, mean, rstd)
    seen: list[runtime.LaunchRecord] = []
    with runtime.listening(seen.append):
        got = layer_norm.layer_norm_backward(x, x, weight, mean, rstd, None, of_weight, of_bias)
    assert len(seen) == launches
    for result, want, asked in zip(got, whole, (True, of_weight, of_bias), strict=True):
        assert (result is not None) == asked
        assert result is None or (want is not None and torch.equal(result, want))


def test_strided_rows_are_refused(device: str) -> None:
    x = torch.full((4, 64), 1.0, device=device)[:, ::2]
    with pytest.raises(LayoutError, match=r"x .*has strides.*contiguous"):
        layer_norm.layer_norm_forward(x, torch.full((32,), 1.0, device=device), None, 1e-6)
