"""Write a base model with its adapters added: a plain Hugging Face folder that needs no adapter.

The update is added in float32 to the weights as the checkpoint holds them and rounded once to the
type of the file. Merging into NF4 would round base and update together to 16 levels and lose most
of the update, so it is not offered.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from entrenar.errors import AdapterError, ConfigError, UnsupportedModelError
from entrenar.finetune.files import appearing_folder
from entrenar.lora import LoraAdapters
from entrenar.optable import call
from entrenar.transformer.checkpoint import Checkpoint, open_checkpoint

__all__ = ["merge_adapter"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHARD_BYTES = 4 << 30
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def merge_adapter(
    model: str | Path, adapters: LoraAdapters, folder: str | Path, dtype: str = "bfloat16"
) -> int:
    """Write the merged model; the folder appears once, complete.

    Args:
        model: The base model's folder or GGUF file, read again one tensor at a time.
        adapters: What to add.
        folder: A folder that is missing or empty.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.

    Returns:
        How many weights the adapters changed.

    Raises:
        ConfigError: The dtype is another, or the folder is not empty.
        UnsupportedModelError: The GGUF file has a rotation that a config.json cannot state.
        AdapterError: The adapters are for other layers than the model's.
    """
    target = Path(folder)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}", "choose one")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder", "choose a new one")
    source = open_checkpoint(model)
    wanted = {f"{name}.weight" for name in adapters.layers}
    absent = wanted - set(source.names())
    if absent:
        raise AdapterError(f"{model} has no {min(absent)}", "the adapter is of another model")
    document = _document(source, dtype)
    with appearing_folder(target) as temporary:
        _write_shards(temporary, _merged(source, adapters, _DTYPES[dtype]))
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        _write_tokenizer(temporary, source)
    return len(wanted)


def _merged(
    source: Checkpoint, adapters: LoraAdapters, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source.tensors():
        layer = adapters.layers.get(name.removesuffix(".weight"))
        if layer is not None:
            tensor = tensor.contiguous().clone()
            call("add_", tensor, layer.delta().to("cpu"))
        yield name, tensor.to(dtype).contiguous()


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    shards: list[dict[str, str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        path = folder / f"shard-{len(shards)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        shards.append(dict.fromkeys(held, path.name))
        held.clear()

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if held and size + count > _SHARD_BYTES:
            write()
            size = 0
        held[name] = tensor
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
    document = {k: v for k, v in source.document.items() if v is not None}
    if (document.get("rope_parameters") or {}).get("rope_type") == "factors":
        raise UnsupportedModelError(
            f"{source.path} stretches its rotation by a table that config.json cannot state",
            "merge into the Hugging Face checkpoint of the same model",
        )
    if not document.get("rope_parameters"):
        document.pop("rope_parameters", None)
    if "architectures" not in document and source.config.model_type in _ARCHITECTURES:
        document["architectures"] = [_ARCHITECTURES[source.config.model_type]]
    document.pop("dtype", None)
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
