"""Thirty steps beside transformers' Trainer and PEFT: the same batches, the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from entrenar import InstructConfig, InstructPipeline

for package in ("transformers", "peft", "accelerate"):
    pytest.importorskip(package)

STEPS, ACCUMULATE, RATE = 30, 4, 2e-3
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend


def samples(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of very different lengths over few tokens, so that there is something to learn."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(STEPS * ACCUMULATE):
        prompt = rng.integers(5, vocabulary, rng.integers(1, 20)).tolist()
        found.append((prompt, (np.arange(rng.integers(1, 25)) % 7 + 5).tolist()))
    return found


def their_losses(
    folder: Path, adapter: Path, pairs: list[tuple[list[int], list[int]]], output: Path
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train with the Trainer from the same adapter; return losses and the adapter it ends with."""
    import peft
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [{"input_ids": p + r, "labels": [-100] * len(p) + r} for p, r in pairs]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(output), max_steps=STEPS, per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATE, learning_rate=RATE, lr_scheduler_type="constant",
        weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = InOrder(
        model=model, args=arguments, train_dataset=rows,
        data_collator=lambda batch: {k: torch.tensor([row[k] for row in batch]) for k in batch[0]},
    )  # fmt: skip
    trainer.train()
    model.save_pretrained(output / "adapter")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, load_file(output / "adapter" / "adapter_model.safetensors")


def test_thirty_steps_have_the_losses_of_the_trainer(folder: Path, tmp_path: Path) -> None:
    """Accumulated over samples of 1 to 24 learned tokens, where a mean of means would differ."""
    config = InstructConfig(
        lora_rank=4, lora_alpha=8.0, target_modules="all-linear", learning_rate=RATE, schedule="constant",
        batch_size=1, grad_accum_steps=ACCUMULATE, max_seq_len=64, device="cpu", seed=1,
    )  # fmt: skip
    pairs = samples(json.loads((folder / "config.json").read_text())["vocab_size"])
    pipeline = InstructPipeline.from_pretrained(folder, config)
    pipeline.save_adapter(tmp_path / "start")
    theirs, adapter = their_losses(folder, tmp_path / "start", pairs, tmp_path / "theirs")
    ours = [
        pipeline.train_batch(pairs[at : at + ACCUMULATE]).avg_loss
        for at in range(0, len(pairs), ACCUMULATE)
    ]
    assert len(theirs) == STEPS
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert ours[-1] < 0.7 * ours[0]
    mine = pipeline.adapter_state()
    assert mine.keys() == adapter.keys()
    for name, array in mine.items():
        # Adam's first steps are the sign of the gradient, which rounding decides where it is near 0.
        difference = np.abs(array - adapter[name])
        assert np.quantile(difference, 0.99) < 2e-3, name
