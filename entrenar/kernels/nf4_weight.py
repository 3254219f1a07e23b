"""NF4 weights in torch storage: what ``nf4_quantize`` returns and the NF4 products read.

Apart from the kernels so that it can be imported where triton is absent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["NF4Weight"]


@dataclasses.dataclass(frozen=True)
class NF4Weight:
    """A 4-bit NormalFloat weight; the twin of ``entrenar.reference.nf4.NF4Weight``.

    Attributes:
        codes: uint8 [ceil(n/2)], two codes to a byte, the first in the high nibble.
        absmax: float32 [ceil(n/block_size)], or None with double quantisation.
        shape: Shape of the weight.
        dtype: dtype that decoding gives unless told otherwise.
        block_size: Weights that share one absmax.
        absmax_codes: uint8 [ceil(n/block_size)], codes of the absmax less ``offset``.
        absmax2: float32, one per 256 absmax codes.
        offset: float32 [1], mean of the absmax.
    """

    codes: torch.Tensor
    absmax: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int = 64
    absmax_codes: torch.Tensor | None = None
    absmax2: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    @property
    def double_quant(self) -> bool:
        """Whether the absmax is itself quantised."""
        return self.absmax_codes is not None

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all its storage."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, as they are."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def tensors(self) -> list[torch.Tensor]:
        """Return the storage it consists of."""
        return [v for v in self.fields().values() if isinstance(v, torch.Tensor)]

    def to(self, device: str | torch.device) -> NF4Weight:
        """Return the weight with its storage on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.fields().items()
        }
        return NF4Weight(**moved)
