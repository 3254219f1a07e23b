"""A micro-batch as one packed row of tokens: samples end to end, no padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from entrenar.autograd import upload
from entrenar.finetune.chat import Example

__all__ = ["PackedBatch", "pack"]


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Storage that one forward pass reads.

    Attributes:
        ids: int64 [T], tokens of all samples; the last of each, which predicts nothing, is left out.
        positions: int64 [T] in host memory, counted from 0 in each sample.
        cu_seqlens: int32 [B + 1] in host memory, where each sample starts, and T.
        rows: int64 [R], the positions that predict a response token: only they reach the lm_head.
        targets: int64 [R], the tokens they predict.
    """

    ids: torch.Tensor
    positions: np.ndarray
    cu_seqlens: np.ndarray
    rows: torch.Tensor
    targets: torch.Tensor


def pack(examples: Sequence[Example], device: str) -> PackedBatch:
    """Join samples, each of at least two tokens, one of them to be learned, without waiting for copies.

    Args:
        examples: The samples.
        device: Where the storage goes.
    """
    lengths = [len(example) - 1 for example in examples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found = [
        np.flatnonzero(e.is_response[1:]) + start
        for e, start in zip(examples, starts, strict=False)
    ]
    rows = np.concatenate(found).astype(np.int64)
    targets = np.concatenate([example.ids[1:][example.is_response[1:]] for example in examples])
    return PackedBatch(
        ids=upload(np.concatenate([example.ids[:-1] for example in examples]), device),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        cu_seqlens=starts.astype(np.int32),
        rows=upload(rows, device),
        targets=upload(targets, device),
    )
