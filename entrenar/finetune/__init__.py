"""Instruction fine-tuning: configuration, data, the pipeline that trains, the run above it.

Names are imported on first use, so that reading a configuration needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Corpus": "entrenar.finetune.corpus",
    "InstructBatchResult": "entrenar.finetune.instruct_pipeline",
    "InstructConfig": "entrenar.finetune.config",
    "InstructPipeline": "entrenar.finetune.instruct_pipeline",
    "InstructStepResult": "entrenar.finetune.instruct_pipeline",
    "TrainingRun": "entrenar.finetune.training_run",
    "read_corpus": "entrenar.finetune.corpus",
}

__all__ = [
    "Corpus",
    "InstructBatchResult",
    "InstructConfig",
    "InstructPipeline",
    "InstructStepResult",
    "TrainingRun",
    "read_corpus",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'entrenar.finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
