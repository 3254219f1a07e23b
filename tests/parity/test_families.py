"""Random small models of every family, saved by transformers and PEFT, read here: the same numbers.

Logits are held to 1e-4 in float32, which both sides compute in: some twenty sums of up to a hundred
terms one after another, on logits of a few units.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import Transformer
from entrenar.autograd import Tape, ops
from entrenar.finetune.merge import merge_adapter
from entrenar.lora import LoraAdapters, load_adapter
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.families import FAMILIES
from entrenar.transformer.generation import GenerateConfig, generate
from tests.parity.drawn_families import CONTEXT, FULL, ORIGINAL, SLIDING, draw

# from 5.0 on a config states its rotation as rope_parameters, which is how configs are drawn here
transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend
NAMES = sorted(FAMILIES)
NEW_TOKENS = 10


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def randomise(model: Any, rng: np.random.Generator) -> None:
    """Fill weights so that every part of the model shows in logits of a few units."""
    offset = FAMILIES[model.config.model_type].norm_offset
    for name, parameter in model.named_parameters():
        value = rng.standard_normal(tuple(parameter.shape))
        if "norm" in name:
            value = 1.0 - offset + 0.2 * value
        elif name.endswith("bias"):
            value *= 0.3
        else:
            value *= 1.2 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(torch.from_numpy(value))


def older_spelling(folder: Path) -> None:
    """State the same config with the keys of older files, and without those at their defaults."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    family = FAMILIES[config["model_type"]]
    rope = config.pop("rope_parameters")
    local = rope[SLIDING] if FULL in rope else {}
    rope = dict(rope.get(FULL, rope))
    config["rope_theta"] = rope.pop("rope_theta")
    if local:
        config["rope_local_base_freq"] = local["rope_theta"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] != "default":
        if not local:  # of these transformers reads the kind under its new name alone
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    for key, value in family.defaults.items():
        if config.get(key) == value:
            del config[key]
    path.write_text(json.dumps(config))


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def saved(family: str, number: int, folder: Path) -> tuple[Any, np.random.Generator]:
    settings, rng = draw(family, number)
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, rng)
    model.save_pretrained(folder)
    if number % 2:
        older_spelling(folder)
    return theirs(folder), rng


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def adapted(model: Any, folder: Path, targets: Any, rng: np.random.Generator) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=7.0, target_modules=targets, task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            value = 0.2 * rng.standard_normal(tuple(parameter.shape))
            parameter.data.copy_(torch.from_numpy(value))
    made.save_pretrained(folder)
    return made.eval()


def attach(model: Transformer, folder: Path) -> LoraAdapters:
    config, state = load_adapter(folder)
    adapters = LoraAdapters(model.linear_shapes(), config)
    adapters.load_state_dict(state)
    model.attach(adapters)
    return adapters


def targets_of(family: str, number: int) -> Any:
    if number % 3 == 0:
        return "all-linear"
    return ["qkv_proj"] if FAMILIES[family].fused else ["q_proj", "v_proj"]


