"""Keys of a ``config.json``, read with their type and range checked.

A key that is absent takes the family's default. One that is stated as something else than what it
must be is refused by its name, before anything is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from entrenar.errors import ConfigError

__all__ = ["Fields", "refuse", "token_ids"]

_MISSING = object()


def refuse(key: str, value: object, wanted: str) -> ConfigError:
    """Return the error that a key's value is not what it must be."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(f"config: {key} is {shown}, wanted {wanted}", "check config.json")


class Fields:
    """The keys of one object of a config, with the defaults of those it leaves out.

    Args:
        stated: The object.
        defaults: Value of each key that may be absent.
        inside: Name of the object, for messages; empty for the config itself.
    """

    def __init__(
        self, stated: Mapping[str, Any], defaults: Mapping[str, Any], inside: str = ""
    ) -> None:
        self.stated, self.defaults, self.inside = stated, defaults, inside

    def __contains__(self, key: str) -> bool:
        return key in self.stated

    def get(self, key: str) -> Any:
        """Return a key's value, its default where it is absent, None where it has none."""
        value = self.stated.get(key, _MISSING)
        return self.defaults.get(key) if value is _MISSING else value

    def integer(self, key: str, most: int, least: int = 1) -> int:
        """Return a whole number from ``least`` to ``most``.

        Raises:
            ConfigError: It is missing without a default, null, of another type, or out of range.
        """
        value = self.get(key)
        if value is None and key not in self.stated:
            raise ConfigError(f"config: {key} is missing", "check config.json")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refuse(key, value, f"a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str, most: int, least: int = 1) -> int | None:
        """Return a whole number from ``least`` to ``most``, or None where it is null or absent.

        Raises:
            ConfigError: It is of another type or out of range.
        """
        return None if self.get(key) is None else self.integer(key, most, least)

    def number(self, key: str, most: float = math.inf) -> float:
        """Return a finite number above 0 and up to ``most``.

        Raises:
            ConfigError: It is missing without a default, null, of another type, or out of range.
        """
        value = self.get(key)
        good = not isinstance(value, bool) and isinstance(value, int | float)
        # compared before it is converted: a whole number may be past the largest float
        if not good or not 0 < value <= min(most, 1e300):
            bound = "" if most == math.inf else f" and up to {most:g}"
            raise self._refuse(key, value, f"a finite number above 0{bound}")
        return float(value)

    def optional_number(self, key: str, most: float = math.inf) -> float | None:
        """Return a finite number above 0, or None where it is null or absent.

        Raises:
            ConfigError: It is of another type or out of range.
        """
        return None if self.get(key) is None else self.number(key, most)

    def boolean(self, key: str, default: bool = False) -> bool:
        """Return true or false; where the key is null or absent its default, or else ``default``.

        Raises:
            ConfigError: It is something else.
        """
        value = self.get(key)
        value = self.defaults.get(key, default) if value is None else value
        if not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; an empty one where the key is null or absent.

        Raises:
            ConfigError: It is something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._refuse(key, value, "an object or null")
        return value or {}

    def _refuse(self, key: str, value: object, wanted: str) -> ConfigError:
        return refuse(f"{self.inside}.{key}" if self.inside else key, value, wanted)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return a key that holds one token id, a list of them, or null, as a tuple.

    Raises:
        ConfigError: It holds something else.
    """
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise refuse(key, value, "a token id, a list of them, or null")
    return tuple(ids)
