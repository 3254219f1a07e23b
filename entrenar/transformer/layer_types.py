"""In what the layers of one model differ: which have a window, which rotate, and by which base."""

from __future__ import annotations

import dataclasses

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.transformer.config_fields import Fields, refuse
from entrenar.transformer.families import Family

__all__ = ["LayerTypes", "read_layers"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """One entry a layer in each.

    Attributes:
        windows: Keys a query sees, itself included; 0 means all.
        rotates: Whether q and k are rotated.
        local: Whether they are rotated by the windowed layers' own base.
    """

    windows: tuple[int, ...]
    rotates: tuple[bool, ...]
    local: tuple[bool, ...]


def read_layers(fields: Fields, family: Family, layers: int, context: int) -> LayerTypes:
    """Read every key that tells layers apart.

    Args:
        fields: The config.
        family: Its family.
        layers: How many there are.
        context: Most positions there can be; a window that holds them all is none.

    Raises:
        UnsupportedModelError: ``layer_types`` names a kind of layer that is not implemented.
        ConfigError: A list has not one entry a layer, or keys contradict each other.
    """
    rotates = _rotates(fields, family, layers)
    size = _window_size(fields, family)
    stated = _stated_types(fields, layers)
    if family.window == "pattern":
        sliding = _pattern(fields, family, layers) if stated is None else stated
    else:
        sliding = _sliding(fields, family, layers, size, rotates)
        if stated is not None and family.window == "opt_in" and size:
            sliding = stated
        if stated is not None and stated != sliding:
            at = next(i for i in range(layers) if stated[i] != sliding[i])
            raise ConfigError(
                f"config: layer_types says {_SLIDING if stated[at] else _FULL} of layer {at}, the "
                f"rest of the config that a {family.model_type} model has "
                f"{_SLIDING if sliding[at] else _FULL} there",
                "check layer_types, sliding_window and use_sliding_window",
            )
    windows = tuple(size if windowed and size < context else 0 for windowed in sliding)
    local = sliding if family.local_rope else (False,) * layers
    return LayerTypes(windows, rotates, local)


def _window_size(fields: Fields, family: Family) -> int:
    """Return the window of the layers that have one, 0 for none."""
    if family.window == "none":
        return 0
    opted = family.window != "opt_in" or fields.boolean("use_sliding_window")
    size = fields.optional_integer("sliding_window", _LARGEST)
    return size if opted and size is not None else 0


def _stated_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Return which layers ``layer_types`` says are windowed, None where it is absent."""
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise refuse("layer_types", types, "a list or null")
    unknown = sorted({str(t) for t in types} - {_FULL, _SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"config: layer_types names {unknown[0]!r}, which is not implemented",
            f"implemented are {_FULL} and {_SLIDING}",
        )
    _check_length("layer_types", types, layers)
    return tuple(t == _SLIDING for t in types)


def _check_length(key: str, values: list[object], layers: int) -> None:
    if len(values) != layers:
        raise ConfigError(
            f"config: {key} has {len(values)} entries, wanted one for each of {layers} layers",
            f"check {key} and num_hidden_layers",
        )


def _pattern(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    period = family.window_pattern
    if family.local_rope and fields.get("sliding_window_pattern") is not None:
        period = fields.integer("sliding_window_pattern", _LARGEST)
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def _sliding(
    fields: Fields, family: Family, layers: int, size: int, rotates: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Return which layers the keys besides ``layer_types`` give a window."""
    if not size:
        return (False,) * layers
    if family.window == "all":
        return (True,) * layers
    if family.skips_rope:
        return tuple(not rope for rope in rotates)
    first = fields.integer("max_window_layers", _LARGEST, least=0)
    return tuple(layer >= first for layer in range(layers))


def _rotates(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * layers
    stated = fields.get("no_rope_layers")
    if stated:  # despite the key's name, 1 marks a layer that is rotated
        if not isinstance(stated, list) or any(
            type(v) is not int or v not in (0, 1) for v in stated
        ):
            raise refuse("no_rope_layers", stated, "a list of 0 and 1")
        _check_length("no_rope_layers", stated, layers)
        return tuple(bool(v) for v in stated)
    interval = fields.integer("no_rope_layer_interval", _LARGEST)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))