def numbers(family: str, count: int) -> range:
    """The family's share of ``count`` configs."""
    return range((count - NAMES.index(family) + len(NAMES) - 1) // len(NAMES))


@pytest.mark.parametrize("family", NAMES)
def test_logits_tokens_and_adapters_are_theirs(
    family: str, tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    for number in numbers(family, counts(12, 63)):
        folder = tmp_path / str(number)
        model, rng = saved(family, number, folder)
        ours = Transformer.from_pretrained(folder, device="cpu")
        vocab = model.config.vocab_size
        what = (family, number, (folder / "config.json").read_text())
        for length in (1, ORIGINAL - 3, CONTEXT):  # the last is past the original context
            ids = rng.integers(0, vocab, (2, length))
            wanted = logits_of(model, ids)
            np.testing.assert_allclose(ours.logits(ids), wanted, rtol=0, atol=1e-4, err_msg=what)
            assert 0.5 < np.abs(wanted).max() < 50
        # transformers makes keys anew where the frequencies switch only for the family that has them
        crosses = family == "phi3" or ours.config.rope_scaling.kind != "longrope"
        prompt = rng.integers(0, vocab, ORIGINAL - (4 if crosses else 11))
        check_tokens(model, ours, prompt, what)
        long = rng.integers(0, vocab, (2, CONTEXT))
        plain = logits_of(model, long)
        peft_model = adapted(model, folder / "adapter", targets_of(family, number), rng)
        adapters = attach(ours, folder / "adapter")
        wanted = logits_of(peft_model, long)
        assert np.abs(wanted - plain).max() > 0.01
        np.testing.assert_allclose(ours.logits(long), wanted, rtol=0, atol=1e-4, err_msg=what)
        merge_adapter(folder, adapters, folder / "merged", dtype="float32")
        merged = logits_of(theirs(folder / "merged"), long)
        np.testing.assert_allclose(merged, wanted, rtol=0, atol=1e-4, err_msg=what)


def check_tokens(model: Any, ours: Transformer, prompt: np.ndarray, what: Any) -> None:
    """Ten greedy tokens; where a rule changes at the original context, they cross it."""
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        made = model.generate(
            torch.from_numpy(prompt[None]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    wanted = made[0, len(prompt) :].tolist()
    ours.stop_token_ids = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = generate(
            ours, prompt.tolist(), GenerateConfig(temperature=0.0, max_new_tokens=NEW_TOKENS)
        )
    assert len(wanted) == NEW_TOKENS
    assert got.ids == wanted, what


@pytest.mark.parametrize("family", NAMES)
def test_bfloat16_loses_no_more_than_theirs(family: str, tmp_path: Path) -> None:
    """Against their float32; both round where activations are stored, we nowhere else."""
    model, rng = saved(family, 2, tmp_path)
    ids = rng.integers(0, model.config.vocab_size, (2, 40))
    wanted = logits_of(model, ids)
    with torch.no_grad():
        rounded = theirs(tmp_path, torch.bfloat16)(torch.from_numpy(ids)).logits.float().numpy()
    got = Transformer.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").logits(ids)
    ours, other = (float(np.sqrt(((x - wanted) ** 2).mean())) for x in (got, rounded))
    assert ours < 1.1 * other


@pytest.mark.parametrize("family", NAMES)
def test_adapter_gradients_are_those_of_torch(
    family: str, tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    """Both in float32; held to 1e-4 of the largest gradient of each tensor, element by element."""
    for number in range(counts(1, 4)):
        model, rng = saved(family, number, tmp_path / str(number))
        ids = rng.integers(0, model.config.vocab_size, (2, 20))
        theirs = adapted(model, tmp_path / str(number) / "adapter", "all-linear", rng)
        loss = theirs(torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss * 2 * 19
        loss.backward()
        wanted = {
            name.replace(".default", ""): p.grad.numpy()
            for name, p in theirs.named_parameters()
            if p.requires_grad
        }
        ours = Transformer.from_pretrained(tmp_path / str(number), device="cpu")
        adapters = attach(ours, tmp_path / str(number) / "adapter")
        targets = np.roll(ids, -1, axis=1)
        targets[:, -1] = -100
        with Tape() as tape:
            hidden = ours.hidden(ids.reshape(-1), np.tile(np.arange(20), 2), [0, 20, 40])
            value, rows = ops.linear_cross_entropy(
                hidden,
                ours.lm_head_weight,
                targets.reshape(-1),
                softcap=ours.config.final_logit_softcapping,
            )
        tape.backward(value)
        assert rows == 2 * 19
        assert value.item() == pytest.approx(loss.item(), rel=1e-5)
        got = adapters.grad_dict()
        assert set(got) == set(wanted)
        for name, gradient in wanted.items():
            bound = 1e-4 * np.abs(gradient).max()
            assert np.abs(gradient).max() > 0
            np.testing.assert_allclose(
                got[name], gradient, rtol=0, atol=bound, err_msg=f"{family} {number} {name}"
            )


@pytest.mark.parametrize("family", NAMES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    ours = TransformerConfig.from_hf({"model_type": family})
    rope = theirs.rope_parameters
    for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key), key
    size = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or size)
    assert ours.rope_theta == rope.get(FULL, rope)["rope_theta"]
    if FAMILIES[family].local_rope:
        assert ours.local_rope_theta == rope[SLIDING]["rope_theta"]
    window = getattr(theirs, "sliding_window", None) or 0
    types = getattr(theirs, "layer_types", None) or [SLIDING] * theirs.num_hidden_layers
    expected = tuple(window if t == SLIDING else 0 for t in types)
    assert ours.windows == expected
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        assert (getattr(ours, key) or None) == getattr(theirs, key, None)
