"""Ids, special tokens, chat templates and streaming, on toy vocabularies and the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError
from entrenar.transformer.chat_template import render, select_template
from entrenar.transformer.checkpoint import load_tokenizer
from entrenar.transformer.gguf_tokenizer import tokenizer_from_metadata
from entrenar.transformer.tokenizer import TextStream, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

DATA = Path(__file__).resolve().parents[1] / "data"


def byte_names() -> list[str]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in kept]
    return [chr(b) if b in kept else chr(256 + other.index(b)) for b in range(256)]


def toy_backend(special: tuple[str, ...] = ("<s>", "</s>", "<pad>")) -> Any:
    """Byte-level: special tokens first, then one token for each byte."""
    vocab = {name: i for i, name in enumerate([*special, *byte_names()])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


@pytest.fixture
def toy(tmp_path: Path) -> Tokenizer:
    toy_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(tmp_path)


def test_special_tokens_keep_their_own_ids(toy: Tokenizer) -> None:
    """https://github.com/keras-team/keras-hub/issues/1435"""
    a = toy.encode("a")[0]
    assert toy.encode("<s>a</s>") == [0, a, 1]
    assert toy.decode([0, a, 1, 2]) == "a"
    assert toy.decode([0, a, 1], skip_special_tokens=False) == "<s>a</s>"
    assert (toy.bos_token_id, toy.eos_token_id, toy.pad_token_id) == (0, 1, None)
    assert toy.vocab_size == 259


def test_round_trip_of_random_text(toy: Tokenizer) -> None:
    """https://github.com/keras-team/keras-hub/issues/1435"""
    rng = np.random.default_rng(0)
    for _ in range(200):
        points = rng.integers(1, 0x2FFFF, rng.integers(0, 30))
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert toy.decode(toy.encode(text)) == text


def test_an_id_the_model_has_and_the_tokenizer_has_not(toy: Tokenizer) -> None:
    """https://github.com/QwenLM/Qwen/issues/553"""
    a = toy.encode("a")[0]
    assert toy.decode([5000]) == ""
    assert toy.decode([a, 5000, a]) == "aa"
    assert toy.decode(np.array([a, a])) == "aa"


def test_stop_ids_are_a_union(tmp_path: Path) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/1791"""
    toy_backend(("<s>", "</s>", "<|im_end|>", "x")).save(str(tmp_path / "tokenizer.json"))
    bare = Tokenizer.from_folder(tmp_path, stop_token_ids=(5, 7))
    assert bare.stop_token_ids == (2, 5, 7)
    assert bare.eos_token_id == 5
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    stated = Tokenizer.from_folder(tmp_path, stop_token_ids=(5,))
    assert stated.stop_token_ids == (1, 2, 5)
    assert stated.eos_token_id == 1


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    toy_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<pad>", "bos_token": "<s>"}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    found = Tokenizer.from_folder(tmp_path)
    assert (found.bos_token_id, found.eos_token_id) == (0, 1)


def test_stored_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    backend = toy_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    backend.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.from_folder(tmp_path)
    assert len(found.encode("abcdef")) == 6
    assert len(found.encode("a")) == 1


def test_bos_only_when_asked(tmp_path: Path) -> None:
    backend = toy_backend()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.from_folder(tmp_path)
    assert found.encode("a") == found.encode("a", add_special_tokens=True)[1:]
    assert found.encode("a", add_special_tokens=True)[0] == 0


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


# streaming


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    out = TextStream(tokenizer)
    return [*(out.push(i) for i in ids), out.flush()]


def test_a_character_comes_whole(toy: Tokenizer) -> None:
    """https://github.com/exo-explore/exo/issues/1691"""
    emoji, a = toy.encode("\U0001f600"), toy.encode("a")
    assert stream(toy, [*emoji, *a]) == ["", "", "", "\U0001f600", "a", ""]
    assert stream(toy, toy.encode("\u00e9")) == ["", "\u00e9", ""]


def test_a_cut_character_comes_at_the_end(toy: Tokenizer) -> None:
    """https://github.com/timtoole02/Camelid/issues/288"""
    cut = toy.encode("a\U0001f600")[:3]
    assert stream(toy, cut) == ["a", "", "", "\ufffd"]
    assert toy.decode(cut) == "a\ufffd"


def test_the_pieces_make_the_whole(toy: Tokenizer) -> None:
    """https://github.com/exo-explore/exo/issues/1691"""
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = [int(i) for i in rng.integers(0, 259, 40)]
        assert "".join(stream(toy, ids)) == toy.decode(ids)


# chat templates

MESSAGES = [{"role": "user", "content": "hi <b>"}]


def test_the_template_file_counts_first(tmp_path: Path) -> None:
    toy_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "from config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES) == "from config"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    found = Tokenizer.from_folder(tmp_path)
    assert found.has_chat_template
    assert found.apply_chat_template(MESSAGES) == "hi <b></s>"


def test_no_template(toy: Tokenizer) -> None:
    assert not toy.has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        toy.apply_chat_template(MESSAGES)


def test_templates_by_name() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert select_template(named, "x") == "d"
    assert select_template(named[:1], "x") == "t"
    assert select_template(None, "x") is None
    with pytest.raises(ConfigError, match="no default"):
        select_template([{"name": "a", "template": ""}, {"name": "b", "template": ""}], "x")
    with pytest.raises(ConfigError, match="is a int"):
        select_template(3, "x")


def test_blocks_are_trimmed_as_transformers_trims_them() -> None:
    template = (
        "{%- for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n"
        "    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\nA:{% endif %}"
    )
    assert render(template, MESSAGES, add_generation_prompt=True) == "U: hi <b>\nA:"


