"""The task of ``perf step`` as transformers, peft and bitsandbytes do it; runs in the peers' environment.

    python peer_step.py --convert GGUF OUT      write a GGUF file as a Hugging Face folder in float32
    python peer_step.py --model OUT --tokens 512 [--dense]      one LoRA step, timed
    python peer_step.py --model OUT --tokens 128 --generate 64  greedy decoding, timed

Imports nothing of entrenar and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def convert(gguf: Path, out: Path) -> None:
    """Write what transformers reads from a GGUF file as a folder of its own format."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    model.config.__dict__.pop("quantization_config", None)
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
    # save_pretrained refuses what came from GGUF, though it is plain float32 by now
    tensors = {k: v.contiguous().clone() for k, v in model.state_dict().items() if k != tied}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(out)


def load(path: Path, dense: bool) -> Any:
    """Return the model in float32, its linears in NF4 unless ``dense``."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    more: dict[str, Any] = {}
    if not dense:
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)


def train(path: Path, tokens: int, steps: int, dense: bool) -> dict[str, Any]:
    """Time LoRA steps: the same ids, loss, clipping and optimiser as ours."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(load(path, dense), config)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    numbers = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    ids = torch.from_numpy(numbers)
    labels = ids.clone()
    labels[:, : tokens // 2] = -100
    times, used, losses = [], [], []
    for _ in range(steps):
        start, before = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        times.append(time.perf_counter() - start)
        used.append(time.process_time() - before)
        losses.append(float(loss.detach()))
    step = statistics.median(times[1:])
    cpu = statistics.median(used[1:])
    return {"step_s": step, "cpu_s": cpu, "tokens_per_s": tokens / step, "losses": losses}


def generate(path: Path, tokens: int, new: int, dense: bool) -> dict[str, Any]:
    """Time greedy decoding after a prompt of random ids; the second of two runs counts."""
    import numpy as np
    import torch

    model = load(path, dense).eval()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    times = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            made = model.generate(
                torch.from_numpy(ids),
                attention_mask=torch.ones(ids.shape, dtype=torch.int64),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        times.append(time.perf_counter() - start)
    return {"tokens_per_s": new / times[-1], "ids": made[0, tokens:].tolist()}


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "OUT"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--generate", type=int, default=0, metavar="NEW")
    parser.add_argument("--dense", action="store_true")
    options = parser.parse_args()
    if options.convert:
        convert(*options.convert)
        return 0
    if options.generate:
        row = generate(options.model, options.tokens, options.generate, options.dense)
    else:
        row = train(options.model, options.tokens, options.steps, options.dense)
    import torch
    import transformers

    row |= {
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
