"""Micro-batches through a captured graph: padded to few forms, so that a capture serves many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from entrenar.autograd import Tape, Tensor, current_stream
from entrenar.autograd.graph import Graph
from entrenar.finetune.chat import Example
from entrenar.finetune.instruct_pipeline.packed import PackedBatch, pack
from entrenar.optable import call

__all__ = ["GraphedMicroBatches", "padded"]

# Tokens are padded to a multiple of the first, or of the second past eight of it; rows that carry loss
# to a quarter, a half or all of the tokens. That is a dozen forms up to 512 tokens.
_FINE, _COARSE = 64, 256
_FORMS = 8
_IGNORED = -100

Loss = Callable[[PackedBatch, Any, bool, Any], tuple[Tensor, int]]


def padded(examples: Sequence[Example], samples: int, context: int) -> PackedBatch:
    """Pack samples and pad them to a form: at least one token more, in a segment of its own, without loss.

    Args:
        examples: The samples.
        samples: Segments to pad to; empty ones are added.
        context: Positions of the padding stay below it.

    Returns:
        All of it in host memory.
    """
    packed = pack(examples, "cpu")
    tokens, rows = packed.ids.shape[0], packed.rows.shape[0]
    unit = _FINE if tokens < 8 * _FINE else _COARSE
    length = (tokens // unit + 1) * unit
    width = next(w for w in (length // 4, length // 2, length) if w >= rows)
    # The last position is that of the longest sample of the form, so that tables made for one of its
    # batches serve all.
    places = np.minimum(np.arange(tokens, length, dtype=np.int64), context - 1)
    ends = [tokens] * max(samples + 1 - len(packed.cu_seqlens), 0) + [length]
    return PackedBatch(
        ids=torch.from_numpy(_filled(packed.ids.numpy(), length, 0)),
        positions=np.concatenate([packed.positions, places]),
        cu_seqlens=np.concatenate([packed.cu_seqlens, ends]).astype(np.int32),
        rows=torch.from_numpy(_filled(packed.rows.numpy(), width, 0)),
        targets=torch.from_numpy(_filled(packed.targets.numpy(), width, _IGNORED)),
    )


def _filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(length - len(array), value, dtype=array.dtype)])


class GraphedMicroBatches:
    """Adds gradients and losses of micro-batches, each form captured once and then replayed.

    Args:
        loss: The pipeline's loss of a packed batch.
        device: Where it computes.
        watch: The arena, and whatever else a capture holds on to.
        context: The model's context.
        samples: Samples of a micro-batch; where it varies, each number has forms of its own.

    Attributes:
        total: The summed loss since :meth:`begin`, float32 [1] on the device.
        graph: The captured forms.
    """

    def __init__(
        self, loss: Loss, device: str, watch: Sequence[Any], context: int, samples: int
    ) -> None:
        self._loss = loss
        self._context, self._samples = context, samples
        self._recompute = self._drops = False
        self.total = Tensor(torch.zeros(1, dtype=torch.float32, device=device))
        self.graph = Graph(
            self._micro_batch, device=device, watch=(*watch, self.total), capacity=_FORMS
        )

    def begin(self) -> None:
        """Set the summed loss to zero."""
        call("fill_", self.total.data, 0.0, stream=current_stream(self.total.device))

    def add(
        self,
        examples: Sequence[Example],
        scale: float,
        recomputes: Callable[[PackedBatch], bool],
        seeds: np.ndarray | None,
    ) -> None:
        """Add the gradient and the loss of a micro-batch.

        Args:
            examples: Its samples.
            scale: Factor of the gradient.
            recomputes: Says of a packed batch whether activations are computed again in backward.
            seeds: Of the dropout masks, int64, one a linear layer; None without dropout.
        """
        batch = padded(examples, self._samples, self._context)
        self._recompute, self._drops = recomputes(batch), seeds is not None
        given = np.zeros(1, dtype=np.int64) if seeds is None else seeds
        self.graph(
            batch.ids, batch.positions, batch.cu_seqlens, batch.rows, batch.targets,
            float(scale), given, key=(self._recompute, self._drops),
        )  # fmt: skip

    def _micro_batch(
        self,
        ids: torch.Tensor,
        positions: Any,
        cu_seqlens: Any,
        rows: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        batch = PackedBatch(ids, positions, cu_seqlens, rows, targets)
        with Tape(overwrite_activations=True) as tape:
            # a number that is the same each time where there is no dropout: the capture bakes it in
            loss, _ = self._loss(batch, scale, self._recompute, seeds if self._drops else 0)
        tape.backward(loss)
        value = loss.data.view(1)
        call("add_", self.total.data, value, stream=current_stream(value.device))
