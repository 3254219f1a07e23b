"""Configs: what is settled for each architecture, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar.errors import ConfigError, EntrenarError, UnsupportedModelError
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.families import FAMILIES
from entrenar.transformer.rope import inverse_frequencies
from entrenar.transformer.rope_config import KINDS
from entrenar.transformer.weights import linear_shapes, tensor_shapes

read = TransformerConfig.from_hf
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def settings(tiny_settings: dict[str, Any]) -> dict[str, Any]:
    return dict(tiny_settings)


def test_head_dim_that_is_not_hidden_over_heads(settings: dict[str, Any]) -> None:
    """https://github.com/paiml/entrenar/issues/262"""
    settings |= {"hidden_size": 20, "num_attention_heads": 4, "head_dim": 8}
    shapes = linear_shapes(read(settings))
    assert shapes["model.layers.0.self_attn.q_proj"] == (32, 20)
    assert shapes["model.layers.0.self_attn.k_proj"] == (16, 20)
    assert shapes["model.layers.0.self_attn.v_proj"] == (16, 20)
    assert shapes["model.layers.0.self_attn.o_proj"] == (20, 32)
    settings |= {"hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 8}
    assert read({**settings, "head_dim": 128}).head_dim == 128


def test_hidden_that_heads_do_not_divide(settings: dict[str, Any]) -> None:
    """https://github.com/paiml/entrenar/issues/262"""
    settings |= {"hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 8}
    with pytest.raises(ConfigError, match="1792 is not a multiple of num_attention_heads 24"):
        read(settings)


def test_unknown_architecture_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma9' is not implemented.*llama.*qwen3"):
        read({**settings, "model_type": "gemma9"})
    with pytest.raises(UnsupportedModelError, match="None is not implemented"):
        read({k: v for k, v in settings.items() if k != "model_type"})
    with pytest.raises(UnsupportedModelError, match=r"\['llama'\]"):
        read({**settings, "model_type": ["llama"]})


def test_biases_of_qwen2_do_not_need_a_key(settings: dict[str, Any]) -> None:
    """https://github.com/sbryngelson/ANEForge/issues/253"""
    names = tensor_shapes(read({**settings, "model_type": "qwen2"}))
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert "model.layers.0.self_attn.v_proj.bias" in names


def test_output_bias_follows_the_architecture(settings: dict[str, Any]) -> None:
    """https://github.com/sgl-project/sglang-jax/issues/578"""
    stated = {**settings, "attention_bias": True}
    name = "model.layers.1.self_attn.o_proj.bias"
    assert name not in tensor_shapes(read({**stated, "model_type": "qwen2"}))
    assert name in tensor_shapes(read(stated))


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_either_key(settings: dict[str, Any], key: str, value: str) -> None:
    """https://github.com/huggingface/transformers/issues/34743"""
    assert read({**settings, key: value}).dtype == "bfloat16"


def test_dtype_absent_auto_or_unknown(settings: dict[str, Any]) -> None:
    """https://github.com/huggingface/transformers/issues/34743"""
    assert read(settings).dtype is None
    assert read({**settings, "dtype": "auto"}).dtype is None
    with pytest.raises(ConfigError, match="dtype is 'fp8'"):
        read({**settings, "dtype": "fp8"})


def test_end_of_text_as_one_id_a_list_or_null(settings: dict[str, Any]) -> None:
    """https://github.com/vllm-project/vllm/issues/4180"""
    assert read({**settings, "eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert read({**settings, "eos_token_id": 9}).eos_token_ids == (9,)
    assert read({**settings, "eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id is 'x'"):
        read({**settings, "eos_token_id": "x"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "24"),
        ("hidden_size", 0),
        ("vocab_size", True),
        ("num_hidden_layers", 2.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "1e4"),
        ("tie_word_embeddings", "yes"),
        ("rope_scaling", [1]),
    ],
)
def test_a_bad_value_is_named(settings: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read({**settings, key: value})


def test_heads_that_do_not_group(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 3 does not divide"):
        read({**settings, "num_key_value_heads": 3})


def test_windows(settings: dict[str, Any]) -> None:
    window = {**settings, "sliding_window": 5, "num_hidden_layers": 3}
    assert read(window).windows == (0, 0, 0)  # llama has none, whatever its config says
    assert read({**window, "model_type": "mistral"}).windows == (5, 5, 5)
    assert read({**window, "model_type": "mistral", "sliding_window": None}).windows == (0, 0, 0)
    qwen = {**window, "model_type": "qwen2", "max_window_layers": 1}
    assert read(qwen).windows == (0, 0, 0)
    assert read({**qwen, "use_sliding_window": True}).windows == (0, 5, 5)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    stated = {**qwen, "use_sliding_window": True, "layer_types": types}
    assert read(stated).windows == (5, 0, 5)
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read({**stated, "layer_types": ["chunked_attention"] * 3})


def test_layers_without_rotation(settings: dict[str, Any]) -> None:
    smollm3 = {**settings, "model_type": "smollm3", "num_hidden_layers": 5}
    assert read(smollm3).rope_layers == (True, True, True, False, True)
    stated = {**smollm3, "no_rope_layers": [1, 0, 1, 0, 1]}
    assert read(stated).rope_layers == (True, False, True, False, True)
    with pytest.raises(ConfigError, match="no_rope_layers has 2 entries, wanted one for each of 5"):
        read({**smollm3, "no_rope_layers": [1, 0]})


def test_quantised_checkpoints_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"already quantised \(gptq\)"):
        read({**settings, "quantization_config": {"quant_method": "gptq"}})


def test_unknown_activation(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="'mish' is not implemented"):
        read({**settings, "hidden_act": "mish"})


def test_qwen3_has_head_norms_and_its_own_head_size(settings: dict[str, Any]) -> None:
    config = read({**settings, "model_type": "qwen3"})
    assert config.qk_norm
    assert config.head_dim == 128
    assert tensor_shapes(config)["model.layers.0.self_attn.q_norm.weight"] == (128,)


def test_every_family_reads_its_minimum(settings: dict[str, Any]) -> None:
    for model_type in FAMILIES:
        assert read({**settings, "model_type": model_type}).model_type == model_type


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_junk_in_any_key_is_an_error_of_ours_or_is_read(
    settings: dict[str, Any], model_type: str
) -> None:
    window = FAMILIES[model_type].window
    scaling: dict[str, Any] = {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    whole = {
        **settings,
        "model_type": model_type,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": None if window in ("all", "pattern") else ["full_attention"] * 2,
        "no_rope_layers": [1, 1],
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "rope_scaling": scaling,
        "original_max_position_embeddings": 32,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 2,
        "rope_theta": 1e4,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "hidden_activation": "gelu",
        "num_experts": 1,
    }
    if FAMILIES[model_type].scalar_scale:
        whole["query_pre_attn_scalar"] = 8
    for key in FAMILIES[model_type].softcaps:
        whole[key] = 30.0
    junk = [
        None,
        True,
        0,
        -1,
        1,
        3,
        0.5,
        "",
        "x",
        [],
        [1],
        ["x"],
        [None],
        {},
        {"a": 1},
        float("inf"),
        float("nan"),
        10**400,
    ]
    read(whole)
    for key in whole:
        for value in junk:
            try:
                config = read({**whole, key: value})
                inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling, 99)
                tensor_shapes(config)
            except EntrenarError:
                continue
    for rule in KINDS:
        stated = {**LLAMA3, **scaling, "rope_type": rule, "factors": [1.0], "mscale": 1.0,
                  "mscale_all_dim": 0.5, "attention_factor": 1.0, "beta_fast": 32}  # fmt: skip
        for key in stated:
            for value in junk:
                try:
                    config = read({**whole, "rope_scaling": {**stated, key: value}})
                    inverse_frequencies(config.rotary_dim, 1e4, config.rope_scaling, 99)
                except EntrenarError:
                    continue
