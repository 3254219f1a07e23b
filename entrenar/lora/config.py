"""Settings of LoRA adapters, and which modules they target."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from entrenar.errors import AdapterError, ConfigError

__all__ = ["ALL_LINEAR", "LoraConfig", "match_targets"]

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank, scale and targets of an adapter; field names as in PEFT.

    Attributes:
        r: Rank, at least 1.
        lora_alpha: The update is scaled by ``lora_alpha / r``.
        lora_dropout: Share of the input dropped on the way into the adapter, in training.
        target_modules: Last components of module names or whole names, matched exactly; or
            ``"all-linear"``, every linear layer but the output layer; or another string, a regular
            expression that a whole name must match.
        use_rslora: Scale by ``lora_alpha / sqrt(r)`` instead.
        seed: Of the generator that fills A.
        rank_pattern: Ranks of modules that differ, as (pattern, rank) pairs. A pattern is the end of a
            module's name from a dot on, or a regular expression for that; the first that fits counts.
        alpha_pattern: The same for alpha.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    use_rslora: bool = False
    seed: int = 0
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("rank_pattern", "alpha_pattern"):
            object.__setattr__(self, name, _pairs(name, getattr(self, name)))
        for pattern, rank in self.rank_pattern:
            _check_integer(f"rank_pattern[{pattern!r}]", rank, 1)
        for pattern, value in self.alpha_pattern:
            if not _number(f"alpha_pattern[{pattern!r}]", value) > 0:
                raise ConfigError(f"alpha_pattern[{pattern!r}] is {value}, wanted more than 0", "")
        _check_integer("r", self.r, 1)
        _check_integer("seed", self.seed, 0)
        alpha = _number("lora_alpha", self.lora_alpha)
        if not alpha > 0:
            raise ConfigError(
                f"lora_alpha is {alpha}, wanted more than 0", "at 0 the adapter has no effect"
            )
        if not 0 <= _number("lora_dropout", self.lora_dropout) < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}, wanted 0 <= p < 1", "")
        if not isinstance(self.use_rslora, bool):
            raise ConfigError(f"use_rslora is {self.use_rslora!r}, wanted true or false", "")
        self._check_targets()

    def _check_targets(self) -> None:
        targets = self.target_modules
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ConfigError(
                    f"target_modules {targets!r} is not a regular expression: {error}", ""
                ) from error
        else:
            if not isinstance(targets, Iterable) or not all(isinstance(t, str) for t in targets):
                raise ConfigError(f"target_modules is {targets!r}, wanted a list of names", "")
            # a list is accepted and kept as a tuple, so that the config can be hashed
            object.__setattr__(self, "target_modules", tuple(targets))
            repeated = [t for t in self.target_modules if self.target_modules.count(t) > 1]
            if repeated:
                raise ConfigError(f"target_modules names {repeated[0]!r} twice", "")
        if not targets or (not isinstance(targets, str) and "" in targets):
            raise ConfigError("target_modules is empty or holds an empty name", "name a module")

    @property
    def scaling(self) -> float:
        """Factor of ``B @ A`` in the output of a layer that no pattern names."""
        return self._scaling(self.r, self.lora_alpha)

    def _scaling(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _first(self.rank_pattern, module, self.r)

    def scaling_of(self, module: str) -> float:
        """Return the factor of ``B @ A`` in a module's output."""
        alpha = _first(self.alpha_pattern, module, self.lora_alpha)
        return self._scaling(self.rank_of(module), alpha)


def _pairs(name: str, given: Any) -> tuple[tuple[str, Any], ...]:
    """Return a mapping or pairs as pairs, refusing patterns that are no regular expressions."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple(given)
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{name}: {pattern!r} is not a module's name or a regular expression: {error}", ""
            ) from error
    return pairs


def _first(pairs: Iterable[tuple[str, Any]], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with.

    Source: PEFT's ``get_pattern_key``.
    """
    for pattern, value in pairs:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def match_targets(names: Iterable[str], target_modules: tuple[str, ...] | str) -> list[str]:
    """Return the module names that an adapter targets, in the order of ``names``.

    Args:
        names: Full names of the model's linear layers.
        target_modules: As in :class:`LoraConfig`.

    Raises:
        AdapterError: A target matches nothing; the message names it and the nearest module.

    Source: PEFT's ``check_target_module_exists``, which ignores a target that matches nothing.
    """
    names = list(names)
    if isinstance(target_modules, str):
        if target_modules == ALL_LINEAR:
            matched = [n for n in names if n.rpartition(".")[2] != "lm_head"]
        else:
            matched = [n for n in names if re.fullmatch(target_modules, n)]
        if not matched:
            _refuse_target(target_modules, names)
        return matched
    found: set[str] = set()
    for target in target_modules:
        hits = {n for n in names if n == target or n.endswith(f".{target}")}
        if not hits:
            _refuse_target(target, names)
        found |= hits
    return [n for n in names if n in found]


def _refuse_target(target: str, names: list[str]) -> None:
    last = sorted({n.rpartition(".")[2] for n in names})
    near = difflib.get_close_matches(target, last, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the model has {', '.join(last) or 'none'}"
    raise AdapterError(f"target module {target!r} matches no linear layer of the model", hint)


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, wanted an integer of at least {least}", "")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}, wanted a finite number", "")
    return value
