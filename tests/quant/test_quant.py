"""Quantising checkpoints by name, and what NF4 takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.autograd import Tensor
from entrenar.errors import ConfigError, DTypeError, NumericsError
from entrenar.optable import call
from entrenar.quant import (
    NF4Weight,
    is_quantisable,
    nf4_bytes,
    quantize_checkpoint,
    quantize_weight,
    weight_memory,
)

TENSORS = {
    "model.embed_tokens.weight": (32, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (32, 64),
}


def checkpoint() -> list[tuple[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    return [
        (n, torch.from_numpy(rng.standard_normal(s).astype(np.float32))) for n, s in TENSORS.items()
    ]


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (1, 1), (300, 129)])
def test_memory_is_what_the_weight_takes(shape: tuple[int, int], double_quant: bool) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    weight = quantize_weight(values, double_quant=double_quant)
    assert weight.shape == shape
    assert weight.nbytes == nf4_bytes(shape[0] * shape[1], double_quant=double_quant)
    decoded = call("nf4_dequantize", weight)
    assert decoded.shape == shape
    assert np.abs(decoded.numpy() - values).max() < 0.4 * np.abs(values).max()


def test_counts_past_32_bits() -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2071."""
    n = 128 * 4096 * 4096
    assert n == 1 << 31
    assert nf4_bytes(n) == 1073741824 + 4 * 33554432
    assert nf4_bytes(n - 64) == nf4_bytes(n) - 32 - 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_weight_is_refused_by_name_and_position(bad: float) -> None:
    """https://github.com/huggingface/peft/issues/1009."""
    tensors = checkpoint()
    dict(tensors)["model.layers.0.mlp.up_proj.weight"][2, 7] = bad
    with pytest.raises(NumericsError, match=r"model.layers.0.mlp.up_proj.weight: .*\(2, 7\)"):
        list(quantize_checkpoint(tensors))


def test_output_layer_tables_and_norms_stay_dense() -> None:
    """The user's list adds to the default one: https://github.com/huggingface/transformers/issues/45674."""
    for skip, quantised in (
        ((), ["q_proj", "v_proj", "up_proj"]),
        (["v_proj"], ["q_proj", "up_proj"]),
        (("model.layers.0.mlp.up_proj",), ["q_proj", "v_proj"]),
    ):
        held = dict(quantize_checkpoint(checkpoint(), skip_modules=skip))
        assert list(held) == list(TENSORS)
        names = [name for name, weight in held.items() if isinstance(weight, NF4Weight)]
        assert [name.split(".")[-2] for name in names] == quantised
        report = weight_memory(held.items())
        assert report.names == tuple(names)
        assert report.quantised == sum(np.prod(TENSORS[name]) for name in names)
        assert report.total_bytes == report.quantised_bytes + 4 * report.dense
        assert report.bits_per_quantised_weight == 4.5
        assert report.saved_bytes == report.quantised * (16 - 4.5) / 8


def test_one_string_is_not_a_list_of_modules() -> None:
    with pytest.raises(ConfigError, match="wanted a list of names"):
        list(quantize_checkpoint(checkpoint(), skip_modules="v_proj"))


def test_names_match_whole_components() -> None:
    assert is_quantisable("model.layers.0.mlp.up_proj.weight", (4, 4), ["proj", "p_proj"])
    assert not is_quantisable("model.layers.0.mlp.up_proj.weight", (4, 4), ["up_proj"])
    assert not is_quantisable("model.layers.0.self_attn.q_norm.weight", (4, 4))


def test_memory_of_mixed_weights() -> None:
    assert weight_memory([]).bits_per_quantised_weight == 0.0
    report = weight_memory(
        [("a", Tensor(np.ones((2, 3)))), ("b", torch.ones(4, dtype=torch.bfloat16))]
    )
    assert (report.dense, report.dense_bytes, report.names) == (10, 56, ())


def test_integers_are_refused_by_name() -> None:
    with pytest.raises(DTypeError, match=r"layer.weight: nf4_quantize"):
        quantize_weight(np.ones((2, 64), np.int64), name="layer.weight")
