"""Adapter folders: PEFT's open here, ours open in PEFT, and damaged ones are refused by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from entrenar.errors import AdapterError, ConfigError
from entrenar.lora import LoraAdapters, LoraConfig, load_adapter, save_adapter
from entrenar.lora import peft_files as module

Shapes = dict[str, tuple[int, int]]
Fill = Callable[[LoraAdapters], LoraAdapters]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = A0.replace("lora_A", "lora_B")


def edit(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / CONFIG).read_text())
    document.update(changes)
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in document.items() if v != "absent"}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def saved(shapes: Shapes, fill: Fill, tmp_path: Path) -> Path:
    adapters = fill(LoraAdapters(shapes, LoraConfig(r=4, lora_alpha=32)))
    save_adapter(tmp_path / "adapter", adapters, "some/model")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("name", "config", "modules"),
    [
        ("all_linear_rslora_dropout", LoraConfig(3, 6, 0.1, "all-linear", True), 14),
        ("qv_bfloat16", LoraConfig(2, 16, 0.0, ("q_proj", "v_proj")), 4),
        ("second_layer_only", LoraConfig(2, 4, 0.0, ("model.layers.1.self_attn.o_proj",)), 1),
        ("regular_expression", LoraConfig(2, 4, 0.0, r".*\.mlp\.(up|down)_proj"), 4),
    ],
)
def test_what_peft_wrote_opens_here(
    peft_folders: Path, shapes: Shapes, name: str, config: LoraConfig, modules: int
) -> None:
    """bfloat16 and rsLoRA as well: https://github.com/paiml/aprender/issues/2189."""
    got, state = load_adapter(peft_folders / name)
    for field in ("r", "lora_alpha", "lora_dropout", "use_rslora", "scaling"):
        assert getattr(got, field) == getattr(config, field)
    if config.target_modules == "all-linear":
        # PEFT writes every module in full where there are few
        assert set(got.target_modules) == set(shapes)
    else:
        assert got.target_modules == config.target_modules
    assert len(state) == 2 * modules
    adapters = LoraAdapters(shapes, got)
    adapters.load_state_dict(state)
    file = load_file(peft_folders / name / WEIGHTS)
    for key, array in adapters.state_dict().items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, file[key].float().numpy())


