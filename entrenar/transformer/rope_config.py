"""How a config states its rotation: the base, the rule that scales it, and what is rotated.

Older files hold ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters`` with both inside,
and models whose windowed layers rotate otherwise one such object for each type of layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.transformer.config_fields import Fields, refuse
from entrenar.transformer.families import Family
from entrenar.transformer.rope import RopeScaling

__all__ = ["KINDS", "Rotation", "read_rotation", "read_scaling"]

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
}
_LARGEST = 2**27
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Rotation:
    """What a config says of its rotation.

    Attributes:
        theta: Base of the frequencies.
        scaling: The rule that stretches them.
        partial: Share of each head that is rotated.
        local_theta: Base of the windowed layers of a model that gives them one of their own.
        local_scaling: Their rule.
    """

    theta: float
    scaling: RopeScaling
    partial: float
    local_theta: float
    local_scaling: RopeScaling


def read_rotation(fields: Fields, family: Family, max_position: int) -> Rotation:
    """Read every key that concerns the rotation.

    Raises:
        UnsupportedModelError: The rule is not implemented, or not part of the architecture.
        ConfigError: A number is missing or senseless, or two keys contradict each other.
    """
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    local: Mapping[str, Any] = {}
    if any(isinstance(v, Mapping) for v in newer.values()):
        newer, local = _by_layer_type(newer, family)
    elif newer and family.local_rope:
        raise ConfigError(
            f"config: rope_parameters holds {', '.join(newer)}, wanted an object for each of "
            f"{' and '.join(_LAYER_TYPES)}",
            f"layers of a {family.model_type} model rotate in two ways",
        )
    rope = _agreed(older, newer)
    return Rotation(
        _theta(rope, fields, "rope_theta"),
        read_scaling(_with_original(rope, fields, family), max_position, family.rope_kinds),
        _partial(rope, fields, family),
        _theta(local, fields, "rope_local_base_freq") if family.local_rope else 10000.0,
        read_scaling(local, max_position),
    )


def _by_layer_type(
    parameters: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if not family.local_rope:
        raise UnsupportedModelError(
            f"config: rope_parameters has a set for each of {', '.join(parameters)}",
            f"layers of a {family.model_type} model all rotate in one way",
        )
    unknown = sorted(set(parameters) - set(_LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"config: rope_parameters names the layer type {unknown[0]!r}",
            f"implemented are {' and '.join(_LAYER_TYPES)}",
        )
    inside = Fields(parameters, {}, "rope_parameters")
    return inside.mapping(_LAYER_TYPES[0]), inside.mapping(_LAYER_TYPES[1])


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")


def _agreed(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the two spellings of one thing, which must not contradict each other."""
    for key in sorted(set(older) & set(newer) - {"type", "rope_type"}):
        if older[key] != newer[key]:
            raise ConfigError(
                f"config: rope_scaling says {key} is {older[key]!r}, rope_parameters {newer[key]!r}",
                "leave one of them out",
            )
    kinds = [_kind(older), _kind(newer)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise ConfigError(
            f"config: rope_scaling is of type {kinds[0]!r}, rope_parameters of type {kinds[1]!r}",
            "leave one of them out",
        )
    return {**older, **newer}


def _theta(rope: Mapping[str, Any], fields: Fields, key: str) -> float:
    if rope.get("rope_theta") is not None:
        theta = Fields(rope, {}, "rope_parameters").number("rope_theta")
    else:
        theta = fields.number(key) if fields.get(key) is not None else fields.defaults[key]
    if theta <= 1:
        raise refuse(key, theta, "more than 1")
    return theta


def _partial(rope: Mapping[str, Any], fields: Fields, family: Family) -> float:
    key = "partial_rotary_factor"
    inside = rope.get(key) is not None
    if not inside and fields.get(key) is None:
        return 1.0
    share = (Fields(rope, {}, "rope_parameters") if inside else fields).number(key, 1.0)
    if share != 1.0 and not family.partial_rope and rope.get("rope_type") != "factors":
        raise UnsupportedModelError(
            f"config: {key} is {share}, but {family.model_type} models rotate whole heads",
            "the config is of another architecture than its model_type says",
        )
    return share


def _with_original(rope: Mapping[str, Any], fields: Fields, family: Family) -> Mapping[str, Any]:
    """Settle ``original_max_position_embeddings``, which may stand outside the object too."""
    key = "original_max_position_embeddings"
    outside = fields.get(key)
    if outside is None or _kind(rope) in (None, "default", "linear", "dynamic"):
        return rope
    if rope.get(key) not in (None, outside):
        raise ConfigError(
            f"config: {key} is {outside!r}, inside the rope's object {rope[key]!r}",
            "they are one and the same; state the same number in both places",
        )
    return {**rope, key: outside}


def read_scaling(
    parameters: Mapping[str, Any], max_position: int, kinds: tuple[str, ...] = ()
) -> RopeScaling:
    """Read a ``rope_scaling`` or ``rope_parameters`` object.

    Args:
        parameters: The object; empty means no scaling. The kind stands under ``rope_type`` or, in
            older files, ``type``.
        max_position: The config's ``max_position_embeddings``, original length where none is given.
        kinds: The only ones the architecture has; empty for any.

    Raises:
        UnsupportedModelError: The kind is not implemented.
        ConfigError: A number it needs is missing or senseless.
    """
    kind = _kind(parameters) or "default"
    # "su" is what longrope was called first, and Phi-3 files of that time say "yarn" as well.
    if kind == "su" or (kind == "yarn" and "longrope" in kinds):
        kind = "longrope"
    allowed = kinds or KINDS
    if not isinstance(kind, str) or kind not in allowed:
        shown = ", ".join(k for k in allowed if k != "factors")
        raise UnsupportedModelError(
            f"config: rope_type {kind!r} is not supported", f"supported are {shown}"
        )
    missing = [key for key in _NEEDS[kind] if parameters.get(key) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind} lacks {', '.join(missing)}", "check rope_scaling")
    if kind == "default":
        return RopeScaling()
    if kind == "factors":
        return RopeScaling(kind, factors=_numbers(parameters, "factors"))
    if kind == "longrope":
        return _longrope(parameters, max_position)
    factor = _positive(parameters, "factor", 1.0)
    scaling = RopeScaling(
        kind,
        factor,
        _original(parameters, max_position),
        _positive(parameters, "low_freq_factor", 1.0),
        _positive(parameters, "high_freq_factor", 4.0),
        _positive(parameters, "beta_fast", 32.0),
        _positive(parameters, "beta_slow", 1.0),
        _yarn_attention(parameters, factor) if kind == "yarn" else 1.0,
        bool(parameters.get("truncate", True)),
    )
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"rope scaling llama3: high_freq_factor {scaling.high_freq_factor} is not above "
            f"low_freq_factor {scaling.low_freq_factor}",
            "check rope_scaling",
        )
    if kind == "dynamic":  # this rule stretches what the config says, whatever was there before
        scaling = dataclasses.replace(scaling, original_max_position=max_position)
    return scaling


