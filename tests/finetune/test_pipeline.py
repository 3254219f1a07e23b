"""The pipeline's steps: one mean over the batch, clipping that clips, steps that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import GenerateConfig, InstructConfig, InstructPipeline, Stream, runtime
from entrenar.autograd import detect_hazards
from entrenar.errors import AdapterError
from entrenar.finetune.chat import Example
from entrenar.finetune.instruct_pipeline import pipeline as pipeline_module

PAIRS = [([5, 9, 17, 3], [8, 44, 2]), ([7], [12, 30, 61, 9, 2]), ([20, 21], [33, 2])]


def make(model: Path, **settings: Any) -> InstructPipeline:
    given = {"lora_rank": 4, "learning_rate": 1e-2, "schedule": "constant", "device": "cpu"}
    pipeline = InstructPipeline.from_pretrained(model, InstructConfig(**{**given, **settings}))
    rng = np.random.default_rng(1)
    state = pipeline.adapter_state()  # B away from zero, so that A has gradients too
    pipeline.adapters.load_state_dict(
        {k: (rng.standard_normal(v.shape) * 0.1).astype(np.float32) for k, v in state.items()}
    )
    return pipeline


def arena(pipeline: InstructPipeline) -> np.ndarray:
    return pipeline.adapters.params.numpy().copy()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loss_is_one_mean_over_the_accumulated_batch(tiny_model: Path, size: int) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/1875
    https://github.com/axolotl-ai-cloud/axolotl/issues/2227
    """
    whole, parts = make(tiny_model, batch_size=3), make(tiny_model, batch_size=size)
    a, b = whole.train_batch(PAIRS), parts.train_batch(PAIRS)
    assert b.avg_loss == pytest.approx(a.avg_loss, rel=1e-6)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert a.total_response_tokens == b.total_response_tokens == 10
    grads = [p.adapters.grads.numpy() for p in (whole, parts)]
    np.testing.assert_allclose(grads[0], grads[1], rtol=0, atol=1e-6)


def test_the_mean_weighs_tokens_not_samples(tiny_model: Path) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/1875"""
    pipeline = make(tiny_model)
    each = [pipeline.evaluate([pair]) for pair in PAIRS]
    summed = sum(r.avg_loss * r.total_response_tokens for r in each)
    whole = pipeline.evaluate(PAIRS)
    assert whole.avg_loss == pytest.approx(summed / 10, rel=1e-6)
    assert whole.perplexity == pytest.approx(math.exp(whole.avg_loss))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_evaluation_does_not_depend_on_the_batch_size(tiny_model: Path, size: int) -> None:
    """https://github.com/huggingface/transformers/issues/39241"""
    wanted = make(tiny_model).evaluate(PAIRS).avg_loss
    assert make(tiny_model, batch_size=size).evaluate(PAIRS).avg_loss == pytest.approx(
        wanted, rel=1e-6
    )


def test_evaluation_changes_nothing_and_ignores_dropout(tiny_model: Path) -> None:
    """https://github.com/paiml/aprender/issues/2170"""
    plain, dropping = make(tiny_model), make(tiny_model, lora_dropout=0.5)
    before = arena(dropping)
    assert dropping.evaluate(PAIRS) == plain.evaluate(PAIRS)
    assert np.array_equal(before, arena(dropping))
    losses = [
        make(tiny_model, lora_dropout=0.5, seed=s).train_batch(PAIRS).avg_loss for s in (0, 1)
    ]
    assert len({*losses, plain.evaluate(PAIRS).avg_loss}) == 3


def test_the_clip_is_applied(tiny_model: Path) -> None:
    """https://github.com/openvla/openvla/issues/334"""
    free = make(tiny_model, gradient_clip_norm=None, betas=(0.0, 0.0), eps=1e6, weight_decay=0.0)
    clipped = make(tiny_model, gradient_clip_norm=0.01, betas=(0.0, 0.0), eps=1e6, weight_decay=0.0)
    moves = []
    for pipeline in (free, clipped):
        norm = pipeline.train_batch(PAIRS).grad_norm
        moves.append(np.linalg.norm(pipeline.adapters.m.numpy()))
    assert norm > 0.01
    assert moves[0] == pytest.approx(norm, rel=1e-4)
    assert moves[1] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("what", ["train_batch", "evaluate"])
