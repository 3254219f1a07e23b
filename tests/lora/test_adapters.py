"""The arena: what it holds, how it starts, that gradients and loaded values land in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from entrenar.autograd import Tape, Tensor, no_grad, ops
from entrenar.errors import AdapterError, ConfigError
from entrenar.lora import LoraAdapters, LoraConfig
from entrenar.optable import call
from entrenar.quant import quantize_weight

Shapes = dict[str, tuple[int, int]]
Fill = Callable[[LoraAdapters], LoraAdapters]
Q0 = "model.layers.0.self_attn.q_proj"


def test_everything_is_a_view_of_one_arena(shapes: Shapes) -> None:
    adapters = LoraAdapters(shapes, LoraConfig(r=3, target_modules="all-linear"))
    assert list(adapters.layers) == list(shapes)
    starts = []
    for tensor in adapters.parameters():
        assert tensor.requires_grad
        assert tensor.grad is not None
        assert tensor.data.untyped_storage().data_ptr() == adapters.params.data_ptr()
        assert tensor.grad.untyped_storage().data_ptr() == adapters.grads.data_ptr()
        assert tensor.data.storage_offset() == tensor.grad.storage_offset()
        assert tensor.data.data_ptr() % 16 == adapters.params.data_ptr() % 16
        starts.append((tensor.data.storage_offset(), tensor.data.numel()))
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(starts))
    assert adapters.num_parameters == sum(3 * (o + i) for o, i in shapes.values())
    for flat in (adapters.params, adapters.grads, adapters.m, adapters.v):
        assert flat.dtype == torch.float32
        assert flat.shape == adapters.params.shape
    assert adapters.nbytes == 16 * adapters.params.numel()
    assert adapters.step.tolist() == [0]


def test_b_starts_at_zero_and_a_uniform(shapes: Shapes) -> None:
    """https://github.com/Lightning-AI/litgpt/issues/1229."""
    config = LoraConfig(r=64, target_modules=("down_proj",), seed=5)
    adapters = LoraAdapters(shapes, config)
    for layer in adapters.layers.values():
        assert not layer.lora_b.numpy().any()
        a = layer.lora_a.numpy()
        bound = 1 / np.sqrt(24)
        assert np.abs(a).max() <= np.float32(bound)
        assert np.abs(a).max() > 0.98 * bound
        assert a.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
    again = LoraAdapters(shapes, config)
    assert torch.equal(adapters.params, again.params)
    other = LoraAdapters(shapes, LoraConfig(r=64, target_modules=("down_proj",), seed=6))
    assert not torch.equal(adapters.params, other.params)


@pytest.mark.parametrize("nf4", [False, True])
def test_first_steps(shapes: Shapes, nf4: bool) -> None:
    """The base is undisturbed, B moves first: https://github.com/Lightning-AI/litgpt/issues/1229."""
    adapters = LoraAdapters(shapes, LoraConfig(r=2, target_modules=("q_proj",)))
    layer = adapters.layers[Q0]
    rng = np.random.default_rng(1)
    dense = torch.from_numpy(rng.standard_normal((16, 16)).astype(np.float32))
    weight = quantize_weight(dense) if nf4 else Tensor(dense)
    x = Tensor(rng.standard_normal((5, 16)).astype(np.float32))
    with no_grad():
        base = ops.nf4_linear(x, weight) if nf4 else ops.linear(x, weight)  # type: ignore[arg-type]
    for step in range(2):
        adapters.zero_grad()
        with Tape() as tape:
            y = ops.lora_linear(x, weight, layer.lora_a, layer.lora_b, layer.scaling)
        if step == 0:
            np.testing.assert_array_equal(y.numpy(), base.numpy())
        tape.backward(y, torch.ones(5, 16))
        assert layer.lora_a.grad is not None
        assert layer.lora_b.grad is not None
        assert bool(layer.lora_b.grad.any())
        assert bool(layer.lora_a.grad.any()) == (step == 1)
        lr = torch.tensor([1e-2])
        call(
            "adamw_step", adapters.params, adapters.grads, adapters.m, adapters.v, adapters.step, lr
        )
    assert adapters.step.tolist() == [2]


