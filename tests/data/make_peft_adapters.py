"""Write the small adapter folders in ``tests/data/peft_adapters`` with PEFT itself.

Run with transformers and peft installed: ``python tests/data/make_peft_adapters.py``. PEFT's own
README and the name of the base model's folder are left out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "peft_adapters"
CASES: dict[str, dict[str, Any]] = {
    "all_linear_rslora_dropout": {
        "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": "all-linear", "use_rslora": True,
    },
    "qv_bfloat16": {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "second_layer_only": {
        "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "layers_to_transform": [1],
    },
    "regular_expression": {"r": 2, "lora_alpha": 4, "target_modules": r".*\.mlp\.(up|down)_proj"},
}  # fmt: skip


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def main() -> None:
    for name, settings in CASES.items():
        model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", **settings))
        rng = np.random.default_rng(7)
        for key, weight in model.named_parameters():
            if "lora_" in key:
                values = torch.from_numpy(rng.standard_normal(weight.shape).astype(np.float32))
                weight.data = values.to(torch.bfloat16 if "bfloat16" in name else torch.float32)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        config["base_model_name_or_path"] = None
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
