"""Adapter folders exactly as PEFT writes and reads them.

``adapter_config.json`` beside ``adapter_model.safetensors``, whose tensors are named
``base_model.model.<module>.lora_A.weight`` [r, in] and ``….lora_B.weight`` [out, r], B not scaled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from entrenar.errors import AdapterError, ConfigError
from entrenar.lora.adapters import LoraAdapters, check_keys, checked_array
from entrenar.lora.config import ALL_LINEAR, LoraConfig

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "load_adapter", "read_config", "save_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_OLD_WEIGHTS_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."

# PEFT's default where lora_alpha is absent from the file.
_DEFAULT_ALPHA = 8

# Keys that change nothing about what the tensors mean.
_INERT = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    "exclude_modules", "layers_pattern", "layers_to_transform", "loftq_config", "ensure_weight_tying",
}  # fmt: skip
_READ = {
    "alpha_pattern", "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern", "target_modules",
    "use_rslora",
}  # fmt: skip
# What an option that is off may be.
_NOTHING: tuple[Any, ...] = (None, False, {}, [], "")
# Options that change the computation, and what each may be.
_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "alora_invocation_tokens", "arrow_config", "corda_config",
            "fan_in_fan_out", "kasa_config", "layer_replication", "lora_bias", "lora_ga_config",
            "modules_to_save", "monteclora_config", "target_parameters",
            "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config",
        ),
        _NOTHING,
    ),
    "bias": (None, "none"),
    # ways to fill A that leave the base model as it was
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}  # fmt: skip


def save_adapter(
    directory: str | Path, adapters: LoraAdapters, base_model_name_or_path: str | None
) -> None:
    """Write an adapter folder: to a temporary folder beside it, then renamed.

    An existing adapter folder is replaced, its other files kept. The tensor file holds no date, path
    or version, so equal adapters give equal bytes.

    Args:
        directory: The folder; created where absent.
        adapters: What to write; B is written as it is, not scaled.
        base_model_name_or_path: Model that the adapter belongs to.

    Raises:
        AdapterError: The folder is not empty and holds no adapter, the path is a file, or a value
            is not finite. Nothing has changed then.
    """
    target = Path(os.path.realpath(directory))
    others = _others(target)
    state = {key: checked_array(key, array) for key, array in adapters.state_dict().items()}
    if not state:
        raise AdapterError("the adapter holds no tensors, wanted at least one adapted module", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as folder:
        for path in others:
            if path.is_dir():
                shutil.copytree(path, folder / path.name, symlinks=True)
            else:
                shutil.copy2(path, folder / path.name, follow_symlinks=False)
        (folder / WEIGHTS_FILE).write_bytes(save(state, metadata={"format": "pt"}))
        document = config_document(adapters, base_model_name_or_path)
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            _sync(folder / name)


def config_document(adapters: LoraAdapters, base_model_name_or_path: str | None) -> dict[str, Any]:
    """Return what ``adapter_config.json`` holds."""
    config = adapters.config
    targets: Any = config.target_modules
    if targets == ALL_LINEAR:
        # as PEFT does: the names it stands for, so that every version reads them alike
        targets = list(dict.fromkeys(name.rpartition(".")[2] for name in adapters.layers))
    alpha = float(config.lora_alpha)
    return {
        "alpha_pattern": dict(config.alpha_pattern),
        "auto_mapping": None,
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": list(targets) if isinstance(targets, list | tuple) else targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }


def load_adapter(directory: str | Path) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read an adapter folder that we or PEFT wrote.

    Args:
        directory: The folder.

    Returns:
        The config, and every tensor as float32 under PEFT's names. Where the file restricts the
        layers its targets apply to, the config names each module in full.

    Raises:
        AdapterError: A file is missing or damaged, an option is on that changes the computation and
            is not implemented, or a tensor is missing, misnamed, of the wrong shape or not finite.
    """
    folder = Path(directory)
    document = read_config(folder)
    config = _parse_config(document, folder / CONFIG_FILE)
    state = _read_tensors(folder, config)
    if any(document.get(k) for k in ("exclude_modules", "layers_pattern", "layers_to_transform")):
        modules = dict.fromkeys(_module(key)[0] for key in state)
        config = dataclasses.replace(config, target_modules=tuple(modules))
    return config, state


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Raises:
        AdapterError: It is missing or is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AdapterError(f"{directory} is not an adapter folder: no {CONFIG_FILE}", "") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterError(f"{path} cannot be read: {error}", "save the adapter again") from error
    if not isinstance(document, dict):
        raise AdapterError(f"{path} holds a {type(document).__name__}, wanted an object", "")
    return document


