"""The gather and its scatter-add in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar.errors import DataError
from entrenar.reference.embedding import embedding_backward, embedding_forward


def test_repeated_ids_add_up() -> None:
    grad = np.arange(8.0).reshape(4, 2)
    got = embedding_backward(grad, np.array([2, 0, 2, 2]), 4)
    np.testing.assert_array_equal(got, [[2, 3], [0, 0], [10, 13], [0, 0]])


def test_backward_is_the_transpose_of_forward() -> None:
    generator = np.random.default_rng(0)
    ids, weight = generator.integers(0, 5, 9), generator.standard_normal((5, 3))
    grad = generator.standard_normal((9, 3))
    forward = float((embedding_forward(ids, weight) * grad).sum())
    assert forward == pytest.approx(float((embedding_backward(grad, ids, 5) * weight).sum()))


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_ids_out_of_range_are_refused_or_marked(bad: int) -> None:
    ids, weight = np.array([1, bad]), np.ones((5, 2))
    with pytest.raises(DataError, match="the table has 5 rows"):
        embedding_forward(ids, weight)
    with pytest.raises(DataError, match="the table has 5 rows"):
        embedding_backward(np.ones((2, 2)), ids, 5)
    status = np.zeros(1, np.int32)
    y = embedding_forward(ids, weight, status)
    assert status[0] == 1
    np.testing.assert_array_equal(y, [[1, 1], [np.nan, np.nan]])


def test_status_is_left_alone_by_good_ids() -> None:
    status = np.zeros(1, np.int32)
    embedding_forward(np.array([0, 4]), np.ones((5, 2)), status)
    assert status[0] == 0
