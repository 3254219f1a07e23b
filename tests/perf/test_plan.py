"""The plan of a step against a step that is executed, and against sums by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from entrenar import InstructConfig, InstructPipeline, runtime
from entrenar.errors import ConfigError
from entrenar.finetune.chat import Example
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.model import Transformer
from entrenar.transformer.weights import tensor_shapes
from perf import plan, plan_step
from perf.devices import DEVICES

TINY: dict[str, Any] = plan_step.CONFIGS["qwen2.5-1.5b"] | {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 272, "num_hidden_layers": 2,
}  # fmt: skip
TOKENS = 24


def executed(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], **options: Any) -> list[Any]:
    """Run a step with compiled kernels, emulated; return op and bytes of each launch."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_80")
    model = TransformerConfig.from_hf(config)
    rng = np.random.default_rng(0)
    weights = (
        (name, torch.from_numpy(rng.standard_normal(shape, np.float32) * 0.1).to(torch.bfloat16))
        for name, shape in tensor_shapes(model).items()
    )
    settings: dict[str, Any] = {
        "quantize_nf4": True, "max_seq_len": TOKENS, "dtype": "bfloat16", "device": "cpu",
    }  # fmt: skip
    pipeline = InstructPipeline(
        Transformer(
            model, weights, quantize="nf4", dtype="bfloat16", device="cpu", decode_ahead=True
        ),
        InstructConfig(**(settings | options)),
    )
    ids = rng.integers(0, 272, TOKENS).tolist()
    records: list[Any] = []
    with runtime.listening(lambda record: records.append((record.op, plan_step._bytes(record)))):
        result = pipeline.train_examples([[Example.from_pair(ids[:12], ids[12:])]])
    assert np.isfinite(result.avg_loss)
    return records


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (True, {"checkpointing": False}),
        (False, {"checkpointing": True}),
        (True, {"checkpointing": False, "weight_cache": "decoded"}),
    ],
)
def test_the_list_is_that_of_a_step_that_is_executed(
    monkeypatch: pytest.MonkeyPatch, tied: bool, options: dict[str, Any]
) -> None:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    config = TINY | {"tie_word_embeddings": tied}
    found: list[Any] = []
    planned = plan_step._launches

    def keep(*arguments: Any) -> Any:
        with plan_step.recorded() as records:
            made = planned(*arguments)
        found.extend((record.op, plan_step._bytes(record)) for record, _ in records)
        return made

    monkeypatch.setattr(plan_step, "_launches", keep)
    made, _ = plan_step.step(config, TOKENS, "sm_80", **options)
    real = executed(monkeypatch, config, **options)
    assert found[-len(real) :] == real
    assert sum(launch.op == "lora_forward" for launch in made) >= 2 * 2 * 2


def test_operations_by_hand() -> None:
    """One sequence of a small model: products with weights, adapters and attention, forward."""
    made, _ = plan_step.step(TINY, TOKENS, "sm_90", checkpointing=False)
    t, h, f, kv, layers, rank = TOKENS - 1, 64, 128, 32, 2, 16
    forward = [launch for launch in made if launch.phase == "forward"]
    weights = layers * 2 * t * (h * h + h * kv * 2 + h * h + 3 * h * f)
    adapters = layers * 2 * t * rank * ((h + h) + (h + kv))
    attention = layers * 4 * (t * (t + 1) // 2) * h
    head = (
        2 * 2 * (TOKENS // 2) * 272 * h
    )  # the logits of labelled rows, and the gradient behind them
    assert sum(launch.flops for launch in forward) == weights + adapters + attention + head
    backward = [launch for launch in made if launch.phase == "backward"]
    by_op = {op: sum(x.flops for x in backward if x.op == op) for op in ("attention_backward",)}
    assert by_op["attention_backward"] == attention // 2 * 7  # 7 products where forward has 2


def test_bytes_by_hand() -> None:
    made, _ = plan_step.step(TINY, TOKENS, "sm_90", checkpointing=False)
    t = TOKENS - 1
    swiglu = [x for x in made if x.op == "swiglu_forward"]
    assert [x.bytes for x in swiglu] == [3 * t * 128 * 2] * 2
    gathered = next(x for x in made if x.op == "embedding_forward" and x.bytes > 1000)
    assert gathered.bytes == t * 8 + 2 * t * 64 * 2


def test_choices_show(counts: Callable[[int, int], int]) -> None:
    """Of a model's own sizes, without its memory."""
    device = DEVICES["h200"]
    names = plan_step.CONFIGS if counts(0, 1) else ["qwen2.5-1.5b"]
    for model in names:
        found = {recipe: plan.plan(model, 2048, device, recipe) for recipe in plan.RECIPES}
        ours = found["ours"]
        assert ours["floor_ms"] > 0
        for other in ("recompute all", "learn every token", "usual"):
            assert found[other]["floor_ms"] > ours["floor_ms"], other
        assert found["decoded copies"]["floor_ms"] < ours["floor_ms"]
        assert found["decoded copies"]["peak_bytes"] > ours["peak_bytes"]
        assert found["recompute all"]["peak_bytes"] < ours["peak_bytes"]
        assert found["recompute all"]["flops"] > ours["flops"]
        assert not any(row["phase"] == "modelled" for row in ours["rows"])
        assert sum(row["floor_us"] for row in ours["rows"]) == pytest.approx(
            1e3 * ours["floor_ms"], rel=1e-3
        )


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wanted one of qwen2\.5-1\.5b"):
        plan.plan("gpt2", 128, DEVICES["h200"], "ours")
    with pytest.raises(ConfigError, match="recipe is 'best'"):
        plan.plan("qwen2.5-1.5b", 128, DEVICES["h200"], "best")
    with pytest.raises(ConfigError, match="at least 2"):
        plan.main(["--tokens", "1"])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--tokens", "64", "--recipe", "ours"]) == 0
    shown = capsys.readouterr().out
    assert "qwen2.5-1.5b, 64 tokens, H200 SXM" in shown
    assert "attention_forward" in shown
    assert plan.main(["--tokens", "64", "--recipe", "usual", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert {"launches", "bytes", "flops", "floor_ms", "tokens_per_s_at_floor", "memory"} <= set(row)
