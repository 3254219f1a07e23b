"""Write a model as a Hugging Face folder: config, safetensors shards with an index, tokenizer files.

Weights come one at a time, so peak memory is one shard. In NF4 the decoder's linears are written as
bitsandbytes writes them, which transformers and this package read without quantising again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from entrenar.errors import ConfigError, UnsupportedModelError
from entrenar.finetune.files import appearing_folder
from entrenar.quant import NF4Weight, bitsandbytes_config, to_bitsandbytes
from entrenar.transformer.checkpoint import Checkpoint

__all__ = ["MERGED_KEY", "check_new_folder", "write_model"]

# Entry of config.json that lists the adapters a model already contains.
MERGED_KEY = "entrenar_merged_adapters"
_SHARD_BYTES = 5_000_000_000
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
# What transformers calls the classes whose names do not follow from the model type.
_ARCHITECTURES = {"smollm3": "SmolLM3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def check_new_folder(folder: Path) -> None:
    """Refuse a path that is not a missing or empty folder.

    Raises:
        ConfigError: It holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder", "choose a new one")


def write_model(
    folder: Path,
    source: Checkpoint,
    weights: Iterable[tuple[str, torch.Tensor | NF4Weight]],
    dtype: str,
    double_quant: bool | None = None,
    merged: Iterable[str] = (),
) -> None:
    """Write a model folder; it appears once, complete.

    Args:
        folder: A folder that is missing or empty.
        source: The checkpoint the model comes from: its config and tokenizer go along.
        weights: (Hugging Face name, weight) of every weight, each in its final dtype.
        dtype: Name of the dense weights' dtype, for the config.
        double_quant: Whether the NF4 weights' scales are quantised; None where no weight is NF4.
        merged: Fingerprints of the adapters the weights contain, to be listed in the config.

    Raises:
        ConfigError: The folder is not empty.
        UnsupportedModelError: The GGUF file has a rotation that a config.json cannot state.
    """
    check_new_folder(folder)
    document = _document(source, dtype)
    if double_quant is not None:
        document["quantization_config"] = bitsandbytes_config(double_quant, dtype)
    if merged:
        document[MERGED_KEY] = sorted(merged)
    with appearing_folder(folder) as temporary:
        _write_shards(temporary, weights)
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        _write_tokenizer(temporary, source)


def _write_shards(folder: Path, weights: Iterable[tuple[str, torch.Tensor | NF4Weight]]) -> None:
    shards: list[dict[str, str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        path = folder / f"shard-{len(shards)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        shards.append(dict.fromkeys(held, path.name))
        held.clear()

    for name, weight in weights:
        tensors = to_bitsandbytes(name, weight) if isinstance(weight, NF4Weight) else {name: weight}
        count = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if held and size + count > _SHARD_BYTES:
            write()
            size = 0
        held.update(tensors)
        size, total = size + count, total + count
    write()
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(shard, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _document(source: Checkpoint, dtype: str) -> dict[str, Any]:
    left_out = ("quantization_config", "dtype")
    # null says something in a config.json: no window, no soft cap; in a GGUF file's it is what is unstated
    kept = source.path.is_dir()
    document = {
        k: v for k, v in source.document.items() if k not in left_out and (kept or v is not None)
    }
    if (document.get("rope_parameters") or {}).get("rope_type") == "factors":
        raise UnsupportedModelError(
            f"{source.path} stretches its rotation by a table that config.json cannot state",
            "merge into the Hugging Face checkpoint of the same model",
        )
    if not document.get("rope_parameters"):
        document.pop("rope_parameters", None)
    kind = source.config.model_type
    document.setdefault(
        "architectures", [_ARCHITECTURES.get(kind, f"{kind.capitalize()}ForCausalLM")]
    )
    document["torch_dtype"] = dtype
    return document


def _write_tokenizer(folder: Path, source: Checkpoint) -> None:
    if source.path.is_dir():
        for name in _COPIED:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
        return
    tokenizer = source.tokenizer()
    if tokenizer is None:
        return
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.update(tokenizer.special_tokens)
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
