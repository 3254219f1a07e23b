"""Which samples a step reads."""

from __future__ import annotations

import itertools

import pytest

from entrenar.finetune.batching import plan_epoch, plan_steps, split_heldout, total_steps
from entrenar.finetune.config import InstructConfig


def flat(steps: list) -> list[int]:
    return [i for step in steps for batch in step for i in batch]


def test_the_last_partial_window_is_a_step() -> None:
    """https://github.com/tracel-ai/burn/issues/5695"""
    config = InstructConfig(grad_accum_steps=4, epochs=1)
    steps = plan_epoch([5] * 10, config, 0)
    assert [len(step) for step in steps] == [4, 4, 2]
    assert sorted(flat(steps)) == list(range(10))
    assert total_steps([5] * 10, config) == 3


@pytest.mark.parametrize(("count", "size", "batches"), [(7, 4, [4, 3]), (2, 8, [2]), (1, 4, [1])])
def test_the_remainder_is_a_batch(count: int, size: int, batches: list[int]) -> None:
    """https://github.com/ml-explore/mlx-examples/issues/843
    https://github.com/slideflow/slideflow/issues/248
    """
    steps = plan_epoch([5] * count, InstructConfig(batch_size=size), 0)
    assert [len(batch) for step in steps for batch in step] == batches


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    """https://github.com/huggingface/transformers/issues/17032"""
    orders = {
        (seed, epoch): tuple(flat(plan_epoch([5] * 20, InstructConfig(seed=seed), epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    again = plan_epoch([5] * 20, InstructConfig(seed=1), 1)
    assert tuple(flat(again)) == orders[1, 1]


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once; another NumPy or processor must give it too."""
    assert flat(plan_epoch([5] * 12, InstructConfig(seed=7), 0)) == [
        4, 6, 10, 0, 1, 3, 8, 7, 2, 5, 9, 11
    ]  # fmt: skip
    assert split_heldout(12, 0.25, 7)[1] == [2, 4, 7]


def test_a_run_continues_in_the_middle_of_an_epoch() -> None:
    """https://github.com/huggingface/transformers/issues/17032"""
    config = InstructConfig(batch_size=3)
    whole = list(itertools.islice(plan_steps([5] * 10, config), 12))
    assert list(itertools.islice(plan_steps([5] * 10, config, start=5), 7)) == whole[5:]
    assert [epoch for epoch, _ in whole[:5]] == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_packed_rows_hold_every_sample_once_and_no_row_is_too_long() -> None:
    lengths = [3, 30, 12, 7, 19, 31, 2, 2, 9, 16, 5] * 20
    config = InstructConfig(packing=True, max_seq_len=32)
    batches = [batch for step in plan_epoch(lengths, config, 0) for batch in step]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= 32 for batch in batches)
    assert len(batches) < 1.15 * sum(lengths) / 32 + 1


def test_max_steps_goes_before_epochs() -> None:
    assert total_steps([5] * 10, InstructConfig(max_steps=7)) == 7


@pytest.mark.parametrize(
    ("count", "fraction", "held"), [(10, 0.3, 3), (3, 0.1, 0), (1, 0.9, 0), (2, 0.99, 1)]
)
def test_a_split_keeps_something_to_train_on(count: int, fraction: float, held: int) -> None:
    """https://github.com/openspeech-team/openspeech/issues/217"""
    train, heldout = split_heldout(count, fraction, 0)
    assert len(heldout) == held
    assert sorted(train + heldout) == list(range(count))
