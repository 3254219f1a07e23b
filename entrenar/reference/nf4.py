"""NF4: 4-bit NormalFloat weights in blocks, and the second quantisation of their scales.

A weight is cut into blocks of ``block_size`` consecutive values. Each block keeps its largest
magnitude, ``absmax``, and one of sixteen codes per value: the level nearest to ``w / absmax``. With
double quantisation the absmax, less their mean, are themselves quantised to 8 bits in blocks of 256.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

__all__ = ["NF4Weight"]


@dataclasses.dataclass(frozen=True)
class NF4Weight:
    """A 4-bit NormalFloat weight in ndarrays; the twin of ``entrenar.kernels.nf4_weight.NF4Weight``.

    Attributes:
        codes: uint8 [ceil(n/2)], two codes to a byte, the first in the high nibble.
        absmax: float32 [ceil(n/block_size)], or None with double quantisation.
        shape: Shape of the weight.
        dtype: Name of the dtype that decoding gives unless told otherwise.
        block_size: Weights that share one absmax.
        absmax_codes: uint8 [ceil(n/block_size)], codes of the absmax less ``offset``.
        absmax2: float32, one per 256 absmax codes.
        offset: float32 [1], mean of the absmax.
    """

    codes: np.ndarray
    absmax: np.ndarray | None
    shape: tuple[int, ...]
    dtype: Any
    block_size: int = 64
    absmax_codes: np.ndarray | None = None
    absmax2: np.ndarray | None = None
    offset: np.ndarray | None = None

    @property
    def double_quant(self) -> bool:
        """Whether the absmax is itself quantised."""
        return self.absmax_codes is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))
