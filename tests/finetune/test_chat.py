"""Which tokens of a conversation carry loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar.errors import DataError
from entrenar.finetune.chat import ChatEncoder, Example, encode_corpus
from entrenar.finetune.corpus import read_corpus
from entrenar.transformer.checkpoint import load_tokenizer

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def learned(tokenizer: Any, example: Example) -> list[str]:
    """Return each run of learned tokens as text."""
    runs: list[list[int]] = [[]]
    for token, kept in zip(example.ids.tolist(), example.is_response.tolist(), strict=True):
        if kept:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def test_loss_begins_after_the_header_and_ends_with_the_end_of_turn(tokenizer: Any) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3352"""
    example = ChatEncoder(tokenizer).encode([USER, ANSWER])
    assert learned(tokenizer, example) == ["Hello<|im_end|>"]
    text = tokenizer.decode(example.ids.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"


def test_the_ids_hold_prompt_and_response(tokenizer: Any) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/154"""
    encoder = ChatEncoder(tokenizer)
    example = encoder.encode([USER, ANSWER])
    prompt = encoder.prompt_ids([USER])
    assert example.ids[: len(prompt)].tolist() == prompt
    assert len(example.ids) == len(example.is_response) == len(prompt) + len("Hello") + 1


def test_every_answer_of_a_conversation_is_learned_and_nothing_else(tokenizer: Any) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/10827"""
    turns = [t for i in range(3) for t in (USER, {"role": "assistant", "content": f"A{i}"})]
    example = ChatEncoder(tokenizer).encode(turns)
    assert learned(tokenizer, example) == [f"A{i}<|im_end|>" for i in range(3)]


def test_answers_in_the_prompt_are_not_learned(tokenizer: Any) -> None:
    example = ChatEncoder(tokenizer).encode([USER, ANSWER, USER, ANSWER], learned_from=3)
    assert learned(tokenizer, example) == ["Hello<|im_end|>"]
    assert example.is_response[-6:].all()


def test_all_tokens_are_learned_where_that_is_chosen(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"instruction": "hi", "output": "Hello"}\n')
    answers = encode_corpus(read_corpus(path), tokenizer, 128)
    whole = encode_corpus(read_corpus(path), tokenizer, 128, train_on="all")
    assert whole.examples[0].ids.tolist() == answers.examples[0].ids.tolist()
    assert answers.response_tokens == len("Hello") + 1
    assert whole.response_tokens == len(whole.examples[0]) - 1


def test_a_text_is_learned_whole_and_ends(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "abc"}\n')
    encoded = encode_corpus(read_corpus(path), tokenizer, 128)
    assert learned(tokenizer, encoded.examples[0]) == ["abc<|im_end|>"]


def test_long_samples_are_cut_left_out_or_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (9, 10, 30)))
    corpus = read_corpus(path)
    lengths = {
        choice: [len(e) for e in encode_corpus(corpus, tokenizer, 11, long_samples=choice).examples]
        for choice in ("truncate", "skip")
    }
    assert lengths == {"truncate": [10, 11, 11], "skip": [10, 11]}
    skipped = encode_corpus(corpus, tokenizer, 11, long_samples="skip")
    assert (skipped.left_out, skipped.truncated, skipped.longest) == ((f"{path}:3",), 0, 31)
    with pytest.raises(DataError, match=r"d\.jsonl:3 has 31 tokens, max_seq_len is 11"):
        encode_corpus(corpus, tokenizer, 11, long_samples="error")
    with pytest.raises(DataError, match=r"every sample of .*d\.jsonl has more than 5 tokens"):
        encode_corpus(corpus, tokenizer, 5, long_samples="skip")


def test_only_the_last_answer_where_the_template_rewrites_history(
    make_model: Callable[..., Path],
) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1355"""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer(make_model(template))
    example = ChatEncoder(tokenizer).encode([USER, ANSWER, USER, ANSWER])
    assert learned(tokenizer, example) == ["(thought)Hello<|im_end|>"]


def test_a_generation_prompt_that_is_no_prefix_is_refused(make_model: Callable[..., Path]) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1355"""
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}bot> {% endif %}"
    )
    encoder = ChatEncoder(load_tokenizer(make_model(template)))
    with pytest.raises(DataError, match="another way than its generation prompt"):
        encoder.encode([USER, ANSWER])


