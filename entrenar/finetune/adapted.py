"""A base model with a saved adapter on it, for everything that is not training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entrenar.errors import AdapterError, ConfigError
from entrenar.finetune.merge import refuse_merged
from entrenar.lora import LoraAdapters, load_adapter
from entrenar.lora.peft_files import read_config
from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.model import Transformer

__all__ = ["base_of", "load_adapted", "read_adapters"]


def base_of(adapter: str | Path) -> str:
    """Return the base model an adapter folder names.

    Raises:
        AdapterError: It names none.
    """
    base = read_config(adapter).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise AdapterError(f"{adapter} does not name its base model", "say --model and its path")
    return base


def read_adapters(
    adapter: str | Path, shapes: dict[str, tuple[int, int]], device: str
) -> LoraAdapters:
    """Read an adapter folder, its rank, scale and targets as saved.

    Args:
        adapter: The folder.
        shapes: The model's linear layers.
        device: Where the adapters go.

    Raises:
        AdapterError: It is not an adapter, or not one for these layers.
    """
    config, state = load_adapter(adapter)
    adapters = LoraAdapters(shapes, config, device)
    adapters.load_state_dict(state)
    return adapters


def load_adapted(
    model: str | Path | None, adapter: str | Path | None, **options: Any
) -> tuple[Transformer, LoraAdapters | None]:
    """Load a model and, where one is given, its adapter.

    Args:
        model: The base model; the one that the adapter names where None.
        adapter: An adapter folder, or None.
        **options: ``quantize``, ``dtype``, ``device`` and ``double_quant`` of the model.

    Raises:
        ConfigError: Neither is given.
        AdapterError: The adapter does not fit the model, or is merged into it already; found before
            any weight is read where the folder itself is at fault.
    """
    if adapter is not None:
        load_adapter(adapter)
        model = model or base_of(adapter)
    if model is None:
        raise ConfigError("neither a model nor an adapter was given", "say --model or --adapter")
    found = Transformer.from_pretrained(model, **options)
    if adapter is None:
        return found, None
    adapters = read_adapters(adapter, found.linear_shapes(), found.device)
    refuse_merged(open_checkpoint(model), adapters)
    found.attach(adapters)
    return found, adapters
