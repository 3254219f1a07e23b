"""The architectures that are implemented, and in what each differs from a plain Llama.

One row per ``model_type`` of a Hugging Face config. A row states which parts of the decoder block the
architecture has, and what a key means that the config may leave out. A model type without a row is
refused by name: weights of an unknown block would load and compute something else.

Source: the configuration and modelling files of transformers 5.24, to whose defaults a test holds the
rows: https://github.com/huggingface/transformers/tree/main/src/transformers/models
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from entrenar.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture has that another has not.

    Attributes:
        model_type: The config's ``model_type``.
        defaults: Value of each key that a config may leave out, by the config's own names. Sizes of
            a head are not among them where they follow from the others. Token ids are not either:
            those a config does not name are the tokenizer's to state.
        gguf: ``general.architecture`` of the same model in a GGUF file; empty where there is none.
        gguf_permuted: Rows of q and k are permuted for interleaved rotation in GGUF files.
        qkv_bias: Whether q, k and v have biases: a fixed answer, or None for ``attention_bias``.
        output_bias: The same of the attention's output projection.
        mlp_bias: The same of the MLP's projections, None for ``mlp_bias``.
        fused: q, k and v are one linear, ``qkv_proj``, and gate and up another, ``gate_up_proj``.
        qk_norm: RMSNorm over each head of q and k before rotation.
        norm_offset: Added to the weights of every norm: 1 where a checkpoint stores them around 0.
        post_norms: What attention and MLP return passes a norm before it joins the residual stream.
        scales_embedding: Embedded tokens are multiplied by sqrt(hidden_size).
        window: How ``sliding_window`` applies: ``"none"`` ignored, ``"all"`` every layer,
            ``"opt_in"`` only with ``use_sliding_window``, in layers from ``max_window_layers`` on,
            or ``"pattern"`` in all layers but each ``window_pattern``-th.
        window_pattern: Layers from one full attention to the next where ``layer_types`` is absent.
        local_rope: Windowed layers rotate by a base of their own (``rope_local_base_freq``).
        partial_rope: ``partial_rotary_factor`` applies.
        skips_rope: Some layers carry no rotation (``no_rope_layers``).
        rope_kinds: The only scaling rules the architecture has; empty for any.
        scalar_scale: Scores are divided by the root of ``query_pre_attn_scalar``, not of the head.
        softcaps: Which of ``attn_logit_softcapping`` and ``final_logit_softcapping`` apply.
        activation_key: The config's key for the gate's activation.
        gelu_is_tanh: ``gelu`` means the approximation by tanh.
    """

    model_type: str
    defaults: Mapping[str, Any]
    gguf: str = ""
    gguf_permuted: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    fused: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    scales_embedding: bool = False
    window: str = "none"
    window_pattern: int = 0
    local_rope: bool = False
    partial_rope: bool = False
    skips_rope: bool = False
    rope_kinds: tuple[str, ...] = ()
    scalar_scale: bool = False
    softcaps: tuple[str, ...] = ()
    activation_key: str = "hidden_act"
    gelu_is_tanh: bool = False


# Alike in every family that does not say otherwise.
_COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        **_COMMON,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **more,
    }


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            _sizes(32000, 4096, 11008, 32, 32, 2048),
            gguf="llama",
            gguf_permuted=True,
            mlp_bias=None,
        ),
        Family(
            "mistral",
            _sizes(
                32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096
            ),
            qkv_bias=False,
            output_bias=False,
            window="all",
        ),
        Family(
            "qwen2",
            _sizes(151936, 4096, 22016, 32, 32, 32768, **_QWEN),
            gguf="qwen2",
            qkv_bias=True,
            output_bias=False,
            window="opt_in",
        ),
        Family(
            "qwen3",
            _sizes(151936, 4096, 22016, 32, 32, 32768, **_QWEN, head_dim=128),
            gguf="qwen3",
            qk_norm=True,
            window="opt_in",
        ),
        Family(
            "smollm3",
            _sizes(
                128256, 2048, 11008, 36, 16, 32768, num_key_value_heads=4,
                rope_theta=2000000.0, tie_word_embeddings=True, no_rope_layer_interval=4,
            ),
            mlp_bias=None,
            window="opt_in",
            skips_rope=True,
        ),
        Family(
            "phi3",
            _sizes(
                32064, 3072, 8192, 32, 32, 4096, rms_norm_eps=1e-5,
                original_max_position_embeddings=4096,
            ),
            qkv_bias=False,
            output_bias=False,
            fused=True,
            window="all",
            partial_rope=True,
            rope_kinds=("default", "longrope"),
        ),
        Family(
            "gemma",
            _sizes(
                256000, 3072, 24576, 28, 16, 8192, **_GEMMA, num_key_value_heads=16,
                hidden_act="gelu_pytorch_tanh",
            ),
            norm_offset=1.0,
            scales_embedding=True,
            gelu_is_tanh=True,
        ),
        Family(
            "gemma2",
            _sizes(
                256000, 2304, 9216, 26, 8, 8192, **_GEMMA2,
                attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
            ),
            norm_offset=1.0,
            post_norms=True,
            scales_embedding=True,
            window="pattern",
            window_pattern=2,
            scalar_scale=True,
            softcaps=("attn_logit_softcapping", "final_logit_softcapping"),
            activation_key="hidden_activation",
        ),
        Family(
            "gemma3_text",
            _sizes(
                262208, 2304, 9216, 26, 8, 131072, **_GEMMA2,
                rope_theta=1000000.0, rope_local_base_freq=10000.0,
            ),
            qk_norm=True,
            norm_offset=1.0,
            post_norms=True,
            scales_embedding=True,
            window="pattern",
            window_pattern=6,
            local_rope=True,
            scalar_scale=True,
            softcaps=("final_logit_softcapping",),
            activation_key="hidden_activation",
        ),
    )
}  # fmt: skip
# Keys that say, in a model type that is not implemented, what sets it apart.
_TELLING = (
    "num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank", "text_config",
    "is_encoder_decoder", "state_size", "ssm_cfg", "alibi",
)  # fmt: skip


def family_of(model_type: object, config: Mapping[str, Any] | None = None) -> Family:
    """Return the row of a model type.

    Args:
        model_type: The config's ``model_type``.
        config: The rest of the config, of which the message names the key that sets the model apart.

    Raises:
        UnsupportedModelError: There is none; the message lists those there are.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        told = [key for key in _TELLING if (config or {}).get(key)]
        apart = f" (it states {', '.join(told)})" if told else ""
        raise UnsupportedModelError(
            f"config: model_type {model_type!r} is not implemented{apart}",
            f"use a model of one of these: {', '.join(sorted(FAMILIES))}",
        )
    return family
