"""Rotary embedding in NumPy against written numbers."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar.errors import DataError
from entrenar.reference.rope import rope_backward, rope_forward


def tables(positions: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angles), np.sin(angles)


def test_pairs_are_halves_not_neighbours() -> None:
    """https://github.com/paiml/aprender/issues/2252: adjacent pairs under the name of half rotation."""
    q, k = np.array([[[1.0, 2.0, 3.0, 4.0]]]), np.array([[[1.0, 2.0, 3.0, 4.0]]])
    rope_forward(q, k, *tables(np.arange(2.0), 2), np.array([1]))
    wanted = [-1.984111, 1.959901, 2.462378, 4.019800]
    np.testing.assert_allclose(q[0, 0], wanted, atol=1e-6)
    np.testing.assert_allclose(k[0, 0], wanted, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (3, 3), (14, 2)])
def test_every_kv_head_turns(heads: int, kv_heads: int) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/342: a single kv head stayed as it was."""
    q, k = np.ones((3, heads, 128)), np.ones((3, kv_heads, 128))
    cos, sin = tables(np.arange(3.0), 64)
    rope_forward(q, k, cos, sin, np.arange(3))
    np.testing.assert_array_equal(k[0], np.ones((kv_heads, 128)))
    for position in range(3):
        first, second = cos[position] - sin[position], cos[position] + sin[position]
        row = np.concatenate([first, second])
        np.testing.assert_allclose(k[position], np.tile(row, (kv_heads, 1)))
        np.testing.assert_allclose(q[position], np.tile(row, (heads, 1)))


def test_backward_undoes_forward_and_leaves_the_rest_alone() -> None:
    generator = np.random.default_rng(0)
    q, k = generator.standard_normal((5, 3, 10)), generator.standard_normal((5, 1, 10))
    before = q.copy(), k.copy()
    cos, sin = tables(np.arange(9.0), 3)
    positions = generator.integers(0, 9, 5)
    rope_forward(q, k, cos, sin, positions)
    np.testing.assert_array_equal(q[..., 6:], before[0][..., 6:])
    rope_backward(q, k, cos, sin, positions)
    np.testing.assert_allclose(q, before[0], rtol=1e-13)
    np.testing.assert_allclose(k, before[1], rtol=1e-13)


def test_a_position_past_the_table_is_refused() -> None:
    q, k = np.ones((2, 1, 4)), np.ones((2, 1, 4))
    with pytest.raises(DataError, match="positions run from 0 to 9, the table has 9 rows"):
        rope_forward(q, k, *tables(np.arange(9.0), 2), np.array([0, 9]))
    np.testing.assert_array_equal(q, np.ones((2, 1, 4)))