def test_one_norm_over_all_layers(shapes: Shapes) -> None:
    """Dense and 4-bit layers are clipped together: https://github.com/paiml/entrenar/issues/267."""
    adapters = LoraAdapters(shapes, LoraConfig(r=2, target_modules=("q_proj", "v_proj")))
    rng = np.random.default_rng(2)
    for name, layer in adapters.layers.items():
        n_out, n_in = shapes[name]
        dense = torch.from_numpy(rng.standard_normal((n_out, n_in)).astype(np.float32))
        weight = quantize_weight(dense) if name.endswith("v_proj") else Tensor(dense)
        x = Tensor(1e5 * rng.standard_normal((4, n_in)).astype(np.float32))
        with Tape() as tape:
            y = ops.lora_linear(x, weight, layer.lora_a, layer.lora_b, layer.scaling)
        tape.backward(y, torch.ones(4, n_out))
        assert bool(layer.lora_b.grad.any())  # type: ignore[union-attr]
    norm = call("clip_grad_norm", adapters.grads, 1.0)
    assert norm.item() > 1e5
    assert torch.linalg.vector_norm(adapters.grads).item() == pytest.approx(1.0, abs=1e-4)


def test_zero_grad_is_in_place(shapes: Shapes) -> None:
    adapters = LoraAdapters(shapes, LoraConfig())
    adapters.grads.fill_(3.0)
    adapters.zero_grad()
    assert not adapters.grads.any()
    assert all(t.grad is not None for t in adapters.parameters())


def test_state_is_under_pefts_names_and_a_copy(shapes: Shapes, fill: Fill) -> None:
    adapters = fill(LoraAdapters(shapes, LoraConfig(r=2)))
    state = adapters.state_dict()
    assert len(state) == 8
    assert f"base_model.model.{Q0}.lora_A.weight" in state
    assert all(array.dtype == np.float32 for array in state.values())
    shape = {key: array.shape for key, array in state.items()}
    assert shape["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] == (8, 2)
    other = LoraAdapters(shapes, LoraConfig(r=2, seed=9))
    other.load_state_dict(state)
    assert torch.equal(other.params, adapters.params)
    adapters.params.zero_()
    assert state[f"base_model.model.{Q0}.lora_B.weight"].any()


def test_merging_adds_the_scaled_product(shapes: Shapes, fill: Fill) -> None:
    """https://github.com/Blaizzy/mlx-vlm/issues/986, https://github.com/ml-explore/mlx-examples/issues/622."""
    one = LoraAdapters(
        {"m.q_proj": (1, 1)}, LoraConfig(r=8, lora_alpha=16, target_modules=("q_proj",))
    )
    layer = one.layers["m.q_proj"]
    layer.lora_a.data.fill_(1 / 8)
    layer.lora_b.data.fill_(1.0)
    assert layer.delta().tolist() == [[2.0]]
    adapters = fill(
        LoraAdapters(shapes, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    )
    for layer in adapters.layers.values():
        want = 8.0 * layer.lora_b.numpy().astype(np.float64) @ layer.lora_a.numpy()
        np.testing.assert_allclose(layer.delta().numpy(), want, rtol=1e-5, atol=1e-6)


def test_dropout_is_on_the_adapters_input_in_training_only(shapes: Shapes) -> None:
    """https://github.com/paiml/aprender/issues/2170."""
    n = 1000
    x = Tensor(np.ones((1, n), np.float32))
    a = Tensor(np.full((1, n), 1 / n, np.float32))
    b, w = Tensor(np.ones((1, 1), np.float32)), Tensor(np.full((1, n), 2.0, np.float32))
    assert ops.lora_linear(x, w, a, b, 1.0).item() == pytest.approx(2001.0, abs=1e-3)
    deltas = [
        ops.lora_linear(x, w, a, b, 1.0, dropout_p=0.5, seed=seed).item() - 2000.0
        for seed in range(200)
    ]
    assert len(set(deltas)) > 20
    assert np.mean(deltas) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, k: s.pop(k), r"lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
        (lambda s, k: s.update({"foo.lora_A.weight": s[k]}), "unexpected foo.lora_A.weight"),
        (
            lambda s, k: s.update({k: s[k][:1]}),
            r"lora_A.weight has shape \(1, 16\), wanted \(2, 16\)",
        ),
        (lambda s, k: s[k].__setitem__((1, 3), np.nan), r"lora_A.weight holds nan at \(1, 3\)"),
        (lambda s, k: s[k].__setitem__((0, 0), np.inf), r"lora_A.weight holds inf at \(0, 0\)"),
    ],
)
def test_loading_is_strict_and_changes_nothing_on_refusal(
    shapes: Shapes, fill: Fill, change: Callable, message: str
) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1725, https://github.com/alvdansen/signet-trainer/issues/105."""
    adapters = fill(LoraAdapters(shapes, LoraConfig(r=2)))
    state = adapters.state_dict()
    state["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"] += 1
    change(state, f"base_model.model.{Q0}.lora_A.weight")
    before = adapters.params.clone()
    with pytest.raises(AdapterError, match=message):
        adapters.load_state_dict(state)
    assert torch.equal(adapters.params, before)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="q_proj has sizes"):
        LoraAdapters({"q_proj": (0, 4)}, LoraConfig(target_modules=("q_proj",)))