def _parse_config(document: Mapping[str, Any], path: Path) -> LoraConfig:
    if document.get("peft_type") != "LORA":
        raise AdapterError(
            f"{path}: peft_type is {document.get('peft_type')!r}, wanted 'LORA'",
            "only LoRA adapters are supported",
        )
    _refuse_options(document, path)
    for key in ("r", "target_modules"):
        if document.get(key) in (None, []):
            raise AdapterError(f"{path}: {key} is missing", "save the adapter again")
    alpha = document.get("lora_alpha")
    if alpha is None:
        warnings.warn(
            f"{path}: lora_alpha is missing, taking PEFT's default of {_DEFAULT_ALPHA}",
            stacklevel=3,
        )
        alpha = _DEFAULT_ALPHA
    targets = document["target_modules"]
    try:
        return LoraConfig(
            r=document["r"],
            lora_alpha=alpha,
            lora_dropout=document.get("lora_dropout") or 0.0,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            use_rslora=document.get("use_rslora") or False,
            rank_pattern=_pattern(document, "rank_pattern", path),
            alpha_pattern=_pattern(document, "alpha_pattern", path),
        )
    except (ConfigError, TypeError) as error:
        raise AdapterError(f"{path}: {error}", "") from error


def _pattern(document: Mapping[str, Any], key: str, path: Path) -> tuple[tuple[str, Any], ...]:
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{path}: {key} is {value!r}, wanted an object", "")
    return tuple(value.items())


def _refuse_options(document: Mapping[str, Any], path: Path) -> None:
    unknown = []
    for key in document.keys() - _INERT - _READ:
        if document[key] not in _OFF.get(key, _NOTHING):
            raise AdapterError(
                f"{path}: {key} is {document[key]!r}, which changes what the adapter computes and is "
                "not supported",
                "train or convert the adapter without it",
            )
        if key not in _OFF:
            unknown.append(key)
    if unknown:
        listed = ", ".join(sorted(unknown))
        warnings.warn(f"{path}: unknown keys that are off: {listed}", stacklevel=4)


def _read_tensors(folder: Path, config: LoraConfig) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS_FILE
    if not path.exists():
        hint = (
            "convert it to safetensors with PEFT" if (folder / _OLD_WEIGHTS_FILE).exists() else ""
        )
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}", hint)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged: {error}", "copy or save it again") from error
    if not tensors:
        raise AdapterError(f"{path} holds no tensors", "the adapter was saved empty")
    plain = _without_adapter_name(tensors)
    state = {key: _array(key, tensor) for key, tensor in plain.items()}
    _check_pairs(state, config)
    return state


def _without_adapter_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under the names PEFT gives files, where all carry one adapter's name.

    A model's own state_dict has ``lora_A.default.weight`` for ``lora_A.weight``. Names that are mixed
    stay as they are, and are refused as unexpected.
    """
    split = {key: re.fullmatch(r"(.*\.lora_[AB])\.([^.]+)\.weight", key) for key in tensors}
    adapters = {match[2] if match else None for match in split.values()}
    if len(adapters) != 1 or None in adapters:
        return dict(tensors)
    return {f"{match[1]}.weight": tensors[key] for key, match in split.items() if match}


def _array(key: str, tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise AdapterError(f"{key} is {tensor.dtype}, wanted a floating dtype", "")
    return checked_array(key, tensor.to(torch.float32).numpy())


def _module(key: str) -> tuple[str, str]:
    """Return module name and part of a tensor's name; ("", "") where it is not PEFT's."""
    for part in ("lora_A", "lora_B"):
        suffix = f".{part}.weight"
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key[len(_PREFIX) : -len(suffix)], part
    return "", ""


def _check_pairs(state: Mapping[str, np.ndarray], config: LoraConfig) -> None:
    modules = {_module(key)[0] for key in state}
    wanted = {f"{_PREFIX}{m}.{p}.weight" for m in modules - {""} for p in ("lora_A", "lora_B")}
    check_keys(wanted, set(state))
    for key, array in state.items():
        module, part = _module(key)
        axis, rank = 0 if part == "lora_A" else 1, config.rank_of(module)
        if array.ndim != 2 or array.shape[axis] != rank:
            form = f"({rank}, in)" if axis == 0 else f"(out, {rank})"
            raise AdapterError(
                f"{key} has shape {array.shape}, wanted {form}",
                f"{CONFIG_FILE} says its rank is {rank}",
            )


def _others(target: Path) -> list[Path]:
    """Return the files of an adapter folder that saving keeps, refusing another kind of folder."""
    if not target.exists():
        return []
    if not target.is_dir():
        raise AdapterError(f"{target} is a file, wanted a folder", "choose another path")
    inside = sorted(target.iterdir())
    if inside and not (target / CONFIG_FILE).is_file():
        raise AdapterError(
            f"{target} is not empty and holds no adapter", "choose another folder, or empty it"
        )
    ours = {CONFIG_FILE, WEIGHTS_FILE, _OLD_WEIGHTS_FILE}
    return [path for path in inside if path.name not in ours]


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the place of ``target`` if the block succeeds."""
    token = secrets.token_hex(4)
    folder = target.parent / f".{target.name}.{token}"
    old = target.parent / f".{target.name}.{token}.old"
    folder.mkdir()
    try:
        yield folder
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(folder, target)
        except OSError:
            if old.exists():
                os.rename(old, target)
            raise
        _sync(target.parent)
    finally:
        for leftover in (folder, old):
            if leftover.exists():
                shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
