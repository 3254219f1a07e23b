"""The tiny model that peers are compared on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "peft_tiny_llama.npz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A two-layer llama in a Hugging Face folder."""
    path = tmp_path / "model"
    path.mkdir()
    with np.load(GOLDEN) as data:
        (path / "config.json").write_text(str(data["config"]))
        weights = {k.removeprefix("weight/"): data[k] for k in data if k.startswith("weight/")}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
