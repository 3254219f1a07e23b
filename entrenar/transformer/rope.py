"""Rotary position embedding: frequencies of each scaling rule, and their cos and sin tables.

Frequency i of R/2 is ``theta^(-2i/R)``; a rule stretches them so that a model reaches positions it
was not trained on. All is computed in float64 and rounded once to the float32 that the rope kernel
reads: a float32 angle at position 16000 is already off by 1e-3.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
whose results the rules match.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from entrenar.errors import ConfigError, UnsupportedModelError

__all__ = ["KINDS", "RopeScaling", "RopeTable", "inverse_frequencies", "read_scaling", "rope_table"]

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": ("factors",),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """One scaling rule with its numbers.

    Attributes:
        kind: ``default`` (none), ``linear``, ``dynamic``, ``llama3``, ``yarn``, or ``factors``: each
            frequency divided by its own number, as GGUF files state them.
        factor: How many times longer the context becomes.
        original_max_position: Context length before scaling (dynamic, llama3, yarn).
        low_freq_factor: llama3: wavelengths above original / this are scaled in full.
        high_freq_factor: llama3: wavelengths below original / this are left alone.
        beta_fast: yarn: rotations above which a frequency is left alone.
        beta_slow: yarn: rotations below which it is scaled in full.
        attention_factor: yarn: multiplies cos and sin.
        truncate: yarn: round the ramp's bounds to whole dimensions.
        factors: ``factors``: one divisor per frequency.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def read_scaling(parameters: Mapping[str, Any], max_position: int) -> RopeScaling:
    """Read a ``rope_scaling`` or ``rope_parameters`` object.

    Args:
        parameters: The object; empty means no scaling. The kind stands under ``rope_type`` or, in
            older files, ``type``.
        max_position: The config's ``max_position_embeddings``, original length where none is given.

    Raises:
        UnsupportedModelError: The kind is not implemented.
        ConfigError: A number it needs is missing or senseless.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModelError(
            f"rope scaling kind {kind!r} is not supported", f"supported are {', '.join(KINDS[:-1])}"
        )
    missing = [key for key in _NEEDS[kind] if parameters.get(key) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind} lacks {', '.join(missing)}", "check rope_scaling")
    if kind == "default":
        return RopeScaling()
    if kind == "factors":
        stated = parameters["factors"]
        if not isinstance(stated, list) or not stated:
            raise ConfigError(f"rope scaling: factors is {stated!r}, wanted a list of numbers", "")
        factors = (_positive({"factors": f}, "factors", 1.0) for f in stated)
        return RopeScaling(kind, factors=tuple(factors))
    factor = _positive(parameters, "factor", 1.0)
    scaling = RopeScaling(
        kind,
        factor,
        int(_positive(parameters, "original_max_position_embeddings", max_position)),
        _positive(parameters, "low_freq_factor", 1.0),
        _positive(parameters, "high_freq_factor", 4.0),
        _positive(parameters, "beta_fast", 32.0),
        _positive(parameters, "beta_slow", 1.0),
        _attention_factor(parameters, factor) if kind == "yarn" else 1.0,
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"rope scaling: {key} is {value!r}, wanted a number above 0", "")
    return float(value)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor", 1.0)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if not parameters.get("mscale") or not parameters.get("mscale_all_dim"):
        return magnitude(1.0)
    one, all_dims = (_positive(parameters, key, 1.0) for key in ("mscale", "mscale_all_dim"))
    return magnitude(one) / magnitude(all_dims)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None, seq_len: int = 0
) -> np.ndarray:
    """Return the angle per position of each rotated pair.

    Args:
        rotary_dim: Rotated dimensions R, even.
        theta: Base.
        scaling: The rule; None for none.
        seq_len: Longest sequence of the call; only ``dynamic`` looks at it.

    Returns:
        float64 [R/2].
    """
    scaling = scaling or RopeScaling()
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    plain = theta**-exponents
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        return _dynamic(rotary_dim, theta, scaling, seq_len, exponents)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, rotary_dim, theta, scaling)
    if scaling.kind == "factors":
        if len(scaling.factors) != len(plain):
            raise ConfigError(
                f"rope factors: got {len(scaling.factors)}, wanted {len(plain)}, one per frequency",
                "the file's rope_freqs tensor does not fit its head size",
            )
        return plain / np.asarray(scaling.factors, dtype=np.float64)
    return plain


def _dynamic(
    rotary_dim: int, theta: float, scaling: RopeScaling, seq_len: int, exponents: np.ndarray
) -> np.ndarray:
    trained = scaling.original_max_position or 1
    stretch = scaling.factor * max(seq_len, trained) / trained - (scaling.factor - 1)
    if rotary_dim <= 2:  # the single frequency is theta^0, whatever theta
        return theta**-exponents
    return (theta * stretch ** (rotary_dim / (rotary_dim - 2))) ** -exponents


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = (scaling.original_max_position or 1) * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: np.ndarray, rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    trained = scaling.original_max_position or 1

    def dimension(rotations: float) -> float:
        turns = trained / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    scaled = np.clip((np.arange(rotary_dim // 2) - low) / width, 0.0, 1.0)
    return plain / scaling.factor * scaled + plain * (1 - scaled)


def rope_table(
    length: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of every position below ``length``.

    Returns:
        float32 [length, rotary_dim/2] each.

    Numerics:
        Angles, cosines and sines in float64, rounded once.
    """
    angles = np.outer(
        np.arange(length, dtype=np.float64),
        inverse_frequencies(rotary_dim, theta, scaling, length),
    )
    magnitude = scaling.attention_factor if scaling else 1.0
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


class RopeTable:
    """Tables that grow with the longest position asked for.

    Args:
        rotary_dim: Rotated dimensions R.
        theta: Base.
        scaling: The rule.
    """

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling) -> None:
        self.rotary_dim, self.theta, self.scaling = rotary_dim, theta, scaling
        self._length = 0
        self._tables: tuple[np.ndarray, np.ndarray] | None = None

    def tables(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin that cover positions below ``length``: float32 [P, R/2], P >= length.

        The same arrays until a longer length is asked for, so a caller may cache what it derives.
        Past its trained length, ``dynamic`` gives each length a table of its own.
        """
        trained = self.scaling.original_max_position or 0
        exact = self.scaling.kind == "dynamic" and length > trained
        if self._tables is None or (self._length != length if exact else self._length < length):
            self._make(length if exact else self._rounded(length))
        elif self.scaling.kind == "dynamic" and not exact and self._length > trained:
            self._make(self._rounded(length))
        assert self._tables is not None
        return self._tables

    def _rounded(self, length: int) -> int:
        rounded = max(512, 1 << (max(length, 1) - 1).bit_length())
        if self.scaling.kind == "dynamic":
            return max(length, min(rounded, self.scaling.original_max_position or rounded))
        return rounded

    def _make(self, length: int) -> None:
        self._length = length
        self._tables = rope_table(length, self.rotary_dim, self.theta, self.scaling)
