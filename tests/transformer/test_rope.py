"""Frequencies of each scaling rule against written numbers, and tables against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.rope import (
    RopeScaling,
    RopeTable,
    inverse_frequencies,
    rope_table,
)
from entrenar.transformer.rope_config import read_scaling

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_under_both_spellings(key: str) -> None:
    """https://github.com/unslothai/unsloth/issues/6197"""
    scaling = read_scaling({key: "llama3", **LLAMA3}, 131072)
    got = inverse_frequencies(128, 500000.0, scaling)
    plain = inverse_frequencies(128, 500000.0)
    assert got[0] == 1.0
    assert got[1] == pytest.approx(0.81461723, rel=1e-7)
    assert got[28] == pytest.approx(3.21144599e-3, rel=1e-8)
    assert got[28] == plain[28]
    expected = {29: 2.16657076e-3, 31: 8.56751413e-4, 34: 1.78507813e-4, 35: 9.55621235e-5}
    for index, value in expected.items():
        assert got[index] == pytest.approx(value, rel=1e-7)
    assert got[63] == pytest.approx(3.06892599e-7, rel=1e-7)
    assert got[63] == pytest.approx(plain[63] / 8, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}}, 500000.0),
        ({"rope_theta": 500000}, 500000.0),
        ({}, 10000.0),
        # both, and different: the newer key wins
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}, 500000.0),
    ],
)
def test_theta_from_either_key(
    tiny_settings: dict[str, Any], changes: dict[str, Any], theta: float
) -> None:
    """https://github.com/vllm-project/vllm/issues/42624"""
    config = TransformerConfig.from_hf({**tiny_settings, "head_dim": 128, **changes})
    assert config.rope_theta == theta
    wanted = 0.81461723 if theta == 500000.0 else 0.86596432
    assert inverse_frequencies(128, config.rope_theta)[1] == pytest.approx(wanted, rel=1e-7)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ({"rope_type": "llama3", **LLAMA3}, "llama3"),
        ({"type": "linear", "factor": 2.0}, "linear"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 4}, "yarn"),
        ({"rope_type": "default"}, "default"),
        ({}, "default"),
        (None, "default"),
    ],
)
def test_every_form_of_the_dictionary(
    tiny_settings: dict[str, Any], rule: dict[str, Any] | None, kind: str
) -> None:
    """https://github.com/meta-llama/llama3/issues/299"""
    assert (
        TransformerConfig.from_hf({**tiny_settings, "rope_scaling": rule}).rope_scaling.kind == kind
    )


def test_other_kinds_are_refused_by_name() -> None:
    """https://github.com/b4rtaz/distributed-llama/issues/120"""
    with pytest.raises(UnsupportedModelError, match="rope_type 'proportional' is not supported"):
        read_scaling({"rope_type": "proportional", "factor": 2.0}, 4096)
    with pytest.raises(UnsupportedModelError, match="rope_type 'llama3' is not supported"):
        read_scaling({"rope_type": "llama3", **LLAMA3}, 4096, ("default", "longrope"))
    with pytest.raises(ConfigError, match="llama3 lacks factor, low_freq_factor"):
        read_scaling({"rope_type": "llama3"}, 4096)
    with pytest.raises(ConfigError, match="factor is -2"):
        read_scaling({"rope_type": "linear", "factor": -2}, 4096)


def test_linear_divides_every_frequency() -> None:
    plain = inverse_frequencies(8, 10000.0)
    scaled = inverse_frequencies(8, 10000.0, RopeScaling("linear", 2.0))
    np.testing.assert_allclose(scaled, plain / 2, rtol=1e-15)


def test_dynamic_changes_nothing_within_the_trained_length() -> None:
    scaling = read_scaling({"rope_type": "dynamic", "factor": 4.0}, 16)
    plain = inverse_frequencies(8, 10000.0)
    np.testing.assert_array_equal(inverse_frequencies(8, 10000.0, scaling, 16), plain)
    longer = inverse_frequencies(8, 10000.0, scaling, 32)
    # base * (4*32/16 - 3)^(8/6) = 10000 * 5^(4/3)
    assert longer[1] == pytest.approx((10000 * 5 ** (4 / 3)) ** -0.25, rel=1e-12)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    scaling = read_scaling(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072
    )
    plain = inverse_frequencies(128, 1000000.0)
    got = inverse_frequencies(128, 1000000.0, scaling)
    np.testing.assert_allclose(got[:20], plain[:20], rtol=1e-12)
    np.testing.assert_allclose(got[-20:], plain[-20:] / 4, rtol=1e-12)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 1.0, 2.0],
    "long_factor": [1.0, 4.0, 8.0, 32.0],
}


