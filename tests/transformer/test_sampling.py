"""One draw: the filters, their edges, and what is refused."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from entrenar.errors import ConfigError, NumericsError, ShapeMismatchError
from entrenar.transformer.sampling import GenerateConfig, sample_token, token_probabilities

PLAIN = {"temperature": 1.0, "top_k": 0}


def config(**changes: object) -> GenerateConfig:
    return GenerateConfig(**{**PLAIN, **changes})  # type: ignore[arg-type]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_defaults() -> None:
    made = GenerateConfig()
    assert (made.max_new_tokens, made.temperature, made.top_k, made.top_p) == (256, 0.7, 50, 1.0)
    assert (made.min_p, made.repetition_penalty, made.stop_tokens, made.seed) == (
        0.0,
        1.0,
        (),
        None,
    )


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8])
@pytest.mark.parametrize("top_k", [0, 2])
def test_no_temperature_is_greedy(temperature: float, top_k: int) -> None:
    """https://github.com/google-deepmind/gemma/issues/562"""
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        made = config(temperature=temperature, top_k=top_k)
        assert sample_token(np.array([1.0, 3.0, 2.0]), made) == 1


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_senseless_temperature(temperature: float) -> None:
    """https://github.com/google-deepmind/gemma/issues/562"""
    with pytest.raises(ConfigError, match="temperature"):
        config(temperature=temperature)


@pytest.mark.parametrize("top_k", [5, 6, 50, 0, None])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int | None) -> None:
    """https://github.com/TransformerLensOrg/TransformerLens/issues/1347"""
    logits = np.array([0.1, -2.0, 3.0, 0.5, 1.0])
    got = token_probabilities(logits, config(top_k=top_k))
    np.testing.assert_allclose(got, softmax(logits), rtol=1e-12)


def test_top_k_one_is_greedy() -> None:
    """https://github.com/karpathy/nanochat/issues/467"""
    rng = np.random.default_rng(0)
    logits = np.array([0.0, 0.1, 0.05])
    assert {sample_token(logits, config(top_k=1), rng) for _ in range(50)} == {1}


@pytest.mark.parametrize(
    "logits",
    [[math.nan, 1, 2], [-math.inf, -math.inf], [math.inf, 0], [math.inf, math.inf]],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(logits: list[float], temperature: float) -> None:
    """https://github.com/robertknight/rten/issues/1089"""
    with pytest.raises(NumericsError, match="non-finite logits"):
        sample_token(np.array(logits), config(temperature=temperature))


def test_minus_infinity_excludes() -> None:
    logits = np.array([-math.inf, 0.0, -math.inf])
    rng = np.random.default_rng(1)
    assert {sample_token(logits, config(), rng) for _ in range(20)} == {1}
    penalised = config(repetition_penalty=2.0)
    assert sample_token(logits, penalised, rng, previous=[0, 1]) == 1


def test_temperature_one_samples_and_the_seed_decides() -> None:
    """https://github.com/huggingface/text-generation-inference/issues/687"""
    logits = np.zeros(2)
    state = np.random.get_state()[1].copy()

    def draws(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return [sample_token(logits, config(seed=seed), rng) for _ in range(1000)]

    assert 420 < sum(draws(0)) < 580
    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    assert sample_token(logits, config(seed=4)) == sample_token(logits, config(seed=4))


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample_token(np.array([1.0, 5.0, 5.0, 5.0]), config(temperature=0.0)) == 1


def test_top_k_keeps_exactly_k_of_equals() -> None:
    got = token_probabilities(np.array([1.0, 2.0, 2.0, 2.0]), config(top_k=2))
    np.testing.assert_allclose(got, [0, 0.5, 0.5, 0])


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(
        token_probabilities(logits, config(top_p=0.6)), [0.625, 0.375, 0, 0], rtol=1e-12
    )
    np.testing.assert_allclose(token_probabilities(logits, config(top_p=0.5)), [1, 0, 0, 0])
    np.testing.assert_allclose(token_probabilities(logits, config(top_p=1e-9)), [1, 0, 0, 0])


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    got = token_probabilities(logits, config(min_p=0.4))
    np.testing.assert_allclose(got, [0.625, 0.375, 0, 0], rtol=1e-12)


def test_temperature_divides() -> None:
    logits = np.array([1.0, 2.0, -1.0])
    got = token_probabilities(logits, config(temperature=0.5))
    np.testing.assert_allclose(got, softmax(logits * 2), rtol=1e-12)


def test_repetition_penalty_lowers_either_sign() -> None:
    logits = np.array([2.0, -2.0, 0.5])
    got = token_probabilities(logits, config(repetition_penalty=2.0), previous=[0, 1, 1, 99])
    np.testing.assert_allclose(got, softmax(np.array([1.0, -4.0, 0.5])), rtol=1e-12)
    assert logits.tolist() == [2.0, -2.0, 0.5]


def test_huge_logits_and_a_tiny_share() -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        got = token_probabilities(np.array([1e30, -1e30, 0.0]), config())
    np.testing.assert_allclose(got, [1, 0, 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2.5},
        {"top_k": True},
        {"seed": -1},
        {"seed": 0.5},
        {"temperature": "1"},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"repetition_penalty": math.nan},
        {"stop_tokens": "</s>"},
        {"stop_tokens": 7},
        {"stop_tokens": (7, -1)},
        {"stop_tokens": ("7",)},
    ],
)
def test_out_of_range_settings_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        config(**changes)


