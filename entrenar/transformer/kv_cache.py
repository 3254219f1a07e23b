"""Keys and values of the positions already seen, so that a new token costs one row."""

from __future__ import annotations

import torch

from entrenar.autograd.ops.nf4_gemm import DecodedWeights
from entrenar.errors import ShapeMismatchError
from entrenar.transformer.config import TransformerConfig

__all__ = ["KVCache"]

_FIRST_ROWS = 64


class KVCache:
    """Growing buffers for one sequence: rotated keys, and values, of every layer.

    Args:
        config: The model's.
        dtype: Storage dtype of keys and values.
        device: Where they lie.
        capacity: Most positions; buffers grow up to it by doubling.

    Attributes:
        length: Positions held by every layer.
        weights: The model's 4-bit weights decoded, which the products of a token read; None decodes
            each in its turn.
    """

    def __init__(
        self,
        config: TransformerConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        capacity: int | None = None,
    ) -> None:
        self.capacity = config.context_length if capacity is None else capacity
        self.length = 0
        self.weights: DecodedWeights | None = None
        rows = min(_FIRST_ROWS, self.capacity)
        shape = (rows, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = (
            [
                torch.empty(shape, dtype=dtype, device=device)
                for _ in range(config.num_hidden_layers)
            ]
            for _ in range(2)
        )

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more positions in every layer.

        Raises:
            ShapeMismatchError: They do not fit in the capacity.
        """
        wanted = self.length + count
        if wanted > self.capacity:
            raise ShapeMismatchError(
                f"{self.length} positions and {count} new ones are {wanted}, the cache holds "
                f"{self.capacity}",
                "shorten the prompt or generate fewer tokens",
            )
        if not self._keys or wanted <= self._keys[0].shape[0]:
            return
        rows = min(max(wanted, 2 * self._keys[0].shape[0]), self.capacity)
        self._keys = [self._grown(buffer, rows) for buffer in self._keys]
        self._values = [self._grown(buffer, rows) for buffer in self._values]

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new rows and return all of its rows, as views.

        Args:
            layer: Index of the layer.
            keys: [T, kv heads, head_dim], rotated.
            values: The same shape.

        Returns:
            Keys and values [length + T, kv heads, head_dim]. ``length`` itself moves once all
            layers have stored theirs, by :meth:`advance`.
        """
        start, end = self.length, self.length + keys.shape[0]
        self._keys[layer][start:end].copy_(keys)
        self._values[layer][start:end].copy_(values)
        return self._keys[layer][:end], self._values[layer][:end]

    def advance(self, count: int) -> None:
        """Count ``count`` more positions as held."""
        self.length += count

    def _grown(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        grown = torch.empty((rows, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
        grown[: self.length].copy_(buffer[: self.length])
        return grown
