"""A tiny llama with LoRA against what transformers and PEFT computed of the same numbers.

The expected values are in ``tests/data/peft_tiny_llama.npz``, the script that made them beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from entrenar import InstructConfig, InstructPipeline

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "peft_tiny_llama.npz"
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as data:
        return dict(data)


def part(golden: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)}


@pytest.fixture
def pipeline(golden: dict[str, np.ndarray], tmp_path: Path) -> InstructPipeline:
    (tmp_path / "config.json").write_text(str(golden["config"]))
    save_file(part(golden, "weight/"), tmp_path / "model.safetensors")
    settings = json.loads(str(golden["settings"]))
    config = InstructConfig(
        lora_rank=settings["r"],
        lora_alpha=settings["lora_alpha"],
        target_modules=tuple(settings["target_modules"]),
        learning_rate=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        gradient_clip_norm=settings["clip"],
        schedule="constant",
        max_seq_len=64,
        device="cpu",
    )
    return InstructPipeline.from_pretrained(tmp_path, config)


def start(golden: dict[str, np.ndarray], pipeline: InstructPipeline, *, zero_b: bool) -> None:
    state = part(golden, "start/")
    if zero_b:
        state = {k: np.zeros_like(v) if "lora_B" in k else v for k, v in state.items()}
    pipeline.adapters.load_state_dict(state)


def batch(golden: dict[str, np.ndarray], index: int) -> list[tuple[list[int], list[int]]]:
    pairs = []
    for row in range(3):
        ids = golden[f"batch/{index}/{row}/ids"].tolist()
        prompt = int(golden[f"batch/{index}/{row}/prompt"])
        pairs.append((ids[:prompt], ids[prompt:]))
    return pairs


def test_logits(golden: dict[str, np.ndarray], pipeline: InstructPipeline) -> None:
    start(golden, pipeline, zero_b=True)
    logits = pipeline.model.logits(golden["logits/ids"])
    np.testing.assert_allclose(logits, golden["logits/value"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_one_batch(
    golden: dict[str, np.ndarray], pipeline: InstructPipeline, checkpointing: bool
) -> None:
    """A learning rate of zero leaves the adapter as it is, so its gradients can be read off."""
    start(golden, pipeline, zero_b=False)
    before = pipeline.adapters.state_dict()
    pipeline.set_checkpointing(checkpointing)
    pipeline.set_learning_rate(0.0)
    result = pipeline.train_batch(batch(golden, 0))
    assert result.avg_loss == pytest.approx(float(golden["gradient/loss"]), abs=1e-5)
    after = pipeline.adapters.state_dict()
    assert all(np.array_equal(before[k], after[k]) for k in before)
    expected = part(golden, "gradient/")
    expected.pop("loss")
    gradients = pipeline.adapters.grad_dict()
    assert set(gradients) == set(expected)
    for name, want in expected.items():
        # 1e-4 of the tensor's largest gradient, element by element
        np.testing.assert_allclose(gradients[name], want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_ten_steps(golden: dict[str, np.ndarray], pipeline: InstructPipeline) -> None:
    start(golden, pipeline, zero_b=True)
    results = [pipeline.train_batch(batch(golden, i)) for i in range(10)]
    np.testing.assert_allclose([r.avg_loss for r in results], golden["losses"], rtol=0, atol=1e-3)
    np.testing.assert_allclose([r.grad_norm for r in results], golden["grad_norms"], rtol=2e-3)
    state = pipeline.adapters.state_dict()
    expected = part(golden, "final/")
    assert set(state) == set(expected)
    for name, want in expected.items():
        np.testing.assert_allclose(state[name], want, rtol=0, atol=5e-3)


def test_the_adapter_moves_only_where_it_may(
    golden: dict[str, np.ndarray], pipeline: InstructPipeline
) -> None:
    start(golden, pipeline, zero_b=True)
    weight = pipeline.model.lm_head_weight.data
    frozen = weight.clone()
    pipeline.train_batch(batch(golden, 0))
    assert torch.equal(weight, frozen)
