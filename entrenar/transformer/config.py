"""What a decoder looks like, read from a Hugging Face ``config.json``.

Field names are the config's own. Everything that another file would have to guess (head size,
biases, which layers have a window, the rotation's base and scaling) is settled here, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.transformer.config_fields import Fields, refuse, token_ids
from entrenar.transformer.families import Family, family_of
from entrenar.transformer.layer_types import read_layers
from entrenar.transformer.rope import RopeScaling
from entrenar.transformer.rope_config import read_rotation

__all__ = ["ACTIVATIONS", "TransformerConfig", "token_ids"]

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
# A damaged file must not ask for a trillion layers. Several times what any public model has.
_MOST = {
    "vocab_size": 2**27,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**14,
    "max_position_embeddings": 2**27,
}
_LARGEST_HEAD = 2**14
_LARGEST_ID = 2**31 - 1
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Keys of other architectures that some files state under these model types too, and the values at
# which they change nothing.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0, 1),
    "kv_lora_rank": (None, 0),
    "clip_qkv": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "alibi": (None, False),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a decoder-only model.

    Attributes:
        model_type: Name of the architecture, a key of ``families.FAMILIES``.
        vocab_size: Rows of the embedding; may exceed the tokenizer's vocabulary.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_hidden_layers: Decoder blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads; divides the query heads.
        head_dim: Size of a head, which need not be hidden_size / num_attention_heads.
        max_position_embeddings: Positions the model was trained for.
        rms_norm_eps: Added to the mean square.
        rope_theta: Base of the rotation's frequencies.
        rope_scaling: The rule that stretches them.
        partial_rotary_factor: Share of each head that is rotated.
        tie_word_embeddings: The output projection is the embedding.
        attention_bias: q, k and v have biases.
        attention_output_bias: o has a bias.
        mlp_bias: gate, up and down have biases.
        fused_projections: q, k and v are one linear, gate and up another.
        qk_norm: q and k pass an RMSNorm over each head.
        norm_offset: What is added to the stored weights of every norm.
        post_norms: Attention and MLP end in a norm of their own.
        scales_embedding: Embedded tokens are multiplied by sqrt(hidden_size).
        query_pre_attn_scalar: Scores are divided by its root; head_dim where None.
        attn_logit_softcapping: c of c·tanh(score / c); 0 for none.
        final_logit_softcapping: The same of the logits.
        hidden_act: Activation of the gate: silu, gelu, gelu_tanh or relu.
        windows: For each layer, the keys a query sees, itself included; 0 means all.
        rope_layers: For each layer, whether q and k are rotated.
        local_rope_layers: For each layer, whether by the base of the windowed ones.
        local_rope_theta: That base.
        local_rope_scaling: Its rule.
        bos_token_id: Beginning of text, or None.
        eos_token_ids: Ids that end a text, as the config states them; may be empty.
        dtype: dtype the checkpoint says it was saved in, or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    scales_embedding: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    hidden_act: str = "silu"
    windows: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    local_rope_layers: tuple[bool, ...] = ()
    local_rope_theta: float = 10000.0
    local_rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}, which num_key_value_heads "
                f"{self.num_key_value_heads} does not divide",
                "the config does not describe grouped-query attention",
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"{self.rotary_dim} of head_dim {self.head_dim} dimensions would be rotated, wanted "
                "an even number up to head_dim",
                "check head_dim and partial_rotary_factor",
            )
        layers = self.num_hidden_layers
        object.__setattr__(self, "windows", self.windows or (0,) * layers)
        object.__setattr__(self, "rope_layers", self.rope_layers or (True,) * layers)
        object.__setattr__(self, "local_rope_layers", self.local_rope_layers or (False,) * layers)
        for name in ("windows", "rope_layers", "local_rope_layers"):
            if len(getattr(self, name)) != layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries, wanted one for each of "
                    f"{layers} layers",
                    "",
                )
        for scaling in (self.rope_scaling, self.local_rope_scaling):
            for factors in (scaling.factors, scaling.long_factors):
                if factors and len(factors) != self.rotary_dim // 2:
                    raise ConfigError(
                        f"rope scaling {scaling.kind} has {len(factors)} factors, wanted "
                        f"{self.rotary_dim // 2}, one for each pair of rotated dimensions",
                        "check rope_scaling, head_dim and partial_rotary_factor",
                    )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """Positions that may be used: the trained ones, or what the rope scaling makes of them."""
        return _context(self.max_position_embeddings, self.rope_scaling)

    @property
    def rotation_depends_on_length(self) -> bool:
        """Whether the longest sequence of a call decides how all of it is rotated."""
        rules = (self.rope_scaling, self.local_rope_scaling)
        return any(
            rule.depends_on_length and (rule.original_max_position or 0) < self.context_length
            for rule in rules
        )

    @property
    def attention_scale(self) -> float:
        """Factor of the attention's scores."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TransformerConfig:
        """Read the dictionary of a ``config.json``.

        Args:
            config: The parsed file. Keys that do not change what is computed are passed over.

        Raises:
            UnsupportedModelError: The architecture, activation or rope scaling is not implemented.
            ConfigError: A key is missing, of the wrong type, or out of range.
        """
        family = family_of(config.get("model_type"), config)
        fields = Fields(config, family.defaults)
        _refuse_foreign(fields, family)
        sizes = _checked_sizes(fields, family)
        rope = read_rotation(fields, family, sizes["max_position_embeddings"])
        context = _context(sizes["max_position_embeddings"], rope.scaling)
        layers = read_layers(fields, family, sizes["num_hidden_layers"], context)
        attention_bias = fields.boolean("attention_bias")
        return cls(
            model_type=family.model_type,
            **sizes,
            rms_norm_eps=fields.number("rms_norm_eps", 1.0),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            partial_rotary_factor=rope.partial,
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=(
                attention_bias if family.output_bias is None else family.output_bias
            ),
            mlp_bias=fields.boolean("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            fused_projections=family.fused,
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            post_norms=family.post_norms,
            scales_embedding=family.scales_embedding,
            query_pre_attn_scalar=(
                fields.number("query_pre_attn_scalar") if family.scalar_scale else None
            ),
            attn_logit_softcapping=_softcap(fields, family, "attn_logit_softcapping"),
            final_logit_softcapping=_softcap(fields, family, "final_logit_softcapping"),
            hidden_act=_activation(fields, family),
            windows=layers.windows,
            rope_layers=layers.rotates,
            local_rope_layers=layers.local,
            local_rope_theta=rope.local_theta,
            local_rope_scaling=rope.local_scaling,
            bos_token_id=fields.optional_integer("bos_token_id", _LARGEST_ID, least=0),
            eos_token_ids=token_ids(config, "eos_token_id"),
            dtype=_dtype(config),
        )


def _context(max_position: int, scaling: RopeScaling) -> int:
    if scaling.kind not in ("dynamic", "yarn"):
        return max_position
    trained = scaling.original_max_position or max_position
    return max(max_position, int(trained * scaling.factor))


def _checked_sizes(fields: Fields, family: Family) -> dict[str, int]:
    """Return every size of the model, by the config's names."""
    found = {key: fields.integer(key, most) for key, most in _MOST.items()}
    heads = found["num_attention_heads"]
    # null means as many as query heads, absent the family's number
    kv_heads = fields.optional_integer("num_key_value_heads", _MOST["num_attention_heads"])
    found["num_key_value_heads"] = heads if kv_heads is None else kv_heads
    stated = fields.integer if "head_dim" in family.defaults else fields.optional_integer
    head_dim = stated("head_dim", _LARGEST_HEAD)
    if head_dim is None and found["hidden_size"] % heads:
        raise ConfigError(
            f"config: hidden_size {found['hidden_size']} is not a multiple of num_attention_heads "
            f"{heads} and head_dim is not stated",
            "state head_dim in config.json",
        )
    found["head_dim"] = found["hidden_size"] // heads if head_dim is None else head_dim
    return found


def _refuse_foreign(fields: Fields, family: Family) -> None:
    """Refuse keys of parts that no family here has, or this one has not."""
    method = fields.mapping("quantization_config")
    if method:
        raise UnsupportedModelError(
            f"the checkpoint's weights are already quantised ({method.get('quant_method', 'unnamed')})",
            "use the unquantised checkpoint and quantize='nf4'",
        )
    foreign = [key for key in _SOFTCAPS if key not in family.softcaps]
    if not family.scalar_scale:
        foreign.append("query_pre_attn_scalar")
    for key, neutral in {**_FOREIGN, **dict.fromkeys(foreign, (None,))}.items():
        value = fields.stated.get(key)
        if not any(value is n or (type(value) is type(n) and value == n) for n in neutral):
            raise UnsupportedModelError(
                f"config: {key} is {value!r}, which a {family.model_type} model as implemented here "
                "has no part for",
                "leaving it out would compute something else",
            )


def _activation(fields: Fields, family: Family) -> str:
    name = fields.get(family.activation_key)
    name = fields.defaults[family.activation_key] if name is None else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config: {family.activation_key} {name!r} is not implemented",
            f"implemented are {', '.join(sorted(ACTIVATIONS))}",
        )
    found = ACTIVATIONS[name]
    return "gelu_tanh" if found == "gelu" and family.gelu_is_tanh else found


def _softcap(fields: Fields, family: Family, key: str) -> float:
    return (fields.optional_number(key) or 0.0) if key in family.softcaps else 0.0


def _dtype(config: Mapping[str, Any]) -> str | None:
    stated = [
        config[key] for key in ("dtype", "torch_dtype") if config.get(key) not in (None, "auto")
    ]
    names = [str(value).removeprefix("torch.") for value in stated]
    for value, name in zip(stated, names, strict=True):
        if name not in _DTYPES:
            raise refuse("dtype", value, f"one of {', '.join(_DTYPES)} or auto")
    if len(set(names)) > 1:
        raise ConfigError(
            f"config: dtype is {names[0]}, torch_dtype {names[1]}", "leave one of them out"
        )
    return names[0] if names else None
