"""LoRA adapters: settings, the flat arena they live in, and PEFT's files."""

from __future__ import annotations

from entrenar.lora.adapters import LoraAdapters, LoraLayer, peft_key
from entrenar.lora.config import ALL_LINEAR, LoraConfig, match_targets
from entrenar.lora.peft_files import load_adapter, save_adapter

__all__ = [
    "ALL_LINEAR",
    "LoraAdapters",
    "LoraConfig",
    "LoraLayer",
    "load_adapter",
    "match_targets",
    "peft_key",
    "save_adapter",
]
