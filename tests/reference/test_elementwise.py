"""The oracle of elementwise functions: rounding to bfloat16 by bits, dtypes, aliasing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.errors import DTypeError, ShapeMismatchError
from entrenar.reference import elementwise


def test_bfloat16_rounds_to_nearest_even() -> None:
    """https://github.com/tenstorrent/tt-metal/issues/19882."""
    values = np.array([3.14, 1e-8, 1.00390625, 1.01171875, np.inf, -0.0, 3.4e38], np.float32)
    got = elementwise.cast(values, "bfloat16")
    assert got.dtype == np.float32
    wanted = np.array([3.140625, 1.0011717677116394e-8, 1.0, 1.015625, np.inf, -0.0, np.inf])
    np.testing.assert_array_equal(got, wanted)
    assert np.signbit(got[5])
    nan = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(elementwise.cast(nan, "bfloat16")).all()


def test_bfloat16_agrees_with_torch_on_all_kinds_of_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    x = bits.view(np.float32)
    wanted = torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(elementwise.cast(x, "bfloat16"), wanted)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), torch.float16])
def test_a_dtype_may_be_named_in_any_way(dtype: object) -> None:
    got = elementwise.cast(np.array([0.1, 1e6], np.float32), dtype)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.array([0.0999755859375, np.inf], np.float16))


def test_integers_are_refused() -> None:
    with pytest.raises(DTypeError, match="x is int64"):
        elementwise.scale(np.arange(3), 2.0)
    with pytest.raises(DTypeError, match="dtype is int8"):
        elementwise.cast(np.zeros(3), np.int8)
    with pytest.raises(ShapeMismatchError, match="bias has shape"):
        elementwise.bias_add(np.zeros((3, 4)), np.zeros(3))


def test_in_place_forms_return_what_they_wrote() -> None:
    dst = np.ones(4, np.float32)
    assert elementwise.add_(dst, np.ones(4)) is dst
    assert elementwise.fill_(dst, 7.0) is dst
    assert elementwise.scale(dst, 0.5, out=dst) is dst
    assert elementwise.multiply(dst, dst, out=dst) is dst
    np.testing.assert_array_equal(dst, np.full(4, 12.25, np.float32))


def test_bias_gradient_of_no_rows_is_zero() -> None:
    assert not elementwise.bias_backward(np.zeros((0, 3))).any()
