"""A tiny llama in a Hugging Face folder, with a byte-level tokenizer and a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> int:
    """Write a byte-level tokenizer without merges; return its size."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def write_model(folder: Path, template: str | None = TEMPLATE, **changes: object) -> Path:
    """Write a random tiny llama with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "vocab_size": write_tokenizer(folder, template), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    weights = {
        name: (rng.standard_normal(shape) * 0.2).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = ["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        norms += [
            f"model.layers.{layer}.input_layernorm.weight",
            f"model.layers.{layer}.post_attention_layernorm.weight",
        ]
    weights |= {name: np.ones(hidden, dtype=np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model; not to be written to."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model with another template or config."""
    return lambda template=TEMPLATE, **changes: write_model(tmp_path / "model", template, **changes)


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Ten short pairs."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"instruction": f"say {c}", "response": c * 4} for c in "abcdefghij"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
