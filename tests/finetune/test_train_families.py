"""A step of every family trains: the loss falls, and the saved adapter computes the same elsewhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from entrenar import InstructConfig, InstructPipeline
from entrenar.errors import AdapterError
from entrenar.finetune.adapted import load_adapted
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.families import FAMILIES
from entrenar.transformer.weights import tensor_shapes

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "make_family_golden.py"
PAIRS = [([5, 9, 17, 3], [8, 44, 2]), ([7, 7], [30, 31, 32, 2])]
IDS = [[1, 5, 9, 30, 31, 2, 17]]


def write(folder: Path, model_type: str, **changes: object) -> Path:
    """Write a small model of a family, without a tokenizer."""
    spec = importlib.util.spec_from_file_location("family", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    settings = {**script.BASE, "model_type": model_type, "head_dim": 16, "hidden_size": 64}
    if FAMILIES[model_type].scalar_scale:
        settings |= {"query_pre_attn_scalar": 20, "sliding_window": 4}
    settings |= changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    shapes = tensor_shapes(TransformerConfig.from_hf(settings))
    offset = FAMILIES[model_type].norm_offset
    weights = {
        name: torch.tensor(script.make_weight(name, shape) - (offset if "norm" in name else 0.0))
        for name, shape in shapes.items()
    }
    save_file({k: v.float() for k, v in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_loss_falls_and_the_adapter_is_kept(
    tmp_path: Path, model_type: str, quantize: bool
) -> None:
    folder = write(tmp_path / "model", model_type)
    config = InstructConfig(
        lora_rank=4,
        lora_alpha=8,
        target_modules="all-linear",
        learning_rate=1e-2,
        quantize_nf4=quantize,
        checkpointing=not quantize,
        device="cpu",
    )
    pipeline = InstructPipeline.from_pretrained(folder, config)
    untrained = pipeline.model.logits(IDS)
    losses = [pipeline.train_batch(PAIRS).avg_loss for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    trained = pipeline.model.logits(IDS)
    assert np.abs(trained - untrained).max() > 0.1
    cap = pipeline.model.config.final_logit_softcapping
    assert not cap or np.abs(trained).max() < cap
    pipeline.save_adapter(tmp_path / "adapter")
    model, _ = load_adapted(
        folder, tmp_path / "adapter", device="cpu", quantize="nf4" if quantize else None
    )
    np.testing.assert_array_equal(model.logits(IDS), trained)


def test_default_targets_that_a_family_has_not_name_what_it_has(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "phi3")
    with pytest.raises(AdapterError, match=r"'q_proj' matches no linear.*'qkv_proj'"):
        InstructPipeline.from_pretrained(folder, InstructConfig(device="cpu"))
