"""A checkpoint in a GGUF file: config, tensors under their Hugging Face names, tokenizer.

llama.cpp names everything its own way, states sizes as metadata, and for the llama architecture
permutes the rows of q and k so that rotation acts on neighbouring rows; here they are put back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from entrenar.errors import CheckpointError, UnsupportedModelError
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.families import FAMILIES, Family
from entrenar.transformer.gguf_file import GGUFFile
from entrenar.transformer.weights import check_tensors

if TYPE_CHECKING:
    from entrenar.transformer.tokenizer import Tokenizer

__all__ = ["GGUFModel", "hf_name", "unpermute"]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Return a tensor's Hugging Face name; a name that has none is returned as it is."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return _TOP.get(name, name)
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives q and k of the llama architecture.

    Args:
        rows: [heads * head_dim, ...]; each head's rows interleave its two halves.
        heads: Heads in these rows.
    """
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


class GGUFModel:
    """A file whose header has been read and describes a model that is implemented.

    Args:
        path: The file.

    Attributes:
        config: The model's config.
        document: The same as the content of a ``config.json``.
        quantised: Empty: other formats of 4 bits are decoded as they are read.
        stop_token_ids: Ids that end a text, as the metadata states them.

    Raises:
        CheckpointError: The file is damaged, or a tensor is missing, extra or of a wrong shape.
        UnsupportedModelError: Its architecture or block format is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quantised: dict[str, tuple[int, ...]] = {}
        self.file = GGUFFile(path)
        self._family = _family(self.file)
        self.document = _hf_config(self.file, self._family)
        self.config = TransformerConfig.from_hf(self.document)
        self.stop_token_ids = self.config.eos_token_ids
        names = [name for name in self.file.tensors if name != _ROPE_FACTORS]
        self._names = {hf_name(name): name for name in names}
        shapes = {new: self.file.tensors[old].shape for new, old in self._names.items()}
        check_tensors(str(path), shapes, self.config)

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order they are read."""
        return list(self._names)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as float32, by its Hugging Face name."""
        value = self.file.read(self._names[name])
        if self._family.gguf_permuted:
            if ".self_attn.q_proj." in name:
                value = unpermute(value, self.config.num_attention_heads)
            elif ".self_attn.k_proj." in name:
                value = unpermute(value, self.config.num_key_value_heads)
        return torch.from_numpy(value)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), one at a time, in the file's order."""
        for name in self._names:
            yield name, self.read(name)

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what :meth:`tensors` yields."""
        return self.tensors()

    def stored_types(self) -> dict[str, int]:
        """Return how many parameters the file holds in each type, such as ``"Q4_1"``."""
        found: dict[str, int] = {}
        for name in self._names.values():
            tensor = self.file.tensors[name]
            found[tensor.kind] = found.get(tensor.kind, 0) + math.prod(tensor.shape)
        return found

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer the metadata describes, or None where it describes none."""
        if "tokenizer.ggml.tokens" not in self.file.metadata:
            return None
        from entrenar.transformer.gguf_tokenizer import tokenizer_from_metadata

        return tokenizer_from_metadata(
            self.file.metadata, str(self.path), stop_token_ids=self.stop_token_ids
        )


def _family(file: GGUFFile) -> Family:
    architecture = file.metadata.get("general.architecture")
    for family in FAMILIES.values():
        if family.gguf and family.gguf == architecture:
            if file.metadata.get(f"{architecture}.expert_count"):
                break
            return family
    kind = "mixture of experts" if f"{architecture}.expert_count" in file.metadata else "GGUF"
    raise UnsupportedModelError(
        f"{file.path}: {kind} architecture {architecture!r} is not implemented",
        f"implemented are {', '.join(f.gguf for f in FAMILIES.values() if f.gguf)}",
    )


def _hf_config(file: GGUFFile, family: Family) -> dict[str, Any]:
    """State the metadata under the keys of a config.json, which is then read as one."""
    metadata, prefix = file.metadata, family.gguf

    def get(key: str) -> Any:
        return metadata.get(f"{prefix}.{key}")

    def need(key: str) -> Any:
        if get(key) is None:
            raise CheckpointError(f"{file.path}: metadata {prefix}.{key} is missing", "")
        return get(key)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: has no tensor token_embd.weight", "")
    heads, kv_heads = need("attention.head_count"), get("attention.head_count_kv")
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise UnsupportedModelError(f"{file.path}: layers differ in their number of heads", "")
    if get("attention.value_length") != get("attention.key_length"):
        raise UnsupportedModelError(f"{file.path}: keys and values differ in size", "")
    config = {
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": get("attention.key_length") or _quotient(need("embedding_length"), heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope(file, prefix),
    }
    rotated = get("rope.dimension_count")
    if rotated is None:
        return config
    if isinstance(rotated, bool) or not isinstance(rotated, int):
        raise CheckpointError(f"{file.path}: {prefix}.rope.dimension_count is {rotated!r}", "")
    head_dim = TransformerConfig.from_hf(config).head_dim
    return {**config, "partial_rotary_factor": rotated / head_dim}


def _quotient(hidden: Any, heads: Any) -> int | None:
    """Return the head size that llama.cpp takes where none is stated, or None for from_hf to judge."""
    good = type(hidden) is type(heads) is int and heads > 0 and hidden % heads == 0
    return hidden // heads if good else None


def _rope(file: GGUFFile, prefix: str) -> dict[str, Any]:
    if _ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": file.read(_ROPE_FACTORS).tolist()}
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    stated = {
        "rope_type": kind,
        "factor": file.metadata.get(f"{prefix}.rope.scaling.factor"),
        "original_max_position_embeddings": file.metadata.get(
            f"{prefix}.rope.scaling.original_context_length"
        ),
    }
    return {key: value for key, value in stated.items() if value is not None}
