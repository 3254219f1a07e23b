"""Generation: when it ends, what it refuses, and the same tokens with and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from entrenar import runtime
from entrenar.errors import DataError, NumericsError, ShapeMismatchError
from entrenar.transformer.generation import GenerateConfig, generate
from entrenar.transformer.model import Transformer
from entrenar.transformer.tokenizer import Tokenizer

PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8}


@pytest.fixture
def model(make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]) -> Transformer:
    return make_model({**tiny_settings, "eos_token_id": None, "max_position_embeddings": 16})


@pytest.fixture
def silent(model: Transformer) -> Transformer:
    """A model that names a token that ends a text, which it does not come to."""
    model.stop_token_ids = (60,)
    return model


def script(model: Transformer, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model's logits spell these tokens."""
    remaining = iter(tokens)

    def next_logits(ids: np.ndarray, cache: Any) -> np.ndarray:
        logits = np.zeros(model.config.vocab_size, np.float32)
        logits[next(remaining)] = 9.0
        return logits

    monkeypatch.setattr(model, "next_logits", next_logits)


def test_the_cache_gives_the_tokens_of_full_recomputation(silent: Transformer) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/959"""
    ids = list(PROMPT)
    for _ in range(8):
        ids.append(int(silent.logits([ids])[0, -1].argmax()))
    result = generate(silent, PROMPT, GenerateConfig(**GREEDY))
    assert result.ids == ids[len(PROMPT) :]
    assert (result.finish_reason, result.text) == ("length", "")


def test_weights_decoded_once_give_the_tokens_of_those_decoded_each_time(
    make_model: Callable[..., Transformer],
    tiny_settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model({**tiny_settings, "eos_token_id": None}, quantize="nf4")
    model.stop_token_ids = (60,)
    decodings: list[str] = []

    def note(record: runtime.LaunchRecord) -> None:
        decodings.extend([record.op] if "nf4" in record.op else [])

    with runtime.listening(note):
        kept = generate(model, PROMPT, GenerateConfig(**GREEDY)).ids
    assert decodings == ["nf4_dequantize"] * len(model.linear_shapes())
    decodings.clear()
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda device="cpu": 1000)
    assert model.decoded_weights() is None
    with runtime.listening(note):
        assert generate(model, PROMPT, GenerateConfig(**GREEDY)).ids == kept
    assert decodings == ["nf4_gemm_forward"] * len(model.linear_shapes()) * len(kept)


def test_greedy_tokens_of_every_family_are_those_of_transformers(
    family_golden: dict[str, Any], family_script: ModuleType, make_model: Callable[..., Transformer]
) -> None:
    prompt = family_script.make_ids()[0, : family_script.PROMPT]
    for case, golden in family_golden.items():
        model = make_model(golden["config"])
        model.stop_token_ids = (model.config.vocab_size,)  # none that it could come to
        config = GenerateConfig(temperature=0.0, max_new_tokens=10)
        assert generate(model, prompt.tolist(), config).ids == golden["tokens"], case


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_keys_are_made_anew_where_longrope_switches(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any], model_type: str
) -> None:
    """https://github.com/huggingface/transformers/pull/33129"""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0, 3.0, 9.0]}
    model = make_model(
        {
            **tiny_settings,
            "model_type": model_type,
            "original_max_position_embeddings": 16,
            "rope_scaling": longrope,
        }
    )
    ids = list(range(13))
    cache = model.new_cache()
    for at in (16, 17):
        want = model.logits([list(range(at))])[0, -1]
        if at == 16:
            model.next_logits(np.arange(15), cache)
            np.testing.assert_allclose(model.next_logits(np.array([15]), cache), want, atol=1e-12)
    with pytest.raises(ShapeMismatchError, match="holds 16 positions rotated for a short text"):
        model.next_logits(np.array([16]), cache)
    model.stop_token_ids = (61,)
    for _ in range(8):
        ids.append(int(model.logits([ids])[0, -1].argmax()))
    got = generate(model, ids[:13], GenerateConfig(temperature=0.0, max_new_tokens=8))
    assert got.ids == ids[13:]