def test_saved_file_is_what_peft_expects(saved: Path) -> None:
    """https://github.com/artidoro/qlora/issues/44, https://github.com/ml-explore/mlx-examples/issues/622."""
    with safe_open(saved / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
    assert len(shapes) == 8
    assert shapes[A0] == (4, 16)
    assert shapes[B0] == (16, 4)
    document = json.loads((saved / CONFIG).read_text())
    assert document["peft_type"] == "LORA"
    assert document["base_model_name_or_path"] == "some/model"
    assert (document["r"], document["lora_alpha"]) == (4, 32)
    config, _ = load_adapter(saved)
    assert config == LoraConfig(r=4, lora_alpha=32)
    assert config.scaling == 8.0


def test_b_is_written_unscaled_and_equal_adapters_give_equal_bytes(
    shapes: Shapes, fill: Fill, tmp_path: Path
) -> None:
    written = []
    for name, alpha in (("one", 8.0), ("two", 64.5)):
        adapters = fill(LoraAdapters(shapes, LoraConfig(r=4, lora_alpha=alpha)))
        save_adapter(tmp_path / name, adapters, None)
        written.append((tmp_path / name / WEIGHTS).read_bytes())
        config, state = load_adapter(tmp_path / name)
        assert config.lora_alpha == alpha
        for key, array in adapters.state_dict().items():
            np.testing.assert_array_equal(array, state[key])
    assert written[0] == written[1]


def test_all_linear_is_written_as_the_names_it_stands_for(
    shapes: Shapes, fill: Fill, tmp_path: Path
) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.05, use_rslora=True)
    save_adapter(tmp_path / "a", fill(LoraAdapters(shapes, config)), None)
    got, state = load_adapter(tmp_path / "a")
    assert got.target_modules == (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    assert (got.use_rslora, got.lora_dropout) == (True, 0.05)
    LoraAdapters({**shapes, "lm_head": (32, 16)}, got).load_state_dict(state)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("ranks", [(), (("layers.1.mlp.up_proj", 2),)])
@pytest.mark.parametrize("alphas", [(), ((r"layers\.\d\.mlp\.up_proj", 5.0),)])
def test_ours_opens_in_peft(
    shapes: Shapes, fill: Fill, tmp_path: Path, ranks: Any, alphas: Any
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = LoraConfig(
        r=3, lora_alpha=12.5, lora_dropout=0.1, target_modules="all-linear", use_rslora=True,
        rank_pattern=ranks, alpha_pattern=alphas,
    )  # fmt: skip
    adapters = fill(LoraAdapters(shapes, config))
    save_adapter(tmp_path / "a", adapters, None)
    llama = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(llama), tmp_path / "a")
    state = peft.get_peft_model_state_dict(model)
    assert set(state) == set(adapters.state_dict())
    for key, array in adapters.state_dict().items():
        np.testing.assert_array_equal(state[key].numpy(), array)
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    scaling = config.scaling_of("model.layers.1.mlp.up_proj")
    assert (scaling == config.scaling) is not bool(ranks or alphas)
    assert layer.scaling["default"] == pytest.approx(scaling)
    ours = adapters.layers["model.layers.1.mlp.up_proj"].delta()
    torch.testing.assert_close(layer.get_delta_weight("default").detach(), ours)


def test_saving_replaces_an_adapter_and_keeps_other_files(
    shapes: Shapes, fill: Fill, saved: Path
) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "tokenizer").mkdir()
    (saved / "tokenizer" / "t.json").write_text("{}")
    (saved / "adapter_model.bin").write_bytes(b"stale")
    save_adapter(saved, fill(LoraAdapters(shapes, LoraConfig(r=2))), "other/model")
    assert sorted(p.name for p in saved.iterdir()) == [CONFIG, WEIGHTS, "notes.txt", "tokenizer"]
    assert (saved / "tokenizer" / "t.json").read_text() == "{}"
    assert load_adapter(saved)[0].r == 2
    assert [p.name for p in saved.parent.iterdir()] == ["adapter"]


def test_saving_refuses_other_folders(shapes: Shapes, fill: Fill, tmp_path: Path) -> None:
    adapters = fill(LoraAdapters(shapes, LoraConfig(r=2)))
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    with pytest.raises(AdapterError, match="not empty and holds no adapter"):
        save_adapter(other, adapters, None)
    with pytest.raises(AdapterError, match="is a file"):
        save_adapter(other / "thesis.tex", adapters, None)
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]
    empty = tmp_path / "deep" / "empty"
    empty.mkdir(parents=True)
    save_adapter(empty, adapters, None)
    assert load_adapter(empty)[0].r == 2


