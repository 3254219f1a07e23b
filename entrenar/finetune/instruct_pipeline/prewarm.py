"""Compile the kernels of a training step before the model is loaded.

The step is run over a model of the same sizes, whose weights are untouched zeros of the host's memory,
with nothing behind the launchers; what they ask for is compiled for the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from entrenar import runtime
from entrenar.finetune.chat import Example
from entrenar.finetune.config import InstructConfig
from entrenar.transformer.checkpoint import open_checkpoint
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.model import Transformer
from entrenar.transformer.weights import linear_shapes, tensor_shapes

if TYPE_CHECKING:
    from entrenar.finetune.instruct_pipeline.pipeline import InstructPipeline
    from entrenar.kernels.warm import Form

__all__ = ["PrewarmReport", "prewarm", "standing_in_for", "untouched_pipeline"]

# Lengths that take other tiles or specialisations than max_seq_len: odd ones and short ones.
_SHARES = (1.0, 0.5, 0.25)


@dataclasses.dataclass(frozen=True)
class PrewarmReport:
    """What was compiled.

    Attributes:
        kernels: Name of the launcher of each form that was compiled, in the order of the step.
        seconds: What collecting and compiling took.
    """

    kernels: tuple[str, ...]
    seconds: float


def prewarm(
    path: str | Path,
    config: InstructConfig | None = None,
    lengths: tuple[int, ...] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PrewarmReport:
    """Compile every kernel of a training step, for a device that runs kernels.

    Args:
        path: The model's folder or GGUF file; its headers alone are read.
        config: The settings of training.
        lengths: Tokens of the samples to prepare for; where None ``max_seq_len``, halves of it, and
            odd lengths beside them.
        progress: Called with (kernels compiled, kernels in all).

    Returns:
        What was compiled; nothing where the CPU computes with NumPy.

    Raises:
        CheckpointError: There is no whole, supported model at ``path``.
        MissingExtraError: Triton is not installed.
    """
    start = time.perf_counter()
    config = config or InstructConfig()
    device = runtime.resolve_device(config.device)
    if device == "cpu" and runtime.backend() == "numpy":
        return PrewarmReport((), 0.0)
    model = open_checkpoint(path).config
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    longest = min(config.max_seq_len, model.context_length)
    wanted = lengths or _lengths(longest)
    from entrenar.kernels.warm import compile_forms

    with _standing_in(device):
        forms = _forms(model, config, dtype, device != "cpu", wanted)
    compile_forms(forms, device, progress)
    return PrewarmReport(tuple(form.op for form in forms), time.perf_counter() - start)


def _lengths(longest: int) -> tuple[int, ...]:
    found = {max(int(longest * share) - odd, 2) for share in _SHARES for odd in (0, 1)}
    return tuple(sorted(found, reverse=True))


def _standing_in(device: str) -> contextlib.AbstractContextManager[None]:
    """Let host storage stand in for a GPU's: launchers then choose what they would choose there."""
    if device == "cpu":
        return contextlib.nullcontext()
    major, minor = torch.cuda.get_device_capability(device)
    return standing_in_for(f"sm_{major}{minor}")


@contextlib.contextmanager
def standing_in_for(target: str) -> Iterator[None]:
    """Let launchers choose for a target, such as ``"sm_90"``, on storage of the host."""
    names = {"ENTRENAR_BACKEND": "ptx", "ENTRENAR_PTX_TARGET": target}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def untouched_pipeline(
    model: TransformerConfig, config: InstructConfig, decode_ahead: bool
) -> InstructPipeline:
    """Return a pipeline on the host over weights that take no memory until they are written.

    For use where nothing is launched: inside ``collecting`` of :mod:`entrenar.kernels.warm`, say.

    Args:
        model: The model's dimensions.
        config: The settings; ``dtype`` is stated.
        decode_ahead: Whether 4-bit weights are decoded on a side stream, as on a GPU.
    """
    # the pipeline imports this module
    from entrenar.finetune.instruct_pipeline.pipeline import InstructPipeline
    from entrenar.kernels.warm import untouched

    quantised = {f"{name}.weight" for name in linear_shapes(model)} if config.quantize_nf4 else {}
    dtype = getattr(torch, config.dtype)
    # in the dtype they are held in or quantised from: a conversion would touch the memory
    weights = (
        (name, untouched(shape, torch.float32 if name in quantised else dtype))
        for name, shape in tensor_shapes(model).items()
    )
    stand_in = Transformer(
        model,
        weights,
        quantize="nf4" if config.quantize_nf4 else None,
        dtype=config.dtype,
        device="cpu",
        double_quant=config.double_quant,
        decode_ahead=decode_ahead,
    )
    return InstructPipeline(stand_in, config.replace(device="cpu", graph="auto", prewarm=False))


def _forms(
    model: TransformerConfig,
    config: InstructConfig,
    dtype: str,
    decode_ahead: bool,
    lengths: tuple[int, ...],
) -> list[Form]:
    """Run steps over zeros and return the forms of kernels they ask for."""
    from entrenar.kernels.warm import collecting

    with collecting() as forms:
        pipeline = untouched_pipeline(model, config.replace(dtype=dtype), decode_ahead)
        for length in lengths:
            prompt = length // 2
            sample = Example.from_pair([0] * prompt, [0] * (length - prompt))
            pipeline.train_examples([[sample] * config.batch_size])
    return forms
