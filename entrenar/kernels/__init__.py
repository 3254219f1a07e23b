"""Triton kernels and their launchers, one op family a file; imported on first use.

``entrenar.kernels.X`` is the launcher ``X`` whatever family it is in. Each takes torch storage and
``stream=``. Importing the package imports neither torch nor triton; it settles whether the kernels
imported from it are interpreted, since that cannot be changed once they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from entrenar import runtime

# ENTRENAR_BACKEND=triton has to reach triton before the first kernel is decorated.
runtime.backend()

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
