"""The fields of ``InstructConfig`` as flags: the same names with dashes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig, read_toml

__all__ = ["DEMO_DEFAULTS", "add_config_flags", "config_from", "flag_values"]

_LISTS = ("target_modules", "betas")
_TRISTATE = ("checkpointing", "graph")
_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


# What a machine without a GPU gets through in minutes; every one of them can be set by its flag.
DEMO_DEFAULTS: dict[str, Any] = {
    "quantize_nf4": True,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "weight_decay": 0.0,
    "max_steps": 50,
    "batch_size": 8,
    "max_seq_len": 256,
}


def add_config_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None
) -> None:
    """Add a flag for every field of ``InstructConfig``; a flag that is not given stays None.

    Args:
        parser: What to add them to.
        defaults: Defaults of the command where they are not those of ``InstructConfig``.
    """
    group = parser.add_argument_group("training settings")
    for field in dataclasses.fields(InstructConfig):
        flag = "--" + field.name.replace("_", "-")
        default = (defaults or {}).get(field.name, field.default)
        text = f"{field.metadata['help']} (default {_shown(default)})"
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=field.name, default=None, action=action, help=text)
        else:
            kind = _metavar(field.name, field.default)
            group.add_argument(flag, dest=field.name, metavar=kind, default=None, help=text)


def flag_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings whose flags were given, converted from text.

    Raises:
        ConfigError: A value is not of the setting's kind.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(InstructConfig):
        text = getattr(arguments, field.name, None)
        if text is not None:
            values[field.name] = text if isinstance(text, bool) else _convert(field, text)
    return values


def config_from(
    arguments: argparse.Namespace, file: str | None, defaults: dict[str, Any] | None = None
) -> tuple[InstructConfig, dict[str, Any]]:
    """Resolve the settings: a flag goes before the file, the file before the defaults.

    Args:
        arguments: The parsed flags.
        file: A TOML file, or None.
        defaults: Settings that apply where neither says otherwise.

    Returns:
        The configuration, and the file's table ``[run]``.

    Raises:
        ConfigError: A setting is unknown or refused.
    """
    values = dict(defaults or {})
    run: Any = {}
    if file is not None:
        table = read_toml(file)
        run = table.pop("run", {})
        if not isinstance(run, dict):
            raise ConfigError(f"{file}: run is {run!r}, wanted a table", "write it as [run]")
        InstructConfig.from_dict(table, file)  # an error in the file names the file
        values.update(table)
    values.update(flag_values(arguments))
    return InstructConfig.from_dict(values, "the settings"), run


def _convert(field: dataclasses.Field[Any], text: str) -> Any:
    name, default = field.name, field.default
    if name in _LISTS:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if name == "betas":
            return [_number(name, part, float) for part in parts]
        return "all-linear" if parts == ["all-linear"] else parts
    if name in _TRISTATE:
        return _WORDS.get(text.lower(), text)
    if name in ("max_steps", "gradient_clip_norm") and text.lower() == "none":
        return "none"
    if name == "max_steps" or isinstance(default, int):
        return _number(name, text, int)
    return _number(name, text, float) if isinstance(default, float) else text


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {text!r}, wanted {wanted}", "correct it") from None


def _metavar(name: str, default: Any) -> str:
    if name == "max_steps" or (isinstance(default, int) and not isinstance(default, bool)):
        return "N"
    if name == "betas":
        return "B1,B2"
    if name == "target_modules":
        return "NAMES"
    return "X" if isinstance(default, float) else "WORD"


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)
