"""Whether to recompute activations: an estimate of what they take against the memory at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from entrenar import runtime
from entrenar.finetune.config import InstructConfig
from entrenar.transformer.weights import linear_shapes, tensor_shapes

__all__ = ["activation_bytes", "estimate_memory", "wants_checkpointing"]

# Activations may take this share of what is free; the rest is for decoded weights, logits, and
# everyone else on the machine.
_SHARE = 0.25
_CHUNK_ROWS = 256  # rows of logits that exist at once


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


def estimate_memory(
    config: InstructConfig,
    model_config: Any,
    targets: Mapping[str, tuple[int, int]],
    device: str,
) -> dict[str, int]:
    """Estimate the bytes of a training step by component, from the sizes alone.

    Args:
        config: The run's settings.
        model_config: The model's dimensions.
        targets: (out, in) of each layer that gets an adapter.
        device: ``"cpu"`` or ``"cuda:N"``; decides the dtype where it is ``"auto"``.

    Returns:
        Bytes of: weights, the decoded copy of the largest NF4 weight, adapters with gradients and
        moments, activations, logits of one chunk of rows.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    itemsize = 4 if dtype == "float32" else 2
    linears = linear_shapes(model_config)
    everything = sum(math.prod(shape) for shape in tensor_shapes(model_config).values())
    quantised = sum(a * b for a, b in linears.values())
    weights, decoded = everything * itemsize, 0
    if config.quantize_nf4:
        # Half a byte a weight, and a scale for 64 of them: 4 bytes, or 1 byte when quantised too.
        scale = (1 + 4 / 256) if config.double_quant else 4
        weights = (everything - quantised) * itemsize + int(quantised * (0.5 + scale / 64))
        decoded = max(a * b for a, b in linears.values()) * itemsize
    adapters = sum(config.lora_rank * (a + b) for a, b in targets.values())
    length = min(config.max_seq_len, model_config.context_length)
    tokens = config.batch_size * length
    activations = activation_bytes(model_config, tokens, itemsize)
    if wants_checkpointing(config, model_config, tokens, itemsize, device):
        layers = model_config.num_hidden_layers
        kept = 2 * layers * tokens * model_config.hidden_size * itemsize
        activations = activations // layers + kept
    return {
        "weights": weights,
        "decoded weights": decoded,
        "adapters": 4 * 4 * adapters,
        "activations": activations,
        "logits": 2 * _CHUNK_ROWS * model_config.vocab_size * 4,
    }
