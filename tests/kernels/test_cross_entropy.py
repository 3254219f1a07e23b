"""Cross entropy kernels, compiled and executed on the CPU, on the inputs that broke others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from entrenar.errors import LayoutError
from entrenar.kernels import _cross_entropy_kernels, _launch
from entrenar.kernels import cross_entropy as kernels
from entrenar.reference import cross_entropy as plain
from entrenar.testing import poisoned, to_float64


@pytest.fixture(autouse=True)
def on_device(device: str) -> Iterator[None]:
    """New storage lies where kernels run."""
    with torch.device(device):
        yield


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 columns, so that short rows take several."""
    monkeypatch.setattr(kernels, "_row_tile", lambda n_cols: {"BLOCK": 128, "num_warps": 4})


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("vocab", [46_336, 65_537, 151_936, 256_000])
def test_rows_longer_than_a_block(vocab: int) -> None:
    """https://github.com/unslothai/unsloth/issues/7"""
    logits = torch.zeros(2, vocab)
    logits[1, -1] = 5
    targets = _ids(0, vocab - 1)
    loss, counted = kernels.cross_entropy_forward(logits, targets)
    assert int(counted) == 2
    wanted = math.log(vocab) + math.log(vocab - 1 + math.exp(5)) - 5
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    for row, alone in enumerate((math.log(vocab), math.log(vocab - 1 + math.exp(5)) - 5)):
        one = torch.where(torch.arange(2) == row, targets, -100)
        assert float(kernels.cross_entropy_forward(logits, one)[0]) == pytest.approx(
            alone, rel=1e-6
        )
    grad = kernels.cross_entropy_backward(logits, targets).double()
    assert float(grad.sum(dim=1).abs().max()) < 1e-6


def test_no_row_counts() -> None:
    """https://github.com/pytorch/pytorch/issues/116349"""
    logits = torch.arange(50.0).reshape(5, 10) / 10
    targets = torch.full((5,), -100)
    with poisoned():
        loss, counted = kernels.cross_entropy_forward(logits, targets)
        grad = kernels.cross_entropy_backward(logits, targets)
    assert float(loss) == 0.0
    assert int(counted) == 0
    assert not grad.any()


def test_left_out_rows_are_never_looked_at() -> None:
    """https://github.com/pytorch/pytorch/issues/11551"""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[-inf] * 4, [0, 1, 0, 3], [nan, 1, 1, 1]])
    targets = _ids(-100, 1, -100)
    assert float(kernels.cross_entropy_forward(logits, targets)[0]) == pytest.approx(2.21099762)
    grad = to_float64(kernels.cross_entropy_backward(logits, targets, out=logits))
    assert np.array_equal(grad[[0, 2]], np.zeros((2, 4)))
    np.testing.assert_allclose(
        grad[1], [0.04031637, -0.89040874, 0.04031637, 0.80977599], atol=1e-6
    )


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("place", [0, 127, 128, 150, 255, 256, 299])
def test_blocks_without_a_finite_logit(place: int) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1930"""
    logits = torch.full((1, 300), -math.inf)
    logits[0, place] = 10
    assert float(kernels.cross_entropy_forward(logits, _ids(place))[0]) == 0.0
    assert not kernels.cross_entropy_backward(logits, _ids(place)).any()


def test_one_gradient_a_row_whatever_its_stride() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/968, ROCm/TransformerEngine/issues/623"""
    logits = torch.tensor([[2.0, 0], [0, 0], [1, 3]])
    targets = _ids(-100, 1, 0)
    wanted = [[0, 0], [1, -1], [-0.44039854, 0.44039854]]
    for scale in (torch.tensor([7, 2, 0.5]), torch.tensor([7, 0, 2, 0, 0.5, 0])[::2]):
        grad = kernels.cross_entropy_backward(logits, targets, scale)
        np.testing.assert_allclose(to_float64(grad), wanted, atol=1e-6)
    spread = kernels.cross_entropy_backward(logits, targets, torch.ones(1).expand(3))
    assert torch.equal(spread, kernels.cross_entropy_backward(logits, targets, torch.ones(3)))
    single = kernels.cross_entropy_backward(logits, targets, torch.tensor(1.0))
    assert torch.equal(spread, single)


