"""The table itself: the rows of every family, gathered by explicit import."""

from __future__ import annotations

from types import ModuleType

from entrenar.optable import (
    adamw,
    attention,
    clip,
    cross_entropy,
    elementwise,
    embedding,
    gemm,
    lora,
    nf4,
    nf4_gemm,
    rms_norm,
    rope,
    softmax,
    swiglu,
)
from entrenar.optable.row import Function, Op

__all__ = ["FAMILIES", "FUNCTIONS", "OPS"]

_MODULES: tuple[ModuleType, ...] = (
    gemm,
    rms_norm,
    softmax,
    cross_entropy,
    attention,
    rope,
    swiglu,
    nf4,
    nf4_gemm,
    lora,
    adamw,
    clip,
    elementwise,
    embedding,
)

FAMILIES: tuple[str, ...] = tuple(module.__name__.rpartition(".")[2] for module in _MODULES)
FUNCTIONS: dict[str, Function] = {f.name: f for module in _MODULES for f in module.FUNCTIONS}
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in module.OPS}
