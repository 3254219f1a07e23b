"""What an adapter's settings accept, how they scale, and which modules they reach."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar.errors import AdapterError, ConfigError
from entrenar.lora import LoraConfig, match_targets

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = [
    *(f"model.layers.{n}.{'self_attn' if x in LINEARS[:4] else 'mlp'}.{x}" for n in range(12) for x in LINEARS),
    "lm_head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("r", "alpha", "rslora", "scaling"),
    [(8, 16, False, 2.0), (16, 16, True, 4.0), (8, 16, True, 5.65685425), (4, 32, False, 8.0)],
)
def test_scaling(r: int, alpha: float, rslora: bool, scaling: float) -> None:
    """https://github.com/paiml/aprender/issues/2189, https://github.com/Blaizzy/mlx-vlm/issues/986."""
    config = LoraConfig(r=r, lora_alpha=alpha, use_rslora=rslora)
    assert config.scaling == pytest.approx(scaling, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": -1}, "r is -1"),
        ({"r": 2.5}, r"r is 2\.5"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_dropout": 1.0}, r"lora_dropout is 1\.0"),
        ({"lora_dropout": -0.1}, "lora_dropout is -0.1"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": ("",)}, "target_modules is empty or holds an empty name"),
        ({"target_modules": ("q_proj", "q_proj")}, "names 'q_proj' twice"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"target_modules": (1,)}, r"target_modules is \(1,\)"),
        ({"target_modules": "(q_proj"}, "not a regular expression"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


def test_a_list_of_targets_is_kept_in_order() -> None:
    config = LoraConfig(target_modules=["v_proj", "q_proj"])  # type: ignore[arg-type]
    assert config.target_modules == ("v_proj", "q_proj")
    assert hash(config) == hash(LoraConfig(target_modules=("v_proj", "q_proj")))


def test_all_linear_leaves_the_output_layer_out() -> None:
    """https://github.com/huggingface/peft/issues/2267."""
    assert match_targets(NAMES, "all-linear") == NAMES[:-1]
    assert match_targets(NAMES, ("lm_head",)) == ["lm_head"]


def test_a_target_matches_whole_components() -> None:
    """https://github.com/huggingface/peft/issues/2267, https://github.com/huggingface/peft/issues/2194."""
    with pytest.raises(AdapterError, match="'proj' matches no linear layer"):
        match_targets(NAMES, ("proj",))
    assert match_targets(NAMES, ("layers.1.self_attn.q_proj",)) == [
        "model.layers.1.self_attn.q_proj"
    ]
    matched = match_targets(NAMES, ("v_proj", "q_proj"))
    assert matched[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert len(matched) == 24


def test_a_misspelt_target_is_refused_though_another_matches() -> None:
    """https://github.com/huggingface/peft/issues/1959."""
    with pytest.raises(AdapterError, match=r"'v_porj' matches no linear layer.*mean 'v_proj'"):
        match_targets(NAMES, ("q_proj", "v_porj"))


def test_a_string_is_a_regular_expression_on_the_whole_name() -> None:
    assert match_targets(NAMES, r".*layers\.[01]\.mlp\.up_proj") == [
        f"model.layers.{n}.mlp.up_proj" for n in range(2)
    ]
    with pytest.raises(AdapterError, match="'q_proj' matches no linear layer"):
        match_targets(NAMES, "q_proj")
