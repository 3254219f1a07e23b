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
from entrenar.finetune import model_folder
from entrenar.finetune.adapted import load_adapted
from entrenar.finetune.instruct_pipeline import InstructPipeline as Pipeline
from entrenar.finetune.merge import merge_adapter
from entrenar.finetune.model_folder import MERGED_KEY as KEY
from entrenar.optable import call
from entrenar.quant import NF4Weight

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


def test_what_a_config_sets_to_null_stays_null(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/1214: absent, a Mistral's window is 4096 keys."""
    folder = make_model(model_type="mistral", sliding_window=None, max_position_embeddings=8192)
    merge_adapter(folder, None, tmp_path / "merged")
    document = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert document["sliding_window"] is None
    for path in (folder, tmp_path / "merged"):
        assert set(Transformer.from_pretrained(path, device="cpu").config.windows) == {0}


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
    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 20_000)
    pipeline = trained(tiny_model)
    pipeline.merge(tmp_path / "merged", dtype="float32")
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 1
    merged = Transformer.from_pretrained(tmp_path / "merged", device="cpu")
    np.testing.assert_allclose(merged.logits(IDS), pipeline.model.logits(IDS), rtol=0, atol=1e-4)


@pytest.fixture
def wide_model(make_model: Callable[..., Path]) -> Path:
    """Rows of whole NF4 blocks."""
    return make_model(hidden_size=64, intermediate_size=128)


def test_an_adapter_is_not_added_to_what_contains_it(wide_model: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/1355"""
    pipeline = trained(wide_model)
    pipeline.save_adapter(tmp_path / "adapter")
    pipeline.merge(tmp_path / "merged", dtype="float32")
    wanted = Transformer.from_pretrained(tmp_path / "merged", device="cpu").logits(IDS)
    with pytest.raises(AdapterError, match="already contains this adapter"):
        load_adapted(tmp_path / "merged", tmp_path / "adapter", device="cpu")
    again = trained(tmp_path / "merged")
    before = again.adapter_state()
    with pytest.raises(AdapterError, match="already contains this adapter"):
        again.load_adapter(tmp_path / "adapter")
    after = again.adapter_state()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    # another adapter is welcome on it, and both are then listed
    again.merge(tmp_path / "twice", dtype="float32")
    assert len(json.loads((tmp_path / "twice" / "config.json").read_text())[KEY]) == 2
    assert (
        np.abs(
            Transformer.from_pretrained(tmp_path / "twice", device="cpu").logits(IDS) - wanted
        ).max()
        > 0.01
    )
    with pytest.raises(AdapterError, match="already contains this adapter"):
        load_adapted(tmp_path / "twice", tmp_path / "adapter", device="cpu")


@pytest.mark.parametrize("double_quant", [False, True])
def test_merging_into_nf4_says_what_it_costs(
    wide_model: Path, tmp_path: Path, double_quant: bool
) -> None:
    """https://github.com/huggingface/peft/issues/2321"""
    pipeline = trained(wide_model)
    report = pipeline.merge(tmp_path / "nf4", dtype="nf4", double_quant=double_quant)
    pipeline.merge(tmp_path / "dense", dtype="float32")
    name = "model.layers.0.self_attn.q_proj.weight"
    dense, base = (
        load_file(folder / "model.safetensors")[name] for folder in (tmp_path / "dense", wide_model)
    )
    got = Transformer.from_pretrained(tmp_path / "nf4", device="cpu")
    assert got.quantize == "nf4"
    held = got.named_weights()[name]
    assert isinstance(held, NF4Weight)
    assert held.double_quant is double_quant
    decoded = call("nf4_dequantize", held).numpy()
    names = list(pipeline.adapters.layers)
    assert len(names) == report.changed == 4
    # the cost, formed here from the files over the same weights
    error = update = 0.0
    merged = load_file(tmp_path / "dense" / "model.safetensors")
    original = load_file(wide_model / "model.safetensors")
    for module in names:
        key = f"{module}.weight"
        error += (
            (call("nf4_dequantize", got.named_weights()[key]).numpy() - merged[key]) ** 2
        ).sum()
        update += ((merged[key] - original[key]) ** 2).sum()
    assert report.rounding == pytest.approx((error / update) ** 0.5, rel=1e-3)
    assert np.abs(decoded - dense).max() > 1e-3
    assert np.abs(dense - base).max() > 1e-3
    (notice,) = report.notices()
    assert f"{report.rounding:.2g} times the adapter's own update" in notice


def test_a_model_alone_is_written_in_nf4_and_read_back(wide_model: Path, tmp_path: Path) -> None:
    report = merge_adapter(wide_model, None, tmp_path / "nf4", "nf4")
    assert (report.changed, report.rounding, report.notices()) == (0, 0.0, [])
    wanted = Transformer.from_pretrained(wide_model, quantize="nf4", device="cpu")
    got = Transformer.from_pretrained(tmp_path / "nf4", device="cpu")
    for name, weight in wanted.named_weights().items():
        if isinstance(weight, NF4Weight):
            other = got.named_weights()[name]
            assert isinstance(other, NF4Weight)
            pairs = zip(weight.tensors(), other.tensors(), strict=True)
            assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    # writing it once more changes no byte of the weights
    merge_adapter(tmp_path / "nf4", None, tmp_path / "again", "nf4")
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("nf4", "again"))
    assert one == two


def test_merging_into_an_nf4_base_adds_to_what_it_decodes_to(
    wide_model: Path, tmp_path: Path
) -> None:
    merge_adapter(wide_model, None, tmp_path / "nf4", "nf4")
    pipeline = trained(tmp_path / "nf4")
    report = pipeline.merge(tmp_path / "merged", dtype="float32")
    assert "the base holds its weights in NF4" in report.notices()[0]
    merged = Transformer.from_pretrained(tmp_path / "merged", device="cpu")
    assert merged.quantize is None
    assert "quantization_config" not in json.loads(
        (tmp_path / "merged" / "config.json").read_text()
    )
    np.testing.assert_allclose(merged.logits(IDS), pipeline.model.logits(IDS), rtol=0, atol=1e-4)


def test_what_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    pipeline = trained(tiny_model)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        pipeline.merge(tmp_path / "m", dtype="int8")
    with pytest.raises(ConfigError, match="double_quant with dtype 'bfloat16'"):
        pipeline.merge(tmp_path / "m", double_quant=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        pipeline.merge(tmp_path / "full")
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        load_adapted(None, None)
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        load_adapted(tiny_model, tiny_model)