def test_longrope_divides_by_one_list_or_the_other() -> None:
    """https://github.com/ggml-org/llama.cpp/issues/8995"""
    scaling = read_scaling(LONGROPE, 64)
    plain = inverse_frequencies(8, 10000.0)
    for length, factors in ((16, "short_factor"), (17, "long_factor"), (64, "long_factor")):
        got = inverse_frequencies(8, 10000.0, scaling, length)
        np.testing.assert_allclose(got, plain / LONGROPE[factors], rtol=1e-15)
    assert scaling.factor == 4.0
    cos, sin = rope_table(16, 8, 10000.0, scaling)
    # cos² + sin² is the square of what multiplies both: 1 + ln 4 / ln 16
    np.testing.assert_allclose(cos.astype(float) ** 2 + sin.astype(float) ** 2, 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 2.0}, (1 + np.log(2) / np.log(16)) ** 0.5),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_what_longrope_multiplies_by(changes: dict[str, float], factor: float) -> None:
    assert read_scaling({**LONGROPE, **changes}, 64).attention_factor == pytest.approx(factor)


def test_a_longrope_table_is_that_of_the_length() -> None:
    scaling = read_scaling(LONGROPE, 64)
    table = RopeTable(8, 10000.0, scaling)
    short = table.tables(3)
    assert table.tables(16) is short
    np.testing.assert_array_equal(short[0], rope_table(16, 8, 10000.0, scaling)[0])
    long = table.tables(17)
    assert table.tables(64) is long
    np.testing.assert_array_equal(long[0][:64], rope_table(64, 8, 10000.0, scaling)[0])
    np.testing.assert_array_equal(table.tables(16)[0], short[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"long_factor": None},
        {"short_factor": "1.0"},
        {"short_factor": [1.0, 0.0, 1.0, 1.0]},
        {"long_factor": [1.0, float("nan"), 1.0, 1.0]},
        {"original_max_position_embeddings": 1},
        {"original_max_position_embeddings": 16.5},
        {"factor": 1e30},
    ],
)
def test_longrope_numbers_that_are_senseless(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        read_scaling({**LONGROPE, **changes}, 64)


def test_tables_hold_far_positions() -> None:
    """https://github.com/huggingface/transformers/issues/29285"""
    cos, sin = rope_table(32768, 2, 10000.0)
    assert cos.dtype == sin.dtype == np.float32
    assert cos[15962, 0] == pytest.approx(-0.90801590, abs=1e-7)
    assert cos[4095, 0] == pytest.approx(-0.06597600, abs=1e-7)
    exact = np.cos(np.arange(32768, dtype=np.float64))
    assert np.abs(cos[:, 0] - exact).max() < 6e-8


def test_a_table_grows_and_stays_the_same_meanwhile() -> None:
    table = RopeTable(8, 10000.0, RopeScaling())
    first = table.tables(3)
    assert table.tables(400) is first
    longer = table.tables(900)
    assert longer[0].shape[0] >= 900
    np.testing.assert_array_equal(longer[0][:400], first[0][:400])


def test_a_dynamic_table_is_exact_for_each_length() -> None:
    scaling = read_scaling({"rope_type": "dynamic", "factor": 4.0}, 16)
    table = RopeTable(8, 10000.0, scaling)
    short = table.tables(10)[0].copy()
    np.testing.assert_array_equal(table.tables(30)[0], rope_table(30, 8, 10000.0, scaling)[0])
    np.testing.assert_array_equal(table.tables(24)[0], rope_table(24, 8, 10000.0, scaling)[0])
    np.testing.assert_array_equal(table.tables(10)[0][:10], short[:10])


def test_factors_of_a_gguf_file() -> None:
    scaling = read_scaling({"rope_type": "factors", "factors": [1.0, 2.0]}, 64)
    plain = inverse_frequencies(4, 10000.0)
    np.testing.assert_allclose(inverse_frequencies(4, 10000.0, scaling), plain / [1, 2])
    with pytest.raises(ConfigError, match="got 2 numbers, wanted 4"):
        inverse_frequencies(8, 10000.0, scaling)
