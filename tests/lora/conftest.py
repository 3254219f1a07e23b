"""The tiny llama of the PEFT fixtures, as the shapes of its linear layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from entrenar.lora import LoraAdapters

H, FF, KV = 16, 24, 8
LINEARS = {
    "self_attn.q_proj": (H, H),
    "self_attn.k_proj": (KV, H),
    "self_attn.v_proj": (KV, H),
    "self_attn.o_proj": (H, H),
    "mlp.gate_proj": (FF, H),
    "mlp.up_proj": (FF, H),
    "mlp.down_proj": (H, FF),
}


@pytest.fixture
def shapes() -> dict[str, tuple[int, int]]:
    return {f"model.layers.{n}.{name}": s for n in range(2) for name, s in LINEARS.items()}


@pytest.fixture
def peft_folders() -> Path:
    return Path(__file__).resolve().parents[1] / "data" / "peft_adapters"


@pytest.fixture
def fill() -> Callable[[LoraAdapters], LoraAdapters]:
    """Give every B values, so that the adapter does something."""

    def fill(adapters: LoraAdapters) -> LoraAdapters:
        rng = np.random.default_rng(3)
        for layer in adapters.layers.values():
            values = rng.standard_normal(layer.lora_b.shape).astype(np.float32)
            layer.lora_b.data.copy_(torch.from_numpy(values))
        return adapters

    return fill
