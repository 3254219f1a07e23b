"""A training step calls none of torch's math: every operator torch dispatches moves storage only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar import GenerateConfig, InstructConfig, InstructPipeline

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "peft_tiny_llama.npz"
STORAGE = {
    "aten::alias", "aten::as_strided", "aten::clone", "aten::copy_", "aten::detach", "aten::empty",
    "aten::empty_like", "aten::empty_strided", "aten::expand", "aten::fill_", "aten::lift_fresh",
    "aten::permute", "aten::select", "aten::set_", "aten::slice", "aten::split", "aten::squeeze", "aten::t",
    "aten::transpose", "aten::unsqueeze", "aten::view", "aten::zero_", "aten::zeros", "aten::zeros_like",
    "aten::_reshape_alias", "aten::_to_copy", "aten::_unsafe_view", "aten::_local_scalar_dense", "aten::full",
    "aten::unbind", "aten::item",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Collects the names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_planted_product_is_recorded() -> None:
    with Recorder() as recorder:
        _ = torch.ones(2, 2) @ torch.ones(2, 2)
    assert not recorder.names <= STORAGE


@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_moves_storage_only(tmp_path: Path, nf4: bool, dtype: str) -> None:
    with np.load(GOLDEN) as data:
        (tmp_path / "config.json").write_text(str(data["config"]))
        weights = {k.removeprefix("weight/"): data[k] for k in data if k.startswith("weight/")}
    save_file(weights, tmp_path / "model.safetensors")
    config = InstructConfig(
        lora_rank=4, quantize_nf4=nf4, dtype=dtype, max_seq_len=32, device="cpu"
    )
    with Recorder() as recorder:
        pipeline = InstructPipeline.from_pretrained(tmp_path, config)
        result = pipeline.train_batch([([5, 9, 17], [8, 44, 2]), ([7], [12, 30])])
        pipeline.evaluate([([5, 9, 17], [8, 44, 2])])
        pipeline.generate([5, 9], GenerateConfig(max_new_tokens=3, temperature=0.0))
    assert result.total_response_tokens == 5
    assert recorder.names - STORAGE == set()
