"""Training through captured graphs: the ungraphed run up to rounding, with lengths that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar import InstructConfig, InstructPipeline
from entrenar.errors import ConfigError
from entrenar.finetune.chat import Example
from entrenar.finetune.instruct_pipeline.graphed import padded


def make(model: Path, graph: bool, **settings: Any) -> InstructPipeline:
    given = {
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "max_steps": 12,
        "device": "cpu",
        "graph": graph,
    }
    return InstructPipeline.from_pretrained(model, InstructConfig(**{**given, **settings}))


def pairs(step: int, count: int) -> list[Any]:
    rng = np.random.default_rng(step)
    return [
        (rng.integers(3, 90, int(rng.integers(1, 40))).tolist(),
         rng.integers(3, 90, int(rng.integers(1, 30))).tolist())
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 2, "grad_accum_steps": 2, "lora_dropout": 0.2},
        {"quantize_nf4": True, "checkpointing": True},
    ],
    ids=["plain", "dropout", "nf4"],
)
def test_twelve_steps_are_the_ungraphed_ones_up_to_rounding(
    tiny_model: Path, settings: dict[str, Any]
) -> None:
    """Padding changes the sizes of products and so the order of their sums, and nothing else."""
    plain, graphed = make(tiny_model, False, **settings), make(tiny_model, True, **settings)
    for step in range(12):
        batch = pairs(step, 3 if settings.get("batch_size") else 1)
        a, b = plain.train_batch(batch), graphed.train_batch(batch)
        assert b.avg_loss == pytest.approx(a.avg_loss, rel=2e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
        assert (a.total_response_tokens, a.total_tokens) == (
            b.total_response_tokens,
            b.total_tokens,
        )
    graph = graphed._graphed.graph
    assert graph.replays >= 4
    assert len(graph) <= 8
    mine, theirs = plain.adapters, graphed.adapters
    assert mine.step.item() == theirs.step.item() == 12
    # Adam turns the sign of a gradient near zero into a whole step, so parameters are compared as one
    apart = np.linalg.norm(mine.params.numpy() - theirs.params.numpy())
    assert apart < 1e-3 * np.linalg.norm(mine.params.numpy())


def test_a_padded_batch_is_the_batch_and_a_segment_without_loss() -> None:
    examples = [Example.from_pair([1, 2, 3], [4, 5]), Example.from_pair([6], [7, 8, 9])]
    batch = padded(examples, samples=4, context=66)
    assert batch.ids.shape == batch.positions.shape == (64,)
    assert batch.ids.tolist()[:8] == [1, 2, 3, 4, 6, 7, 8, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, *range(7, 64)]
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 7, 7, 64]
    assert batch.rows.shape == batch.targets.shape == (16,)
    assert batch.rows.tolist()[:6] == [2, 3, 4, 5, 6, 0]
    assert batch.targets.tolist()[:6] == [4, 5, 7, 8, 9, -100]
    long = padded([Example.from_pair([1] * 500, [2] * 200)], samples=1, context=600)
    assert long.ids.shape == (768,)
    assert long.rows.shape == (384,)
    assert long.positions.max() == 698


def test_dynamic_rope_scaling_is_refused(make_model: Any) -> None:
    model = make_model(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="dynamic rope scaling depends on each batch's length"):
        make(model, True).train_step([5, 6], [7, 8])