def test_saving_through_a_link_replaces_what_it_points_to(
    shapes: Shapes, fill: Fill, saved: Path
) -> None:
    link = saved.parent / "link"
    link.symlink_to(saved)
    save_adapter(link, fill(LoraAdapters(shapes, LoraConfig(r=2))), None)
    assert link.is_symlink()
    assert load_adapter(saved)[0].r == 2


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_failed_save_leaves_the_old_adapter(
    shapes: Shapes, fill: Fill, saved: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(target) == saved and not str(source).endswith(".old"):
            raise OSError("no space left")
        real(source, target)

    def fsync(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module.os, failing, {"rename": rename, "fsync": fsync}[failing])
    with pytest.raises(OSError, match="no space left"):
        save_adapter(saved, fill(LoraAdapters(shapes, LoraConfig(r=2))), None)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["adapter"]


def test_saving_refuses_values_that_are_not_finite(
    shapes: Shapes, fill: Fill, tmp_path: Path
) -> None:
    adapters = fill(LoraAdapters(shapes, LoraConfig(r=2)))
    adapters.layers["model.layers.0.self_attn.q_proj"].lora_b.data[3, 1] = float("nan")
    with pytest.raises(AdapterError, match=r"q_proj.lora_B.weight holds nan at \(3, 1\)"):
        save_adapter(tmp_path / "a", adapters, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(B0), "lacks .*layers.0.self_attn.q_proj.lora_B.weight"),
        (lambda t: t.update({"foo.lora_A.weight": t[A0].clone()}), "unexpected foo.lora_A.weight"),
        (lambda t: t.update({A0: torch.zeros(5, 16)}), r"lora_A.weight has shape \(5, 16\), wanted \(4, in\)"),
        (lambda t: t.update({B0: torch.zeros(16, 4, 1)}), r"lora_B.weight has shape \(16, 4, 1\)"),
        (lambda t: t.update({B0: torch.zeros(16, 5)}), r"has shape \(16, 5\), wanted \(out, 4\)"),
        (lambda t: t[A0].__setitem__((2, 7), float("nan")), r"q_proj.lora_A.weight holds nan at \(2, 7\)"),
        (lambda t: t.update({A0: torch.zeros(4, 16, dtype=torch.int8)}), "lora_A.weight is torch.int8"),
        (
            lambda t: t.update({A0.replace("A.weight", "A.default.weight"): t.pop(A0)}),
            "unexpected .*lora_A.default.weight",
        ),
        (
            lambda t: [t.update({k.removeprefix("base_model.model."): t.pop(k)}) for k in list(t)],
            "unexpected model.layers.0.self_attn.q_proj.lora_A.weight.*such as base_model.model",
        ),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)  # fmt: skip
def test_bad_tensors_are_refused_by_name(saved: Path, change: Callable, message: str) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1725, https://github.com/alvdansen/signet-trainer/issues/105."""
    rewrite(saved, change)
    with pytest.raises(AdapterError, match=message):
        load_adapter(saved)


def test_an_adapter_of_another_model_does_not_load(saved: Path, shapes: Shapes) -> None:
    config, state = load_adapter(saved)
    longer = {**shapes, "model.layers.2.self_attn.q_proj": (16, 16)}
    with pytest.raises(AdapterError, match=r"lacks .*layers.2.self_attn.q_proj.lora_A"):
        LoraAdapters(longer, config).load_state_dict(state)


@pytest.mark.parametrize("keep", [0, 4, 9, 200, -1])
def test_truncated_files_are_refused(saved: Path, keep: int) -> None:
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged"):
        load_adapter(saved)


def test_other_damage_is_refused(saved: Path) -> None:
    data = (saved / WEIGHTS).read_bytes()
    for bad in (b"\x80\x04pickle" + data, struct.pack("<Q", 1 << 60) + data[8:], data + b"more"):
        (saved / WEIGHTS).write_bytes(bad)
        with pytest.raises(AdapterError, match="is damaged"):
            load_adapter(saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"has no {WEIGHTS}"):
        load_adapter(saved)
    (saved / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="convert it to safetensors"):
        load_adapter(saved)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_damaged_configs_are_refused(saved: Path, text: str) -> None:
    (saved / CONFIG).write_text(text)
    with pytest.raises(AdapterError, match=CONFIG):
        load_adapter(saved)


def test_a_folder_without_a_config_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        load_adapter(tmp_path)
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        load_adapter(tmp_path / "missing")


def test_unknown_keys_that_are_off_are_tolerated_with_one_notice(saved: Path) -> None:
    """https://github.com/huggingface/peft/issues/2275."""
    edit(saved, future_a=None, future_b=False, future_c={}, future_d=[], future_e=None)
    with pytest.warns(
        UserWarning, match="future_a, future_b, future_c, future_d, future_e"
    ) as seen:
        load_adapter(saved)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True), ("lora_bias", True), ("bias", "all"), ("fan_in_fan_out", True),

        ("modules_to_save", ["lm_head"]), ("layer_replication", [[0, 1]]), ("use_qalora", True),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "olora"),
        ("trainable_token_indices", [1]), ("target_parameters", ["x"]), ("future", "on"),
    ],
)  # fmt: skip
def test_options_that_change_the_computation_are_refused_by_name(
    saved: Path, key: str, value: Any
) -> None:
    """https://github.com/huggingface/peft/issues/2275, https://github.com/huggingface/peft/issues/2194."""
    edit(saved, **{key: value})
    with pytest.raises(AdapterError, match=f"{key} is .*not supported"):
        load_adapter(saved)


