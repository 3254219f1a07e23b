"""Generate text token by token, each step one row through the model and its cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from entrenar.errors import DataError, NumericsError
from entrenar.transformer.sampling import (
    GenerateConfig,
    GenerateResult,
    sample_token,
    token_probabilities,
)

if TYPE_CHECKING:
    from entrenar.transformer.model import Transformer

__all__ = [
    "GenerateConfig",
    "GenerateResult",
    "generate",
    "sample_token",
    "stream_tokens",
    "token_probabilities",
]


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    config: GenerateConfig | None = None,
    on_token: Callable[[int], None] | None = None,
) -> GenerateResult:
    """Continue a prompt.

    Args:
        model: The model, with whatever adapter is attached.
        prompt_ids: Token ids; empty means the model's beginning-of-text token.
        config: The settings.
        on_token: Called with each new id as it comes, the one that stops it not included.

    Returns:
        The new ids, their text, and why it ended. Reaching the model's context length ends it
        with ``"length"``, as does ``max_new_tokens``.

    Raises:
        DataError: The prompt is empty and the model has no beginning-of-text token, is longer than
            the context, or holds an id that is not in the vocabulary.
        NumericsError: The model's logits are not finite.
    """
    settings = config or GenerateConfig()
    stops = stop_set(model, settings)
    if not stops:
        warnings.warn(
            "neither the model nor its tokenizer names a token that ends a text; generating up to "
            "max_new_tokens",
            stacklevel=2,
        )
    ids: list[int] = []
    reason = "length"
    for token in stream_tokens(model, prompt_ids, settings):
        if token in stops:
            reason = "stop"
            break
        ids.append(token)
        if on_token is not None:
            on_token(token)
    text = model.tokenizer.decode(ids) if model.tokenizer is not None else ""
    return GenerateResult(ids, text, reason)


def stop_set(model: Transformer, config: GenerateConfig) -> frozenset[int]:
    """Return every id that ends generation: the config's, the tokenizer's, the setting's."""
    own = model.tokenizer.stop_token_ids if model.tokenizer is not None else model.stop_token_ids
    return frozenset({*own, *config.stop_tokens})


def stream_tokens(
    model: Transformer, prompt_ids: Sequence[int], config: GenerateConfig
) -> Iterator[int]:
    """Yield new ids up to ``max_new_tokens`` or the context length, stop tokens among them.

    Raises:
        DataError: As :func:`generate`.
        NumericsError: As :func:`generate`.
    """
    ids = _checked(model, prompt_ids)
    rng = np.random.default_rng(config.seed)
    limit = min(config.max_new_tokens, model.config.context_length - len(ids))
    if limit <= 0:
        return
    cache = model.new_cache(len(ids) + limit)
    cache.weights = model.decoded_weights() if limit > 1 else None
    rows = ids
    for step in range(limit):
        logits = model.next_logits(np.asarray(rows, dtype=np.int64), cache)
        try:
            token = sample_token(logits, config, rng, ids)
        except NumericsError as error:
            raise NumericsError(f"step {step}: {error.message}", error.hint) from error
        yield token
        ids.append(token)
        rows = [token]
        if model.rotation_changes(cache.length, len(ids)):
            weights = cache.weights
            cache, rows = model.new_cache(len(ids) + limit - step - 1), ids
            cache.weights = weights


def _checked(model: Transformer, prompt_ids: Sequence[int]) -> list[int]:
    ids = [int(i) for i in prompt_ids]
    if not ids:
        bos = model.config.bos_token_id
        if bos is None and model.tokenizer is not None:
            bos = model.tokenizer.bos_token_id
        if bos is None:
            raise DataError(
                "empty prompt, and the model has no beginning-of-text token", "write one"
            )
        ids = [bos]
    bad = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise DataError(
            f"token id {bad[0]} is outside the model's vocabulary of {model.config.vocab_size}",
            "encode the prompt with the model's own tokenizer",
        )
    if len(ids) > model.config.context_length:
        raise DataError(
            f"the prompt has {len(ids)} tokens, the model's context {model.config.context_length}",
            "shorten the prompt",
        )
    return ids
