"""A merged model is a plain folder that computes what base and adapter computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from entrenar import InstructConfig, InstructPipeline, Transformer
from entrenar.errors import AdapterError, ConfigError
from entrenar.finetune import merge as merge_module
from entrenar.finetune.adapted import load_adapted
from entrenar.finetune.instruct_pipeline import InstructPipeline as Pipeline

IDS = [[1, 5, 9, 30, 31]]


def trained(model: Path, **settings: object) -> Pipeline:
    config = InstructConfig(
        lora_rank=4, lora_alpha=32, learning_rate=5e-2, device="cpu", **settings
    )
    pipeline = InstructPipeline.from_pretrained(model, config)
    for _ in range(3):
        pipeline.train_batch([([5, 9, 17, 3], [8, 44, 2])])
    return pipeline


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_logits(
    tiny_model: Path, tmp_path: Path, dtype: str, tolerance: float, use_rslora: bool
) -> None:
    """https://github.com/paiml/aprender/issues/2189"""
    pipeline = trained(tiny_model, target_modules="all-linear", use_rslora=use_rslora)
    base = Transformer.from_pretrained(tiny_model, device="cpu").logits(IDS)
    adapted = pipeline.model.logits(IDS)
    pipeline.merge(tmp_path / "merged", dtype=dtype)
    merged = Transformer.from_pretrained(tmp_path / "merged", device="cpu").logits(IDS)
    scale = np.abs(adapted).max()
    assert np.abs(merged - adapted).max() < tolerance * scale
    assert np.abs(merged - base).max() > 0.1 * scale
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == dtype
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (
        tiny_model / "tokenizer.json"
    ).read_bytes()


def test_merging_twice_gives_the_same_and_leaves_the_model_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/peft/issues/1355"""
    pipeline = trained(tiny_model)
    before = pipeline.model.logits(IDS)
    for name in ("a", "b"):
        pipeline.merge(tmp_path / name)
    assert np.array_equal(before, pipeline.model.logits(IDS))
    a, b = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "b"))
    assert a == b


def test_the_update_is_added_to_the_weights_as_the_file_has_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/peft/issues/2321"""
    pipeline = trained(tiny_model, quantize_nf4=True)
    pipeline.merge(tmp_path / "merged", dtype="float32")
    name = "model.layers.0.self_attn.q_proj"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(tiny_model / "model.safetensors")
    assert set(merged) == set(base)
    a, b = (
        pipeline.adapter_state()[f"base_model.model.{name}.{part}.weight"]
        for part in ("lora_A", "lora_B")
    )
    wanted = base[f"{name}.weight"] + 8.0 * (b @ a)
    np.testing.assert_allclose(merged[f"{name}.weight"], wanted, rtol=0, atol=1e-5)
    other = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(merged[other], base[other])


def test_the_output_projection_cannot_be_targeted(tiny_model: Path) -> None:
    """https://github.com/huggingface/peft/issues/2777"""
    with pytest.raises(AdapterError, match="'lm_head' matches no linear layer"):
        trained(tiny_model, target_modules=("lm_head",))


def test_biases_are_kept(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """https://github.com/paiml/entrenar/issues/258"""
    folder = make_model(attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if "self_attn" in name:
            weights[name.replace(".weight", ".bias")] = np.ones(weight.shape[0], dtype=np.float32)
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors")
    trained(folder).merge(tmp_path / "merged", dtype="float32")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(weights)


def test_rank_and_scale_come_from_the_adapter_folder(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/ml-explore/mlx-examples/issues/622"""
    pipeline = trained(tiny_model)
    pipeline.save_adapter(tmp_path / "adapter")
    model, adapters = load_adapted(None, tmp_path / "adapter", device="cpu")
    assert adapters is not None
    assert next(iter(adapters.layers.values())).scaling == 8.0
    assert np.array_equal(model.logits(IDS), pipeline.model.logits(IDS))


def test_shards_and_their_index(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "_SHARD_BYTES", 20_000)
    pipeline = trained(tiny_model)
    pipeline.merge(tmp_path / "merged", dtype="float32")
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 1
    merged = Transformer.from_pretrained(tmp_path / "merged", device="cpu")
    np.testing.assert_allclose(merged.logits(IDS), pipeline.model.logits(IDS), rtol=0, atol=1e-4)


def test_what_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    pipeline = trained(tiny_model)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        pipeline.merge(tmp_path / "m", dtype="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        pipeline.merge(tmp_path / "full")
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        load_adapted(None, None)
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        load_adapted(tiny_model, tiny_model)