def test_what_templates_may_use() -> None:
    assert render("{{ messages | tojson }}", MESSAGES) == '[{"role": "user", "content": "hi <b>"}]'
    assert render("{{ 'é<' | tojson }}", MESSAGES) == '"é<"'
    assert (
        render(
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", []
        )
        == "1"
    )
    assert render("{% generation %}x{{ 1 }}{% endgeneration %}", []) == "x1"
    assert len(render("{{ strftime_now('%Y') }}", [])) == 4
    assert render("{{ tools is none }}{{ flag }}", [], flag=3) == "True3"


def test_keys_without_a_value_are_absent() -> None:
    template = "{{ 'tool_calls' in messages[0] }}"
    assert render(template, [{"role": "assistant", "content": "x", "tool_calls": None}]) == "False"


def test_a_template_that_refuses() -> None:
    with pytest.raises(DataError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", MESSAGES)
    with pytest.raises(DataError, match="does not accept"):
        render("{{ messages[0].content + 1 }}", MESSAGES)
    with pytest.raises(ConfigError, match="line 2"):
        render("\n{% if %}", MESSAGES)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{% set x = messages[0].update({'a': 1}) %}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(DataError):
        render(attack, [dict(MESSAGES[0])])


def test_objects_reach_a_template_as_data() -> None:
    assert render("{{ messages[0].content }}", [{"content": object()}]) == "<object>"


# tokenizers that GGUF metadata describes


def metadata(**changes: Any) -> dict[str, Any]:
    names = byte_names()
    tokens = ["<s>", "</s>", *names, "\u0120a", "bc", "<tool>"]
    kinds = [3, 3, *([1] * (len(names) + 2)), 4]
    base = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["\u0120 a", "b c"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**base, **changes}.items()}


def test_byte_level_metadata() -> None:
    found = tokenizer_from_metadata(metadata(), "m.gguf", stop_token_ids=(1,))
    assert found.encode("<s> abc</s>") == [0, 258, 259, 1]
    assert found.decode(found.encode("<tool> \u00e9"), skip_special_tokens=False) == "<tool> \u00e9"
    assert found.encode("<tool>") == [260]
    assert found.stop_token_ids == (1,)
    assert found.encode("a", add_special_tokens=True) == found.encode("a")
    bos = tokenizer_from_metadata(metadata(add_bos_token=True), "m.gguf")
    assert bos.encode("a", add_special_tokens=True) == [0, *bos.encode("a")]


def test_the_split_follows_its_name() -> None:
    # three digits at a time for llama-bpe, so a merge across digits applies; one for qwen2
    tokens = [*metadata()["tokenizer.ggml.tokens"], "12"]
    kinds = [*metadata()["tokenizer.ggml.token_type"], 1]
    changes = {"tokens": tokens, "token_type": kinds, "merges": ["1 2"]}
    llama = tokenizer_from_metadata(metadata(pre="llama-bpe", **changes), "m")
    qwen = tokenizer_from_metadata(metadata(pre="qwen2", **changes), "m")
    assert len(llama.encode("12")) == 1
    assert len(qwen.encode("12")) == 2


def test_metadata_that_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'martian' splits"):
        tokenizer_from_metadata(metadata(pre="martian"), "m")
    with pytest.raises(UnsupportedModelError, match="kind 'bert'"):
        tokenizer_from_metadata(metadata(model="bert"), "m")
    with pytest.raises(CheckpointError, match="is not a pair"):
        tokenizer_from_metadata(metadata(merges=["a b c"]), "m")
    with pytest.raises(CheckpointError, match="damaged"):
        tokenizer_from_metadata(metadata(merges=["zz yy"]), "m")
    with pytest.raises(CheckpointError, match="not a list of text"):
        tokenizer_from_metadata(metadata(tokens=[1, 2]), "m")


def test_sentencepiece_metadata() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    scores = [0.0] * len(tokens)
    for rank, piece in enumerate(("\u2581", "h", "i", "\u2581h", "hi", "\u2581hi")):
        tokens.append(piece)
        scores.append(-float(rank))
    kinds = [2, 3, 3, *([6] * 256), *([1] * 6)]
    found = tokenizer_from_metadata(
        metadata(model="llama", tokens=tokens, scores=scores, token_type=kinds, merges=None,
                 bos_token_id=1, eos_token_id=2, unknown_token_id=0),
        "m",
    )  # fmt: skip
    assert found.encode("hi") == [tokens.index("\u2581hi")]
    assert found.encode("hi", add_special_tokens=True)[0] == 1
    assert found.decode(found.encode("hi hi \u00e9")) == "hi hi \u00e9"


# the real vocabulary


@pytest.fixture(scope="module")
def real(smollm2_gguf: Path) -> Tokenizer:
    pytest.importorskip("gguf")
    found = load_tokenizer(smollm2_gguf)
    assert found is not None
    return found


def test_ids_are_those_of_transformers(real: Tokenizer) -> None:
    rows = json.loads((DATA / "smollm2_tokens.json").read_text())
    assert len(rows) > 400
    wrong = [text for text, ids in rows if real.encode(text) != ids]
    assert wrong == []
    for text, ids in rows:
        assert real.decode(ids, skip_special_tokens=False) == text
        assert "".join(stream(real, ids)) == real.decode(ids)


def test_the_chat_template_is_that_of_transformers(real: Tokenizer) -> None:
    golden = json.loads((DATA / "smollm2_golden.json").read_text())
    got = real.apply_chat_template(golden["chat_messages"], add_generation_prompt=True)
    assert got == golden["chat"]
    assert real.eos_token_id == 2
    assert real.stop_token_ids == (2,)
    assert real.vocab_size == 49152