def test_bos_comes_once(make_model: Callable[..., Path]) -> None:
    """https://github.com/OpenRLHF/OpenRLHF/issues/393"""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    folder = make_model(template)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    encoder = ChatEncoder(load_tokenizer(folder))
    assert encoder.encode([USER, ANSWER]).ids.tolist().count(1) == 1
    assert encoder.prompt_ids([USER]).count(1) == 1


class MergingTokenizer:
    """Merges ``": A"`` into one token, as BPE may across the boundary of prompt and response."""

    has_chat_template = False
    eos_token_id = 0
    stop_token_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            if text.startswith(": A", at):
                ids, at = [*ids, 500], at + 3
            else:
                ids, at = [*ids, ord(text[at])], at + 1
        return ids


def test_a_merge_across_the_boundary_does_not_move_it() -> None:
    """https://github.com/inclusionAI/AReaL/issues/1427"""
    encoder = ChatEncoder(MergingTokenizer(), plain_prompt=True)
    turns = [{"role": "user", "content": "Q: "}, {"role": "assistant", "content": "A"}]
    example = encoder.encode(turns)
    assert example.ids.tolist() == [*map(ord, "Q: "), ord("A"), 0]
    assert example.is_response.tolist() == [False] * 3 + [True] * 2


def test_headings_of_a_plain_template_do_not_hide_the_response() -> None:
    """https://github.com/huggingface/trl/issues/1920"""
    example = ChatEncoder(MergingTokenizer()).encode([USER, ANSWER])
    text = "".join(map(chr, example.ids.tolist()))
    assert text == "### Instruction:\nhi\n\n### Response:\nHello\0"
    assert "".join(map(chr, example.ids[example.is_response].tolist())) == "Hello\0"


def test_the_end_token_is_learned_though_it_also_pads() -> None:
    """https://github.com/huggingface/trl/issues/1623"""
    example = Example.from_pair([1], [5, 6, 2])
    assert example.is_response.tolist() == [False, True, True, True]
    assert example.response_tokens == 3


def test_count_of_target_positions() -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1697"""
    assert Example.from_pair(range(6), range(3)).response_tokens == 3
    assert Example.from_pair([], range(3)).response_tokens == 2


def test_a_length_that_is_long_enough_changes_nothing(tokenizer: Any) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/2792"""
    example = ChatEncoder(tokenizer).encode([USER, ANSWER])
    assert example.truncated(len(example)) is example
    assert example.truncated(1000) is example
    cut = example.truncated(len(example) - 1)
    assert cut.response_tokens == example.response_tokens - 1


def test_a_sample_without_response_left_is_listed_and_all_such_is_an_error(
    tokenizer: Any, tmp_path: Path
) -> None:
    """https://github.com/alibaba/FederatedScope/issues/625"""
    path = tmp_path / "d.jsonl"
    rows = [("a", "b"), ("x" * 80, "lost"), ("c", "d" * 60)]
    path.write_text("".join(json.dumps({"instruction": i, "output": o}) + "\n" for i, o in rows))
    encoded = encode_corpus(read_corpus(path), tokenizer, 64)
    assert [len(e) for e in encoded.examples] == [22, 64]
    assert encoded.skipped == (f"{path}:2",)
    assert encoded.truncated == 1
    assert encoded.response_tokens == sum(e.response_tokens for e in encoded.examples)
    with pytest.raises(DataError, match=r"no sample of .*d\.jsonl has a response token left"):
        encode_corpus(read_corpus(path), tokenizer, 10)


def test_a_conversation_the_template_refuses_names_its_line(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    tokenizer = load_tokenizer(make_model(template))
    path = tmp_path / "d.jsonl"
    path.write_text('{"instruction": "a", "output": "b", "system": "s"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*no system"):
        encode_corpus(read_corpus(path), tokenizer, 64)


def test_ids_are_int64(tokenizer: Any) -> None:
    example = ChatEncoder(tokenizer).encode([USER, ANSWER])
    assert example.ids.dtype == np.int64
    assert example.is_response.dtype == bool
