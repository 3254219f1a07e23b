"""Data files: each format, strict about everything that would train on something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrenar.errors import DataError
from entrenar.finetune.corpus import Corpus, read_corpus

PAIR = '{"instruction": "a", "output": "b"}'


def read(tmp_path: Path, content: str | bytes) -> Corpus:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return read_corpus(path)


def turns(corpus: Corpus, index: int = 0) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in corpus.conversations[index].messages]


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        (
            {"prompt": "p", "completion": "c"},
            "prompt+completion",
            [("user", "p"), ("assistant", "c")],
        ),
        (
            {"instruction": "i", "input": "x", "output": "o", "system": "s"},
            "instruction+output",
            [("system", "s"), ("user", "i\n\nx"), ("assistant", "o")],
        ),
        (
            {"instruction": "i", "response": "r"},
            "instruction+response",
            [("user", "i"), ("assistant", "r")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "assistant", "content": "ho"},
                    {"role": "user", "content": "unanswered"},
                ]
            },
            "messages",
            [("user", "hi"), ("assistant", "ho")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "look"},
                    {"from": "observation", "value": "42"},
                    {"from": "gpt", "value": "ho"},
                ],
                "system": "s",
            },
            "conversations",
            [
                ("system", "s"),
                ("user", "hi"),
                ("assistant", "look"),
                ("tool", "42"),
                ("assistant", "ho"),
            ],
        ),
        (
            {
                "conversations": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                ]
            },
            "conversations",
            [("user", "hi"), ("assistant", "ho")],
        ),
        (
            {
                "prompt": [{"role": "user", "content": "hi"}],
                "completion": [{"role": "assistant", "content": "ho"}],
            },
            "prompt+completion turns",
            [("user", "hi"), ("assistant", "ho")],
        ),
        (
            {"instruction": "i", "input": "", "output": "o", "text": "### i o"},
            "instruction+output",
            [("user", "i"), ("assistant", "o")],
        ),
        ({"text": "all of it"}, "text", [("text", "all of it")]),
    ],
)
def test_each_format(tmp_path: Path, row: dict, name: str, expected: list) -> None:
    for text in (json.dumps(row), json.dumps([row, row]), json.dumps([row], indent=2)):
        corpus = read(tmp_path, text)
        assert corpus.format == name
        assert turns(corpus) == expected


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            '{"conversations": [{"from": "human", "value": "a"}]}',
            "no turn has the role 'assistant'",
        ),
        ('{"conversations": [{"from": "robot", "value": "a"}]}', r"\[0\]\.from is 'robot', wanted"),
        ('{"conversations": [{"from": ["gpt"], "value": "a"}]}', r"\[0\]\.from is a list, wanted"),
        ('{"conversations": [{"from": "gpt"}]}', r"conversations\[0\] has no key 'value'"),
        (
            (
                '{"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "b"}],'
                ' "system": "c"}'
            ),
            "has a 'system' and a first turn of that role",
        ),
        (
            (
                '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
                ' "completion": [{"role": "user", "content": "c"}]}'
            ),
            "no turn of the completion has the role 'assistant'",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}',
            "'prompt' is a list, wanted text",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}',
            r"messages\[0\] calls tools",
        ),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', r"messages\[0\]\.role is a list"),
        ('{"text": 5}', "'text' is the number 5, wanted text"),
    ],
)
def test_bad_turns_and_texts(tmp_path: Path, row: str, what: str) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:1.*" + what) as caught:
        read(tmp_path, row)
    assert caught.value.exit_code == 2


def test_only_the_completion_of_a_prompt_in_turns_may_be_learned(tmp_path: Path) -> None:
    prompt = [{"role": r, "content": r} for r in ("user", "assistant", "user")]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "c"}]}
    assert read(tmp_path, json.dumps(row)).conversations[0].learned_from == 3


def test_an_empty_text_is_skipped_and_a_file_of_texts_does_not_hold_pairs(tmp_path: Path) -> None:
    assert read(tmp_path, '{"text": " "}\n{"text": "a"}\n').empty_lines == (1,)
    with pytest.raises(
        DataError, match=r":2 has the format instruction\+output, but line 1 has text"
    ):
        read(tmp_path, '{"text": "a"}\n' + PAIR)


def test_byte_order_mark(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/8241"""
    assert len(read(tmp_path, b"\xef\xbb\xbf" + PAIR.encode())) == 1
    with pytest.raises(DataError, match="is UTF-16"):
        read(tmp_path, PAIR.encode("utf-16"))


