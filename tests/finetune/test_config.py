"""Settings: defaults, checks, TOML, and the nearest names of what is unknown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig
from entrenar.optable import call

DEFAULTS = {
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.0,
    "target_modules": ("q_proj", "v_proj"),
    "use_rslora": False,
    "learning_rate": 2e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "schedule": "cosine",
    "epochs": 3,
    "max_steps": None,
    "batch_size": 1,
    "grad_accum_steps": 1,
    "max_seq_len": 512,
    "gradient_clip_norm": 1.0,
    "quantize_nf4": False,
    "double_quant": False,
    "packing": False,
    "checkpointing": "auto",
    "graph": "auto",
    "prewarm": False,
    "weight_cache": "none",
    "lm_head_device": "auto",
    "eval_fraction": 0.0,
    "profile_interval": 0,
    "train_on": "responses",
    "long_samples": "truncate",
    "seed": 0,
    "dtype": "auto",
    "device": "auto",
}


def test_defaults_are_the_documented_ones() -> None:
    assert {
        f.name: getattr(InstructConfig(), f.name) for f in dataclasses.fields(InstructConfig)
    } == (DEFAULTS)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        InstructConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_rank", 0),
        ("lora_rank", 1.5),
        ("lora_rank", True),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("lora_dropout", 1.0),
        ("lora_dropout", -0.1),
        ("target_modules", ()),
        ("target_modules", ("q_proj", "q_proj")),
        ("target_modules", 3),
        ("learning_rate", 0),
        ("learning_rate", "1e-4"),
        ("learning_rate", float("inf")),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -1),
        ("warmup_steps", -1),
        ("warmup_ratio", 1.0),
        ("schedule", "cosin"),
        ("epochs", 0),
        ("max_steps", 0),
        ("batch_size", 0),
        ("grad_accum_steps", 0),
        ("max_seq_len", 1),
        ("gradient_clip_norm", 0.0),
        ("quantize_nf4", 1),
        ("packing", "yes"),
        ("checkpointing", "never"),
        ("checkpointing", 1),
        ("graph", "yes"),
        ("weight_cache", "fp16"),
        ("profile_interval", -1),
        ("eval_fraction", 1.0),
        ("seed", -1),
        ("dtype", "float8"),
        ("device", "gpu"),
    ],
)
def test_a_bad_value_names_the_setting_and_what_was_found(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        InstructConfig(**{name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)
    assert caught.value.exit_code == 2


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps is 5 and warmup_ratio is 0\.1"):
        InstructConfig(warmup_steps=5, warmup_ratio=0.1)
    with pytest.raises(ConfigError, match="double_quant"):
        InstructConfig(double_quant=True)


def test_a_clip_of_zero_is_refused_and_none_is_off() -> None:
    """https://github.com/OpenNMT/OpenNMT-py/issues/1140"""
    with pytest.raises(
        ConfigError, match=r"gradient_clip_norm is 0, wanted a number above 0 or none"
    ):
        InstructConfig(gradient_clip_norm=0)
    assert InstructConfig(gradient_clip_norm=None).gradient_clip_norm is None
    flat = torch.tensor([3.0, 4.0])
    _, factor, skip = call("clip_factor", flat, None)
    assert (factor.item(), skip.item(), flat.tolist()) == (1.0, 0, [3.0, 4.0])


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'learning_rte'; did you mean learning_rate"
    ):
        InstructConfig.from_dict({"learning_rte": 1e-4})


def test_every_setting_survives_toml(tmp_path: Path) -> None:
    changed = InstructConfig(
        lora_rank=4,
        lora_alpha=8,
        lora_dropout=0.25,
        target_modules="all-linear",
        use_rslora=True,
        learning_rate=3e-5,
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.0,
        warmup_ratio=0.1,
        schedule="linear",
        epochs=2,
        max_steps=7,
        batch_size=3,
        grad_accum_steps=2,
        max_seq_len=64,
        gradient_clip_norm=None,
        quantize_nf4=True,
        double_quant=True,
        packing=True,
        checkpointing=False,
        graph=False,
        eval_fraction=0.2,
        seed=9,
        dtype="float32",
        device="cpu",
    )
    path = tmp_path / "config.toml"
    for config in (changed, InstructConfig()):
        path.write_text(config.to_toml({"model": 'a "quoted"\\path\n', "save_every": 3}))
        assert InstructConfig.from_toml(path) == config


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/8241"""
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert InstructConfig.from_toml(path).seed == 3


@pytest.mark.parametrize("text", ["seed = ", "seed = 1\nsede = 2\n", "[run\n"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        InstructConfig.from_toml(path)
    with pytest.raises(ConfigError, match="no configuration file"):
        InstructConfig.from_toml(tmp_path / "none.toml")