def test_a_step_follows_what_the_caller_wrote_and_the_caller_follows_it(
    tiny_model: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and adapters are loaded on the caller's stream, the step runs on another."""
    pipeline = make(tiny_model)
    waits: list[tuple[Stream, Stream | None]] = []
    monkeypatch.setattr(Stream, "wait_event", lambda self, e: waits.append((self, e.stream)))
    launches: list[runtime.LaunchRecord] = []
    with Stream("cpu") as mine, runtime.listening(launches.append):
        waits.clear()  # entering mine waits for the stream before it
        getattr(pipeline, what)(PAIRS)
    (stream,) = {record.stream for record in launches}
    assert stream != mine
    assert next(waited for waiting, waited in waits if waiting == stream) == mine
    assert waits[-1] == (mine, stream)


def test_decay_reaches_nothing_but_the_adapters(make_model: Callable[..., Path]) -> None:
    """https://github.com/huggingface/transformers/issues/35927: norms and biases shrank."""
    pipeline = make(make_model(), weight_decay=0.1)
    weights = pipeline.model.named_weights()
    before = {name: w.data.clone() for name, w in weights.items() if hasattr(w, "data")}
    assert any("layernorm" in name for name in before)
    pipeline.train_batch(PAIRS)
    for name, old in before.items():
        assert torch.equal(weights[name].data, old), name


def test_a_first_adapter_leaves_the_model_as_it_was_and_then_learns(tiny_model: Path) -> None:
    """https://github.com/Lightning-AI/litgpt/issues/1229"""
    config = InstructConfig(lora_rank=4, device="cpu", learning_rate=1e-2, schedule="constant")
    pipeline = InstructPipeline.from_pretrained(tiny_model, config)
    with_adapter = pipeline.model.logits([[1, 5, 9]])
    pipeline.model.detach_adapters()
    assert np.array_equal(with_adapter, pipeline.model.logits([[1, 5, 9]]))
    pipeline.model.attach(pipeline.adapters)
    for step in range(2):
        pipeline.train_batch(PAIRS)
        for layer in pipeline.adapters.layers.values():
            assert np.any(layer.lora_b.grad.numpy())
            assert np.any(layer.lora_a.grad.numpy()) == (step > 0)


def test_targets_are_not_shifted_twice(tiny_model: Path) -> None:
    """https://github.com/huggingface/transformers/issues/47394"""
    pipeline = make(tiny_model)
    ids = [5, 9, 17, 3]
    logits = pipeline.model.logits([ids])[0].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = -np.mean([logs[1, 17], logs[2, 3]])
    assert pipeline.evaluate([(ids[:2], ids[2:])]).avg_loss == pytest.approx(wanted, rel=1e-5)


def test_a_sample_without_response_left_is_skipped_and_counted(tiny_model: Path) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1355"""
    pipeline = make(tiny_model, max_seq_len=8)
    before = arena(pipeline)
    result = pipeline.train_step(list(range(4, 14)), [4, 2])
    assert (result.loss, result.num_response_tokens, result.perplexity) == (0.0, 0, 1.0)
    assert np.array_equal(before, arena(pipeline))
    assert pipeline.skipped_samples == 1
    mixed = pipeline.train_batch([*PAIRS, (list(range(4, 14)), [4, 2])])
    assert (mixed.skipped, mixed.total_response_tokens) == (1, 10)
    assert math.isfinite(mixed.avg_loss)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(
    tiny_model: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make(tiny_model)
    pipeline.train_batch(PAIRS)
    if where == "loss":
        weight = pipeline.model.named_weights()["model.norm.weight"]
        weight.data[0] = math.inf
    else:
        pipeline.adapters.layers["model.layers.0.self_attn.q_proj"].lora_a.grad[0, 0] = math.nan
        monkeypatch.setattr(pipeline.adapters, "zero_grad", lambda: None)
    kept = [getattr(pipeline.adapters, n).numpy().copy() for n in ("params", "m", "v", "step")]
    result = pipeline.train_batch(PAIRS)
    assert result.non_finite
    assert not (math.isfinite(result.avg_loss) and math.isfinite(result.grad_norm))
    assert pipeline.non_finite_steps == 1
    for name, old in zip(("params", "m", "v", "step"), kept, strict=True):
        assert np.array_equal(old, getattr(pipeline.adapters, name).numpy())


def test_recomputing_activations_changes_no_bit_of_the_loss(tiny_model: Path) -> None:
    kept, recomputed = (make(tiny_model, checkpointing=c, lora_dropout=0.3) for c in (False, True))
    for _ in range(2):
        assert kept.train_batch(PAIRS).avg_loss == recomputed.train_batch(PAIRS).avg_loss
    np.testing.assert_array_equal(arena(kept), arena(recomputed))


def test_nf4_trains(tiny_model: Path) -> None:
    pipeline = make(tiny_model, quantize_nf4=True, double_quant=True)
    losses = [pipeline.train_batch(PAIRS).avg_loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_schedule_of_single_steps_is_constant_after_warm_up(tiny_model: Path) -> None:
    pipeline = make(tiny_model, warmup_steps=2, schedule="cosine")
    rates = []
    for _ in range(4):
        rates.append(pipeline.learning_rate)
        pipeline.train_step(*PAIRS[0])
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])


def test_a_context_shorter_than_asked_lowers_max_seq_len_with_a_notice(tiny_model: Path) -> None:
    pipeline = make(tiny_model, max_seq_len=512)
    assert pipeline.config.max_seq_len == 128
    assert "lowered from 512 to 128" in pipeline.notices[0]


def test_a_target_that_matches_nothing_is_refused(tiny_model: Path) -> None:
    """https://github.com/huggingface/peft/issues/1959"""
    with pytest.raises(AdapterError, match="v_porj"):
        make(tiny_model, target_modules=("q_proj", "v_porj"))


def test_all_linear_leaves_the_output_projection_alone(tiny_model: Path) -> None:
    """https://github.com/huggingface/peft/issues/2267"""
    names = {
        n.rpartition(".")[2] for n in make(tiny_model, target_modules="all-linear").adapters.layers
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(AdapterError, match="'proj'"):
        make(tiny_model, target_modules=("proj",))


def test_an_adapter_survives_its_file(tiny_model: Path, tmp_path: Path) -> None:
    """https://github.com/artidoro/qlora/issues/44"""
    first = make(tiny_model)
    first.train_batch(PAIRS)
    first.save_adapter(tmp_path / "adapter")
    second = make(tiny_model)
    second.load_adapter(tmp_path / "adapter")
    assert np.array_equal(arena(first), arena(second))
    assert len(first.adapter_state()) == 2 * 2 * 2
    ids = [[1, 5, 9]]
    assert np.array_equal(first.model.logits(ids), second.model.logits(ids))
    with pytest.raises(AdapterError, match="has r 4, this pipeline 8"):
        make(tiny_model, lora_rank=8).load_adapter(tmp_path / "adapter")


def test_generation_sees_the_adapter(tiny_model: Path) -> None:
    pipeline = make(tiny_model, max_steps=60, learning_rate=2e-2, target_modules="all-linear")
    prompt, answer = pipeline.chat_ids("say hi"), [70, 71, 72, 2]
    for _ in range(60):
        pipeline.train_step(prompt, answer)
    result = pipeline.generate(prompt, GenerateConfig(max_new_tokens=8, temperature=0.0))
    assert result.ids[:3] == [70, 71, 72]
    assert result.finish_reason == "stop"


def test_rows_without_loss_do_not_reach_the_output_projection(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrenar.autograd import ops

    seen = []
    original = ops.linear_cross_entropy
    monkeypatch.setattr(
        ops,
        "linear_cross_entropy",
        lambda hidden, *a, **k: seen.append(hidden.shape[0]) or original(hidden, *a, **k),
    )
    make(tiny_model, batch_size=3).train_batch(PAIRS)
    assert seen == [10]


def test_the_frozen_weights_stay_frozen(tiny_model: Path) -> None:
    pipeline = make(tiny_model)
    before = {k: v.data.clone() for k, v in pipeline.model.named_weights().items()}
    pipeline.train_batch(PAIRS)
    assert all(torch.equal(before[k], v.data) for k, v in pipeline.model.named_weights().items())


def test_examples_without_any_loss_do_nothing(tiny_model: Path) -> None:
    pipeline = make(tiny_model)
    result = pipeline.train_examples([[Example.from_pair([1, 2, 3], [])]])
    assert result.total_response_tokens == 0
    assert pipeline.steps == 0


def test_a_batch_is_copied_before_the_one_before_it_is_computed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and steps alternate, one copy ahead; nothing is ordered by luck."""
    pipeline = make(tiny_model, batch_size=1, grad_accum_steps=3)
    seen: list[str] = []
    real_pack, real_loss = pipeline_module.pack, pipeline._loss
    monkeypatch.setattr(pipeline_module, "pack", lambda *a: (seen.append("copy"), real_pack(*a))[1])
    monkeypatch.setattr(pipeline, "_loss", lambda *a: (seen.append("loss"), real_loss(*a))[1])
    with detect_hazards():
        pipeline.train_batch(PAIRS)
        assert seen == ["copy", "copy", "loss", "copy", "loss", "loss"]
        seen.clear()
        pipeline.evaluate(PAIRS)
    assert seen == ["copy", "copy", "loss", "copy", "loss", "loss"]
