"""Which part of a model each weight belongs to, for profiles by layer."""

from __future__ import annotations

import re

from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.transformer.model import Transformer

__all__ = ["weight_owners"]

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def weight_owners(model: Transformer) -> dict[int, str]:
    """Return where each weight's storage begins, and what it belongs to.

    That is ``"layer N"`` for a block's, and the module's name for any other, such as ``"lm_head"``. A
    head tied to the embedding is the embedding's.
    """
    owners: dict[int, str] = {}
    for name, weight in model.named_weights().items():
        found = _LAYER.search(name)
        owner = f"layer {found[1]}" if found else name.removesuffix(".weight").rpartition(".")[2]
        data = weight.codes if isinstance(weight, NF4Weight) else weight.data
        owners.setdefault(int(data.data_ptr()), owner)
    return owners
