"""How many bytes weights take in NF4, before and after they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["WeightMemory", "nf4_bytes", "weight_memory"]

# One nested absmax for this many first-level ones, as bitsandbytes has it.
_NESTED_BLOCK = 256


def nf4_bytes(n_weights: int, block_size: int = 64, double_quant: bool = False) -> int:
    """Return the bytes of ``n_weights`` values in NF4: codes and scales, 4.5 or 4.127 bits each.

    Args:
        n_weights: Number of values; Python integers, so counts past 2³¹ are ordinary.
        block_size: Values that share one absmax.
        double_quant: The absmax are 8-bit codes with a float32 scale each 256 and one offset.

    >>> nf4_bytes(128 * 4096 * 4096) == 1073741824 + 33554432 * 4
    True
    """
    blocks = -(-n_weights // block_size)
    codes = -(-n_weights // 2)
    if not double_quant:
        return codes + 4 * blocks
    return codes + blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4


@dataclasses.dataclass(frozen=True)
class WeightMemory:
    """What a set of weights takes.

    Attributes:
        quantised: Weights held in NF4.
        quantised_bytes: Their bytes, codes and scales.
        dense: Weights held as they are.
        dense_bytes: Their bytes.
        names: Names of the quantised tensors.
    """

    quantised: int
    quantised_bytes: int
    dense: int
    dense_bytes: int
    names: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return self.quantised_bytes + self.dense_bytes

    @property
    def bits_per_quantised_weight(self) -> float:
        """Bits of each NF4 weight, scales included; 0 where there is none."""
        return 8 * self.quantised_bytes / self.quantised if self.quantised else 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes saved against holding the quantised weights in 16 bits."""
        return 2 * self.quantised - self.quantised_bytes


def weight_memory(weights: Iterable[tuple[str, Any]]) -> WeightMemory:
    """Return what (name, weight) pairs take; each is an NF4 weight, a Tensor or torch storage."""
    counts = {True: 0, False: 0}
    sizes = {True: 0, False: 0}
    names = []
    for name, weight in weights:
        quantised = isinstance(weight, NF4Weight)
        if quantised:
            count, nbytes = 1, weight.nbytes
            for size in weight.shape:
                count *= size
            names.append(name)
        else:
            data = getattr(weight, "data", weight)
            count, nbytes = data.numel(), data.numel() * data.element_size()
        counts[quantised] += count
        sizes[quantised] += nbytes
    return WeightMemory(counts[True], sizes[True], counts[False], sizes[False], tuple(names))
