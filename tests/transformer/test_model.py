"""The model: against an independent forward, its gradients, packing, caching, adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Stream, Tape, Tensor, ops
from entrenar.autograd.hazards import detect_hazards
from entrenar.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    NumericsError,
    ShapeMismatchError,
)
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.lora import LoraAdapters, LoraConfig
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.families import FAMILIES
from entrenar.transformer.generation import GenerateConfig, generate
from entrenar.transformer.model import Transformer

IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
MIXED = ["sliding_attention", "full_attention"]
MICRO = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def forward(settings: dict[str, Any], w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """A llama in plain NumPy, one sequence, one head, one row at a time."""
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    size = settings.get("head_dim", settings["hidden_size"] // heads)
    frequency = 10000.0 ** (-np.arange(0, size, 2) / size)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + settings["rms_norm_eps"]) * w[name]

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        first, second = x[: size // 2], x[size // 2 :]
        angle = position * frequency
        # the tables are stored in float32
        cos, sin = (f(angle).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
        return np.concatenate([first * cos - second * sin, second * cos + first * sin])

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(settings["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        mixed = np.zeros_like(q)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            cut, kv_cut = slice(head * size, head * size + size), slice(kv * size, kv * size + size)
            for i in range(len(ids)):
                query = rotate(q[i, cut], i)
                scores = [query @ rotate(k[j, kv_cut], j) / np.sqrt(size) for j in range(i + 1)]
                e = np.exp(np.array(scores) - max(scores))
                mixed[i, cut] = (e / e.sum()) @ v[: i + 1, kv_cut]
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        up = h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 10}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}],
    ids=str,
)
def test_logits_are_those_of_an_independent_forward(
    make_model: Callable[..., Transformer],
    make_weights: Callable[..., Any],
    tiny_settings: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    settings = {**tiny_settings, **changes}
    weights = make_weights(TransformerConfig.from_hf(settings))
    arrays = {name: value.numpy() for name, value in weights.items()}
    expected = np.stack([forward(settings, arrays, row) for row in IDS])
    got = make_model(settings).logits(IDS)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
    got = make_model(settings, dtype="float32").logits(IDS.tolist())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_logits_of_every_family_are_those_of_transformers(
    family_golden: dict[str, Any], family_script: ModuleType, make_model: Callable[..., Transformer]
) -> None:
    assert {case["config"]["model_type"] for case in family_golden.values()} == set(FAMILIES)
    for case, golden in family_golden.items():
        # float64: theirs are rounded to five places, our rotation tables to float32
        for dtype, bound in (("float64", 2e-5), ("float32", 1e-4)):
            logits = make_model(golden["config"], dtype=dtype).logits(family_script.make_ids())
            error = np.abs(logits[:, ::5] - np.array(golden["logits"])).max()
            assert error < bound, (case, dtype, error)


# gradients


def loss_of(model: Transformer, ids: np.ndarray, cu_seqlens: list[int], **options: Any) -> Tensor:
    positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(cu_seqlens)])
    hidden = model.hidden(ids, positions, np.array(cu_seqlens, np.int32), **options)
    targets = np.roll(ids, -1)
    targets[np.array(cu_seqlens[1:]) - 1] = -100
    cap = model.config.final_logit_softcapping
    if cap:  # fused with the projection alone, which has no gradient of its weight
        return ops.linear_cross_entropy(
            hidden, model.lm_head_weight.detach(), targets, softcap=cap
        )[0]
    return ops.cross_entropy(ops.linear(hidden, model.lm_head_weight), targets)[0]


@pytest.mark.parametrize(
    ("family", "checkpointing", "count"),
    [
        ("llama", False, 16), ("llama", True, 4), ("qwen2", False, 6), ("qwen3", True, 6),
        ("phi3", False, 6), ("phi3", True, 6), ("gemma", False, 6), ("gemma2", True, 6),
        ("gemma3_text", False, 6),
    ],
)  # fmt: skip
def test_every_gradient_agrees_with_finite_differences(
    make_model: Callable[..., Transformer],
    tiny_settings: dict[str, Any],
    family: str,
    checkpointing: bool,
    count: int,
) -> None:
    settings = {**tiny_settings, **MICRO, "model_type": family, "head_dim": 4}
    if FAMILIES[family].scalar_scale:
        settings |= {"query_pre_attn_scalar": 6, "sliding_window": 3, "layer_types": MIXED}
    if family == "gemma2":
        settings |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    model = make_model(settings)
    ids, cu_seqlens = np.array([3, 1, 4, 1, 5, 9, 2]), [0, 4, 7]
    weights = model.named_weights()
    for weight in weights.values():
        assert isinstance(weight, Tensor)
        weight.requires_grad = True
    with Tape() as tape:
        loss = loss_of(model, ids, cu_seqlens, checkpointing=checkpointing)
    tape.backward(loss)
    rng = np.random.default_rng(0)
    step = 1e-5
    for name, weight in weights.items():
        assert isinstance(weight, Tensor)
        if name == "lm_head.weight" and model.config.final_logit_softcapping:
            continue
        assert weight.grad is not None, name
        gradient, storage = weight.grad.numpy(), weight.data.numpy()
        flat = storage.reshape(-1)
        chosen = rng.choice(flat.size, min(count, flat.size), replace=False)
        for at in chosen:
            value = flat[at]
            flat[at] = value + step
            above = loss_of(model, ids, cu_seqlens).item()
            flat[at] = value - step
            below = loss_of(model, ids, cu_seqlens).item()
            flat[at] = value
            expected = (above - below) / (2 * step)
            got = gradient.reshape(-1)[at]
            assert abs(got - expected) <= 1e-6 * max(1.0, abs(expected)), (name, at)


def adapters_for(model: Transformer, seed: int = 0, **options: Any) -> LoraAdapters:
    adapters = LoraAdapters(model.linear_shapes(), LoraConfig(r=3, lora_alpha=6.0, **options))
    rng = np.random.default_rng(seed)
    for layer in adapters.layers.values():
        layer.lora_b.data.copy_(torch.from_numpy(rng.standard_normal(layer.lora_b.shape) * 0.3))
    return adapters


@pytest.mark.parametrize(("quantize", "checkpointing"), [(None, True), ("nf4", False)])
def test_adapter_gradients_agree_with_finite_differences(
    make_model: Callable[..., Transformer],
    tiny_settings: dict[str, Any],
    quantize: str | None,
    checkpointing: bool,
) -> None:
    """Parameters are float32 views of an arena, so the step is wide and the bound relative."""
    model = make_model({**tiny_settings, **MICRO}, quantize=quantize)
    adapters = adapters_for(model, target_modules="all-linear", lora_dropout=0.2)
    model.attach(adapters)
    ids, cu_seqlens = np.array([3, 1, 4, 1, 5, 9, 2]), [0, 4, 7]

    def loss(**options: Any) -> Tensor:
        return loss_of(model, ids, cu_seqlens, dropout_seed=7, **options)

    with Tape() as tape:
        value = loss(checkpointing=checkpointing)
    tape.backward(value)
    params, grads = adapters.params.numpy(), adapters.grads.numpy()
    rng = np.random.default_rng(0)
    for at in rng.choice(np.flatnonzero(grads), 60, replace=False):
        held = params[at]
        params[at] = held + np.float32(2**-9)
        above, up = loss().item(), float(params[at])
        params[at] = held - np.float32(2**-9)
        below, down = loss().item(), float(params[at])
        params[at] = held
        expected = (above - below) / (up - down)
        assert grads[at] == pytest.approx(expected, rel=2e-4, abs=2e-5)


def test_gradients_are_the_same_with_checkpointing(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings, dtype="float32")
    found = []
    for checkpointing in (False, True):
        adapters = adapters_for(model, lora_dropout=0.1)
        model.attach(adapters)
        with Tape() as tape:
            loss = loss_of(model, IDS[0], [0, 8], checkpointing=checkpointing, dropout_seed=3)
        tape.backward(loss)
        found.append(adapters.grads.numpy().copy())
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(*found)


# packing and caching


def test_packed_rows_equal_single_runs(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    """https://github.com/unslothai/unsloth/issues/3795"""
    model = make_model(tiny_settings)
    packed = model.hidden([5, 6, 7, 8], [0, 1, 2, 0], [0, 3, 4])
    logits = model.project(packed)
    np.testing.assert_allclose(logits[:3], model.logits([[5, 6, 7]])[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(logits[3:], model.logits([[8]])[0], rtol=0, atol=1e-12)


def test_an_end_of_text_in_the_middle_is_attended_to(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    """https://github.com/huggingface/transformers/issues/25353

    Were the end of text taken as padding, it would count for nothing, and a word of the same embedding
    would not.
    """
    model = make_model({**tiny_settings, "tie_word_embeddings": False, "pad_token_id": None})
    assert model.config.eos_token_ids == (2,)
    model.embedding.data[2] = model.embedding.data[4]
    for row in ([5, 2, 7], [2, 5, 7], [5, 7, 2]):
        word = [4 if token == 2 else token for token in row]
        np.testing.assert_array_equal(model.logits([row]), model.logits([word]))
    without = model.logits([[5, 7]])[0, -1]
    assert np.abs(model.logits([[5, 2, 7]])[0, -1] - without).max() > 1e-3
    config = GenerateConfig(temperature=0.0, max_new_tokens=1)
    assert generate(model, [5, 2, 7], config) == generate(model, [5, 4, 7], config)


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3_text"]
)
def test_a_cache_changes_nothing(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any], model_type: str
) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/959"""
    settings = {**tiny_settings, "model_type": model_type, "sliding_window": 5, "head_dim": 6}
    if FAMILIES[model_type].scalar_scale:
        settings |= {"query_pre_attn_scalar": 9, "layer_types": MIXED}
    model = make_model(settings)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    full = model.logits([ids])[0]
    cache = model.new_cache(12)
    np.testing.assert_allclose(model.next_logits(np.array(ids[:6]), cache), full[5], atol=1e-12)
    for at in range(6, 12):
        got = model.next_logits(np.array(ids[at : at + 1]), cache)
        np.testing.assert_allclose(got, full[at], rtol=0, atol=1e-12)
    assert cache.length == 12
    with pytest.raises(ShapeMismatchError, match="12 positions and 1 new ones are 13"):
        model.next_logits(np.array([1]), cache)


def test_a_cache_grows_past_its_first_buffer(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model({**tiny_settings, "max_position_embeddings": 400})
    ids = np.random.default_rng(0).integers(0, 61, 200)
    full = model.logits(ids[None])[0]
    cache = model.new_cache()
    model.next_logits(ids[:60], cache)
    model.next_logits(ids[60:70], cache)
    np.testing.assert_allclose(model.next_logits(ids[70:], cache), full[-1], rtol=0, atol=1e-11)


# what is refused


def test_arguments_that_do_not_fit(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings)
    with pytest.raises(ShapeMismatchError, match="3 ids and 2 positions"):
        model.hidden([1, 2, 3], [0, 1])
    with pytest.raises(ShapeMismatchError, match="position 64 lies past the model's context of 64"):
        model.hidden([1], [64])
    with pytest.raises(ShapeMismatchError, match=r"wanted \[batch, seq\]"):
        model.logits([1, 2])
    with pytest.raises(ShapeMismatchError, match="rows differ in length"):
        model.logits([[1, 2], [3]])
    with pytest.raises(ShapeMismatchError, match="holds one sequence"):
        model.hidden([1, 2], [0, 0], [0, 1, 2], cache=model.new_cache())
    assert model.logits(np.zeros((2, 0), np.int64)).shape == (2, 0, 61)
    assert model.logits(np.zeros((0, 3), np.int64)).shape == (0, 3, 61)


def test_an_id_outside_the_vocabulary(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match="61"):
        make_model(tiny_settings).logits([[61]])


def test_options_that_are_not_known(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="quantize is 'int8'"):
        make_model(tiny_settings, quantize="int8")
    with pytest.raises(ConfigError, match="dtype is 'fp8'"):
        make_model(tiny_settings, dtype="fp8")


def test_a_weight_that_is_missing(
    make_weights: Callable[..., Any], tiny_settings: dict[str, Any]
) -> None:
    config = TransformerConfig.from_hf(tiny_settings)
    weights = make_weights(config)
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        Transformer(config, weights.items(), device="cpu")


def test_a_weight_that_is_not_finite(
    make_weights: Callable[..., Any], tiny_settings: dict[str, Any]
) -> None:
    config = TransformerConfig.from_hf(tiny_settings)
    weights = make_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(NumericsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Transformer(config, weights.items(), device="cpu", quantize="nf4")


# adapters and quantisation


def test_attach_and_detach(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings)
    plain = model.logits(IDS)
    fresh = LoraAdapters(model.linear_shapes(), LoraConfig(r=2))
    model.attach(fresh)
    np.testing.assert_allclose(model.logits(IDS), plain, rtol=0, atol=1e-12)
    model.attach(adapters_for(model, target_modules="all-linear"))
    changed = model.logits(IDS)
    assert np.abs(changed - plain).max() > 0.01
    model.attach(fresh)
    np.testing.assert_allclose(model.logits(IDS), plain, rtol=0, atol=1e-12)
    model.detach_adapters()
    np.testing.assert_array_equal(model.logits(IDS), plain)


def test_an_adapter_equals_its_merged_weight(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings)
    adapters = adapters_for(model, target_modules="all-linear")
    model.attach(adapters)
    got = model.logits(IDS)
    model.detach_adapters()
    for name, layer in adapters.layers.items():
        weight = model.named_weights()[f"{name}.weight"]
        assert isinstance(weight, Tensor)
        a, b = (t.data.double() for t in (layer.lora_a, layer.lora_b))
        weight.data.add_(layer.scaling * b @ a)
    np.testing.assert_allclose(got, model.logits(IDS), rtol=0, atol=1e-6)


def test_an_adapter_of_another_model(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings)
    deeper = make_model({**tiny_settings, "num_hidden_layers": 3})
    with pytest.raises(AdapterError, match=r"model\.layers\.2.* which the model has not"):
        model.attach(LoraAdapters(deeper.linear_shapes(), LoraConfig()))
    wider = make_model({**tiny_settings, "head_dim": 8})
    with pytest.raises(AdapterError, match=r"is for \(32, 24\), the model's is \(24, 24\)"):
        model.attach(LoraAdapters(wider.linear_shapes(), LoraConfig()))


def test_dropout_only_while_a_tape_records(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    model = make_model(tiny_settings)
    model.attach(adapters_for(model, lora_dropout=0.5))
    positions = np.arange(8)
    plain = model.hidden(IDS[0], positions).numpy()
    np.testing.assert_array_equal(model.hidden(IDS[0], positions).numpy(), plain)
    assert model.dropout_step == 0
    with Tape():
        first = model.hidden(IDS[0], positions).numpy()
        second = model.hidden(IDS[0], positions).numpy()
        again = model.hidden(IDS[0], positions, dropout_seed=0).numpy()
    assert model.dropout_step == 2
    assert np.abs(first - plain).max() > 1e-3
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_holds_linears_in_four_bits_and_nothing_else(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any], double_quant: bool
) -> None:
    settings = {**tiny_settings, "hidden_size": 64, "intermediate_size": 128}
    dense = make_model(settings, dtype="float32")
    model = make_model(settings, dtype="float32", quantize="nf4", double_quant=double_quant)
    assert model.num_parameters() == dense.num_parameters()
    for name, weight in model.named_weights().items():
        assert isinstance(weight, NF4Weight) == ("_proj" in name), name
        if isinstance(weight, NF4Weight):
            assert weight.double_quant == double_quant
            assert weight.dtype == torch.float32
    error = np.abs(model.logits(IDS) - dense.logits(IDS))
    assert 0 < error.mean() < 0.5 * np.abs(dense.logits(IDS)).mean()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_decoding_ahead_gives_the_same_training_step(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any], checkpointing: bool
) -> None:
    """Across blocks, recomputation and backward: after one pass every weight is decoded ahead of its use."""
    settings = {**tiny_settings, "hidden_size": 64, "intermediate_size": 128}
    results = []
    for ahead in (False, True):
        model = make_model(settings, dtype="float64", quantize="nf4", decode_ahead=ahead)
        shapes = model.linear_shapes()
        adapters = LoraAdapters(shapes, LoraConfig(r=2, target_modules=("q_proj", "down_proj")))
        for layer in adapters.layers.values():
            layer.lora_b.data.copy_(torch.ones(layer.lora_b.shape) * 0.1)
        model.attach(adapters)
        for _ in range(2):
            launches: list[runtime.LaunchRecord] = []
            adapters.zero_grad()
            with detect_hazards(), runtime.listening(launches.append), Tape(Stream("cpu")) as tape:
                hidden = model.hidden(IDS[0], np.arange(len(IDS[0])), checkpointing=checkpointing)
                tape.backward(hidden, np.ones(hidden.shape))
        results.append(adapters.grads.numpy().copy())
        # a product's decode comes one product early
        decodes = [i for i, r in enumerate(launches) if r.op == "nf4_dequantize"]
        assert bool(decodes) == ahead
        if ahead:
            used = [w for r in launches if r.op == "nf4_dequantize" for w in r.writes]
            assert len({w.data_ptr() for w in used}) == 2
    assert np.abs(results[0]).max() > 0.01
    # computed in float64, where only the order of sums differs, and rounded once to float32
    np.testing.assert_allclose(results[1], results[0], rtol=2.0**-22, atol=1e-12)


def test_bfloat16_storage(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    exact = make_model(tiny_settings).logits(IDS)
    for quantize in (None, "nf4"):
        model = make_model(tiny_settings, dtype="bfloat16", quantize=quantize)
        assert model.embedding.dtype == torch.bfloat16
        logits = model.logits(IDS)
        assert logits.dtype == np.float32
        if quantize is None:
            np.testing.assert_allclose(logits, exact, rtol=0, atol=0.15)


def test_norms_around_zero_are_held_in_float32(
    make_model: Callable[..., Transformer], tiny_settings: dict[str, Any]
) -> None:
    """https://github.com/huggingface/transformers/pull/29402"""
    settings = {**tiny_settings, "model_type": "gemma3_text", "head_dim": 8, "layer_types": MIXED}
    settings |= {"query_pre_attn_scalar": 8, "hidden_size": 32}
    exact, model = (make_model(settings, dtype=dtype) for dtype in ("float64", "bfloat16"))
    for name, weight in model.named_weights().items():
        assert isinstance(weight, Tensor)
        assert weight.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        wanted = exact.named_weights()[name]
        if "norm" in name:
            assert isinstance(wanted, Tensor)
            # w and 1 + w are each rounded once
            np.testing.assert_allclose(weight.numpy(), wanted.numpy(), rtol=2.0**-23)
    # sqrt(32) is 5.657, in bfloat16 5.65625
    assert model._embedding_scale == 5.65625
    error = np.abs(model.logits(IDS) - exact.logits(IDS)).max()
    assert error < 0.03 * np.abs(exact.logits(IDS)).max()


def test_an_untrained_model_starts_at_the_logarithm_of_its_vocabulary(
    make_weights: Callable[..., Any], tiny_settings: dict[str, Any]
) -> None:
    """https://github.com/paiml/aprender/issues/2252"""
    config = TransformerConfig.from_hf({**tiny_settings, "vocab_size": 256, "hidden_size": 64})
    weights = {
        name: value if "norm" in name else value * (0.02 / 0.3)
        for name, value in make_weights(config).items()
    }
    model = Transformer(config, weights.items(), device="cpu")
    ids = np.random.default_rng(0).integers(0, 256, 48)
    loss = loss_of(model, ids, [0, 20, 48]).item() / 46
    assert loss == pytest.approx(np.log(256), abs=0.3)
