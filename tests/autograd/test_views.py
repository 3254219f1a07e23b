"""Views: the same storage in another shape, its parts, and joining them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.autograd import Tape, Tensor, ops
from entrenar.errors import DTypeError, ShapeMismatchError


def total(x: Tensor) -> Tensor:
    """Sum to one element, as a product with a column of ones."""
    n = x.data.numel()
    ones = Tensor(torch.ones((n, 1), dtype=x.dtype))
    return ops.reshape(ops.matmul(ops.reshape(x, (1, n)), ones), ())


def test_transposed_views_and_their_gradients() -> None:
    """https://github.com/pytorch/pytorch/issues/764."""
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    with Tape() as tape:
        flat = ops.reshape(ops.transpose(x), (6,))
        loss = total(ops.multiply(flat, Tensor(np.arange(1.0, 7.0))))
    tape.backward(loss)
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 3, 5], [2, 4, 6]]


def test_parts_are_views_and_joining_copies() -> None:
    x = Tensor(np.arange(12.0).reshape(3, 4), requires_grad=True)
    with Tape() as tape:
        left, right = ops.split(x, (1, 3))
        rows = ops.narrow(x, 0, 1, 2)
        for view in (left, right, rows):
            assert view.data.untyped_storage().data_ptr() == x.data.untyped_storage().data_ptr()
        joined = ops.concat([left, right])
        assert not np.shares_memory(joined.numpy(), x.numpy())
        np.testing.assert_array_equal(joined.numpy(), x.numpy())
        loss = ops.add(total(ops.multiply(joined, joined)), total(rows))
    tape.backward(loss)
    assert x.grad is not None
    np.testing.assert_array_equal(
        x.grad.numpy(), 2 * np.arange(12.0).reshape(3, 4) + np.array([[0], [1], [1]])
    )


def test_a_reshape_copies_only_where_no_strides_fit() -> None:
    """Heads of one part of a fused projection are a view; a transposed matrix in one row is not."""
    x = Tensor(np.arange(24.0).reshape(2, 12), requires_grad=True)
    with Tape() as tape:
        queries, _, _ = ops.split(x, (4, 4, 4))
        heads = ops.reshape(queries, (2, 2, 2))
        assert heads.data.untyped_storage().data_ptr() == x.data.untyped_storage().data_ptr()
        flat = ops.reshape(ops.transpose(queries), (8,))
        assert not np.shares_memory(flat.numpy(), x.numpy())
        np.testing.assert_array_equal(flat.numpy(), x.numpy()[:, :4].T.ravel())
        loss = ops.add(total(ops.multiply(heads, heads)), total(flat))
    tape.backward(loss)
    wanted = np.zeros((2, 12))
    wanted[:, :4] = 2 * x.numpy()[:, :4] + 1
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), wanted)


def test_views_that_do_not_fit_are_refused_by_name_and_shape() -> None:
    x = Tensor(np.ones((2, 3)))
    for call_, message in (
        (
            lambda: ops.narrow(x, 1, 2, 2),
            r"narrow: shape \(2, 3\) has no places 2 to 4 in dimension 1",
        ),
        (lambda: ops.narrow(x, 2, 0, 1), r"narrow: shape \(2, 3\) has no dimension 2"),
        (
            lambda: ops.split(x, (1, 1)),
            r"split: sizes \(1, 1\) do not add up to dimension 1 of shape \(2, 3",
        ),
        (
            lambda: ops.concat([x, Tensor(np.ones((3, 3)))]),
            r"concat: shapes \(2, 3\) and \(3, 3\) differ",
        ),
        (lambda: ops.concat([]), "concat: no tensors"),
        (lambda: ops.transpose(x, 0, -3), r"transpose: shape \(2, 3\) has no dimension -3"),
    ):
        with pytest.raises(ShapeMismatchError, match=message):
            call_()
    with pytest.raises(DTypeError, match=r"concat: .*float32"):
        ops.concat([x, Tensor(np.ones((2, 3), np.float32))])
