"""Build a tokenizer from the metadata of a GGUF file, which carries no ``tokenizer.json``.

Two kinds are built: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``). What metadata does
not say (how text is split before merging) follows from the name in ``tokenizer.ggml.pre``; the
splits of other names are refused rather than guessed.

Numerics:
    Ids equal those of transformers' reading of the same file.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp for the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from entrenar import runtime
from entrenar.errors import CheckpointError, UnsupportedModelError
from entrenar.transformer.chat_template import select_template
from entrenar.transformer.tokenizer import Tokenizer

__all__ = ["tokenizer_from_metadata"]

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None is GPT-2's own split, which the byte-level step has built in.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_metadata(
    metadata: Mapping[str, Any], where: str, stop_token_ids: Iterable[int] = ()
) -> Tokenizer:
    """Return the tokenizer that ``tokenizer.ggml.*`` describes.

    Args:
        metadata: The file's metadata.
        where: The file, for messages.
        stop_token_ids: Ids that end a text, as the model's config says.

    Raises:
        CheckpointError: The metadata contradicts itself.
        UnsupportedModelError: The vocabulary is of a kind, or is split in a way, not implemented.
        MissingExtraError: The ``tokenizers`` package is not installed.
    """
    tokenizers = runtime.require("tokenizers", extra="train", feature="tokenising text")
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens is not a list of text", "")
    if kind == "gpt2":
        backend = _byte_level(tokenizers, metadata, where, tokens)
    elif kind == "llama":
        backend = _sentencepiece(tokenizers, metadata, where, tokens)
    else:
        raise UnsupportedModelError(
            f"{where}: tokenizer kind {kind!r} is not implemented", "implemented are gpt2 and llama"
        )
    _add_special(tokenizers, backend, metadata, tokens, byte_level=kind == "gpt2")
    roles = {}
    for role, key in _ROLES.items():
        number = _id(metadata, key, tokens)
        if number is not None:
            roles[role] = tokens[number]
    _add_bos(tokenizers, backend, metadata, roles, default=kind == "llama")
    template = select_template(metadata.get("tokenizer.chat_template"), where)
    return Tokenizer(backend, roles, template, stop_token_ids)


def _id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    """Return the token id under a key, or None where there is none within the vocabulary."""
    number = metadata.get(f"tokenizer.ggml.{key}")
    good = type(number) is int and 0 <= number < len(tokens)
    return number if good else None


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    stated = metadata.get("tokenizer.ggml.merges")
    merges = [tuple(str(m).split(" ")) for m in (stated if isinstance(stated, list) else [])]
    if any(len(pair) != 2 for pair in merges):
        raise CheckpointError(f"{where}: a merge of the tokenizer is not a pair", "")
    return [(first, second) for first, second in merges]


def _byte_level(tokenizers: Any, metadata: Mapping[str, Any], where: str, tokens: list[str]) -> Any:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{where}: how {pre!r} splits text is not implemented",
            f"implemented are {', '.join(sorted(_SPLITS))}; or use the model's Hugging Face folder",
        )
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        model = tokenizers.models.BPE(vocab=vocab, merges=_merges(metadata, where))
    except Exception as error:  # the package raises bare Exception for a merge without a token
        raise CheckpointError(f"{where}: its tokenizer is damaged ({error})", "") from error
    backend = tokenizers.Tokenizer(model)
    split, steps = _SPLITS[pre], tokenizers.pre_tokenizers
    if split is None:
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
        backend.pre_tokenizer = steps.ByteLevel(add_prefix_space=prefix)
    else:
        pattern = tokenizers.Regex(split)
        backend.pre_tokenizer = steps.Sequence(
            [
                steps.Split(pattern, behavior="isolated"),
                steps.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokenizers: Any, metadata: Mapping[str, Any], where: str, tokens: list[str]
) -> Any:
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = _merges(metadata, where)
    if not merges:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise CheckpointError(f"{where}: tokenizer has neither merges nor scores", "")
        if not all(isinstance(score, int | float) for score in scores):
            raise CheckpointError(f"{where}: a score of the tokenizer is not a number", "")
        merges = _merges_from_scores(vocab, scores)
    unknown = _id(metadata, "unknown_token_id", tokens)
    model = tokenizers.models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if prefix else "never", split=False
    )
    decoders = tokenizers.decoders
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Recover the merges that a SentencePiece vocabulary implies: any split of a token, by score."""
    found = []
    for token, number in vocab.items():
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[number], pair) for pair in pairs]
    found.sort(key=lambda item: item[0], reverse=True)
    return [pair for _, pair in found]


def _byte_alphabet() -> set[str]:
    """Return the characters byte-level BPE writes bytes with."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {chr(b) for b in kept} | {chr(256 + i) for i in range(256 - len(kept))}


def _add_special(
    tokenizers: Any,
    backend: Any,
    metadata: Mapping[str, Any],
    tokens: list[str],
    byte_level: bool,
) -> None:
    stated = metadata.get("tokenizer.ggml.token_type")
    kinds = stated if isinstance(stated, list) else []
    alphabet = _byte_alphabet() if byte_level else None

    def of_kind(kind: int) -> list[str]:
        return [token for token, k in zip(tokens, kinds, strict=False) if k == kind]

    # A control token outside the byte alphabet would be added under a new id, past the model's rows.
    control = [t for t in of_kind(_CONTROL) if alphabet is None or set(t) <= alphabet]
    made = tokenizers.AddedToken
    backend.add_special_tokens([made(t, normalized=False, special=True) for t in control])
    plain = of_kind(_USER_DEFINED)
    backend.add_tokens([made(t, normalized=False, special=False) for t in plain])


def _add_bos(
    tokenizers: Any,
    backend: Any,
    metadata: Mapping[str, Any],
    roles: Mapping[str, str],
    default: bool,
) -> None:
    if not metadata.get("tokenizer.ggml.add_bos_token", default) or "bos_token" not in roles:
        return
    bos = roles["bos_token"]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )
