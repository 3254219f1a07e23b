"""One linear layer of a decoder: its frozen weight, dense or NF4, and the adapter it may carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from entrenar.autograd import DecodeAhead, Tensor, ops
from entrenar.kernels.nf4_weight import NF4Weight

if TYPE_CHECKING:
    from entrenar.lora import LoraLayer

__all__ = ["Linear", "layer_seeds"]

# Distinct seeds of neighbouring layers come from one seed of the step by this odd multiplier.
_SEED_STRIDE = 0x9E3779B1


def layer_seeds(seed: int, layers: int) -> np.ndarray:
    """Return the seeds of the first ``layers`` linears in a step with this seed, int64."""
    return _seed_of(seed, np.arange(layers, dtype=np.int64))


def _seed_of(seed: int, index: Any) -> Any:
    """Return the seed of the linear with this number, or of each in an array of numbers."""
    return (seed + index * _SEED_STRIDE) & 0x7FFFFFFF


class Linear:
    """y = x·Wᵀ + bias, plus the adapter's product where one is attached.

    Args:
        name: Full module name, such as ``model.layers.0.mlp.up_proj``.
        index: Its place among the model's linears; tells the dropout masks of layers apart.
        weight: [out_features, in_features].
        bias: [out_features], or None.
        ahead: Decodes a 4-bit weight while the layer before computes; None decodes it in its turn.
    """

    def __init__(
        self,
        name: str,
        index: int,
        weight: Tensor | NF4Weight,
        bias: Tensor | None = None,
        ahead: DecodeAhead | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.weight = weight
        self.bias = bias
        self.ahead = ahead
        self.adapter: LoraLayer | None = None

    def __call__(self, x: Tensor, dropout_seed: int | torch.Tensor | None = None) -> Tensor:
        """Apply the layer to rows.

        Args:
            x: [T, in_features].
            dropout_seed: Seed of the step while training, or every layer's own, int64 [layers] on the
                device, as :func:`layer_seeds` returns them; None applies no dropout.

        Returns:
            [T, out_features].
        """
        adapter = self.adapter
        if adapter is not None:
            dropout = adapter.dropout if dropout_seed is not None else 0.0
            seed: int | torch.Tensor
            if isinstance(dropout_seed, torch.Tensor):
                seed = dropout_seed.narrow(0, self.index, 1)
            else:
                seed = _seed_of(dropout_seed or 0, self.index)
            return ops.lora_linear(
                x,
                self.weight,
                adapter.lora_a,
                adapter.lora_b,
                adapter.scaling,
                self.bias,
                dropout,
                seed,
                self.ahead,
            )
        if isinstance(self.weight, NF4Weight):
            return ops.nf4_linear(x, self.weight, self.bias, self.ahead)
        return ops.linear(x, self.weight, self.bias)
