"""What a decoder looks like, read from a Hugging Face ``config.json``.

Field names are the config's own. Everything that another file would have to guess (head size,
biases, which layers have a window, the rotation's base and scaling) is settled here, once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.transformer.families import Family, family_of
from entrenar.transformer.rope import RopeScaling, read_scaling

__all__ = ["ACTIVATIONS", "TransformerConfig"]

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
# A damaged file must not make a table of a trillion layers; the deepest public model has 126.
_MOST_LAYERS = 10_000
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
        qk_norm: q and k pass an RMSNorm over each head.
        hidden_act: Activation of the gate: silu, gelu, gelu_tanh or relu.
        windows: For each layer, the keys a query sees, itself included; 0 means all.
        rope_layers: For each layer, whether q and k are rotated.
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
    qk_norm: bool = False
    hidden_act: str = "silu"
    windows: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
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
        for name in ("windows", "rope_layers"):
            if len(getattr(self, name)) != layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries, wanted one for each of "
                    f"{layers} layers",
                    "check layer_types and no_rope_layers",
                )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """Positions that may be used: the trained ones, or what the rope scaling makes of them."""
        scaling = self.rope_scaling
        if scaling.kind not in ("dynamic", "yarn"):
            return self.max_position_embeddings
        trained = scaling.original_max_position or self.max_position_embeddings
        return max(self.max_position_embeddings, int(trained * scaling.factor))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TransformerConfig:
        """Read the dictionary of a ``config.json``.

        Args:
            config: The parsed file. Keys that do not change what is computed are passed over.

        Raises:
            UnsupportedModelError: The architecture, activation or rope scaling is not implemented.
            ConfigError: A key is missing, of the wrong type, or out of range.
        """
        family = family_of(config.get("model_type"))
        if config.get("quantization_config"):
            method = _mapping(config, "quantization_config").get("quant_method", "unnamed")
            raise UnsupportedModelError(
                f"the checkpoint's weights are already quantised ({method})",
                "use the unquantised checkpoint and quantize='nf4'",
            )
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        layers = _integer(config, "num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise _refuse("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
        rope = _rope_parameters(config)
        max_position = _integer(config, "max_position_embeddings", family.default_max_position)
        return cls(
            model_type=family.model_type,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_kv_heads(config, family, heads),
            head_dim=_head_dim(config, family, hidden, heads),
            max_position_embeddings=max_position,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config, rope, family),
            rope_scaling=read_scaling(rope, max_position),
            partial_rotary_factor=_number(
                rope, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)
            ),
            tie_word_embeddings=_boolean(config, "tie_word_embeddings", family.default_tied),
            attention_bias=_either(family.qkv_bias, config, "attention_bias"),
            attention_output_bias=_either(family.output_bias, config, "attention_bias"),
            mlp_bias=_either(family.mlp_bias, config, "mlp_bias"),
            qk_norm=family.qk_norm,
            hidden_act=_activation(config),
            windows=_windows(config, family, layers),
            rope_layers=_rope_layers(config, family, layers),
            bos_token_id=_optional_integer(config, "bos_token_id"),
            eos_token_ids=token_ids(config, "eos_token_id"),
            dtype=_dtype(config),
        )


def _refuse(key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"config: {key} is {value!r}, wanted {wanted}", "check config.json")


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config: {key} is missing", "check config.json")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _refuse(key, value, "a whole number above 0")
    return value


def _optional_integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise _refuse(key, value, "a token id or null")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(key, value, "a number")
    if not math.isfinite(value) or value <= 0:
        raise _refuse(key, value, "a finite number above 0")
    return float(value)


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise _refuse(key, value, "true or false")
    return value


def _either(fixed: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return _boolean(config, key, False) if fixed is None else fixed


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _refuse(key, value, "an object or null")
    return value or {}


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return a key that holds one token id, a list of them, or null, as a tuple.

    Raises:
        ConfigError: It holds something else.
    """
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise _refuse(key, value, "a token id, a list of them, or null")
    return tuple(ids)


def _kv_heads(config: Mapping[str, Any], family: Family, heads: int) -> int:
    default = heads
    if "num_key_value_heads" not in config and family.default_kv_heads is not None:
        default = family.default_kv_heads
    return _integer(config, "num_key_value_heads", default)


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if family.default_head_dim is not None:
        return family.default_head_dim
    if hidden % heads:
        raise ConfigError(
            f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and "
            "head_dim is not stated",
            "state head_dim in config.json",
        )
    return hidden // heads


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge ``rope_scaling`` (older files) and ``rope_parameters`` (newer), which wins."""
    parameters = _mapping(config, "rope_parameters")
    if parameters and all(isinstance(v, Mapping) for v in parameters.values()):
        raise UnsupportedModelError(
            f"config: rope_parameters has a set for each of {', '.join(parameters)}",
            "models whose layer types rotate differently are not implemented",
        )
    return {**_mapping(config, "rope_scaling"), **parameters}


def _rope_theta(config: Mapping[str, Any], rope: Mapping[str, Any], family: Family) -> float:
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", family.default_rope_theta))
    if theta <= 1:
        raise _refuse("rope_theta", theta, "more than 1")
    return theta


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config: hidden_act {name!r} is not implemented",
            f"implemented are {', '.join(sorted(ACTIVATIONS))}",
        )
    return ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Return each layer's window; a ``layer_types`` list decides where there is one."""
    if family.window == "none":
        return (0,) * layers
    size = config.get("sliding_window", family.default_sliding_window)
    if size is None or (
        family.window == "opt_in" and not _boolean(config, "use_sliding_window", False)
    ):
        return (0,) * layers
    size = _integer({"sliding_window": size}, "sliding_window")
    types = config.get("layer_types")
    if isinstance(types, list) and family.window == "opt_in":
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedModelError(f"config: layer type {unknown[0]!r} is not implemented", "")
        return tuple(size if t == "sliding_attention" else 0 for t in types)
    if family.window == "all":
        return (size,) * layers
    if family.skips_rope:
        return tuple(0 if rope else size for rope in _rope_layers(config, family, layers))
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise _refuse("max_window_layers", first, "a whole number")
    return tuple(size if i >= first else 0 for i in range(layers))


def _rope_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * layers
    stated = config.get("no_rope_layers")
    if stated:  # despite the key's name, 1 marks a layer that is rotated
        if not isinstance(stated, list) or any(v not in (0, 1) for v in stated):
            raise _refuse("no_rope_layers", stated, "a list of 0 and 1")
        return tuple(bool(v) for v in stated)
    interval = _integer(config, "no_rope_layer_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise _refuse("dtype", value, f"one of {', '.join(_DTYPES)} or auto")
    return name
