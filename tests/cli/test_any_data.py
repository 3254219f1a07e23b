"""Any data file and any settings: a run trains, or one sentence says why it cannot."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from entrenar.cli import main
from entrenar.finetune.training_run import TrainingRun

WORDS = st.sampled_from(
    ["a", "say it", "é\u2028\U0001f600", "<|im_end|>", "{{ x }}", "w " * 60, " b", "", " "]
)
ODD = st.sampled_from(
    [None, True, 0, -1.5, 10**400, [], {}, ["a"], [{"type": "text", "text": "t"}], "\ud800"]
)
ROLES = ("user", "assistant", "system", "tool", "human", "gpt", "robot", None, [])


@st.composite
def decisions(draw: st.DrawFn) -> random.Random:
    """Evenly spread choices: hypothesis prefers the first of what it chooses from."""
    return random.Random(draw(st.integers(0, 2**63)))


def words(draw: st.DrawFn, rng: random.Random, odd: float) -> Any:
    """Return a text, or with probability ``odd`` anything else."""
    return draw(ODD) if rng.random() < odd else draw(WORDS)


def turns(draw: st.DrawFn, rng: random.Random, odd: float, shared: bool = False) -> Any:
    """Return turns of a user and answers, or with probability ``odd`` something like it."""
    role, text = ("from", "value") if shared else ("role", "content")
    names = ("human", "gpt") if shared else ("user", "assistant")
    if rng.random() < odd:
        return draw(ODD)
    found = [{role: "system", text: draw(WORDS)}] if rng.random() < 0.2 else []
    for _ in range(rng.randint(1, 3)):
        found += [{role: name, text: words(draw, rng, odd)} for name in names]
    if rng.random() < odd:
        rng.choice(found)[role] = rng.choice(ROLES)
    if rng.random() < odd:
        rng.choice(found).pop(rng.choice((role, text)))
    return found


def row(draw: st.DrawFn, rng: random.Random, form: int, odd: float) -> Any:
    """Return a row of the ``form``-th format."""

    def text() -> Any:
        return words(draw, rng, odd)

    if form < 3:
        key = ("messages", "conversations", "prompt")[form]
        made = {key: turns(draw, rng, odd, shared=form == 1)}
        if form == 2:
            made["completion"] = [{"role": "assistant", "content": text()}]
    elif form == 6:
        made = {"text": text()}
    else:
        first, second = (
            ("prompt", "completion"),
            ("instruction", "output"),
            ("instruction", "response"),
        )[form - 3]
        made = {first: text(), second: text()}
        if rng.random() < 0.2:
            made[rng.choice(("system", "input"))] = text()
    if rng.random() < odd:
        made.pop(rng.choice(list(made)))
    if rng.random() < 0.1:
        made["id"] = draw(ODD)
    return draw(ODD) if rng.random() < odd / 4 else made


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """One format mostly, sometimes a foreign row, broken text or bytes."""
    rng = draw(decisions())
    odd = rng.choice((0.0, 0.0, 0.0, 0.05, 0.5))
    form = rng.randrange(7)
    rows = [row(draw, rng, form, odd) for _ in range(rng.choice((0, 1, 1, 2, 3, 4)))]
    if rng.random() < 0.1:
        rows.insert(rng.randint(0, len(rows)), row(draw, rng, rng.randrange(7), odd))
    texts = [json.dumps(made, ensure_ascii=rng.random() < 0.5) for made in rows]
    newline = rng.choice(["\n", "\r\n", "\n\n"])
    whole = newline.join(texts)
    if rng.random() < 0.4:
        whole = "[" + ("," + newline).join(texts) + "]"
    data = whole.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:  # a byte lost or changed
        at = rng.randint(0, len(data))
        data = data[:at] + rng.choice([b"", b"\xff", b"}", b"\x00", b'"']) + data[at + 1 :]
    return (
        rng.choice([b"", b"", b"", b"", b"\xef\xbb\xbf"]) + data
        if rng.random() > 0.03
        else b"\xff\xfe"
    )


GOOD: dict[str, list[Any]] = {
    "train_on": ["responses", "all"],
    "long_samples": ["truncate", "skip", "error"],
    "max_seq_len": [16, 48, 512],
    "packing": [True, False],
    "batch_size": [1, 3],
    "grad_accum_steps": [1, 2],
    "eval_fraction": [0.0, 0.3, 0.9],
    "lora_dropout": [0.0, 0.5],
    "schedule": ["cosine", "linear", "constant"],
    "target_modules": ["all-linear", ["q_proj"], ["down_proj", "v_proj"]],
    "quantize_nf4": [True, False],
    "gradient_clip_norm": ["none", 0.5],
    "seed": [0, 2**40],
    "checkpointing": ["auto", True, False],
}
WRONG: dict[str, list[Any]] = {
    "train_on": ["prompt", None, 3],
    "max_seq_len": [0, "64", 2.5],
    "batch_size": [0, -1, True],
    "eval_fraction": [1.0, "half", -0.1],
    "target_modules": [[], "", ["no_such_layer"], ["q_proj", "q_proj"]],
    "learning_rate": [0.0, "1e-4"],
    "double_quant": [True],
    "sede": [1],
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Some settings, each allowed; one in eight times one that is not, too."""
    rng = draw(decisions())
    found = {name: rng.choice(choices) for name, choices in GOOD.items() if rng.random() < 0.3}
    if rng.random() < 1 / 8:
        name = rng.choice(list(WRONG))
        found[name] = rng.choice(WRONG[name])
    return {name: value for name, value in found.items() if value is not None}


def test_a_run_trains_or_says_in_one_sentence_why_not(
    capsys: pytest.CaptureFixture[str],
    counts: Callable[[int, int], int],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingRun, "_draw", lambda self: None)  # half of a run's time
    data, config, output = tmp_path / "d.jsonl", tmp_path / "c.toml", tmp_path / "run"
    codes: dict[int, int] = {}

    @settings(
        max_examples=counts(100, 2000),
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(content=files(), values=configs())
    def check(content: bytes, values: dict[str, Any]) -> None:
        shutil.rmtree(output, ignore_errors=True)
        data.write_bytes(content)
        config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
        arguments = ["train", "--model", tiny_model, "--data", data, "--output", output]
        arguments += ["--config", config, "--max-steps=1", "--lora-rank=2", "--device=cpu"]
        code = main([*map(str, arguments), "--answers=0", "--show=1"])
        shown = capsys.readouterr()
        codes[code] = codes.get(code, 0) + 1
        assert "Traceback" not in shown.out + shown.err
        if code == 0:
            assert (output / "adapter" / "adapter_model.safetensors").is_file()
            assert " trained on" in shown.out
            return
        assert code == 2, shown.err
        assert shown.err.startswith("entrenar: error: ")
        assert shown.err.count("\n") == 1, shown.err
        assert len(shown.err) < 700, shown.err
        assert not (output / "adapter").exists()

    check()
    least = counts(100, 2000) // 8
    assert codes[0] >= least, codes  # neither outcome is a rarity, or little was tried
    assert codes[2] >= least, codes
