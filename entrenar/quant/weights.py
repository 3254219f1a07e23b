"""Quantise a checkpoint's weights to NF4, refusing bad ones by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from entrenar.autograd import current_stream
from entrenar.errors import ConfigError, EntrenarError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call

__all__ = ["NEVER_QUANTISED", "is_quantisable", "quantize_checkpoint", "quantize_weight"]

# Modules whose weights stay dense whatever else is to be skipped: the output layer and the tables.
NEVER_QUANTISED = ("lm_head", "embed_tokens")


def quantize_weight(
    weight: torch.Tensor | np.ndarray,
    block_size: int = 64,
    double_quant: bool = False,
    device: str | torch.device | None = None,
    name: str = "the weight",
) -> NF4Weight:
    """Quantise one weight.

    Args:
        weight: Any shape, floating.
        block_size: Values that share one absmax.
        double_quant: Quantise the absmax too.
        device: Where to quantise and keep it; where ``weight`` lies if None.
        name: What to call it in an error.

    Raises:
        NumericsError: It holds a NaN or an infinity; the message names it and the position.
        DTypeError: It is not floating.
        ConfigError: The block size is none of bitsandbytes'.
    """
    tensor = torch.from_numpy(weight) if isinstance(weight, np.ndarray) else weight
    if device is not None:
        tensor = tensor.to(device)
    stream = current_stream(tensor.device)
    try:
        return call(
            "nf4_quantize",
            tensor.contiguous(),
            block_size=block_size,
            double_quant=double_quant,
            stream=stream,
        )
    except EntrenarError as error:
        raise type(error)(f"{name}: {error.message}", error.hint) from error


def is_quantisable(name: str, shape: tuple[int, ...], skip_modules: Iterable[str] = ()) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear layer that may be held in 4 bits.

    The output layer, embeddings, norms and biases never are; ``skip_modules`` adds to those.

    Args:
        name: Tensor name, such as ``"model.layers.0.mlp.up_proj.weight"``.
        shape: Its shape.
        skip_modules: Further modules to leave dense, by last component or full name.
    """
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if kind != "weight" or len(shape) != 2 or "norm" in last:
        return False
    skipped = {*NEVER_QUANTISED, *skip_modules}
    return not any(module == s or module.endswith(f".{s}") for s in skipped)


def quantize_checkpoint(
    tensors: Iterable[tuple[str, torch.Tensor]],
    skip_modules: Iterable[str] = (),
    block_size: int = 64,
    double_quant: bool = False,
    device: str | torch.device | None = None,
    quantisable: Callable[[str, tuple[int, ...], Iterable[str]], bool] = is_quantisable,
) -> Iterator[tuple[str, torch.Tensor | NF4Weight]]:
    """Quantise the linear weights of a stream of tensors, one at a time.

    Args:
        tensors: (name, tensor) pairs, as a checkpoint reader yields them.
        skip_modules: Modules to leave dense besides the output layer, embeddings and norms.
        block_size: Values that share one absmax.
        double_quant: Quantise the absmax too.
        device: Where the results lie; where each tensor lies if None.
        quantisable: Decides by name, shape and ``skip_modules``.

    Yields:
        (name, NF4 weight or the tensor as it is).

    Raises:
        NumericsError: A weight holds a NaN or an infinity; the message names it.
        ConfigError: ``skip_modules`` is one string instead of a list of names.
    """
    if isinstance(skip_modules, str):
        raise ConfigError(f"skip_modules is {skip_modules!r}, wanted a list of names", "")
    skip = tuple(skip_modules)
    for name, tensor in tensors:
        if quantisable(name, tuple(tensor.shape), skip):
            yield name, quantize_weight(tensor, block_size, double_quant, device, name)
        else:
            yield name, tensor if device is None else tensor.to(device)