def test_targets_that_do_not_sum_to_one() -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/2428: the gradient took their sum to be 1."""
    grad = kernels.cross_entropy_backward(torch.tensor([[1.0, 2, 0]]), _ids(0), torch.tensor([0.5]))
    np.testing.assert_allclose(to_float64(grad), [[-0.37763576, 0.33262048, 0.04501529]], atol=1e-6)


def test_rows_that_are_not_adjacent() -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/2734"""
    base = torch.arange(64.0).reshape(4, 2, 8) % 7
    targets = _ids(0, 1, 2, 3)
    logits = base.transpose(0, 1)[0]
    assert not logits.is_contiguous()
    for function in (kernels.cross_entropy_forward, kernels.cross_entropy_backward):
        got, wanted = function(logits, targets), function(logits.contiguous(), targets)
        for g, w in zip(got, wanted, strict=True):
            assert torch.equal(g, w)
    with pytest.raises(LayoutError, match="contiguous columns"):
        kernels.cross_entropy_forward(base[:, 0].T, torch.zeros(8, dtype=torch.int64))


def test_logits_far_apart() -> None:
    """https://github.com/FluxML/NNlib.jl/issues/68"""
    logits = torch.tensor([[-431.0, 279, 427]])
    assert float(kernels.cross_entropy_forward(logits, _ids(0))[0]) == 858.0
    assert kernels.cross_entropy_backward(logits, _ids(0)).tolist() == [[-1, 0, 1]]
    huge = torch.tensor([[3e38, 3e38], [-1e30, -1e30], [3e38, -3e38]])
    loss = kernels.cross_entropy_forward(huge, _ids(0, 1, 0))[0]
    assert float(loss) == pytest.approx(2 * math.log(2))


def test_what_must_be_noticed_is_nan() -> None:
    rows = torch.tensor([[0, math.nan], [math.inf, 0], [-math.inf, -math.inf]])
    for row in rows:
        assert torch.isnan(kernels.cross_entropy_forward(row[None], _ids(1))[0])
        assert torch.isnan(kernels.cross_entropy_backward(row[None], _ids(1))).any()


@pytest.mark.parametrize("target", [8, -1, 2**31, -(2**40)])
def test_a_target_out_of_range_stays_in_bounds(
    target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/3767, where the host cannot look."""
    monkeypatch.setattr(kernels, "_check_targets_on_cpu", lambda *_: None)
    logits = torch.zeros(3, 8)
    targets = _ids(0, target, 2)
    loss, counted = kernels.cross_entropy_forward(logits, targets)
    assert torch.isnan(loss)
    assert int(counted) == 3
    grad = kernels.cross_entropy_backward(logits, targets)
    assert torch.isnan(grad[1]).all()
    assert torch.isfinite(grad[[0, 2]]).all()


@triton.jit
def _row_offset_kernel(out_ptr, row, stride_row):
    tl.store(out_ptr, _cross_entropy_kernels._row_offset(row, stride_row))


def test_a_row_past_two_to_the_31() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    _launch.launch(
        _row_offset_kernel, (1,), op="offset", stream=None, reads=(), writes=(out,),
        out_ptr=out, row=16_390, stride_row=256_000,
    )  # fmt: skip
    assert out.item() == 16_390 * 256_000


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_over_its_logits_is_the_gradient_beside_them(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    logits = torch.tensor(4 * rng.standard_normal((3, 517)), dtype=dtype)
    targets = _ids(0, -100, 516)
    beside = kernels.cross_entropy_backward(logits, targets, 0.5)
    onto = kernels.cross_entropy_backward(logits, targets, 0.5, out=logits)
    assert onto is logits
    assert torch.equal(beside, onto)


def test_a_confident_row_keeps_its_gradient_in_16_bits() -> None:
    """1 is subtracted before rounding: after it, p = 0.9995 would give 0 in bfloat16."""
    logits = torch.tensor([[8.0, 0.4]], dtype=torch.bfloat16)
    grad = to_float64(kernels.cross_entropy_backward(logits, _ids(0)))
    wanted = plain.cross_entropy_backward(to_float64(logits), np.array([0]))
    np.testing.assert_allclose(grad, wanted, rtol=2**-8)


def test_the_chunk_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of all rows never exist; chunks split evenly."""
    hidden, weight = torch.ones(20, 4), torch.ones(40, 4)
    with poisoned() as given:
        kernels.linear_cross_entropy(
            hidden, weight, torch.zeros(20, dtype=torch.int64), chunk_rows=8
        )
    assert max(t.numel() for t in given) == 7 * 40
    assert sum(t.numel() for t in given if t.shape[-1:] == (40,)) == 7 * 40
