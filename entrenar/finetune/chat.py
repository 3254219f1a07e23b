"""Tokens of a conversation, and which of them are answers: the only ones that carry loss.

The model's chat template renders the conversation up to the generation prompt and as a whole; what
the second has and the first has not is the answer, up to and including its end-of-turn token. The
answer's tokens therefore follow exactly the prompt that generation will feed. Where a merge across
the boundary would change the prompt's tokens, the two parts are tokenised apart.

A model without a template gets a plain one: the prompt as it is for ``prompt+completion``, else
``### Instruction:`` and ``### Response:`` headings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar.errors import DataError
from entrenar.finetune.corpus import Corpus

__all__ = ["ChatEncoder", "EncodedCorpus", "Example", "encode_corpus"]

Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Example:
    """One sample in tokens.

    Attributes:
        ids: int64 [n] token ids, prompt and response.
        is_response: bool [n], whether a token is one to be learned. Position p - 1 predicts token
            p, so the first token never counts.
    """

    ids: np.ndarray
    is_response: np.ndarray

    @classmethod
    def from_pair(cls, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Example:
        """Join a prompt and its response."""
        ids = np.concatenate(
            [np.asarray(prompt_ids, dtype=np.int64), np.asarray(response_ids, dtype=np.int64)]
        )
        return cls(ids, np.arange(len(ids)) >= len(prompt_ids))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def response_tokens(self) -> int:
        """How many tokens carry loss."""
        return int(self.is_response[1:].sum())

    def truncated(self, max_seq_len: int) -> Example:
        """Return the first ``max_seq_len`` tokens."""
        if len(self.ids) <= max_seq_len:
            return self
        return Example(self.ids[:max_seq_len], self.is_response[:max_seq_len])


class ChatEncoder:
    """Turns messages into tokens the way the model was taught to read them.

    Args:
        tokenizer: The model's tokenizer.
        plain_prompt: Without a chat template, feed the user's text as it is.
    """

    def __init__(self, tokenizer: Any, plain_prompt: bool = False) -> None:
        self.tokenizer = tokenizer
        self.plain_prompt = plain_prompt
        self._stops = set(tokenizer.stop_token_ids)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the tokens from which the model generates its answer."""
        return self._tokens(self._render(messages, True))

    def encode(self, messages: Messages, learned_from: int = 0) -> Example:
        """Return a conversation's tokens; loss on the answers of every assistant turn.

        Where the template rewrites earlier turns once later ones follow, on the last answer only.

        Args:
            messages: The turns, the last of them the assistant's.
            learned_from: Number of the first turn that may be learned.

        Raises:
            DataError: The template refuses the conversation, or its generation prompt is not how
                it begins an answer.
        """
        whole = self._render(messages, False)
        answers = [
            i for i, t in enumerate(messages) if t["role"] == "assistant" and i >= learned_from
        ]
        spans = [self._span(messages, i, whole) for i in answers]
        if spans[-1] is None:
            raise DataError(
                "the chat template starts an answer in another way than its generation prompt",
                "correct the model's chat template",
            )
        kept = [s for s in spans if s is not None] if None not in spans else [spans[-1]]
        return self._assemble(whole, [s for s in kept if s is not None])

    def encode_text(self, text: str) -> Example:
        """Return a plain text's tokens, all learned: BOS where the model wants one, text, end."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=True))
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return Example(np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=bool))

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        if self.tokenizer.has_chat_template:
            try:
                return str(
                    self.tokenizer.apply_chat_template(
                        [dict(turn) for turn in messages],
                        add_generation_prompt=add_generation_prompt,
                    )
                )
            except DataError as error:
                raise DataError(
                    f"the chat template refuses the turns: {error.message}",
                    "correct that row, or the model's chat template",
                ) from error
        return self._render_plain(messages, add_generation_prompt)

    def _render_plain(self, messages: Messages, add_generation_prompt: bool) -> str:
        if self.plain_prompt:
            return "".join(turn["content"] for turn in messages)
        heading = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
        parts = [heading.get(turn["role"], "") + turn["content"] for turn in messages]
        if add_generation_prompt:
            parts.append(heading["assistant"])
        return "\n\n".join(parts)

    def _span(self, messages: Messages, index: int, whole: str) -> tuple[int, int] | None:
        """Return where an answer starts and ends in the whole text; None where it cannot be told."""
        prompt = self._render(messages[:index], True)
        turn = whole if index == len(messages) - 1 else self._render(messages[: index + 1], False)
        if turn.startswith(prompt) and whole.startswith(turn):
            return len(prompt), len(turn)
        return None

    def _assemble(self, whole: str, spans: list[tuple[int, int]]) -> Example:
        """Tokenise between the boundaries, or as a whole where that gives the same prompt tokens."""
        edges = [0, *(edge for span in spans for edge in span)]
        pieces = [self._tokens(whole[a:b]) for a, b in itertools.pairwise(edges)]
        if len(spans) == 1:
            joined = self._tokens(whole[: edges[-1]])
            if joined[: len(pieces[0])] == pieces[0]:
                pieces[1] = joined[len(pieces[0]) :]
        ids: list[int] = []
        answer: list[bool] = []
        for number, piece in enumerate(pieces):
            learned = 0
            if number % 2:
                learned = max((k + 1 for k, t in enumerate(piece) if t in self._stops), default=0)
                is_last = number == len(pieces) - 1
                if not learned:
                    end = self.tokenizer.eos_token_id
                    piece = [*piece, end] if is_last and end is not None else piece
                    learned = len(piece)
                elif is_last:
                    piece = piece[:learned]  # a newline after the last end of turn teaches nothing
            ids += piece
            answer += [k < learned for k in range(len(piece))]
        return Example(np.asarray(ids, dtype=np.int64), np.asarray(answer, dtype=bool))

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """Samples in tokens, none over the longest length, and what that cost.

    Attributes:
        examples: Those kept, each with at least one token to learn.
        skipped: ``file:line`` of those of which cutting left nothing to learn.
        truncated: How many lost tokens but were kept.
        left_out: ``file:line`` of those left out because they are too long.
        longest: Tokens of the longest sample before any cutting.
    """

    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    truncated: int = 0
    left_out: tuple[str, ...] = ()
    longest: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(example) for example in self.examples)

    @property
    def response_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(example.response_tokens for example in self.examples)


def encode_corpus(
    corpus: Corpus,
    tokenizer: Any,
    max_seq_len: int,
    *,
    train_on: str = "responses",
    long_samples: str = "truncate",
) -> EncodedCorpus:
    """Tokenise a corpus and see to the samples of more than ``max_seq_len`` tokens.

    Args:
        corpus: The samples.
        tokenizer: The model's tokenizer.
        max_seq_len: Tokens of the longest sample.
        train_on: What carries loss: ``"responses"``, or ``"all"`` tokens. Plain text always has loss on
            all.
        long_samples: ``"truncate"`` cuts from the right, and leaves out and lists a sample of which
            nothing to learn is left; ``"skip"`` leaves out and lists every longer one; ``"error"``
            refuses the first.

    Raises:
        DataError: A sample cannot be rendered or is refused as too long, or none is left.
    """
    encoder = ChatEncoder(tokenizer, plain_prompt=corpus.format == "prompt+completion")
    kept: list[Example] = []
    skipped: list[str] = []
    left_out: list[str] = []
    truncated = longest = 0
    for index in range(len(corpus)):
        whole = _encoded(corpus, index, encoder, train_on)
        longest = max(longest, len(whole))
        if len(whole) > max_seq_len and long_samples != "truncate":
            if long_samples == "error":
                raise DataError(
                    f"{corpus.where(index)} has {len(whole)} tokens, max_seq_len is {max_seq_len}",
                    "raise max_seq_len, or set long_samples to truncate or skip",
                )
            left_out.append(corpus.where(index))
            continue
        cut = whole.truncated(max_seq_len)
        if cut.response_tokens:
            kept.append(cut)
            truncated += len(cut) < len(whole)
        else:
            skipped.append(corpus.where(index))
    if not kept:
        raise _nothing_left(corpus, max_seq_len, skipped, left_out)
    return EncodedCorpus(tuple(kept), tuple(skipped), truncated, tuple(left_out), longest)


def _encoded(corpus: Corpus, index: int, encoder: ChatEncoder, train_on: str) -> Example:
    conversation = corpus.conversations[index]
    if corpus.format == "text":
        return encoder.encode_text(conversation.messages[0]["content"])
    try:
        whole = encoder.encode(conversation.messages, conversation.learned_from)
    except DataError as error:
        raise DataError(f"{corpus.where(index)}: {error.message}", error.hint) from error
    if train_on == "all":
        return Example(whole.ids, np.ones(len(whole), dtype=bool))
    return whole


def _nothing_left(
    corpus: Corpus, max_seq_len: int, skipped: list[str], left_out: list[str]
) -> DataError:
    if not left_out:
        return DataError(
            f"no sample of {corpus.path} has a response token left after cutting at "
            f"{max_seq_len} tokens; the first is {skipped[0]}",
            "raise max_seq_len or shorten the prompts",
        )
    return DataError(
        f"every sample of {corpus.path} has more than {max_seq_len} tokens; the first is "
        f"{left_out[0]}",
        "raise max_seq_len, or set long_samples to truncate",
    )
