"""A checkpoint in a Hugging Face folder: config.json, safetensors shards, tokenizer files.

Weights are one ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names; a
stray shard beside them is not read. Names in the index must be plain file names; a shard may be a
symbolic link, as it is in the hub's own cache. Linears that bitsandbytes saved in NF4 are read as they
are, without decoding them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from entrenar.errors import CheckpointError, UnsupportedModelError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call
from entrenar.quant import (
    check_bitsandbytes_config,
    from_bitsandbytes,
    is_bitsandbytes,
    parts_of,
    stated_shape,
)
from entrenar.transformer.config import TransformerConfig, token_ids
from entrenar.transformer.safetensors_file import SafetensorsFile
from entrenar.transformer.weights import check_tensors, is_ignored

if TYPE_CHECKING:
    from entrenar.transformer.tokenizer import Tokenizer

__all__ = ["HFFolder", "read_json"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, is not JSON, or holds something else than an object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not valid JSON ({error})", "download it again"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: holds a {type(parsed).__name__}, wanted an object", "")
    return parsed


def read_model_config(path: Path) -> tuple[TransformerConfig, dict[str, Any]]:
    """Read a ``config.json``; no weights need lie beside it.

    Returns:
        The model's config, and the content of the file.

    Raises:
        CheckpointError: The file cannot be read, or its weights are quantised in a way not read here.
        UnsupportedModelError: It is of a model that is not implemented.
        ConfigError: A field is not sensible.
    """
    document = read_json(path)
    if document.get("quantization_config"):
        check_bitsandbytes_config(document["quantization_config"])
    plain = {k: v for k, v in document.items() if k != "quantization_config"}
    return TransformerConfig.from_hf(plain), document


class HFFolder:
    """A folder whose config and tensor headers have been read and agree.

    Args:
        path: The folder.

    Attributes:
        config: The model's config.
        document: The content of ``config.json``.
        quantised: Names of the weights that the folder holds in NF4, each with its shape.
        stop_token_ids: Ids that end a text: generation_config.json's where it states any, else
            config.json's.

    Raises:
        CheckpointError: A file or tensor is missing, extra or damaged.
        UnsupportedModelError: The folder holds another kind of model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise _explain(path)
        self.config, self.document = read_model_config(path / "config.json")
        quantization = self.document.get("quantization_config")
        self.stop_token_ids = self.config.eos_token_ids
        if (path / "generation_config.json").is_file():
            generation = read_json(path / "generation_config.json")
            self.stop_token_ids = token_ids(generation, "eos_token_id") or self.stop_token_ids
        self._files = self._open()
        self.quantised = self._find_quantised() if quantization else {}
        inner = {p for name in self.quantised for p in parts_of(name, self._files)[1:]}
        self._names = [name for name in self._files if name not in inner]
        shapes = {name: self._files[name].entries[name].shape for name in self._names}
        check_tensors(str(path), {**shapes, **self.quantised}, self.config)

    def names(self) -> list[str]:
        """Return the names of the weights, in the order they are read."""
        return list(self._names)

    def read(self, name: str) -> torch.Tensor:
        """Return one weight as float32, decoded where it is held in NF4.

        Raises:
            CheckpointError: It is not there or cannot be read.
            UnsupportedModelError: It does not hold floating-point numbers.
        """
        found = self.read_stored(name)
        return found if isinstance(found, torch.Tensor) else call("nf4_dequantize", found)

    def read_stored(self, name: str) -> torch.Tensor | NF4Weight:
        """Return one weight as the files hold it: in NF4, else as float32.

        Raises:
            CheckpointError: It is not there or cannot be read.
            UnsupportedModelError: It does not hold floating-point numbers.
        """
        if name in self.quantised:
            parts = {p: self._files[p].read(p) for p in parts_of(name, self._files)}
            weight = from_bitsandbytes(name, parts)
            return dataclasses.replace(weight, dtype=torch.float32)
        file = self._files[name]
        if file.entries[name].dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{file.path}: {name} is {file.entries[name].dtype}, wanted {' or '.join(_FLOATS)}",
                "the weights are quantised; use the unquantised checkpoint and quantize='nf4'",
            )
        return file.read(name).to(torch.float32)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), one at a time, the file's order."""
        for name in self._names:
            yield name, self.read(name)

    def stored(self) -> Iterator[tuple[str, torch.Tensor | NF4Weight]]:
        """Yield (Hugging Face name, weight as it is held), one at a time, the file's order."""
        for name in self._names:
            yield name, self.read_stored(name)

    def stored_types(self) -> dict[str, int]:
        """Return how many parameters the files hold in each type, such as ``"BF16"`` or ``"NF4"``."""
        found: dict[str, int] = {}
        for name in self._names:
            entry = self._files[name].entries[name]
            kind = "NF4" if name in self.quantised else entry.dtype
            count = math.prod(self.quantised.get(name, entry.shape))
            found[kind] = found.get(kind, 0) + count
        return found

    def tokenizer(self) -> Tokenizer | None:
        """Return the folder's tokenizer, or None where it has no tokenizer.json."""
        if not (self.path / "tokenizer.json").is_file():
            return None
        from entrenar.transformer.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.path, stop_token_ids=self.stop_token_ids)

    def _find_quantised(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name in self._files:
            if is_bitsandbytes(name, self._files):
                state = parts_of(name, self._files)[-1]
                found[name] = stated_shape(name, self._files[state].read(state))
        return found

    def _open(self) -> dict[str, SafetensorsFile]:
        if (self.path / _SINGLE).is_file():
            file = SafetensorsFile(self.path / _SINGLE)
            return {name: file for name in file.entries if not is_ignored(name)}
        if (self.path / _INDEX).is_file():
            return self._open_shards()
        raise _explain(self.path)

    def _open_shards(self) -> dict[str, SafetensorsFile]:
        weight_map = read_json(self.path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / _INDEX}: has no weight_map", "download it again")
        by_shard: dict[str, list[str]] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
                raise CheckpointError(
                    f"{self.path / _INDEX}: shard {shard!r} is not a plain file name",
                    "the index would read outside the model folder",
                )
            by_shard.setdefault(shard, []).append(tensor)
        absent = [shard for shard in by_shard if not (self.path / shard).is_file()]
        if absent:
            lost = [tensor for shard in absent for tensor in by_shard[shard]]
            raise CheckpointError(
                f"{self.path}: shards {', '.join(absent)} are missing, with {len(lost)} tensors, "
                f"{lost[0]} first",
                "download them",
            )
        found = {}
        for shard, tensors in by_shard.items():
            file = SafetensorsFile(self.path / shard)
            lost = [tensor for tensor in tensors if tensor not in file.entries]
            if lost:
                raise CheckpointError(
                    f"{file.path}: has no tensor {lost[0]}, which the index says is there",
                    "index and shards are not of the same model; download them again",
                )
            found.update({tensor: file for tensor in tensors if not is_ignored(tensor)})
        return found


def _explain(path: Path) -> CheckpointError:
    """Say what a folder without a readable model holds instead."""
    names = sorted(p.name for p in path.iterdir())
    gguf = [n for n in names if n.endswith(".gguf")]
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    if "adapter_config.json" in names:
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base"
        return CheckpointError(
            f"{path}: is a LoRA adapter, not a model", f"load {base} and apply the adapter to it"
        )
    if gguf:
        return CheckpointError(
            f"{path}: holds {gguf[0]} and no Hugging Face model", f"pass {path / gguf[0]} itself"
        )
    if pickled:
        return UnsupportedModelError(
            f"{path}: holds {pickled[0]} and no safetensors file; pickled weights can run code and "
            "are not read",
            "convert them with transformers' save_pretrained, or use a safetensors checkpoint",
        )
    if "config.json" in names:
        return CheckpointError(
            f"{path}: has neither {_SINGLE} nor {_INDEX}", "download the weights"
        )
    return CheckpointError(
        f"{path}: has no config.json", "pass a Hugging Face model folder or a GGUF file"
    )
