"""The flat arena: views, groups, one update for everything, steps that change nothing, files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd.arena import Arena
from entrenar.errors import CheckpointError

SHAPES = {"weight": (3, 5), "bias": (5,), "scalar": (), "gain": (7,)}


def filled(device: str = "cpu", decays=None, seed: int = 0) -> Arena:
    arena = Arena(SHAPES, device, decays)
    rng = np.random.default_rng(seed)
    for tensor in arena.tensors.values():
        for view in (tensor.data, tensor.grad):
            view.copy_(torch.from_numpy(rng.standard_normal(tensor.shape).astype(np.float32)))
    return arena


def rate(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_parameters_are_views_that_start_on_16_bytes() -> None:
    arena = filled()
    for tensor in arena.tensors.values():
        assert tensor.data.untyped_storage().data_ptr() == arena.params.data_ptr()
        assert tensor.grad.untyped_storage().data_ptr() == arena.grads.data_ptr()
        assert (tensor.data.data_ptr() - arena.params.data_ptr()) % 16 == 0
    arena.zero_grad()
    assert all(not tensor.grad.any() for tensor in arena.tensors.values())


@pytest.mark.parametrize("layers", [1, 30])
def test_norm_and_step_are_three_launches_of_the_table_whatever_the_number_of_layers(
    layers: int,
) -> None:
    arena = Arena({f"{i}.{part}": (4, 3) for i in range(layers) for part in "AB"})
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        arena.update(rate(1e-3), 1.0)
    assert [launch.op for launch in launches] == ["clip_factor", "adamw_step"]


@pytest.mark.parametrize("backend", ["cpu", "ptx"])
@pytest.mark.parametrize("at", [0, 1, 20, 40])
def test_an_empty_parameter_changes_nothing_for_the_others(
    backend: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/3207: those before it were left out."""
    if backend == "ptx":
        pytest.importorskip("triton")
        if not (shutil.which("gcc") or shutil.which("cc")):
            pytest.skip("the emulator needs a C compiler")
        monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    names = [f"p{i}" for i in range(40)]
    names.insert(at, "empty")
    arena = Arena({name: (0,) if name == "empty" else (3,) for name in names})
    arena.params.fill_(1.0)
    for tensor in arena.tensors.values():
        tensor.grad.fill_(1.0)
    norm, skip = arena.update(rate(0.1), 1.0, eps=1e-12, weight_decay=0.0)
    assert norm.item() == pytest.approx(120**0.5, rel=1e-6)
    assert skip.item() == 0
    assert arena.tensors["empty"].data.shape == (0,)
    for name in names:
        assert torch.allclose(arena.tensors[name].data, torch.tensor(0.9), rtol=1e-6), name


def test_an_update_is_adamw_by_hand_and_leaves_alone_what_is_not_decayed() -> None:
    arena = filled(decays=lambda name: name == "weight")
    before = {name: tensor.data.clone() for name, tensor in arena.tensors.items()}
    grads = {name: tensor.grad.clone() for name, tensor in arena.tensors.items()}
    norm, skip = arena.update(rate(0.1), None, betas=(0.0, 0.0), eps=1e-12, weight_decay=0.5)
    whole = np.concatenate([g.numpy().ravel() for g in grads.values()])
    assert norm.item() == pytest.approx(float(np.linalg.norm(whole)), rel=1e-6)
    assert skip.item() == 0
    for name, tensor in arena.tensors.items():
        decay = 0.5 if name == "weight" else 0.0
        exact = before[name] - 0.1 * (torch.sign(grads[name]) + decay * before[name])
        torch.testing.assert_close(tensor.data, exact, rtol=1e-6, atol=1e-7)
    assert arena.step.tolist() == [1, 1]


def test_groups_agree_with_one_arena_each() -> None:
    """Two ranges of one arena step as two arenas would, clipping aside, which is global."""
    arena = filled(decays=lambda name: name == "weight")
    alone = {
        name: Arena({name: shape}, decays=lambda name: name == "weight")
        for name, shape in SHAPES.items()
    }
    for name, one in alone.items():
        one.tensors[name].data.copy_(arena.tensors[name].data)
        one.tensors[name].grad.copy_(arena.tensors[name].grad)
    for step in range(3):
        arena.update(rate(0.1 / (step + 1)), None)
        for one in alone.values():
            one.update(rate(0.1 / (step + 1)), None)
    for name, one in alone.items():
        assert torch.equal(one.tensors[name].data, arena.tensors[name].data), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    """https://github.com/pytorch/pytorch/issues/46849: a non-finite gradient reached the moments."""
    arena = filled()
    arena.update(rate(0.1), 1.0)
    good, before = arena.grads.clone(), arena.state_dict()
    arena.tensors["bias"].grad[2] = bad
    _, skip = arena.update(rate(0.1), 1.0)
    after = arena.state_dict()
    assert (skip.item(), int(before.pop("skipped")[0]), int(after.pop("skipped")[0])) == (1, 0, 1)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    arena.grads.copy_(good)
    arena.update(rate(0.1), 1.0)
    assert (int(arena.step[0]), int(arena.skipped[0])) == (2, 1)


def test_state_goes_to_a_file_and_back_to_the_bit(tmp_path: Path) -> None:
    arena = filled(decays=lambda name: name == "weight")
    arena.update(rate(0.1), 1.0)
    arena.save(tmp_path / "state.safetensors")
    other = filled(decays=lambda name: name == "weight", seed=1)
    other.load(tmp_path / "state.safetensors")
    for name in ("params", "m", "v", "step", "skipped"):
        assert torch.equal(getattr(arena, name), getattr(other, name)), name
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_state_of_other_parameters_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    arena = filled()
    before = arena.state_dict()
    state = Arena({**SHAPES, "bias": (6,)}).state_dict()
    with pytest.raises(CheckpointError, match=r"bias is .* \(6,\), wanted .* \(5,\)"):
        arena.load_state_dict(state)
    del state["m.bias"]
    with pytest.raises(CheckpointError, match=r"m\.bias is in one of them only"):
        arena.load_state_dict(state)
    (tmp_path / "cut").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        arena.load(tmp_path / "cut")
    with pytest.raises(CheckpointError, match="cannot write"):
        arena.save(tmp_path / "nowhere" / "file")
    for name, array in arena.state_dict().items():
        np.testing.assert_array_equal(before[name], array)


def test_an_arena_of_nothing_steps() -> None:
    arena = Arena({})
    arena.update(rate(0.1), 1.0)
    assert arena.step.tolist() == [1]
