"""The pipeline that turns pairs into adapter updates: load, step, evaluate, generate, save."""

from entrenar.finetune.instruct_pipeline.pipeline import InstructPipeline
from entrenar.finetune.instruct_pipeline.results import InstructBatchResult, InstructStepResult

__all__ = ["InstructBatchResult", "InstructPipeline", "InstructStepResult"]
