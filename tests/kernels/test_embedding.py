"""Embedding kernels compiled: ids out of range, repeated ids, order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.errors import DataError
from entrenar.kernels import _launch, embedding
from entrenar.testing import poisoned


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_ids_out_of_range_set_the_status_word(device: str, bad: int) -> None:
    weight = torch.full((5, 3), 1.0, device=device)
    ids = torch.tensor([1, bad, 4], device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    with poisoned():
        y = embedding.embedding_forward(ids, weight, status)
    assert status.item() == 1
    assert np.isnan(y.cpu().numpy()[1]).all()
    assert np.isfinite(y.cpu().numpy()[[0, 2]]).all()
    if device == "cpu":
        with pytest.raises(DataError, match="the table has 5 rows"):
            embedding.embedding_forward(ids, weight)


def test_status_is_left_alone_by_good_ids(device: str) -> None:
    status = torch.zeros(1, dtype=torch.int32, device=device)
    weight = torch.full((5, 3), 1.0, device=device)
    embedding.embedding_forward(torch.tensor([0, 4], device=device), weight, status)
    assert status.item() == 0


def test_backward_stays_inside_the_table(device: str) -> None:
    """What a GPU does with an id it cannot check before the launch: leaves its gradient out."""
    memory = torch.full((7, 4), 7.0, device=device)
    grad = torch.full((3, 4), 1.0, device=device)
    _launch.launch(
        embedding._embedding_backward_kernel, (3,), op="embedding_backward", stream=None,
        reads=(grad,), writes=(memory,), grad_y_ptr=grad, ids_ptr=torch.tensor([-1, 1, 5], device=device),
        grad_weight_ptr=memory[1:6], n_tokens=3, n_rows=5, n_cols=4, n_col_blocks=1,
        TOKENS=32, BLOCK=4, num_warps=1,
    )  # fmt: skip
    assert memory.cpu()[:, 0].tolist() == [7.0, 7.0, 1.0, 7.0, 7.0, 7.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_repeat_to_the_bit_and_are_float32(device: str, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.integers(0, 3, 90)).to(device)
    grad = torch.from_numpy(generator.standard_normal((90, 17))).to(device, dtype)
    with poisoned():
        first, second = (embedding.embedding_backward(grad, ids, 5) for _ in range(2))
    assert torch.equal(first, second)
    exact = np.zeros((5, 17))
    np.add.at(exact, ids.cpu().numpy(), grad.double().cpu().numpy())
    scale = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    np.testing.assert_allclose(first.double().cpu(), exact, rtol=scale, atol=1e-5)


def test_no_tokens_give_zeros(device: str) -> None:
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    with poisoned():
        grad = embedding.embedding_backward(torch.empty((0, 4), device=device), ids, 3)
    assert grad.tolist() == [[0.0] * 4] * 3
