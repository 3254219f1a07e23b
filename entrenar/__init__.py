"""Triton kernels with a minimal tape autograd, for QLoRA fine-tuning of Llama-type models.

Public names are imported on first use, so ``import entrenar`` is quick and needs neither triton
nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {
    "CudaTrainer": "entrenar.autograd.trainer",
    "Event": "entrenar.autograd",
    "GenerateConfig": "entrenar.transformer.sampling",
    "GenerateResult": "entrenar.transformer.sampling",
    "Graph": "entrenar.autograd.graph",
    "InstructConfig": "entrenar.finetune.config",
    "InstructPipeline": "entrenar.finetune.instruct_pipeline",
    "Stream": "entrenar.autograd",
    "Tape": "entrenar.autograd",
    "Tensor": "entrenar.autograd",
    "Trainer": "entrenar.autograd.trainer",
    "Transformer": "entrenar.transformer.model",
    "TransformerConfig": "entrenar.transformer.config",
    "checkpoint": "entrenar.autograd",
    "cuda_training_available": "entrenar.autograd.trainer",
    "detect_hazards": "entrenar.autograd.hazards",
    "gradcheck": "entrenar.autograd",
    "no_grad": "entrenar.autograd",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'entrenar' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
