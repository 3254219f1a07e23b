"""Write a base model with its adapters added: a plain Hugging Face folder that needs no adapter.

The update is added in float32 to the weights as the checkpoint holds them and rounded once to the
type of the file. Into NF4 base and update are rounded together to 16 levels a block, which loses part
of the update; how much is measured and said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from entrenar.errors import AdapterError, ConfigError
from entrenar.finetune.model_folder import MERGED_KEY, check_new_folder, write_model
from entrenar.lora import LoraAdapters
from entrenar.optable import call
from entrenar.quant import NF4Weight, is_quantisable, quantize_weight
from entrenar.transformer.checkpoint import Checkpoint, open_checkpoint
from entrenar.transformer.weights import linear_shapes

__all__ = ["MERGE_DTYPES", "MergeReport", "merge_adapter", "refuse_merged"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MERGE_DTYPES = (*_DTYPES, "nf4")
# What the dense weights of an NF4 folder are stored in.
_BESIDE_NF4 = "bfloat16"


@dataclasses.dataclass
class MergeReport:
    """What a merge did.

    Attributes:
        changed: Weights that adapters changed.
        base_is_nf4: The base's weights are NF4 already, so what is merged is their decoded form.
        update_squares: Sum of squares of the updates; with ``error_squares`` only where NF4 is
            written.
        error_squares: Sum of squares of what rounding the merged weights to NF4 changed.
    """

    changed: int = 0
    base_is_nf4: bool = False
    update_squares: float = 0.0
    error_squares: float = 0.0

    @property
    def rounding(self) -> float:
        """Root mean square of the rounding error over that of the update; 0 where nothing is lost."""
        return (self.error_squares / self.update_squares) ** 0.5 if self.update_squares else 0.0

    def notices(self) -> list[str]:
        """Return what the user should know of the result, a sentence each."""
        found = []
        if self.base_is_nf4:
            found.append(
                "the base holds its weights in NF4: what is written is their decoded form with the "
                "adapter added, which is what the adapter was trained on if it was trained on this "
                "base"
            )
        if self.error_squares:
            found.append(
                "rounding the merged weights to NF4 changes them by "
                f"{self.rounding:.2g} times the adapter's own update (root mean square); merge into "
                "bfloat16 to keep the update"
            )
        return found


def merge_adapter(
    model: str | Path,
    adapters: LoraAdapters | None,
    folder: str | Path,
    dtype: str = "bfloat16",
    double_quant: bool = False,
) -> MergeReport:
    """Write the merged model; the folder appears once, complete.

    Args:
        model: The base model's folder or GGUF file, read again one tensor at a time.
        adapters: What to add; None writes the model alone.
        folder: A folder that is missing or empty.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``, or ``"nf4"``: the decoder's linears as
            bitsandbytes saves them, the rest in bfloat16.
        double_quant: Quantise the NF4 scales too.

    Returns:
        How many weights changed, and what rounding to NF4 cost.

    Raises:
        ConfigError: The dtype is another, or the folder is not empty.
        UnsupportedModelError: The GGUF file has a rotation that a config.json cannot state.
        AdapterError: The adapters are for other layers than the model's, or are merged into it
            already.
    """
    target = Path(folder)
    if dtype not in MERGE_DTYPES:
        wanted = ", ".join(MERGE_DTYPES)
        raise ConfigError(f"dtype is {dtype!r}, wanted one of {wanted}", "choose one")
    if double_quant and dtype != "nf4":
        raise ConfigError(f"double_quant with dtype {dtype!r}, wanted 'nf4'", "leave one out")
    check_new_folder(target)
    source = open_checkpoint(model)
    merged = set(source.document.get(MERGED_KEY) or ())
    if adapters is not None:
        absent = {f"{name}.weight" for name in adapters.layers} - set(source.names())
        if absent:
            raise AdapterError(f"{model} has no {min(absent)}", "the adapter is of another model")
        refuse_merged(source, adapters)
        merged.add(adapters.fingerprint())
    report = MergeReport(base_is_nf4=bool(source.quantised) and adapters is not None)
    weights = _merged(source, adapters, report)
    if dtype == "nf4":
        weights = _rounded(weights, source, adapters, double_quant, report)
        write_model(target, source, weights, _BESIDE_NF4, double_quant, merged)
    else:
        dense = ((name, _dense(weight).to(_DTYPES[dtype])) for name, weight in weights)
        write_model(target, source, dense, dtype, None, merged)
    return report


def refuse_merged(source: Checkpoint, adapters: LoraAdapters) -> None:
    """Refuse adapters that a model already contains.

    Raises:
        AdapterError: The model's config says they were merged into it.
    """
    if adapters.fingerprint() in (source.document.get(MERGED_KEY) or ()):
        raise AdapterError(
            f"{source.path} already contains this adapter: it was merged into it, and would be added "
            "twice",
            "use the model as it is, or apply the adapter to its base",
        )


def _merged(
    source: Checkpoint, adapters: LoraAdapters | None, report: MergeReport
) -> Iterator[tuple[str, torch.Tensor | NF4Weight]]:
    """Yield every weight: as it is stored where no adapter changes it, else the sum in float32."""
    for name, weight in source.stored():
        layer = adapters.layers.get(name.removesuffix(".weight")) if adapters else None
        if layer is not None:
            weight = _dense(weight).contiguous().clone()
            call("add_", weight, layer.delta().to("cpu"))
            report.changed += 1
        yield name, weight


def _dense(weight: torch.Tensor | NF4Weight) -> torch.Tensor:
    return call("nf4_dequantize", weight) if isinstance(weight, NF4Weight) else weight.contiguous()


def _rounded(
    weights: Iterator[tuple[str, torch.Tensor | NF4Weight]],
    source: Checkpoint,
    adapters: LoraAdapters | None,
    double_quant: bool,
    report: MergeReport,
) -> Iterator[tuple[str, torch.Tensor | NF4Weight]]:
    """Yield the decoder's linears in NF4 and the rest in 16 bits; measure what that costs the update.

    What the source already holds in NF4 and no adapter changes stays as it is, to the bit.
    """
    linears = {f"{name}.weight" for name in linear_shapes(source.config)}
    beside = _DTYPES[_BESIDE_NF4]
    for name, weight in weights:
        if isinstance(weight, NF4Weight) and weight.double_quant == double_quant:
            yield name, dataclasses.replace(weight, dtype=beside)
        elif name not in linears or not is_quantisable(name, tuple(weight.shape)):
            yield name, _dense(weight).to(beside)
        else:
            dense = _dense(weight)
            found = quantize_weight(dense, double_quant=double_quant, name=name)
            layer = adapters.layers.get(name.removesuffix(".weight")) if adapters else None
            if layer is not None:
                report.update_squares += _squares(layer.delta().to("cpu").numpy())
                report.error_squares += _squares(_dense(found).numpy() - dense.numpy())
            yield name, dataclasses.replace(found, dtype=beside)


def _squares(array: np.ndarray) -> float:
    flat = array.reshape(-1).astype(np.float64)
    return float(flat @ flat)
