"""Softmax compiled: block edges, extreme rows, masks, in place, poisoned neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.errors import LayoutError
from entrenar.kernels import softmax
from entrenar.reference import softmax as oracle
from entrenar.testing import Tolerance, assert_close, poisoned, to_float64


def close(got: torch.Tensor, wanted: np.ndarray) -> None:
    kind = str(got.dtype).removeprefix("torch.")
    assert_close(got, wanted, Tolerance(kind, reduction=wanted.shape[-1], b=4.0))


def normals(*shape: int, device: str) -> torch.Tensor:
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return torch.from_numpy(values).float().to(device)


@pytest.mark.parametrize("n", [1, 3, 5, 63, 64, 65, 100])
def test_neighbours_in_memory_do_not_matter(n: int, device: str) -> None:
    """https://github.com/triton-lang/triton/issues/737: lanes past the row fed the maximum."""
    for poison in (float("nan"), float("inf"), 1e30):
        flat = torch.full((n + 64,), poison, device=device)
        x = flat[:n].view(1, n)
        x.copy_(torch.zeros(1, n))
        with poisoned():
            got = to_float64(softmax.softmax_forward(x))
        np.testing.assert_allclose(got, 1 / n, rtol=1e-6)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([1e4, 1e4 - 1], [0.73105858, 0.26894142]),
        ([-1e30, -1e30], [0.5, 0.5]),
        ([3e38, 3e38], [0.5, 0.5]),
        ([-431.0, 279.0, 427.0], [0.0, 0.0, 1.0]),
    ],
)
def test_large_logits_do_not_overflow(row: list[float], wanted: list[float], device: str) -> None:
    """https://github.com/FluxML/NNlib.jl/issues/68."""
    got = softmax.softmax_forward(torch.tensor([row], device=device))
    np.testing.assert_allclose(to_float64(got)[0], wanted, atol=1e-7)


@pytest.mark.parametrize("at", [0, 4095, 4096, 8192, 36000, 40000])
def test_one_finite_value_in_a_row_of_minus_infinity(at: int, device: str) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1930: a block of -inf gave NaN."""
    x = torch.full((1, 40001), float("-inf"), device=device)
    x[0, at] = 10.0
    got = to_float64(softmax.softmax_forward(x))[0]
    assert got[at] == 1.0
    assert np.count_nonzero(got) == 1


@pytest.mark.parametrize("n", [1, 129, 40001])
def test_a_row_of_minus_infinity_is_zeros(n: int, device: str) -> None:
    x = torch.full((2, n), float("-inf"), device=device)
    assert (to_float64(softmax.softmax_forward(x)) == 0).all()


def test_hidden_values_may_be_anything(device: str) -> None:
    x = normals(9, 9, device=device)
    wanted = oracle.softmax_forward(to_float64(x), causal=True)
    hidden = np.triu(np.ones((9, 9), bool), 1)
    dirty = torch.from_numpy(np.where(hidden, np.nan, to_float64(x))).float().to(device)
    close(softmax.softmax_forward(dirty, causal=True), wanted)


@pytest.mark.parametrize("n", [16384, 16385, 32768, 32769, 36865])
def test_rows_about_the_longest_block(n: int, device: str) -> None:
    """https://github.com/unslothai/unsloth/issues/7: a row longer than one block is no error."""
    x = normals(1, n, device=device)
    y = softmax.softmax_forward(x, scale=2.0)
    close(y, oracle.softmax_forward(to_float64(x), scale=2.0))
    grad = normals(1, n, device=device)
    wanted = oracle.softmax_backward(to_float64(grad), to_float64(y), scale=2.0)
    close(softmax.softmax_backward(grad, y, scale=2.0), wanted)


@pytest.mark.parametrize("n", [37, 40001])
def test_results_may_overwrite_inputs(n: int, device: str) -> None:
    x, grad = normals(3, n, device=device), normals(3, n, device=device)
    y = softmax.softmax_forward(x)
    grad_x = softmax.softmax_backward(grad, y)
    in_x = x.clone()
    assert softmax.softmax_forward(in_x, out=in_x) is in_x
    assert torch.equal(in_x, y)
    in_grad, in_y = grad.clone(), y.clone()
    assert torch.equal(softmax.softmax_backward(in_grad, y, out=in_grad), grad_x)
    assert torch.equal(softmax.softmax_backward(grad, in_y, out=in_y), grad_x)


def test_rows_with_gaps_are_refused(device: str) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/2734: a unit last stride is not enough."""
    with pytest.raises(LayoutError, match="x of shape"):
        softmax.softmax_forward(torch.zeros(4, 2, 8, device=device).transpose(0, 1))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_empty_storage_launches_nothing(shape: tuple[int, int], device: str) -> None:
    """https://github.com/pytorch/pytorch/issues/34202."""
    x = torch.zeros(shape, device=device)
    y = softmax.softmax_forward(x)
    assert y.shape == shape
    assert softmax.softmax_backward(x, y).shape == shape


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-30, 3e38])
def test_any_scale(device: str, scale: float) -> None:
    """One above 0 joins the exponential; one that turns the order round is applied first."""
    x = torch.tensor([[1.0, -2.0, 0.5], [float("-inf"), 3.0, 3.0]], device=device)
    if not 0 < scale < 1e38:  # an infinity of positive sign after scaling is NaN
        x = x[:1]
    y = softmax.softmax_forward(x, scale=scale).cpu().double()
    wide = scale * x.cpu().double()
    np.testing.assert_allclose(y, torch.softmax(wide, 1), atol=1e-6)