def test_only_vectors() -> None:
    with pytest.raises(ShapeMismatchError, match=r"\(1, 3\)"):
        sample_token(np.zeros((1, 3)), config())
    with pytest.raises(ShapeMismatchError):
        sample_token(np.zeros(0), config())


def test_16_bit_logits() -> None:
    assert sample_token(np.array([1, 3, 2], dtype=np.float16), config(temperature=0.0)) == 1


def test_equals_at_the_edge_of_top_p_go_by_id() -> None:
    got = token_probabilities(np.zeros(5), config(top_p=0.5))
    # 0.2, 0.4 and 0.6 of the probability: the third of the equals crosses and is kept
    np.testing.assert_allclose(got, [1 / 3, 1 / 3, 1 / 3, 0, 0])


def test_min_p_keeps_equals_and_what_is_just_at_the_share() -> None:
    np.testing.assert_allclose(token_probabilities(np.zeros(4), config(min_p=0.999)), [0.25] * 4)
    logits = np.array([0.0, math.log(0.5), -20.0])
    # 0.5 exactly, in powers of two: at least the share
    got = token_probabilities(np.array([2.0, 1.0]) * math.log(2), config(min_p=0.4999999))
    np.testing.assert_allclose(got, [2 / 3, 1 / 3])
    assert token_probabilities(logits, config(min_p=0.51))[1] == 0


def test_filters_apply_one_after_another() -> None:
    """Top-k, then top-p of what is left, then min-p of that, as transformers orders its warpers."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    made = config(top_k=3, top_p=0.7, min_p=0.7)
    # of 4/9, 3/9 and 2/9 two reach 0.7, and 3/4 of the likeliest is above the share
    np.testing.assert_allclose(token_probabilities(logits, made), [4 / 7, 3 / 7, 0, 0])
    colder = config(top_k=3, top_p=0.7, min_p=0.7, temperature=0.5)
    # the squares are 16, 9 and 4 of 29; two reach 0.7; 9/16 of the likeliest is below the share
    np.testing.assert_allclose(token_probabilities(logits, colder), [1, 0, 0, 0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}, {"temperature": 0.5, "top_p": 0.9}],
)
def test_draws_follow_the_distribution(changes: dict[str, object]) -> None:
    made = config(**changes)
    logits = np.log([0.05, 0.4, 0.1, 0.25, 0.2])
    wanted = token_probabilities(logits, made)
    rng = np.random.default_rng(7)
    count = 4000
    drawn = np.bincount([sample_token(logits, made, rng) for _ in range(count)], minlength=5)
    # five standard deviations of a binomial: one false alarm in two million
    assert (np.abs(drawn / count - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / count)).all()
    assert (drawn[wanted == 0] == 0).all()


@pytest.mark.parametrize(("value", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_draw_never_give_an_excluded_token(value: float, token: int) -> None:
    class Fixed:
        def random(self) -> float:
            return value

    logits = np.array([-math.inf, 0.1, 0.2, 0.3, -math.inf])
    assert sample_token(logits, config(), Fixed()) == token  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_no_filter_hides_a_nan(changes: dict[str, object]) -> None:
    """https://github.com/robertknight/rten/issues/1089"""
    for place in range(3):
        logits = np.array([5.0, 1.0, 0.0])
        logits[place] = math.nan
        with pytest.raises(NumericsError, match=f"1 of 3, token {place} is nan"):
            sample_token(logits, config(**changes))
