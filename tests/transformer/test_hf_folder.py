"""Hugging Face folders: what loads, and what is refused with the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from entrenar.errors import CheckpointError, EntrenarError, UnsupportedModelError
from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.model import Transformer

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
INDEX = "model.safetensors.index.json"


def load(folder: Path, **options: Any) -> Transformer:
    return Transformer.from_pretrained(folder, device="cpu", **options)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: object) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))


def shard(folder: Path) -> dict[str, str]:
    """Split the single file in two, with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    weight_map = {}
    for part, chosen in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({n: weights[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file_and_shards_are_the_same_model(tiny_folder: Path) -> None:
    whole = load(tiny_folder)
    logits = whole.logits(IDS)
    assert logits.shape == (1, 8, 61)
    assert logits.dtype == np.float32
    shard(tiny_folder)
    save_file({"stray": torch.zeros(3)}, tiny_folder / "model-00009-of-00009.safetensors")
    np.testing.assert_array_equal(load(tiny_folder).logits(IDS), logits)


def test_a_missing_shard(tiny_folder: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/32279"""
    shard(tiny_folder)
    (tiny_folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors are missing.*model\."
    ):
        load(tiny_folder)


def test_an_index_that_names_what_its_shard_has_not(tiny_folder: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/32279"""
    weight_map = shard(tiny_folder)
    first = next(n for n, file in weight_map.items() if "00001" in file)
    write_index(tiny_folder, {**weight_map, first: "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=f"has no tensor {first}"):
        load(tiny_folder)


def test_an_empty_shard(tiny_folder: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/32279"""
    shard(tiny_folder)
    (tiny_folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is empty"):
        load(tiny_folder)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/hostname", "a/../../b.safetensors", ".."]
)
def test_an_index_that_points_outside(tiny_folder: Path, name: str) -> None:
    """https://github.com/huggingface/transformers/issues/47176"""
    weight_map = shard(tiny_folder)
    save_file({"w": torch.zeros(1)}, tiny_folder.parent / "secret.safetensors")
    write_index(tiny_folder, {**weight_map, "w": name})
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        load(tiny_folder)


def test_a_shard_may_be_a_link_as_in_the_hub_cache(tiny_folder: Path) -> None:
    shard(tiny_folder)
    file = tiny_folder / "model-00001-of-00002.safetensors"
    blob = tiny_folder.parent / "blob"
    file.rename(blob)
    file.symlink_to(blob)
    assert load(tiny_folder).num_parameters() > 0


def test_tied_embeddings(tiny_folder: Path) -> None:
    """https://github.com/huggingface/transformers/issues/30202"""
    head = load_file(tiny_folder / "model.safetensors")["lm_head.weight"]
    change(tiny_folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: lm_head\.weight"):
        load(tiny_folder)
    reconfigure(tiny_folder, tie_word_embeddings=True)
    model = load(tiny_folder)
    assert model.lm_head_weight is model.embedding
    tied = model.logits(IDS)
    change(
        tiny_folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    )
    same = load(tiny_folder)
    assert same.lm_head_weight is same.embedding
    change(tiny_folder, lambda w: w.update({"lm_head.weight": head}))
    with pytest.warns(UserWarning, match="the file holds another one"):
        differs = load(tiny_folder)
    assert np.abs(differs.logits(IDS) - tied).max() > 0.1


def test_a_missing_weight(tiny_folder: Path) -> None:
    """https://github.com/huggingface/transformers/issues/35913"""
    name = "model.layers.1.mlp.up_proj.weight"
    change(tiny_folder, lambda w: w.pop(name))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {name}"):
        load(tiny_folder)


def test_many_missing_weights_are_counted_not_all_listed(tiny_folder: Path) -> None:
    """https://github.com/huggingface/transformers/issues/35913"""
    reconfigure(tiny_folder, num_hidden_layers=6)
    with pytest.raises(CheckpointError, match=r"36 tensors are missing: .* and 28 more"):
        load(tiny_folder)


def test_a_weight_too_many(tiny_folder: Path) -> None:
    """https://github.com/sbryngelson/ANEForge/issues/253"""
    name = "model.layers.0.self_attn.q_proj.bias"
    change(tiny_folder, lambda w: w.update({name: torch.zeros(24)}))
    with pytest.raises(CheckpointError, match=f"have no place in a llama model: {name}"):
        load(tiny_folder)


def test_a_bias_the_config_promises(tiny_folder: Path) -> None:
    """https://github.com/sgl-project/sglang-jax/issues/578"""
    reconfigure(tiny_folder, attention_bias=True)
    for name in ("q", "k", "v"):
        rows = 24 if name == "q" else 12
        for layer in (0, 1):
            bias = f"model.layers.{layer}.self_attn.{name}_proj.bias"
            change(tiny_folder, lambda w, bias=bias, rows=rows: w.update({bias: torch.ones(rows)}))
    with pytest.raises(CheckpointError, match=r"2 tensors are missing: .*o_proj\.bias"):
        load(tiny_folder)
    reconfigure(tiny_folder, model_type="qwen2")
    with_bias = load(tiny_folder).logits(IDS)
    for layer in (0, 1):
        change(tiny_folder, lambda w, n=f"model.layers.{layer}.self_attn.v_proj.bias": w[n].zero_())
    assert np.abs(with_bias - load(tiny_folder).logits(IDS)).max() > 0.01


def test_a_weight_of_another_shape(tiny_folder: Path) -> None:
    reconfigure(tiny_folder, intermediate_size=41)
    with pytest.raises(
        CheckpointError, match=r"mlp\.down_proj\.weight has shape \(24, 40\), .*\(24, 41\)"
    ):
        load(tiny_folder)


def test_old_buffers_are_passed_over(tiny_folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(tiny_folder, lambda w: w.update({name: torch.zeros(3)}))
    assert load(tiny_folder).num_parameters() > 0


def test_16_bit_weights_stay_16_bit(tiny_folder: Path) -> None:
    """https://github.com/huggingface/transformers/issues/34743"""

    def halve(w: dict[str, torch.Tensor]) -> None:
        w.update({k: v.to(torch.bfloat16) for k, v in w.items()})

    change(tiny_folder, halve)
    model = load(tiny_folder, dtype="bfloat16")
    assert model.nbytes() == 2 * model.num_parameters()
    assert load(tiny_folder).nbytes() == 4 * model.num_parameters()


def test_integer_weights_are_refused(tiny_folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(tiny_folder, lambda w: w.update({name: w[name].to(torch.int8)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} is I8"):
        load(tiny_folder)


def test_stop_ids(tiny_folder: Path) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/1791"""
    assert load(tiny_folder).stop_token_ids == (2,)
    reconfigure(tiny_folder, eos_token_id=None)
    (tiny_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load(tiny_folder).stop_token_ids == (5, 7)
    (tiny_folder / "generation_config.json").write_text("{}")
    assert load(tiny_folder).stop_token_ids == ()


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EntrenarError, match=r"has neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, wanted an object"):
        open_checkpoint(tmp_path)


def test_pickled_weights(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin .*pickled"):
        load(tiny_folder)
    (tiny_folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(tiny_folder)


def test_a_folder_around_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"pass .*m\.gguf itself"):
        open_checkpoint(tmp_path)


def test_an_adapter_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter.*load org/base"):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_model(tiny_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tiny_folder / "none")
    with pytest.raises(CheckpointError, match="one file of a model folder"):
        open_checkpoint(tiny_folder / "model.safetensors")
