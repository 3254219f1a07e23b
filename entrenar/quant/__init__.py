"""NF4 weights of a checkpoint: quantising them by name, and the memory they take."""

from __future__ import annotations

from entrenar.kernels.nf4_weight import NF4Weight
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
    "is_quantisable",
    "nf4_bytes",
    "quantize_checkpoint",
    "quantize_weight",
    "weight_memory",
]
