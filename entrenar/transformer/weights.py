"""Which tensors a decoder consists of, by their Hugging Face names, and whether a checkpoint has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from entrenar.errors import CheckpointError
from entrenar.transformer.config import TransformerConfig

__all__ = ["EMBEDDING", "FINAL_NORM", "LM_HEAD", "check_tensors", "is_ignored", "linear_shapes"]
__all__ += ["tensor_shapes"]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
_POST_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_NAMES_SHOWN = 8
# Buffers that older versions of transformers saved beside the weights; computed from the config.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def is_ignored(name: str) -> bool:
    """Whether a tensor carries nothing that the config does not say."""
    return _IGNORED.fullmatch(name) is not None


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of each decoder linear, by full module name, in order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    if config.fused_projections:
        inputs = {"qkv_proj": (q + 2 * kv, hidden)}
        gates = {"gate_up_proj": (2 * inner, hidden)}
    else:
        inputs = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        gates = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    attention = {**inputs, "o_proj": (hidden, q)}
    block = {
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        **{f"mlp.{name}": shape for name, shape in gates.items()},
        "mlp.down_proj": (hidden, inner),
    }
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.num_hidden_layers)
        for name, shape in block.items()
    }


def _has_bias(config: TransformerConfig, module: str) -> bool:
    if ".mlp." in module:
        return config.mlp_bias
    return config.attention_output_bias if module.endswith("o_proj") else config.attention_bias


def tensor_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor the model needs; ``lm_head.weight`` only where not tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for module, (out_features, in_features) in linear_shapes(config).items():
        shapes[f"{module}.weight"] = (out_features, in_features)
        if _has_bias(config, module):
            shapes[f"{module}.bias"] = (out_features,)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            *(_POST_NORMS * config.post_norms),
        ):
            shapes[f"{prefix}.{norm}.weight"] = (config.hidden_size,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown}, and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def check_tensors(
    where: str, found: Mapping[str, tuple[int, ...]], config: TransformerConfig
) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or one of another shape.

    Args:
        where: The checkpoint, for the message.
        found: Shape of each tensor it has, by Hugging Face name. ``lm_head.weight`` may be there
            though the config ties it to the embedding.
        config: What the model needs.

    Raises:
        CheckpointError: Naming the tensors.
    """
    wanted = tensor_shapes(config)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing: {_listed(missing)}",
            "the checkpoint is incomplete or of another architecture than its config says",
        )
    allowed = {*wanted, LM_HEAD}
    extra = [name for name in found if name not in allowed and not is_ignored(name)]
    if extra:
        raise CheckpointError(
            f"{where}: {len(extra)} tensors have no place in a {config.model_type} model: "
            f"{_listed(extra)}",
            "ignoring them would compute something else; check model_type and the bias settings",
        )
    wanted.setdefault(LM_HEAD, (config.vocab_size, config.hidden_size))
    for name, shape in found.items():
        if name in wanted and tuple(shape) != wanted[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(shape)}, the config says {wanted[name]}",
                "config and weights are not of the same model",
            )
