"""One decoder block on packed rows: attention and MLP, each behind a norm fused with the residual.

Rows of all sequences of a batch lie one after another, [T, hidden]; ``cu_seqlens`` says where each
sequence begins, so nothing is padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from entrenar.autograd import Tensor, ops
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.kv_cache import KVCache
from entrenar.transformer.linear import Linear

__all__ = ["Block", "Rows"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What every block needs to know of the rows it is given.

    Attributes:
        positions: int64 [T], place of each row in its sequence.
        cu_seqlens: int32 [B+1], first row of each sequence and the end; None for one sequence.
        rotation: cos and sin, float32 [P, R/2] each.
        local_rotation: Those of layers that rotate by a base of their own; None where none do.
        cache: Keys and values of earlier positions; then the rows are of one sequence.
        dropout_seed: Seed of the step while training, or every layer's on the device; None applies no
            dropout.
    """

    positions: torch.Tensor
    cu_seqlens: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor]
    local_rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    cache: KVCache | None = None
    dropout_seed: int | torch.Tensor | None = None


class Block:
    """One decoder block.

    Args:
        config: The model's.
        layer: Its index.
        linears: Its linear layers by the last part of their names.
        norms: Its norm weights by the last part of their names.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        linears: Mapping[str, Linear],
        norms: Mapping[str, Tensor],
    ) -> None:
        self.config = config
        self.layer = layer
        self.window = config.windows[layer]
        self.rotates = config.rope_layers[layer]
        self.rotates_locally = config.local_rope_layers[layer]
        self.linears = dict(linears)
        self.norms = dict(norms)

    def __call__(self, x: Tensor, residual: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        """Apply the block.

        Args:
            x: [T, hidden], what is to be added to the residual stream: the output of the block
                before, or the embedding.
            residual: [T, hidden], the stream before that addition; None in the first block.
            rows: What the rows are.

        Returns:
            The block's own addition and the stream before it, both [T, hidden]; adding them is
            fused into the next norm.
        """
        eps = self.config.rms_norm_eps
        weight = self.norms["input_layernorm"]
        if residual is None:
            normed, stream = ops.rms_norm(x, weight, eps), x
        else:
            normed, stream = ops.rms_norm_residual(x, residual, weight, eps)
        attended = self._attention(normed, rows)
        weight = self.norms["post_attention_layernorm"]
        if self.config.post_norms:
            attended = ops.rms_norm(attended, weight, eps)
            weight = self.norms["pre_feedforward_layernorm"]
        normed, stream = ops.rms_norm_residual(attended, stream, weight, eps)
        mixed = self._mlp(normed, rows.dropout_seed)
        if self.config.post_norms:
            mixed = ops.rms_norm(mixed, self.norms["post_feedforward_layernorm"], eps)
        return mixed, stream

    def _attention(self, x: Tensor, rows: Rows) -> Tensor:
        config, seed = self.config, rows.dropout_seed
        q, k, v = self._heads(x, seed)
        if config.qk_norm:
            q = ops.rms_norm(q, self.norms["q_norm"], config.rms_norm_eps)
            k = ops.rms_norm(k, self.norms["k_norm"], config.rms_norm_eps)
        if self.rotates:
            tables = rows.local_rotation if self.rotates_locally else rows.rotation
            assert tables is not None
            # in place: nothing reads the unrotated rows, neither forward nor backward
            q, k = ops.rope(q, k, *tables, rows.positions, inplace=True)
        if rows.cache is not None:
            keys, values = rows.cache.append(self.layer, k.data, v.data)
            k, v = Tensor(keys), Tensor(values)
        mixed = ops.attention(
            q,
            k,
            v,
            rows.cu_seqlens if rows.cache is None else None,
            rows.cu_seqlens if rows.cache is None else None,
            scale=config.attention_scale,
            window=self.window,
            softcap=config.attn_logit_softcapping,
        )
        width = config.num_attention_heads * config.head_dim
        return self.linears["o_proj"](ops.reshape(mixed, (-1, width)), seed)

    def _heads(self, x: Tensor, seed: int | torch.Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, heads, D], and keys and values [T, kv heads, D]."""
        config = self.config
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        if config.fused_projections:
            together = self.linears["qkv_proj"](x, seed)
            q, k, v = ops.split(together, (heads * size, kv_heads * size, kv_heads * size))
        else:
            q, k, v = (self.linears[name](x, seed) for name in ("q_proj", "k_proj", "v_proj"))
        return (
            ops.reshape(q, (-1, heads, size)),
            ops.reshape(k, (-1, kv_heads, size)),
            ops.reshape(v, (-1, kv_heads, size)),
        )

    def _mlp(self, x: Tensor, seed: int | torch.Tensor | None) -> Tensor:
        if self.config.fused_projections:
            inner = self.config.intermediate_size
            gate, up = ops.split(self.linears["gate_up_proj"](x, seed), (inner, inner))
        else:
            gate = self.linears["gate_proj"](x, seed)
            up = self.linears["up_proj"](x, seed)
        return self.linears["down_proj"](_gated(self.config.hidden_act, gate, up), seed)


def _gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return ops.swiglu(gate, up)
    if activation == "relu":
        return ops.multiply(ops.relu(gate), up)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return ops.multiply(ops.gelu(gate, approximate), up)
