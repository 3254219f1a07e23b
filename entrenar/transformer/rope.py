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

import numpy as np

from entrenar.errors import ConfigError

__all__ = ["RopeScaling", "RopeTable", "inverse_frequencies", "rope_table"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """One scaling rule with its numbers.

    Attributes:
        kind: ``default`` (none), ``linear``, ``dynamic``, ``llama3``, ``yarn``, ``longrope``, or
            ``factors``: each frequency divided by its own number, as GGUF files state them.
        factor: How many times longer the context becomes.
        original_max_position: Context length before scaling (dynamic, llama3, yarn, longrope).
        low_freq_factor: llama3: wavelengths above original / this are scaled in full.
        high_freq_factor: llama3: wavelengths below original / this are left alone.
        beta_fast: yarn: rotations above which a frequency is left alone.
        beta_slow: yarn: rotations below which it is scaled in full.
        attention_factor: yarn, longrope: multiplies cos and sin.
        truncate: yarn: round the ramp's bounds to whole dimensions.
        factors: ``factors``: one divisor per frequency; longrope: those of sequences up to the
            original length.
        long_factors: longrope: those of longer sequences, all of whose positions they stretch.
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
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether a sequence longer than the original context rotates its first positions otherwise."""
        return self.kind in ("dynamic", "longrope")


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None, seq_len: int = 0
) -> np.ndarray:
    """Return the angle per position of each rotated pair.

    Args:
        rotary_dim: Rotated dimensions R, even.
        theta: Base.
        scaling: The rule; None for none.
        seq_len: Longest sequence of the call; only ``dynamic`` and ``longrope`` look at it.

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
        return plain / _divisors("factors", scaling.factors, len(plain))
    if scaling.kind == "longrope":
        longer = seq_len > (scaling.original_max_position or 0)
        name, factors = ("long", scaling.long_factors) if longer else ("short", scaling.factors)
        return plain / _divisors(f"{name}_factor", factors, len(plain))
    return plain


def _divisors(name: str, factors: tuple[float, ...], count: int) -> np.ndarray:
    if len(factors) != count:
        raise ConfigError(
            f"rope {name}: got {len(factors)} numbers, wanted {count}, one per frequency",
            "they are of a model with another head size or partial_rotary_factor",
        )
    return np.asarray(factors, dtype=np.float64)


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
        Past its trained length, ``dynamic`` gives each length a table of its own; ``longrope`` has
        one for lengths up to it and another for those above.
        """
        trained = self.scaling.original_max_position or 0
        if self.scaling.kind == "longrope":
            if self._tables is None or self._length < length or (self._length > trained >= length):
                self._make(trained if length <= trained else self._rounded(length))
            assert self._tables is not None
            return self._tables
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