@pytest.mark.parametrize("stops", [(7, 9), (9,)])
def test_any_of_several_ends_of_text(
    model: Transformer, stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/vllm-project/vllm/issues/4180"""
    model.stop_token_ids = stops
    script(model, [3, 4, 9, 5], monkeypatch)
    seen: list[int] = []
    result = generate(model, PROMPT, GenerateConfig(**GREEDY), on_token=seen.append)
    assert result.ids == seen == [3, 4]
    assert result.finish_reason == "stop"


def test_stop_tokens_of_the_setting(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    script(model, [3, 4, 9, 5], monkeypatch)
    result = generate(model, PROMPT, GenerateConfig(**GREEDY, stop_tokens=(4,)))
    assert (result.ids, result.finish_reason) == ([3], "stop")


def test_no_end_of_text_anywhere_warns(model: Transformer) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/1791"""
    with pytest.warns(UserWarning, match="names a token that ends a text"):
        result = generate(model, PROMPT, GenerateConfig(**GREEDY))
    assert (len(result.ids), result.finish_reason) == (8, "length")


def test_the_context_is_the_limit(silent: Transformer) -> None:
    """https://github.com/karpathy/llama2.c/issues/348"""
    long = GenerateConfig(temperature=0.0, max_new_tokens=20)
    result = generate(silent, [1] * 10, long)
    assert (len(result.ids), result.finish_reason) == (6, "length")
    result = generate(silent, [1] * 16, long)
    assert (result.ids, result.finish_reason) == ([], "length")
    with pytest.raises(DataError, match="the prompt has 17 tokens, the model's context 16"):
        generate(silent, [1] * 17, long)


def test_no_new_tokens(silent: Transformer) -> None:
    result = generate(silent, PROMPT, GenerateConfig(temperature=0.0, max_new_tokens=0))
    assert (result.ids, result.finish_reason) == ([], "length")


def test_an_empty_prompt(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    """https://github.com/huggingface/transformers/issues/3678"""
    model = make_model(tiny_settings)
    config = GenerateConfig(temperature=0.0, max_new_tokens=3)
    assert generate(model, [], config) == generate(model, [1], config)
    without = make_model({**tiny_settings, "bos_token_id": None})
    with pytest.raises(DataError, match="empty prompt"):
        generate(without, [], config)


def test_ids_outside_the_vocabulary(silent: Transformer) -> None:
    for bad in (61, -1):
        with pytest.raises(DataError, match=f"token id {bad} is outside"):
            generate(silent, [bad], GenerateConfig(**GREEDY))


def test_non_finite_logits_name_the_step(
    silent: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/robertknight/rten/issues/1089"""
    values = iter([0.0, 0.0, np.nan])
    size = silent.config.vocab_size
    monkeypatch.setattr(silent, "next_logits", lambda ids, cache: np.full(size, next(values)))
    with pytest.raises(NumericsError, match="step 2: non-finite logits"):
        generate(silent, PROMPT, GenerateConfig(**GREEDY))


def test_an_id_the_tokenizer_has_not(silent: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/QwenLM/Qwen/issues/553"""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    silent.tokenizer = Tokenizer(backend, stop_token_ids=(7,))
    script(silent, [1, 11, 7], monkeypatch)
    result = generate(silent, PROMPT, GenerateConfig(**GREEDY))
    assert (result.ids, result.text, result.finish_reason) == ([1, 11], "b", "stop")


def test_seeds(silent: Transformer) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/687"""

    def ids(seed: int | None) -> list[int]:
        config = GenerateConfig(temperature=1.0, top_k=0, max_new_tokens=9, seed=seed)
        return generate(silent, PROMPT, config).ids

    assert ids(1) == ids(1)
    assert len({tuple(ids(seed)) for seed in range(5)}) > 1
    assert len({tuple(ids(None)) for _ in range(5)}) > 1


def test_the_real_model_generates_what_transformers_generates(smollm2_gguf: Path) -> None:
    """Covered token by token in test_smollm2; here through text."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    model = Transformer.from_pretrained(smollm2_gguf, device="cpu", quantize="nf4")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("The capital of France is")
    result = generate(model, ids, GenerateConfig(temperature=0.0, max_new_tokens=2))
    assert result.text.startswith(" Paris")
