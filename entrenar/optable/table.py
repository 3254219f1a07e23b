"""The table itself: the rows of every family, in the order of the list below."""

from __future__ import annotations

import importlib

from entrenar.optable.row import Function, Op

__all__ = ["FAMILIES", "FUNCTIONS", "OPS"]

FAMILIES: tuple[str, ...] = (
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

_MODULES = tuple(importlib.import_module(f"entrenar.optable.{family}") for family in FAMILIES)

FUNCTIONS: dict[str, Function] = {f.name: f for module in _MODULES for f in module.FUNCTIONS}
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in module.OPS}
