"""Embedding kernels compiled: ids out of range, repeated ids, order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.emulator import install_driver
from entrenar.errors import DataError
from entrenar.kernels import embedding
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
    ids = torch.tensor([-1, 1, 5], device=device)
    embedding._launch_runs("embedding_backward", None, grad, ids, memory[1:6])
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


@pytest.mark.parametrize("n_rows", [32_000, 151_936, 256_000])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_real_vocabularies(device: str, n_rows: int, index: torch.dtype) -> None:
    """Ids at both ends of the table, ones that repeat past a tile, and a number of tokens past one."""
    ids = np.random.default_rng(1).integers(0, n_rows, 141)
    ids[[0, 70, 140]] = n_rows - 1
    ids[[1, 139]] = 0
    ids[10:40] = 31_999
    grad = torch.from_numpy(np.arange(282, dtype=np.float32).reshape(141, 2)).to(device)
    with poisoned():
        got = embedding.embedding_backward(grad, torch.from_numpy(ids).to(device, index), n_rows)
    exact = np.zeros((n_rows, 2), np.float32)
    np.add.at(exact, ids, grad.cpu().numpy())  # small integers: exact in any order
    np.testing.assert_array_equal(got.cpu(), exact)


def test_ids_are_read_once_for_many_tokens(device: str) -> None:
    """Not once a token and block of columns: counted by the emulator as bytes asked of ``ids``."""
    if device != "cpu":
        pytest.skip("the emulator counts, and runs on the CPU")
    tokens = 1024
    ids = torch.arange(tokens).flip(0)
    grad = torch.full((tokens, 8), 1.0)
    driver = install_driver(runtime.ptx_target(), counters=True)
    driver.history = []
    try:
        embedding.embedding_backward(grad, ids, tokens)
    finally:
        install_driver(runtime.ptx_target())  # one that does not count
    buffers = [b for run in driver.history for b in run.counters["distinct"]["buffers"].values()]
    asked = sum(
        b["requested_loaded"] for b in buffers if b["size"] == 8 * tokens
    )  # int64 ids alone
    assert asked >= 8 * tokens
    # eight bytes for each of 64 tokens a program, in four warps of which each asks for all of them
    assert asked <= 4 * 8 * tokens * (tokens / 64 + 2)


def test_no_tokens_give_zeros(device: str) -> None:
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    with poisoned():
        grad = embedding.embedding_backward(torch.empty((0, 4), device=device), ids, 3)
    assert grad.tolist() == [[0.0] * 4] * 3
