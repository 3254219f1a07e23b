"""The oracles: every op in plain NumPy, obviously right, in the precision of its inputs.

Same file names, function names and argument order as ``entrenar.kernels``, less ``stream``; no code
in common with it. ``entrenar.reference.X`` is the function ``X`` whatever family it is in.
"""

from __future__ import annotations

import importlib
from typing import Any

FAMILIES = (
    "gemm",
    "rms_norm",
    "layer_norm",
    "softmax",
    "cross_entropy",
    "attention",
    "rope",
    "swiglu",
    "nf4",
    "nf4_gemm",
    "lora",
    "adamw",
    "clip",
    "elementwise",
    "embedding",
)


def __getattr__(name: str) -> Any:
    if name in FAMILIES or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
