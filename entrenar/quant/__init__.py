"""NF4 weights of a checkpoint: quantising them by name, bitsandbytes' files, and memory."""

from __future__ import annotations

from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.quant.bitsandbytes_files import from_bitsandbytes, is_bitsandbytes, to_bitsandbytes
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
    "from_bitsandbytes",
    "is_bitsandbytes",
    "is_quantisable",
    "nf4_bytes",
    "quantize_checkpoint",
    "quantize_weight",
    "to_bitsandbytes",
    "weight_memory",
]