def test_other_config_faults(saved: Path) -> None:
    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": "absent"}, "r is missing"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"r": 0}, "r is 0"),
        ({"target_modules": 7}, "adapter_config.json"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    ):
        text = (saved / CONFIG).read_text()
        edit(saved, **changes)
        with pytest.raises(AdapterError, match=message):
            load_adapter(saved)
        (saved / CONFIG).write_text(text)


def test_a_missing_alpha_is_pefts_default_and_said(saved: Path) -> None:
    """https://github.com/Blaizzy/mlx-vlm/issues/986."""
    edit(saved, lora_alpha="absent")
    with pytest.warns(UserWarning, match="lora_alpha is missing, taking PEFT's default of 8"):
        config, _ = load_adapter(saved)
    assert config.scaling == 2.0


PATTERN = "layers.1.self_attn.q_proj"


def deep_adapters(**changes: object) -> LoraAdapters:
    shapes = {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in range(12)}
    config = LoraConfig(r=8, lora_alpha=16, target_modules=("q_proj",), **changes)
    return LoraAdapters(shapes, config)


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/2194: layer 1 alone, not layers 10 and 11 with it."""
    adapters = deep_adapters(rank_pattern=((PATTERN, 4),), alpha_pattern=((PATTERN, 32),))
    for index, layer in enumerate(adapters.layers.values()):
        rank, scale = (4, 8.0) if index == 1 else (8, 2.0)
        assert layer.lora_a.shape == (rank, 16)
        assert layer.lora_b.shape == (16, rank)
        assert layer.scaling == scale
    save_adapter(tmp_path / "adapter", adapters, "base")
    document = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (document["rank_pattern"], document["alpha_pattern"]) == ({PATTERN: 4}, {PATTERN: 32})
    config, state = load_adapter(tmp_path / "adapter")
    again = LoraAdapters(dict.fromkeys(adapters.layers, (16, 16)), config)
    again.load_state_dict(state)
    assert again.fingerprint() == adapters.fingerprint()


def test_patterns_are_checked(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"the pattern 'layers\.1\.q_porj' fits none"):
        deep_adapters(rank_pattern=(("layers.1.q_porj", 4),))
    with pytest.raises(ConfigError, match=r"rank_pattern.* is 0, wanted an integer of at least 1"):
        deep_adapters(rank_pattern=((PATTERN, 0),))
    with pytest.raises(ConfigError, match=r"alpha_pattern.* is -1, wanted more than 0"):
        deep_adapters(alpha_pattern=((PATTERN, -1),))
    with pytest.raises(ConfigError, match=r"alpha_pattern: '\(' is not a module's name"):
        deep_adapters(alpha_pattern=(("(", 4),))
    save_adapter(tmp_path / "adapter", deep_adapters(rank_pattern=((PATTERN, 4),)), "base")
    edit(tmp_path / "adapter", rank_pattern={})
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj.* wanted \(8, in\)"):
        load_adapter(tmp_path / "adapter")
    edit(tmp_path / "adapter", rank_pattern=[["q_proj", 4]])
    with pytest.raises(AdapterError, match=r"rank_pattern is .*wanted an object"):
        load_adapter(tmp_path / "adapter")


def test_names_with_the_adapters_own_are_read(saved: Path) -> None:
    """https://github.com/alvdansen/signet-trainer/issues/105: ``lora_A.default.weight``."""
    wanted = load_adapter(saved)[1]

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for key in list(tensors):
            tensors[key.replace(".weight", ".default.weight")] = tensors.pop(key)

    rewrite(saved, rename)
    got = load_adapter(saved)[1]
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[key], wanted[key]) for key in wanted)
