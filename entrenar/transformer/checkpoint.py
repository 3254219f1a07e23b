"""Open a checkpoint, whichever of the two kinds it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from entrenar.errors import CheckpointError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.gguf_model import GGUFModel
from entrenar.transformer.hf_folder import HFFolder

if TYPE_CHECKING:
    from entrenar.transformer.tokenizer import Tokenizer

__all__ = ["Checkpoint", "load_tokenizer", "open_checkpoint"]


class Checkpoint(Protocol):
    """What both kinds of checkpoint offer."""

    path: Path
    config: TransformerConfig
    document: dict[str, Any]
    quantised: dict[str, tuple[int, ...]]
    stop_token_ids: tuple[int, ...]

    def names(self) -> list[str]:
        """Return the Hugging Face names of the tensors, in the order they are read."""

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as float32."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), one at a time."""

    def stored(self) -> Iterator[tuple[str, torch.Tensor | NF4Weight]]:
        """Yield (Hugging Face name, weight), one at a time; NF4 where the files hold that."""

    def stored_types(self) -> dict[str, int]:
        """Return how many parameters the files hold in each type."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None where the checkpoint has none."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file; reads headers, no weights.

    Raises:
        CheckpointError: There is nothing there, or not a whole model.
        UnsupportedModelError: A model that is not implemented.
    """
    where = Path(path).expanduser()
    if where.is_dir():
        return HFFolder(where)
    if where.is_file():
        if where.suffix in (".safetensors", ".json"):
            raise CheckpointError(
                f"{where}: is one file of a model folder", f"pass the folder, {where.parent}"
            )
        return GGUFModel(where)
    raise CheckpointError(
        f"{where}: no such file or folder",
        "pass a Hugging Face model folder or a GGUF file on this machine; models are not downloaded",
    )


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or None where it has none."""
    return open_checkpoint(path).tokenizer()
