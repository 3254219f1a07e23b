"""Choose the next token from logits: the settings of generation, and one draw.

The order of the filters is that of transformers: repetition penalty, temperature, top-k, top-p,
min-p, then a draw from what is left. All of it in float64 on the host, from a generator that the
caller owns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from entrenar.errors import ConfigError, NumericsError, ShapeMismatchError

__all__ = ["GenerateConfig", "GenerateResult", "sample_token", "token_probabilities"]

# Below this a temperature is greedy: dividing by it would overflow, and one token has it all.
_COLDEST = 1e-6


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How text is generated.

    Attributes:
        max_new_tokens: Tokens generated at most.
        temperature: Divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: Keep the k likeliest tokens; 0 or None keeps all, 1 is greedy.
        top_p: Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        min_p: Keep tokens at least this share as likely as the likeliest; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already there.
        stop_tokens: Ids that end generation besides the model's own.
        seed: Seed of the draw; None draws differently each time.
    """

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_k: int | None = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_k", self.top_k or 0)
        for name in ("max_new_tokens", "top_k"):
            _whole(name, getattr(self, name), "a whole number, 0 or more")
        if self.seed is not None:
            _whole("seed", self.seed, "a whole number, 0 or more, or None")
        temperature, penalty = (
            _number(name, getattr(self, name)) for name in ("temperature", "repetition_penalty")
        )
        _check("temperature", temperature, temperature >= 0, "a finite number, 0 or more")
        _check("top_p", self.top_p, 0 < _number("top_p", self.top_p) <= 1, "more than 0, at most 1")
        good = 0 <= _number("min_p", self.min_p) < 1
        _check("min_p", self.min_p, good, "0 (off) or more, below 1")
        _check("repetition_penalty", penalty, penalty > 0, "a finite number above 0")
        if isinstance(self.stop_tokens, str | int):
            _check("stop_tokens", repr(self.stop_tokens), False, "a list of token ids")
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        for token in self.stop_tokens:
            _whole("stop_tokens", token, "token ids, whole numbers of 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < _COLDEST or self.top_k == 1


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What was generated.

    Attributes:
        ids: New token ids, the one that stopped it not included.
        text: Their text, special tokens left out; empty where the model has no tokenizer.
        finish_reason: ``"stop"`` at a stop token, ``"length"`` at a limit.
    """

    ids: list[int]
    text: str
    finish_reason: str


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ConfigError(f"GenerateConfig: {name} is {value}, wanted {wanted}", "")


def _whole(name: str, value: object, wanted: str) -> None:
    good = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0
    _check(name, value, bool(good), wanted)


def _number(name: str, value: object) -> float:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    _check(name, value, good and math.isfinite(float(value)), "a finite number")  # type: ignore[arg-type]
    return float(value)  # type: ignore[arg-type]


def sample_token(
    logits: np.ndarray,
    config: GenerateConfig,
    rng: np.random.Generator | None = None,
    previous: Sequence[int] = (),
) -> int:
    """Return the id of the next token.

    Args:
        logits: [V], any floating dtype. -inf excludes a token.
        config: The settings.
        rng: Where the draw comes from; a fresh one, seeded with ``config.seed``, where None.
        previous: Ids so far, for the repetition penalty.

    Raises:
        NumericsError: A logit is NaN or +inf, or all are -inf.
        ShapeMismatchError: ``logits`` is not a vector with an entry.
    """
    scores = _scores(logits, config, previous)
    if config.greedy:
        return int(np.argmax(scores))
    probabilities = _probabilities(scores, config)
    generator = rng if rng is not None else np.random.default_rng(config.seed)
    cumulative = np.cumsum(probabilities)
    drawn = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    if drawn >= len(probabilities):  # the product rounded up to the sum
        drawn = int(np.flatnonzero(probabilities)[-1])
    return drawn


def token_probabilities(
    logits: np.ndarray, config: GenerateConfig, previous: Sequence[int] = ()
) -> np.ndarray:
    """Return the distribution :func:`sample_token` draws from: float64 [V], summing to 1.

    Raises:
        NumericsError: As :func:`sample_token`.
        ShapeMismatchError: As :func:`sample_token`.
    """
    scores = _scores(logits, config, previous)
    if config.greedy:
        probabilities = np.zeros(len(scores))
        probabilities[np.argmax(scores)] = 1.0
        return probabilities
    return _probabilities(scores, config)


def _scores(logits: np.ndarray, config: GenerateConfig, previous: Sequence[int]) -> np.ndarray:
    scores = np.array(logits, dtype=np.float64)
    if scores.ndim != 1 or not scores.size:
        raise ShapeMismatchError(
            f"logits have shape {scores.shape}, wanted one entry per token", ""
        )
    if np.isnan(scores).any() or (scores == np.inf).any() or (scores == -np.inf).all():
        bad = np.flatnonzero(~np.isfinite(scores))
        raise NumericsError(
            f"non-finite logits: {len(bad)} of {scores.size}, token {bad[0]} is {scores[bad[0]]}",
            "the model or adapter has diverged; check its training loss",
        )
    if config.repetition_penalty != 1.0 and len(previous):
        seen = np.unique(np.asarray(previous, dtype=np.int64))
        seen = seen[(seen >= 0) & (seen < scores.size)]
        values, penalty = scores[seen], config.repetition_penalty
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    return scores


def _probabilities(scores: np.ndarray, config: GenerateConfig) -> np.ndarray:
    scores = scores / config.temperature
    top_k = config.top_k or 0
    if 0 < top_k < scores.size:
        # Of tokens tied at the edge the lowest ids stay, so that exactly k do.
        kept = np.argsort(-scores, kind="stable")[:top_k]
        limited = np.full_like(scores, -np.inf)
        limited[kept] = scores[kept]
        scores = limited
    probabilities = _softmax(scores)
    if config.top_p < 1.0:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= config.top_p]] = 0.0
        probabilities /= probabilities.sum()
    if config.min_p > 0.0:
        probabilities[probabilities < config.min_p * probabilities.max()] = 0.0
        probabilities /= probabilities.sum()
    return probabilities


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()
