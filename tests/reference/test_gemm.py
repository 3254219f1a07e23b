"""The oracle of matrix products, against einsum, and the faults others reported."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar.errors import ConfigError, DTypeError, ShapeMismatchError
from entrenar.reference import gemm


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_against_einsum(trans_a: bool, trans_b: bool, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((*batch, *((7, 5) if trans_a else (5, 7))))
    b = rng.standard_normal((*batch, *((4, 7) if trans_b else (7, 4))))
    bias = rng.standard_normal(4)
    left, right = ("...ki" if trans_a else "...ik"), ("...jk" if trans_b else "...kj")
    wanted = 0.5 * np.einsum(f"{left},{right}->...ij", a, b) + bias
    got = gemm.matmul(a, b, trans_a, trans_b, bias, 0.5)
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 19, 23), (16, 16, 17), (33, 1, 5), (1, 64, 65)]
)
def test_ones_times_ones_is_the_inner_size(m: int, n: int, k: int) -> None:
    """https://github.com/gpu-mode/lectures/issues/51."""
    assert (gemm.gemm_forward(np.ones((m, k)), np.ones((k, n))) == k).all()


def test_zero_rows_give_a_zero_weight_gradient() -> None:
    """https://github.com/pytorch/pytorch/issues/34202."""
    grad = gemm.gemm_backward_b(np.zeros((0, 2100)), np.zeros((0, 3)))
    assert grad.shape == (2100, 3)
    assert not grad.any()


def test_nothing_to_sum_leaves_the_bias() -> None:
    bias = np.arange(4.0)
    np.testing.assert_array_equal(
        gemm.matmul(np.zeros((3, 0)), np.zeros((0, 4)), bias=bias), np.tile(bias, (3, 1))
    )


def test_accumulation_adds_and_returns_out() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((3, 5)), rng.standard_normal((5, 2))
    out = np.ones((3, 2))
    assert gemm.gemm_forward(a, b, out=out, accumulate=True) is out
    np.testing.assert_allclose(out, a @ b + 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_is_that_of_the_inputs(dtype: type) -> None:
    a = np.ones((2, 3), dtype)
    assert gemm.gemm_forward(a, a.T).dtype == dtype
    assert gemm.matmul(a, a, trans_b=True, bias=np.ones(2, dtype), scale=0.3).dtype == dtype


def test_what_does_not_fit_is_refused() -> None:
    a = np.ones((2, 3))
    with pytest.raises(ShapeMismatchError, match="b has shape"):
        gemm.gemm_forward(a, a)
    with pytest.raises(DTypeError, match="wanted one dtype"):
        gemm.gemm_forward(a, a.T.astype(np.float32))
    with pytest.raises(ConfigError, match="precision"):
        gemm.gemm_forward(a, a.T, precision="fast")
    with pytest.raises(ConfigError, match="accumulate without out"):
        gemm.matmul(a, a, trans_b=True, accumulate=True)
