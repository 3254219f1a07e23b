"""What transformers, PEFT and bitsandbytes make of the same numbers, live where they are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from entrenar import InstructConfig, InstructPipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend


@pytest.fixture
def wide_folder(folder: Path) -> Path:
    """The same architecture in rows of whole NF4 blocks: bitsandbytes misreads shorter rows on a CPU."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    rng = np.random.default_rng(5)
    shapes = {
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
        "gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": rng.standard_normal((101, 64)) * 0.25}
    weights["model.norm.weight"] = 1 + 0.1 * rng.standard_normal(64)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = 1 + 0.1 * rng.standard_normal(64)
        for name, shape in shapes.items():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            weights[f"{prefix}.{part}.{name}.weight"] = rng.standard_normal(shape) * 0.25
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {k: v.astype(np.float32) for k, v in weights.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def batches(count: int) -> list[list[tuple[list[int], list[int]]]]:
    """Batches of three pairs that repeat every four, so that the loss can fall."""
    rng = np.random.default_rng(11)
    made = []
    for _ in range(4):
        rows = []
        for _ in range(3):
            prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 12))
            ids = rng.integers(3, 101, prompt + response).tolist()
            rows.append((ids[:prompt], ids[prompt:]))
        made.append(rows)
    return [made[i % 4] for i in range(count)]


def padded(pairs: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(p) + len(r) for p, r in pairs)
    ids, labels, mask = (np.full((len(pairs), width), v, np.int64) for v in (0, -100, 0))
    for i, (prompt, response) in enumerate(pairs):
        n = len(prompt) + len(response)
        ids[i, :n] = prompt + response
        labels[i, len(prompt) : n] = response
        mask[i, :n] = 1
    named = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {k: torch.from_numpy(v) for k, v in named.items()}


def settings(**changes: Any) -> InstructConfig:
    return InstructConfig(
        **{
            "lora_rank": 4,
            "lora_alpha": 8.0,
            "learning_rate": 5e-3,
            "schedule": "constant",
            "max_seq_len": 64,
            "device": "cpu",
            **changes,
        }
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_a_trained_adapter_gives_the_same_logits_in_peft(
    folder: Path, tmp_path: Path, rslora: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = settings(target_modules="all-linear", use_rslora=rslora)
    pipeline = InstructPipeline.from_pretrained(folder, config)
    for pairs in batches(4):
        pipeline.train_batch(pairs)
    pipeline.save_adapter(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = np.random.default_rng(3).integers(3, 101, (2, 13))
    with torch.no_grad():
        plain = base(input_ids=torch.from_numpy(ids)).logits.numpy().copy()
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        wanted = theirs(input_ids=torch.from_numpy(ids)).logits.numpy()
    got = pipeline.model.logits(ids)
    assert np.abs(wanted - plain).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("double_quant", [False, True])
def test_ten_steps_on_nf4_weights_match_peft_on_bitsandbytes(
    wide_folder: Path, double_quant: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    pipeline = InstructPipeline.from_pretrained(
        wide_folder, settings(quantize_nf4=True, double_quant=double_quant, weight_decay=0.01)
    )
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=double_quant,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        wide_folder, dtype=torch.float32, quantization_config=quantization
    )
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=4, lora_alpha=8.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    ).train()  # in eval mode bitsandbytes repacks for its inference kernels, which have no gradient
    start = pipeline.adapters.state_dict()
    params = {
        name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad
    }
    assert set(params) == set(start)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(torch.from_numpy(start[name]))
    optimizer = torch.optim.AdamW(params.values(), lr=5e-3, weight_decay=0.01)
    wanted, got = [], []
    for pairs in batches(10):
        loss = theirs(**padded(pairs)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
        got.append(pipeline.train_batch(pairs).avg_loss)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3)
    assert got[8] < got[0]
