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
        ("hidden_size", -24),
        ("hidden_size", 10**12),
        ("hidden_size", 10**4000),
        ("vocab_size", 2**40),
        ("num_hidden_layers", 10**6),
        ("num_attention_heads", float("inf")),
        ("num_key_value_heads", 0),
        ("head_dim", 2**20),
        ("intermediate_size", [40]),
        ("max_position_embeddings", 2**60),
        ("max_position_embeddings", None),
        ("rms_norm_eps", 2.0),
        ("rms_norm_eps", True),
        ("rms_norm_eps", None),
        ("rope_theta", 1.0),
        ("rope_theta", -1e4),
        ("attention_bias", 1),
        ("mlp_bias", "false"),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention"]),
        ("bos_token_id", -1),
        ("eos_token_id", [1, True]),
        ("dtype", 16),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_value_is_named(settings: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read({**settings, key: value})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3", "head_dim", None),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", True),
        ("mistral", "sliding_window", 2**40),
        ("qwen2", "use_sliding_window", "yes"),
        ("qwen2", "max_window_layers", -1),
        ("smollm3", "no_rope_layers", [1, True]),
        ("smollm3", "no_rope_layer_interval", 0),
        ("phi3", "partial_rotary_factor", 1.5),
        ("phi3", "partial_rotary_factor", float("nan")),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "query_pre_attn_scalar", None),
        ("gemma2", "attn_logit_softcapping", -50.0),
        ("gemma2", "final_logit_softcapping", float("inf")),
        ("gemma3_text", "rope_local_base_freq", "10000"),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma3_text", "rope_parameters", {"full_attention": [], "sliding_attention": {}}),
    ],
)
def test_a_bad_value_of_one_family_is_named(
    settings: dict[str, Any], family: str, key: str, value: object
) -> None:
    use = {"use_sliding_window": True, "sliding_window": 5}
    stated = {**settings, **use, "model_type": family, "head_dim": 8, key: value}
    with pytest.raises(ConfigError, match="full_attention" if key == "rope_parameters" else key):
        read(stated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "dtype is float16, torch_dtype bfloat16"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
            },
            "rope_scaling is of type 'linear', rope_parameters of type 'dynamic'",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling says factor is 2.0, rope_parameters 4.0",
        ),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16,
                },
            },
            "original_max_position_embeddings is 32, inside the rope's object 16",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types says sliding_attention of layer 0, .* llama model has full_attention",
        ),
        (
            {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2},
            "layer_types says full_attention of layer 0",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types says sliding_attention of layer 1",
        ),
        (
            {"model_type": "gemma3_text", "head_dim": 8, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters holds rope_theta, wanted an object for each of full_attention",
        ),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"num_experts": 128, "model_type": "qwen3"}, "num_experts is 128"),
        ({"use_bidirectional_attention": True, "model_type": "gemma"}, "use_bidirectional"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which a llama model"),
        (
            {"attn_logit_softcapping": 50.0, "model_type": "gemma3_text"},
            "attn_logit_softcapping is 50.0, which a gemma3_text model",
        ),
        ({"final_logit_softcapping": 30.0, "model_type": "gemma"}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but llama models rotate"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "rope_parameters has a set for each of full_attention, sliding_attention",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {}, "other": {}}},
            "rope_parameters names the layer type 'other'",
        ),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not implemented"),
        ({"model_type": "gemma2", "hidden_activation": "relu6"}, "hidden_activation 'relu6'"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            r"model_type 'mixtral' is not implemented \(it states num_local_experts\).*phi3, qwen2",
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            r"model_type 'gemma3' is not implemented \(it states text_config\)",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "rope_type 'linear' is not supported; supported are default, longrope",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {
                    "type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3,
                    "short_mscale": 1.1,
                },
            },
            "longrope with short_mscale is not supported",
        ),
    ],
)  # fmt: skip
def test_what_stops_a_model_is_named(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read({**settings, **changes})


def test_keys_at_which_nothing_changes_are_passed_over(settings: dict[str, Any]) -> None:
    neutral = {
        "num_experts": 0, "num_local_experts": 1, "is_encoder_decoder": False,
        "attn_logit_softcapping": None, "query_pre_attn_scalar": None, "logits_scaling": 1.0,
        "partial_rotary_factor": 1.0, "pretraining_tp": 1, "rope_scaling": None, "use_cache": True,
    }  # fmt: skip
    assert read({**settings, **neutral}) == read(settings)


def test_a_window_that_holds_the_whole_context_is_none(settings: dict[str, Any]) -> None:
    phi3 = {**settings, "model_type": "phi3", "max_position_embeddings": 64}
    assert read({**phi3, "sliding_window": 63}).windows == (63, 63)
    assert read({**phi3, "sliding_window": 64}).windows == (0, 0)
    assert read({**phi3, "sliding_window": 262144}).windows == (0, 0)


def test_what_gemma3_configs_leave_out(settings: dict[str, Any]) -> None:
    """The 1b's file of March 2025, and the same in the newer spelling."""
    older = {
        **settings,
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "sliding_window": 5,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = read(older)
    assert config.windows == (5, 5, 5, 5, 5, 0, 5, 5)
    assert config.local_rope_layers == tuple(bool(window) for window in config.windows)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.rope_scaling.kind, config.local_rope_scaling.kind) == ("linear", "default")
    assert (config.head_dim, config.attention_scale) == (256, 1 / 16)
    newer = {k: v for k, v in older.items() if "rope" not in k and "pattern" not in k}
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read(newer) == config


def test_gelu_means_its_approximation_in_gemma(settings: dict[str, Any]) -> None:
    """https://github.com/huggingface/transformers/pull/29402"""
    gemma = {**settings, "model_type": "gemma", "head_dim": 8}
    assert read({**gemma, "hidden_act": "gelu"}).hidden_act == "gelu_tanh"
    assert read({**gemma, "hidden_act": None}).hidden_act == "gelu_tanh"
    assert read({**settings, "hidden_act": "gelu"}).hidden_act == "gelu"


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_states_its_scaling_under_three_names(settings: dict[str, Any], kind: str) -> None:
    rope = {"type": kind, "short_factor": [1.0] * 3, "long_factor": [4.0] * 3}
    phi3 = {**settings, "model_type": "phi3", "rope_scaling": rope}
    config = read({**phi3, "original_max_position_embeddings": 16})
    assert config.rope_scaling.kind == "longrope"
    assert config.rope_scaling.original_max_position == 16
    # 64 positions from 16: sqrt(1 + ln 4 / ln 16)
    assert config.rope_scaling.attention_factor == pytest.approx(1.5**0.5)
    assert config.rotation_depends_on_length
    assert not read({**phi3, "original_max_position_embeddings": 64}).rotation_depends_on_length
    with pytest.raises(ConfigError, match="longrope has 2 factors, wanted 3"):
        read({**phi3, "rope_scaling": {**rope, "long_factor": [4.0] * 2}})


def test_fused_projections_are_two_linears(settings: dict[str, Any]) -> None:
    shapes = linear_shapes(read({**settings, "model_type": "phi3"}))
    assert [name for name in shapes if ".0." in name] == [
        "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj",
    ]  # fmt: skip
    assert shapes["model.layers.0.self_attn.qkv_proj"] == (24 + 2 * 12, 24)
    assert shapes["model.layers.0.mlp.gate_up_proj"] == (80, 24)


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
