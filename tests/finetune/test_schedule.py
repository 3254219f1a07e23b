"""Learning rates: no wasted first step, one peak, a last step above zero."""

from __future__ import annotations

import itertools

import pytest

from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.schedule import LearningRate


def rates(kind: str, warmup: int, total: int) -> list[float]:
    schedule = LearningRate(1e-3, kind, warmup, total)
    return [schedule.at(step) for step in range(total)]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_warm_up_starts_above_zero_and_the_peak_is_reached_once(kind: str) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/2010"""
    found = rates(kind, 4, 10)
    assert found[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert all(a > b for a, b in itertools.pairwise(found[3:]))
    assert found[-1] > 0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (10, 10), (20, 10), (1, 1), (3, 4)])
def test_every_step_has_a_rate(kind: str, warmup: int, total: int) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/2010"""
    found = rates(kind, warmup, total)
    assert all(0 < rate <= 1e-3 for rate in found)
    if warmup == 0:
        assert found[0] == 1e-3


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    assert rates("constant", 2, 5) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-3])


def test_the_rate_is_a_function_of_the_step_alone() -> None:
    """https://github.com/vllm-project/speculators/issues/900"""
    whole = rates("cosine", 5, 50)
    resumed = LearningRate(1e-3, "cosine", 5, 50)
    assert [resumed.at(step) for step in range(20, 50)] == whole[20:]


def test_a_ratio_is_of_the_total_and_rounded_up() -> None:
    config = InstructConfig(warmup_ratio=0.05)
    assert LearningRate.from_config(config, 30).warmup_steps == 2
    assert LearningRate.from_config(config, None).at(0) == config.learning_rate


def test_without_a_total_the_rate_is_constant_after_warm_up() -> None:
    schedule = LearningRate.from_config(InstructConfig(warmup_steps=2, learning_rate=1.0), None)
    assert [schedule.at(step) for step in (0, 1, 2, 1000)] == [0.5, 1.0, 1.0, 1.0]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="cosin"):
        LearningRate(1.0, "cosin", 0, 1)