@pytest.mark.parametrize("end", ["\n\n", "\n   \n", "\n", ""])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_blank_lines(tmp_path: Path, end: str, newline: str) -> None:
    """https://github.com/microsoft/graphrag/issues/2424"""
    corpus = read(tmp_path, f"{PAIR}\n\n{PAIR}{end}".replace("\n", newline))
    assert [c.line for c in corpus.conversations] == [1, 3]
    assert turns(corpus, 1) == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"instruction": "x"', r"data\.jsonl:2 is not valid JSON at column 20"),
        ("[1,2]", r"data\.jsonl:2 is a list, wanted an object"),
        ("NaN", r"data\.jsonl:2 holds NaN"),
        ('{"instruction": "a", "output": NaN}', r"data\.jsonl:2 holds NaN"),
        ("3", r"data\.jsonl:2 is the number 3, wanted an object"),
        (PAIR + " " + PAIR, r"data\.jsonl:2 is not valid JSON at column"),
        ('{"instruction": "a", "output": "b", "output": "c"}', "key 'output' twice"),
        ("[" * 100_000, r"data\.jsonl:2"),
        ('{"a":' * 100_000, r"data\.jsonl:2 is nested too deeply"),
        ('{"instruction": "a", "output": ' + "9" * 5000 + "}", r"data\.jsonl:2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: str, what: str) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/1694"""
    with pytest.raises(DataError, match=what) as caught:
        read(tmp_path, f"{PAIR}\n{bad}\n{PAIR}\n")
    assert caught.value.exit_code == 2


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """https://github.com/volcengine/OpenViking/issues/3988"""
    text = "a\u2028b\u0085c\u000bd".replace("\u000b", "\\u000b")
    corpus = read(tmp_path, '{"instruction": "q", "output": "' + text + '"}\r\n' + PAIR + "\r\n")
    assert turns(corpus)[1] == ("assistant", "a\u2028b\u0085c\u000bd")
    assert len(corpus) == 2


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"instruction": "a", "input": "b"}', "wanted|missing"),
        ('{"instruction": "a", "output": null}', "'output' is null, wanted text"),
        ('{"instruction": "a", "output": {"a": 1}}', "'output' is an object, wanted text"),
        ('{"instruction": "a", "output": 5}', "'output' is the number 5, wanted text"),
        ('{"instruction": "a", "output": true}', "'output' is true or false, wanted text"),
        ('{"instruction": null, "output": "b"}', "'instruction' is null"),
        ('{"instruction": " ", "output": "b"}', "'instruction' is empty"),
    ],
)
def test_a_value_that_is_no_text_is_refused(tmp_path: Path, row: str, what: str) -> None:
    """https://github.com/tloen/alpaca-lora/issues/55"""
    with pytest.raises(DataError, match=what):
        read(tmp_path, row)
    with pytest.raises(DataError, match=r"data\.jsonl:2"):
        read(tmp_path, PAIR + "\n" + row)


def test_an_empty_response_is_skipped_and_counted_and_null_input_is_none(tmp_path: Path) -> None:
    """https://github.com/tloen/alpaca-lora/issues/55"""
    corpus = read(
        tmp_path,
        '{"instruction": "a", "output": ""}\n{"instruction": "a", "input": null, "output": "b"}\n',
    )
    assert corpus.empty_lines == (1,)
    assert turns(corpus) == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    "content", ["", "\n \n\r\n", "[]", "[ ]\n", '{"instruction":"a","output":""}']
)
def test_no_samples(tmp_path: Path, content: str) -> None:
    """https://github.com/openspeech-team/openspeech/issues/217"""
    with pytest.raises(DataError, match="no samples in"):
        read(tmp_path, content)


def test_a_long_line_between_two_others(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/3227"""
    long = json.dumps({"instruction": "a", "output": "x" * 20_000_000})
    corpus = read(tmp_path, f"{PAIR}\n{long}\n{PAIR}\n")
    assert [len(turns(corpus, i)[1][1]) for i in range(3)] == [1, 20_000_000, 1]


def test_surrogates(tmp_path: Path) -> None:
    """https://github.com/openai/tiktoken/issues/82"""
    corpus = read(tmp_path, r'{"instruction":"ab","output":"\ud83d\ude00"}')
    assert turns(corpus)[1] == ("assistant", "\U0001f600")
    with pytest.raises(DataError, match=r"data\.jsonl:1: 'instruction' holds half of a surrogate"):
        read(tmp_path, r'{"instruction":"a\ud800b","output":"x"}')


def test_a_mixed_file_names_the_first_other_line(tmp_path: Path) -> None:
    rows = f'{PAIR}\n{PAIR}\n{{"prompt": "p", "completion": "c"}}\n'
    with pytest.raises(DataError, match=r":3 has the format prompt\+completion, but line 1"):
        read(tmp_path, rows)


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'instuction'.*did you mean instruction"):
        read(tmp_path, '{"instuction": "a", "output": "b"}')


def test_keys_that_are_not_used_are_listed(tmp_path: Path) -> None:
    corpus = read(tmp_path, '{"instruction": "a", "output": "b", "id": 4}\n')
    assert corpus.ignored_keys == ("id",)
    turn = '{"from": "gpt", "value": "a", "weight": 0}'
    assert read(tmp_path, '{"conversations": [' + turn + "]}").ignored_keys == (
        "conversations[].weight",
    )


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ("[]", "'messages' is empty"),
        ('"hi"', "'messages' is text"),
        ('[{"role": "user", "content": "a"}]', "no turn has the role 'assistant'"),
        ('[{"from": "human", "value": "a"}]', "no key 'role'; rename 'from'"),
        ('[{"role": "robot", "content": "a"}]', r"messages\[0\]\.role is 'robot'"),
        ('[{"role": "user", "content": null}]', r"messages\[0\]\.content' is null"),
        ('["a"]', r"messages\[0\] is text"),
    ],
)
def test_bad_messages(tmp_path: Path, messages: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        read(tmp_path, '{"messages": ' + messages + "}")


@pytest.mark.parametrize(
    ("content", "line"),
    [(b'{"instruction": "a", "output": "\xff"}', 1), (PAIR.encode() + b'\n{"a": "\xe9"}', 2)],
)
def test_bytes_that_are_not_utf8(tmp_path: Path, content: bytes, line: int) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:{line} is not UTF-8"):
        read(tmp_path, content)


def test_errors_in_an_array_name_the_line_of_the_item(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:3 is the number 4"):
        read(tmp_path, "[\n" + PAIR + ",\n4]")
    with pytest.raises(DataError, match="wanted a comma"):
        read(tmp_path, "[\n" + PAIR + "\n" + PAIR + "]")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data file"):
        read_corpus(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read_corpus(tmp_path)
