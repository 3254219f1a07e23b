"""Decoded copies of 4-bit weights: the same numbers, nothing decoded in a step, memory as estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar import InstructConfig, InstructPipeline, runtime
from entrenar.errors import ConfigError
from entrenar.finetune.instruct_pipeline.memory import estimate_memory

PAIRS = [([4 + n, 5], [6 + n, 7, 2]) for n in range(4)]


def pipeline(model: Path, **more: Any) -> InstructPipeline:
    settings: dict[str, Any] = {
        "lora_rank": 2, "max_seq_len": 32, "device": "cpu", "quantize_nf4": True, "learning_rate": 1e-2,
        "target_modules": "all-linear",
    }  # fmt: skip
    return InstructPipeline.from_pretrained(model, InstructConfig(**(settings | more)))


@pytest.mark.parametrize(
    "more", [{}, {"double_quant": True}, {"checkpointing": True}, {"graph": True}]
)
def test_it_computes_the_same(tiny_model: Path, more: dict[str, Any]) -> None:
    """Products read the same values; their blocks may fall otherwise, which float32 rounds at 1e-7."""
    plain, kept = pipeline(tiny_model, **more), pipeline(tiny_model, weight_cache="decoded", **more)
    for _ in range(4):
        a, b = plain.train_batch(PAIRS), kept.train_batch(PAIRS)
        assert b.avg_loss == pytest.approx(a.avg_loss, rel=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
    assert kept.evaluate(PAIRS).avg_loss == pytest.approx(plain.evaluate(PAIRS).avg_loss, rel=1e-5)
    for name, array in plain.adapter_state().items():
        np.testing.assert_allclose(kept.adapter_state()[name], array, atol=2e-4)


def test_nothing_is_decoded_in_a_step(tiny_model: Path) -> None:
    kept = pipeline(tiny_model, weight_cache="decoded")
    with runtime.counting() as counts:
        kept.train_batch(PAIRS)
        kept.evaluate(PAIRS)
    assert not [op for op in counts.by_op if "nf4" in op]
    with runtime.counting() as counts:
        pipeline(tiny_model).train_batch(PAIRS)
    assert any("nf4" in op for op in counts.by_op) or counts.by_op["lora_forward"]


def test_memory_is_what_the_estimate_says(tiny_model: Path) -> None:
    kept = pipeline(tiny_model, weight_cache="decoded")
    assert kept._decoded is not None
    sizes = [
        estimate_memory(config, kept.model.config, kept.model.linear_shapes(), "cpu")["weights"]
        for config in (kept.config.replace(weight_cache="none"), kept.config)
    ]
    assert kept._decoded.nbytes == sizes[1] - sizes[0] > 0


def test_without_4_bit_weights_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is decoded"):
        InstructConfig(weight_cache="decoded")
