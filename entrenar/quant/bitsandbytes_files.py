"""NF4 weights in the tensors that bitsandbytes' 4-bit layers save and load.

A weight ``X`` is the tensors ``X`` (uint8 [bytes, 1]), ``X.absmax``, ``X.quant_map`` and
``X.quant_state.bitsandbytes__nf4``, a JSON object as bytes; with double quantisation also
``X.nested_absmax`` and ``X.nested_quant_map``, and then ``X.absmax`` is uint8. A model folder of such
weights says so in its config.json, under ``quantization_config``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from entrenar.errors import CheckpointError, UnsupportedModelError
from entrenar.kernels._nf4_tables import BLOCK_SIZES, NESTED_BLOCK, tables
from entrenar.kernels.nf4_weight import NF4Weight

__all__ = [
    "bitsandbytes_config",
    "check_bitsandbytes_config",
    "from_bitsandbytes",
    "is_bitsandbytes",
    "parts_of",
    "stated_shape",
    "to_bitsandbytes",
]

_STATE = "quant_state.bitsandbytes__nf4"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)
_DTYPES = ("float32", "float16", "bfloat16")


def is_bitsandbytes(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether the tensor of this name is an NF4 weight that bitsandbytes saved."""
    return f"{name}.{_STATE}" in tensors


def parts_of(name: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that belong to the NF4 weight ``name``, itself among them."""
    present = set(names)
    return [part for part in (name, *(f"{name}.{p}" for p in _PARTS)) if part in present]


def check_bitsandbytes_config(config: Any) -> None:
    """Refuse the ``quantization_config`` of a model whose weights are not NF4.

    Raises:
        UnsupportedModelError: Naming the field, its value and what is supported.
    """
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(
            f"quantization_config is a {type(config).__name__}, wanted an object", ""
        )
    method = config.get("quant_method", "bitsandbytes" if "load_in_4bit" in config else None)
    wanted = (
        ("quant_method", method, "bitsandbytes"),
        ("load_in_4bit", config.get("load_in_4bit", config.get("_load_in_4bit")), True),
        ("bnb_4bit_quant_type", config.get("bnb_4bit_quant_type", "fp4"), "nf4"),
        ("bnb_4bit_quant_storage", config.get("bnb_4bit_quant_storage", "uint8"), "uint8"),
    )
    for field, got, want in wanted:
        if got != want:
            raise UnsupportedModelError(
                f"the checkpoint's weights are already quantised: {field} is {got!r}, and only "
                f"{want!r} is read",
                "use the unquantised checkpoint and quantize='nf4'",
            )


def bitsandbytes_config(double_quant: bool, compute_dtype: str) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers writes for NF4 weights."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def stated_shape(name: str, state: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the weight ``name``, from its quant_state tensor.

    Raises:
        CheckpointError: It cannot be read or is not of a supported form.
    """
    return tuple(_state(name, state)["shape"])


def to_bitsandbytes(name: str, weight: NF4Weight) -> dict[str, torch.Tensor]:
    """Return the tensors that bitsandbytes saves for a weight, on the CPU.

    Args:
        name: The weight's name, such as ``"model.layers.0.mlp.up_proj.weight"``.
        weight: What to write; storage on a GPU is waited for.
    """
    levels = tables(torch.device("cpu"))
    weight = weight.to("cpu")
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.block_size,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    absmax = weight.absmax_codes if weight.double_quant else weight.absmax
    # a copy of the tables for each weight, since safetensors refuses tensors that share memory
    parts = {"absmax": absmax, "quant_map": levels.levels.clone()}
    if weight.double_quant and weight.offset is not None:
        state["nested_blocksize"] = NESTED_BLOCK
        state["nested_dtype"] = "float32"
        state["nested_offset"] = weight.offset.item()
        parts |= {"nested_absmax": weight.absmax2, "nested_quant_map": levels.nested.clone()}
    text = np.frombuffer(json.dumps(state).encode("utf-8"), np.uint8).copy()
    return {
        name: weight.codes.view(-1, 1),
        **{f"{name}.{key}": value for key, value in parts.items() if value is not None},
        f"{name}.{_STATE}": torch.from_numpy(text),
    }


def from_bitsandbytes(name: str, tensors: Mapping[str, torch.Tensor]) -> NF4Weight:
    """Return the weight that bitsandbytes saved under ``name``.

    Args:
        name: The weight's name.
        tensors: At least the weight's tensors.

    Raises:
        CheckpointError: A tensor is missing, of the wrong size or dtype, or its tables are not NF4's;
            the message names it.
    """
    state = _state(name, _tensor(f"{name}.{_STATE}", tensors))
    shape = tuple(state["shape"])
    count = math.prod(shape)
    blocks = -(-count // state["blocksize"])
    levels = tables(torch.device("cpu"))
    _check_table(f"{name}.quant_map", tensors, levels.levels)
    codes = _sized(name, tensors, torch.uint8, -(-count // 2))
    form = (shape, getattr(torch, state["dtype"]), state["blocksize"])
    if "nested_offset" not in state:
        return NF4Weight(codes, _sized(f"{name}.absmax", tensors, torch.float32, blocks), *form)
    _check_table(f"{name}.nested_quant_map", tensors, levels.nested)
    groups = -(-blocks // NESTED_BLOCK)
    return NF4Weight(
        codes,
        None,
        *form,
        absmax_codes=_sized(f"{name}.absmax", tensors, torch.uint8, blocks),
        absmax2=_sized(f"{name}.nested_absmax", tensors, torch.float32, groups),
        offset=torch.full((1,), state["nested_offset"], dtype=torch.float32),
    )


def _tensor(key: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if key not in tensors:
        raise CheckpointError(f"{key} is missing", "the 4-bit checkpoint is incomplete")
    return tensors[key]


def _state(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    key = f"{name}.{_STATE}"
    try:
        state = json.loads(bytes(tensor.numpy().astype(np.uint8)).decode("utf-8"))
        wanted = {
            "quant_type": state["quant_type"] == "nf4",
            "blocksize": state["blocksize"] in BLOCK_SIZES,
            "dtype": state["dtype"] in _DTYPES,
            "shape": isinstance(state["shape"], list)
            and all(type(n) is int and n >= 0 for n in state["shape"]),
            "nested_blocksize": state.get("nested_blocksize", NESTED_BLOCK) == NESTED_BLOCK,
            "nested_offset": isinstance(state.get("nested_offset", 0.0), int | float)
            and math.isfinite(state.get("nested_offset", 0.0)),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{key} cannot be read: {error!r}", "") from error
    for field, fits in wanted.items():
        if not fits:
            raise CheckpointError(f"{key}: {field} is {state[field]!r}, which is not supported", "")
    return state


def _sized(
    key: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, count: int
) -> torch.Tensor:
    tensor = _tensor(key, tensors)
    if tensor.dtype != dtype or tensor.numel() != count:
        raise CheckpointError(
            f"{key} is {tensor.dtype} of {tensor.numel()} elements, wanted {dtype} of {count}", ""
        )
    if dtype == torch.float32 and not np.isfinite(tensor.numpy()).all():
        raise CheckpointError(f"{key} holds a value that is not finite", "the file is damaged")
    return tensor.contiguous().view(-1)


def _check_table(key: str, tensors: Mapping[str, torch.Tensor], wanted: torch.Tensor) -> None:
    table = _tensor(key, tensors)
    fits = table.shape == wanted.shape and table.is_floating_point()
    if not fits or not np.allclose(table.float().numpy(), wanted.numpy(), rtol=0, atol=1e-6):
        raise CheckpointError(f"{key} is not the table of this data type", "")
