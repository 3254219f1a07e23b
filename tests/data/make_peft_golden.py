"""Write peft_tiny_llama.npz: what transformers and PEFT make of a tiny random llama.

    pip install torch transformers peft
    python tests/data/make_peft_golden.py

Holds the model's configuration and weights, the adapter's start, ten batches, and what came out:
logits, the gradients of the first batch with a non-zero B, the losses and the final adapter of ten
optimiser steps from B = 0.
"""

import json
import pathlib

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

OUT = pathlib.Path(__file__).with_name("peft_tiny_llama.npz")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS = ["q_proj", "v_proj"]
RANK, ALPHA, LEARNING_RATE, WEIGHT_DECAY, CLIP = 4, 8.0, 2e-2, 0.01, 1.0


def make_model():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager")).float()
    rng = np.random.default_rng(20)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            shape = tuple(parameter.shape)
            spread = 0.1 if name.endswith("norm.weight") or "layernorm" in name else 0.25
            value = rng.standard_normal(shape) * spread + (1.0 if len(shape) == 1 else 0.0)
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))
    return model


def make_batches(rng):
    """Ten batches of three rows: (ids, length, first response position) with unequal lengths."""
    batches = []
    for _ in range(10):
        rows = []
        for _ in range(3):
            prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 12))
            rows.append((rng.integers(3, CONFIG["vocab_size"], prompt + response), prompt))
        batches.append(rows)
    return batches


def padded(rows):
    width = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), -100, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, (row, prompt) in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, prompt : len(row)] = row[prompt:]
        mask[i, : len(row)] = 1
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "attention_mask": torch.from_numpy(mask),
    }


def adapters(model):
    return {
        name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad
    }


def main():
    rng = np.random.default_rng(7)
    model = make_model()
    out = {f"weight/{k}": v.detach().numpy() for k, v in model.named_parameters()}
    batches = make_batches(rng)
    for i, rows in enumerate(batches):
        for j, (ids, prompt) in enumerate(rows):
            out[f"batch/{i}/{j}/ids"] = ids
            out[f"batch/{i}/{j}/prompt"] = np.int64(prompt)
    ids = torch.from_numpy(rng.integers(3, CONFIG["vocab_size"], (2, 9)))
    out["logits/ids"], out["logits/value"] = (
        ids.numpy(),
        model(input_ids=ids).logits.detach().numpy(),
    )
    peft = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    )
    peft.eval()  # no dropout anywhere; gradients flow all the same
    params = adapters(peft)
    with torch.no_grad():
        for name, p in sorted(params.items()):
            value = rng.standard_normal(tuple(p.shape)).astype(np.float32) * 0.2
            p.copy_(torch.from_numpy(value))
            out[f"start/{name}"] = value
    loss = peft(**padded(batches[0])).loss
    loss.backward()
    out["gradient/loss"] = np.float32(loss.item())
    for name, p in params.items():
        out[f"gradient/{name}"] = p.grad.numpy().copy()
        p.grad = None
    with torch.no_grad():
        for name, p in params.items():
            if "lora_B" in name:
                p.zero_()
    optimizer = torch.optim.AdamW(params.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for rows in batches:
        loss = peft(**padded(rows)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    out["losses"], out["grad_norms"] = np.float32(losses), np.float32(norms)
    for name, p in params.items():
        out[f"final/{name}"] = p.detach().numpy()
    settings = {
        "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS,
        "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "clip": CLIP,
    }  # fmt: skip
    out["config"], out["settings"] = np.array(json.dumps(CONFIG)), np.array(json.dumps(settings))
    np.savez_compressed(OUT, **out)
    print(OUT.name, OUT.stat().st_size, "bytes; losses", [round(x, 4) for x in losses], norms)


if __name__ == "__main__":
    main()
