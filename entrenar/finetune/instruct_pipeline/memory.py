"""Whether to recompute activations: an estimate of what they take against the memory at hand."""

from __future__ import annotations

from typing import Any

from entrenar import runtime
from entrenar.finetune.config import InstructConfig

__all__ = ["activation_bytes", "wants_checkpointing"]

# Activations may take this share of what is free; the rest is for decoded weights, logits, and
# everyone else on the machine.
_SHARE = 0.25


def activation_bytes(model_config: Any, tokens: int, itemsize: int) -> int:
    """Estimate what the backward pass keeps of one forward pass without recomputation.

    Per token and block: the inputs of both norms and what they return, the two residual sums, q, k
    and v before attention, its output, and gate, up and their product.

    Args:
        model_config: The model's dimensions.
        tokens: Tokens of a micro-batch.
        itemsize: Bytes of an activation's element.
    """
    heads = model_config.num_attention_heads + 2 * model_config.num_key_value_heads
    attention = (heads + model_config.num_attention_heads) * model_config.head_dim
    per_token = 6 * model_config.hidden_size + attention + 3 * model_config.intermediate_size
    return int(model_config.num_hidden_layers * tokens * per_token * itemsize)


def wants_checkpointing(
    config: InstructConfig, model_config: Any, tokens: int, itemsize: int, device: str
) -> bool:
    """Decide for ``config.checkpointing``: as it says, or for ``"auto"`` by the memory at hand.

    Args:
        config: The run's settings.
        model_config: The model's dimensions.
        tokens: Tokens of the largest micro-batch.
        itemsize: Bytes of an activation's element.
        device: Where the activations lie.
    """
    if isinstance(config.checkpointing, bool):
        return config.checkpointing
    needed = activation_bytes(model_config, tokens, itemsize)
    return needed > _SHARE * runtime.available_memory_bytes(device)
