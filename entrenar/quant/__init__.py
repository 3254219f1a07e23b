"""NF4 weights of a checkpoint: quantising them by name, bitsandbytes' files, and memory."""

from __future__ import annotations

from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.quant.bitsandbytes_files import (
    bitsandbytes_config,
    check_bitsandbytes_config,
    from_bitsandbytes,
    is_bitsandbytes,
    parts_of,
    stated_shape,
    to_bitsandbytes,
)
from entrenar.quant.memory import WeightMemory, nf4_bytes, weight_memory
from entrenar.quant.weights import (
    NEVER_QUANTISED,
    is_quantisable,
    quantize_checkpoint,
    quantize_weight,
)

__all__ = [
    "NEVER_QUANTISED",
    "NF4Weight",
    "WeightMemory",
    "bitsandbytes_config",
    "check_bitsandbytes_config",
    "from_bitsandbytes",
    "is_bitsandbytes",
    "is_quantisable",
    "nf4_bytes",
    "parts_of",
    "quantize_checkpoint",
    "quantize_weight",
    "stated_shape",
    "to_bitsandbytes",
    "weight_memory",
]
