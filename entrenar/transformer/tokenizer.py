"""Text to token ids and back, and a conversation to text, as the model was trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrenar import runtime
from entrenar.errors import CheckpointError, ConfigError
from entrenar.transformer import chat_template
from entrenar.transformer.hf_folder import read_json

__all__ = ["END_OF_TURN", "TextStream", "Tokenizer"]

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eom_id|>",
)
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A vocabulary with its special tokens and chat template.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        special_tokens: Text of the special tokens by role, such as ``{"eos_token": "</s>"}``.
        template: Chat template, or None.
        stop_token_ids: Ids that end a text besides the tokenizer's own, as the model's config says.

    Attributes:
        eos_token_id: The tokenizer's end of text, else the first of the model's; None where neither
            knows one.
        bos_token_id: Beginning of text, or None.
        pad_token_id: Padding, or None; nothing here pads.
        stop_token_ids: All ids that end a turn: the model's, the tokenizer's, and end-of-turn
            markers such as ``<|im_end|>`` that the vocabulary has. Sorted.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str] | None = None,
        template: str | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = template
        stated = tuple(stop_token_ids)
        own = self._id_of("eos_token")
        self.eos_token_id = own if own is not None else next(iter(stated), None)
        self.bos_token_id = self._id_of("bos_token")
        self.pad_token_id = self._id_of("pad_token")
        turns = (backend.token_to_id(token) for token in END_OF_TURN)
        ids = {*stated, own, *turns} - {None}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(i for i in ids if i is not None))

    @classmethod
    def from_folder(cls, folder: Path, stop_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, ``tokenizer_config.json`` and the template.

        A template in ``chat_template.jinja`` counts before one in ``tokenizer_config.json``.

        Raises:
            CheckpointError: A file is missing or damaged.
            MissingExtraError: The ``tokenizers`` package is not installed.
        """
        folder = Path(folder)
        tokenizers = runtime.require("tokenizers", extra="train", feature="tokenising text")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{folder}: has no tokenizer.json", "copy it from the base model")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception for any malformed file
            raise CheckpointError(f"{file}: is not a tokenizer ({error})", "") from error
        # A file saved while training with fixed lengths would cut or pad every text.
        backend.no_truncation()
        backend.no_padding()
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = chat_template.select_template(config.get("chat_template"), str(path))
        return cls(backend, _special_tokens(folder, config), template, stop_token_ids)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included; the model's may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; special tokens spelled in it become their single id.

        Args:
            text: Any text.
            add_special_tokens: Add what the model wants around a text, such as a leading BOS. Off
                by default: a rendered chat template already has it.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids outside the vocabulary and cut characters are tolerated.

        An id that the model has and the tokenizer has not gives nothing; an incomplete UTF-8
        character gives U+FFFD.
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of one token's exact text, or None."""
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return a conversation as text, to be encoded without adding special tokens.

        Args:
            messages: Objects with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.
            **variables: Further names for the template, such as ``enable_thinking``.

        Raises:
            ConfigError: The model has no chat template, or an invalid one.
            DataError: The template refuses the conversation.
        """
        if self.chat_template is None:
            raise ConfigError(
                "the model has no chat template",
                "use prompts and responses as plain text, or add chat_template.jinja to its folder",
            )
        return chat_template.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


class TextStream:
    """Text of ids that arrive one at a time, never a part of a character.

    The concatenation of all pieces equals the decoding of all ids.

    Args:
        tokenizer: Decodes the ids.
        skip_special_tokens: Leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        # Ids before _done are given; decoding starts at _start, one piece earlier, because whether
        # a token begins with a space can depend on the token before it.
        self._start = self._done = 0

    def push(self, token: int) -> str:
        """Take one id and return the text that is now complete, possibly none."""
        self._ids.append(token)
        text = self._decode(self._start, len(self._ids))
        return "" if text.endswith(_REPLACEMENT) else self._give(text)

    def flush(self) -> str:
        """Return what is left; an incomplete character comes as U+FFFD."""
        return self._give(self._decode(self._start, len(self._ids)))

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], self._skip)

    def _give(self, text: str) -> str:
        piece = text[len(self._decode(self._start, self._done)) :]
        if piece:
            self._start, self._done = self._done, len(self._ids)
        return piece


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stated: dict[str, Any] = {}
    path = folder / "special_tokens_map.json"
    if path.is_file():
        stated.update(read_json(path))
    stated.update({role: config[role] for role in _SPECIAL if config.get(role) is not None})
    found = {}
    for role in _SPECIAL:
        value = stated.get(role)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[role] = text
    return found
