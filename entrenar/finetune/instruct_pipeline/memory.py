"""What training takes in memory, by component, from the model's config alone; and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from entrenar import runtime
from entrenar.cpu import threads
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.instruct_pipeline.activations import Moment, StepSizes, highest_moment
from entrenar.lora import match_targets
from entrenar.quant import nf4_bytes
from entrenar.transformer.weights import linear_shapes, tensor_shapes

__all__ = ["PROCESS_BYTES", "adapted_shapes", "estimate_memory", "largest_batch", "largest_length"]
__all__ += ["step_moment", "wants_checkpointing"]

PROCESS_BYTES = 240 << 20
"""Resident bytes of a process on the CPU without a model: Python, torch, NumPy and BLAS's buffers.

Measured with torch 2.13 on x86-64 Linux: 230 MiB before the model, and 5 to 9 MiB more after a step than
its arrays take. Some 80 MiB of it are code; of files just written the system may map 60 MiB more, which it
drops when it needs them.
"""

_SHARE = 0.5  # of what is free, that a step may take; the rest is for everyone else on the machine
_MOST_SAMPLES = 1 << 16


def adapted_shapes(config: InstructConfig, model_config: Any) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each layer of a model that gets an adapter.

    Raises:
        AdapterError: A target module matches no layer.
    """
    shapes = linear_shapes(model_config)
    return {name: shapes[name] for name in match_targets(shapes, config.target_modules)}


def estimate_memory(
    config: InstructConfig,
    model_config: Any,
    targets: Mapping[str, tuple[int, int]],
    device: str,
    free: int | None = None,
) -> dict[str, int]:
    """Estimate the most bytes that training holds at a time, by component; their sum is the total.

    Every token of every sample is taken to carry loss, and every sample to be as long as
    ``max_seq_len`` allows. Not counted: the driver's own context on a GPU, what captured graphs keep,
    and pages of the weights' files, which the system drops when it needs them.

    Args:
        config: The run's settings.
        model_config: The model's dimensions.
        targets: What :func:`adapted_shapes` returns.
        device: ``"cpu"`` or ``"cuda:N"``; decides the dtype where it is ``"auto"``, and what functions
            need while they run.
        free: Bytes that ``checkpointing = "auto"`` goes by; what is free on the device where None.

    Returns:
        Bytes of: weights, adapters, gradients, moments; activations, logits and scratch at the highest
        moment of a step; on the CPU the process without a model.
    """
    weights = _weight_bytes(config, model_config, device)
    elements = 4 * sum(
        -(-n // 4)
        for out, inner in targets.values()
        for n in (config.lora_rank * inner, config.lora_rank * out)
    )
    fixed = {
        "weights": weights,
        "adapters": 4 * elements,
        "gradients": 4 * elements,
        "moments": 8 * elements,
    }
    if device == "cpu":
        fixed["process"] = PROCESS_BYTES
    free = runtime.available_memory_bytes(device) if free is None else free
    left = free - sum(fixed.values())
    moment = step_moment(config, model_config, targets, device, left)
    return {
        **fixed,
        "activations": moment.activations,
        "logits": moment.logits,
        "scratch": moment.scratch,
    }


def step_moment(
    config: InstructConfig,
    model_config: Any,
    targets: Collection[str],
    device: str,
    left: int,
) -> Moment:
    """Return the moment of a step with the longest samples at which the most is held.

    Args:
        config: The run's settings.
        model_config: The model's dimensions.
        targets: Names of the layers that get an adapter.
        device: ``"cpu"`` or ``"cuda:N"``.
        left: Bytes beside weights and adapters, that ``checkpointing = "auto"`` goes by.
    """
    # the last token of a sample predicts nothing and is left out
    longest = min(config.max_seq_len, model_config.context_length) - 1
    tokens = config.batch_size * longest
    sizes = _step_sizes(
        config, model_config, targets, tokens, longest, _itemsize(config, device), device
    )
    if isinstance(config.checkpointing, bool):
        return highest_moment(sizes, config.checkpointing)
    kept = highest_moment(sizes, recompute=False)
    return highest_moment(sizes, recompute=True) if kept.total > _SHARE * left else kept


def wants_checkpointing(
    config: InstructConfig,
    model_config: Any,
    targets: Collection[str],
    tokens: int,
    longest: int,
    itemsize: int,
    device: str,
) -> bool:
    """Decide for ``config.checkpointing``: as it says, or for ``"auto"`` by the memory at hand.

    Args:
        config: The run's settings.
        model_config: The model's dimensions.
        targets: Names of the layers that have an adapter.
        tokens: Rows of the micro-batch.
        longest: Rows of its longest sample.
        itemsize: Bytes of an activation's element.
        device: Where the activations lie.
    """
    if isinstance(config.checkpointing, bool):
        return config.checkpointing
    sizes = _step_sizes(config, model_config, targets, tokens, longest, itemsize, device)
    needed = highest_moment(sizes, recompute=False).total
    return needed > _SHARE * runtime.available_memory_bytes(device)


def largest_batch(
    total_of: Callable[[InstructConfig], int], config: InstructConfig, capacity: int
) -> int:
    """Return the most samples of ``max_seq_len`` to a micro-batch that fit; 0 where not even one does.

    Args:
        total_of: The bytes that training with some settings takes.
        config: The run's settings.
        capacity: Bytes there are.
    """

    def fits(n: int) -> bool:
        return total_of(config.replace(batch_size=n)) <= capacity

    return _largest(fits, 1, _MOST_SAMPLES)


def largest_length(
    total_of: Callable[[InstructConfig], int], config: InstructConfig, capacity: int, context: int
) -> int:
    """Return the longest ``max_seq_len`` that fits at ``batch_size``; 0 where no length does.

    Args:
        total_of: The bytes that training with some settings takes.
        config: The run's settings.
        capacity: Bytes there are.
        context: Tokens the model can take.
    """

    def fits(n: int) -> bool:
        return total_of(config.replace(max_seq_len=n)) <= capacity

    return _largest(fits, 2, context)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low`` to ``high`` that fits, which all smaller ones then do."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _itemsize(config: InstructConfig, device: str) -> int:
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return 4 if dtype == "float32" else 2


def _weight_bytes(config: InstructConfig, model_config: Any, device: str) -> int:
    itemsize, linears = _itemsize(config, device), linear_shapes(model_config)
    total = 0
    for name, shape in tensor_shapes(model_config).items():
        count = math.prod(shape)
        if config.quantize_nf4 and name.removesuffix(".weight") in linears:
            total += nf4_bytes(count, double_quant=config.double_quant)
            if config.weight_cache == "decoded":
                total += itemsize * count
        elif model_config.norm_offset and name.endswith("norm.weight"):
            total += 4 * count
        else:
            total += itemsize * count
    return total


def _step_sizes(
    config: InstructConfig,
    model_config: Any,
    targets: Collection[str],
    tokens: int,
    longest: int,
    itemsize: int,
    device: str,
) -> StepSizes:
    return StepSizes(
        model=model_config,
        adapted=tuple(targets),
        rank=config.lora_rank,
        dropout=config.lora_dropout > 0,
        tokens=tokens,
        longest=longest,
        loss_rows=tokens,
        itemsize=itemsize,
        nf4=config.quantize_nf4,
        threads=threads.count() if device == "cpu" else 0,
    )
