"""The comparison with oracles is itself held to what it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from entrenar.errors import NumericsError
from entrenar.kernels import _launch
from entrenar.testing import (
    Tolerance,
    assert_close,
    directional_derivative,
    error_of,
    poisoned,
    rng,
    round_to,
    to_float64,
    to_storage,
    unit_roundoff,
)

EXACT = Tolerance("float32", reduction=4, a=1.0, b=2.0, reason="a test")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unit_roundoff_is_half_an_ulp_of_one(dtype: str) -> None:
    assert unit_roundoff(dtype) == torch.finfo(getattr(torch, dtype)).eps / 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_rounded_value_is_within_one_rounding(dtype: str) -> None:
    values = rng("testing", dtype).standard_normal(1000) * 100
    tolerance = Tolerance(dtype, reduction=0, a=1.0, b=0.0)
    assert_close(round_to(values, dtype), values, tolerance)
    with pytest.raises(AssertionError):
        assert_close(round_to(values, dtype), values, Tolerance(dtype, a=0.4, b=0.0))


def test_a_moved_element_is_named_with_its_place_and_both_errors() -> None:
    wanted = np.arange(12.0).reshape(3, 4)
    got = wanted.copy()
    got[1, 2] += 1e-3
    with pytest.raises(AssertionError) as caught:
        assert_close(got, wanted, EXACT, "y")
    message = str(caught.value)
    for part in ("y: 1 of 12 elements off", "(1, 2)", "largest error 0.001", "RMS", "(a test)"):
        assert part in message


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1e38, False),
        (0.0, -0.0, True),
    ],
)
def test_nan_and_infinities_agree_or_do_not(got: float, wanted: float, same: bool) -> None:
    pair = np.array([got, 2.0]), np.array([wanted, 2.0])
    if same:
        assert_close(*pair, EXACT)
    else:
        with pytest.raises(AssertionError):
            assert_close(*pair, EXACT)


def test_a_shape_that_differs_is_refused_and_not_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"shape \(3, 1\), wanted \(3,\)"):
        assert_close(np.ones((3, 1)), np.ones(3), EXACT)


def test_nothing_and_all_zeros_compare() -> None:
    assert_close(np.zeros((0, 4)), np.zeros((0, 4)), EXACT)
    assert_close(np.zeros(3), np.zeros(3), EXACT)
    with pytest.raises(AssertionError):
        assert_close(np.full(3, 1e-30), np.zeros(3), EXACT)


def test_error_passes_over_what_is_not_finite() -> None:
    assert error_of(np.array([1.0, math.inf]), np.array([1.5, math.inf])) == 0.5


def test_samples_repeat_by_name_alone() -> None:
    first, again, other = (rng("op", name).standard_normal(3) for name in ("a", "a", "b"))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_storage_is_a_copy_in_the_dtype_and_integers_keep_theirs() -> None:
    values, ids = np.ones((2, 3)), np.arange(3, dtype=np.int32)
    stored = to_storage(values, "bfloat16")
    assert stored.dtype == torch.bfloat16
    stored.zero_()
    assert values.all()
    assert to_storage(ids, "bfloat16").dtype == torch.int32
    assert to_storage("text") == "text"
    assert to_float64(stored).dtype == np.float64


def test_poisoned_storage_is_nan_and_its_guards_are_watched() -> None:
    like = torch.zeros(1)
    with poisoned() as given:
        out = _launch.empty((3, 4), torch.float16, like)
        assert torch.isnan(out).all()
        out.zero_()
    assert given[0] is out
    with pytest.raises(NumericsError, match="outside its result of 24 bytes"):
        write_past_the_end(like)


def write_past_the_end(like: torch.Tensor) -> None:
    with poisoned():
        out = _launch.empty((3, 4), torch.float16, like)
        out.as_strided((13,), (1,), out.storage_offset())[12] = 1.0


def test_derivatives_of_a_cubic_are_exact_to_rounding() -> None:
    x = np.array([0.5, -1.5])
    (slope,) = directional_derivative(lambda v: (v["x"] ** 3,), {"x": x}, {"x": np.ones(2)})
    np.testing.assert_allclose(slope, 3 * x**2, rtol=1e-9)
