"""SmolLM2-135M against transformers' reading of the same GGUF file.

What transformers computed is in ``tests/data/smollm2_golden.json``, the script that asked it beside
it. In float32 logits agree to 1e-4 where 2e-3 is asked for; NF4 changes them, so there only the
memory and the likeliest tokens are held.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.generation import GenerateConfig, generate
from entrenar.transformer.model import Transformer

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

DATA = Path(__file__).resolve().parents[1] / "data"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((DATA / "smollm2_golden.json").read_text())


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Transformer:
    return Transformer.from_pretrained(smollm2_gguf, device="cpu")


def test_logits(model: Transformer, golden: dict[str, Any]) -> None:
    assert model.num_parameters() == 134_515_008
    for prompt in golden["prompts"]:
        logits = model.logits([prompt["ids"]])[0]
        top = np.take_along_axis(logits, np.array(prompt["top_ids"]), axis=-1)
        np.testing.assert_allclose(top, prompt["top_logits"], rtol=0, atol=2e-4)
        np.testing.assert_allclose(logits.mean(-1), prompt["mean"], rtol=0, atol=2e-4)
        wide = logits.astype(np.float64)
        peak = wide.max(-1)
        logsumexp = peak + np.log(np.exp(wide - peak[:, None]).sum(-1))
        np.testing.assert_allclose(logsumexp, prompt["logsumexp"], rtol=0, atol=2e-4)


def test_greedy_tokens(model: Transformer, golden: dict[str, Any]) -> None:
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("The capital of France is")
    assert prompt == golden["prompts"][0]["ids"]
    result = generate(model, prompt, GenerateConfig(temperature=0.0, max_new_tokens=20))
    assert result.ids == golden["greedy"]
    assert result.text.startswith(" Paris.")


def test_chat_ends_at_the_end_of_the_turn(model: Transformer) -> None:
    assert model.tokenizer is not None
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = model.tokenizer.encode(text)
    result = generate(model, ids, GenerateConfig(temperature=0.0, max_new_tokens=32))
    assert result.finish_reason == "stop"
    assert result.text == "The capital of France is Paris."


def test_a_folder_of_the_same_weights_gives_the_same_logits(
    model: Transformer, golden: dict[str, Any], smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Two blocks of it, written as a Hugging Face folder from what was read."""
    found = open_checkpoint(smollm2_gguf)
    config = found.config
    settings = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({n: t.numpy() for n, t in found.tensors()}, tmp_path / "model.safetensors")
    folder = Transformer.from_pretrained(tmp_path, device="cpu")
    assert folder.tokenizer is None
    ids = [golden["prompts"][1]["ids"]]
    np.testing.assert_array_equal(folder.logits(ids), model.logits(ids))


def test_nf4_takes_little_memory_to_load_and_knows_the_capital(smollm2_gguf: Path) -> None:
    code = f"""
from entrenar import GenerateConfig, Transformer
from entrenar.runtime import peak_memory_bytes
from entrenar.transformer.generation import generate
model = Transformer.from_pretrained({str(smollm2_gguf)!r}, quantize="nf4", device="cpu")
loaded = peak_memory_bytes()
ids = model.tokenizer.encode("The capital of France is")
text = generate(model, ids, GenerateConfig(temperature=0.0, max_new_tokens=4)).text
print(text.split(".")[0].strip(), model.nbytes() >> 20, loaded >> 20, peak_memory_bytes() >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    answer, held, peak, generating = done.stdout.split()
    assert answer == "Paris"
    assert int(held) < 180  # 108 MiB of embedding, the rest in 4 bits
    assert int(peak) < 700  # of which importing torch takes about 250
    assert int(generating) < 700 + 406  # which keeps the 106 million weights decoded, 4 bytes each


def test_reading_into_nf4_peaks_at_the_model_and_one_tensor(smollm2_gguf: Path) -> None:
    """Above a process that has the package imported: 173 MB of model, 113 MB of the largest tensor."""
    code = f"""
from entrenar import Transformer
from entrenar.runtime import peak_memory_bytes
before = peak_memory_bytes()
Transformer.from_pretrained({str(smollm2_gguf)!r}, quantize="nf4", device="cpu")
print(peak_memory_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 450e6
