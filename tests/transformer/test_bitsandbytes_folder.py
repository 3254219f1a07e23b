"""A folder that bitsandbytes quantised opens as it is: no weight is decoded, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from entrenar import Transformer
from entrenar.errors import CheckpointError, EntrenarError, UnsupportedModelError
from entrenar.quant import NF4Weight, bitsandbytes_config, quantize_weight, to_bitsandbytes
from entrenar.transformer.checkpoint import open_checkpoint

IDS = [[1, 5, 9, 30, 31]]
NAME = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def write(folder: Path, double_quant: bool = False, keep: tuple[str, ...] = ()) -> Path:
    """Quantise a folder's linears in place, those of ``keep`` left dense."""
    tensors = load_file(folder / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" in name and not any(part in name for part in keep):
            weight = quantize_weight(tensor, double_quant=double_quant)
            made |= to_bitsandbytes(name, weight)
        else:
            made[name] = tensor
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = bitsandbytes_config(double_quant, "float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("double_quant", [False, True])
def test_it_computes_what_quantising_on_load_does(tiny_folder: Path, double_quant: bool) -> None:
    wanted = Transformer.from_pretrained(
        tiny_folder, quantize="nf4", double_quant=double_quant, device="cpu"
    )
    logits = wanted.logits(IDS)
    nbytes = wanted.nbytes()
    write(tiny_folder, double_quant)
    got = Transformer.from_pretrained(tiny_folder, device="cpu")
    assert got.quantize == "nf4"
    assert got.nbytes() == nbytes
    # the offset passes through decimal digits, which give the same float32 back
    np.testing.assert_array_equal(got.logits(IDS), logits)


def test_what_it_left_dense_stays_dense(tiny_folder: Path) -> None:
    write(tiny_folder, keep=("v_proj", "down_proj"))
    model = Transformer.from_pretrained(tiny_folder, quantize="nf4", device="cpu")
    for name, weight in model.named_weights().items():
        quantised = "_proj" in name and "v_proj" not in name and "down_proj" not in name
        assert isinstance(weight, NF4Weight) is quantised, name


def test_dense_reading_decodes(tiny_folder: Path) -> None:
    dense = load_file(tiny_folder / "model.safetensors")[NAME]
    write(tiny_folder)
    found = open_checkpoint(tiny_folder)
    assert NAME in found.names()
    assert not [name for name in found.names() if "absmax" in name or "quant" in name]
    got = found.read(NAME)
    assert (got.dtype, got.shape) == (torch.float32, dense.shape)
    # a level is at most 0.152 of the block's largest value away
    assert (got - dense).abs().max() <= 0.16 * dense.abs().max()
    assert dict(found.tensors())[NAME].equal(got)


def test_parts_of_a_weight_may_lie_in_different_shards(tiny_folder: Path) -> None:
    write(tiny_folder)
    wanted = Transformer.from_pretrained(tiny_folder, device="cpu").logits(IDS)
    tensors = load_file(tiny_folder / "model.safetensors")
    (tiny_folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        shards[list(shards)[index % 2]][name] = tensor
    for shard, held in shards.items():
        save_file(held, tiny_folder / shard)
    index = {name: shard for shard, held in shards.items() for name in held}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    got = Transformer.from_pretrained(tiny_folder, device="cpu").logits(IDS)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(STATE), "tensors have no place"),
        (lambda t: t.pop(f"{NAME}.absmax"), r"q_proj\.weight\.absmax is missing"),
        (lambda t: t.pop(f"{NAME}.quant_map"), r"q_proj\.weight\.quant_map is missing"),
        (
            lambda t: t.update({f"{NAME}.quant_map": torch.zeros(17)}),
            r"q_proj\.weight\.quant_map is not the table",
        ),
        (lambda t: t.update({NAME: t[NAME][:-1].clone()}), r"q_proj\.weight is torch\.uint8 of"),
        (lambda t: t.pop(NAME), "are missing: " + NAME.replace(".", r"\.")),
        (
            lambda t: t[f"{NAME}.absmax"].__setitem__(2, float("nan")),
            r"absmax holds a value that is not finite",
        ),
        (
            lambda t: t.update(
                {STATE: torch.tensor(list(b'{"quant_type": "nf4", "blocksize": 64, '
                 b'"dtype": "float32", "shape": [3, 4]}'), dtype=torch.uint8)}
            ),
            r"has shape \(3, 4\), the config says",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(tiny_folder: Path, edit: Callable[..., Any], message: str) -> None:
    write(tiny_folder)
    change(tiny_folder, edit)
    with pytest.raises(CheckpointError, match=message):
        Transformer.from_pretrained(tiny_folder, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq', and only 'bitsandbytes' is read"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit is False"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
    ],
)
def test_other_quantisations_are_refused_by_field(
    tiny_folder: Path, changes: dict[str, object], message: str
) -> None:
    write(tiny_folder)
    change_config(tiny_folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        Transformer.from_pretrained(tiny_folder, device="cpu")


def test_the_config_must_say_it(tiny_folder: Path) -> None:
    write(tiny_folder)
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "quantization_config"})
    )
    with pytest.raises(EntrenarError, match="tensors have no place"):
        Transformer.from_pretrained(tiny_folder, device="cpu")