def _positive(parameters: Mapping[str, Any], key: str, default: float) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    good = not isinstance(value, bool) and isinstance(value, int | float)
    # far past any that is in use: what these numbers are multiplied to must stay a context length
    if not good or not 0 < value <= _LARGEST:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise ConfigError(
            f"rope scaling: {key} is {shown}, wanted a number above 0 and up to {_LARGEST}", ""
        )
    return float(value)


def _original(parameters: Mapping[str, Any], default: int) -> int:
    key = "original_max_position_embeddings"
    value = _positive(parameters, key, default)
    if value != int(value):
        raise ConfigError(f"rope scaling: {key} is {value!r}, wanted a whole number", "")
    return int(value)


def _numbers(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    stated = parameters[key]
    if not isinstance(stated, list) or not stated:
        raise ConfigError(f"rope scaling: {key} is {stated!r}, wanted a list of numbers", "")
    return tuple(_positive({key: value}, key, 1.0) for value in stated)


def _longrope(parameters: Mapping[str, Any], max_position: int) -> RopeScaling:
    for key in ("short_mscale", "long_mscale"):
        if parameters.get(key) is not None:
            raise UnsupportedModelError(
                f"config: rope scaling longrope with {key} is not supported",
                "supported is attention_factor, one for both tables",
            )
    original = _original(parameters, max_position)
    if original < 2:
        raise ConfigError(
            f"rope scaling longrope: original_max_position_embeddings is {original}, wanted at "
            "least 2",
            "check rope_scaling",
        )
    factor = _positive(parameters, "factor", max_position / original)
    attention = 1.0
    if parameters.get("attention_factor") is not None:
        attention = _positive(parameters, "attention_factor", 1.0)
    elif factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=attention,
        factors=_numbers(parameters, "short_factor"),
        long_factors=_numbers(parameters, "long_factor"),
    )


def _yarn_attention(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor", 1.0)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if not parameters.get("mscale") or not parameters.get("mscale_all_dim"):
        return magnitude(1.0)
    one, all_dims = (_positive(parameters, key, 1.0) for key in ("mscale", "mscale_all_dim"))
    return magnitude(one) / magnitude(all_dims)
