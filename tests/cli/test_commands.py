"""The commands beside training, on a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar import Transformer
from entrenar.cli import main
from entrenar.cli.console import count, duration, gibibytes
from entrenar.cli.model_flags import sampling
from entrenar.cli.parser import parse
from entrenar.transformer.sampling import GenerateConfig


@pytest.fixture(scope="module")
def run_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    data = folder / "pairs.jsonl"
    rows = [{"instruction": f"say {c}", "response": c * 4} for c in "abcdefgh"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (
        "--max-steps 6 --batch-size 4 --lora-rank 2 --learning-rate 2e-2 --answers 0 --device cpu"
    )
    paths = ["--model", str(tiny_model), "--data", str(data), "--output", str(folder / "run")]
    assert main(["train", *paths, *arguments.split(), "--eval-fraction", "0.25"]) == 0
    return folder


def test_evaluate(capsys: pytest.CaptureFixture[str], tiny_model: Path, run_folder: Path) -> None:
    data, losses = str(run_folder / "pairs.jsonl"), []
    capsys.readouterr()
    for flags in (["--model", str(tiny_model)], ["--adapter", str(run_folder / "run" / "adapter")]):
        for size in ("1", "3"):
            assert main(["evaluate", *flags, "--data", data, "--batch-size", size, "--json"]) == 0
            figures = json.loads(capsys.readouterr().out)
            assert figures["samples"] == 8
            assert figures["response_tokens"] == 40
            losses.append(figures["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[2] < losses[0]
    assert main(["evaluate", "--model", str(tiny_model), "--data", data]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--raw"], ["--system", "be brief"]])
def test_generate(capsys: pytest.CaptureFixture[str], run_folder: Path, flags: list[str]) -> None:
    adapter = str(run_folder / "run" / "adapter")
    capsys.readouterr()
    arguments = ["--max-new-tokens", "5", "--temperature", "0", *flags]
    texts = []
    for _ in range(2):
        assert main(["generate", "--adapter", adapter, "--prompt", "say a", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].endswith("\n")


def test_generate_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("say b"))
    arguments = ["--prompt", "-", "--max-new-tokens", "2", "--seed", "1"]
    assert main(["generate", "--model", str(tiny_model), *arguments]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", "--model", str(tiny_model), "--prompt", "-"]) == 2
    assert "--prompt is missing or empty" in capsys.readouterr().err


def test_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    lines = iter(["hello", "/new", "x" * 300, "again"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--model", str(tiny_model), "--max-new-tokens", "3"]) == 0
    assert "/new starts over" in capsys.readouterr().out


def test_merge(capsys: pytest.CaptureFixture[str], run_folder: Path, tmp_path: Path) -> None:
    """https://github.com/ml-explore/mlx-examples/issues/622"""
    adapter = str(run_folder / "run" / "adapter")
    output = tmp_path / "merged"
    assert main(["merge", "--adapter", adapter, "--output", str(output), "--dtype", "float32"]) == 0
    assert "4 weights" in capsys.readouterr().out
    from entrenar.finetune.adapted import load_adapted

    adapted, _ = load_adapted(None, adapter, device="cpu")
    merged = Transformer.from_pretrained(output, device="cpu")
    ids = [[1, 5, 9]]
    np.testing.assert_allclose(merged.logits(ids), adapted.logits(ids), rtol=0, atol=1e-4)
    assert main(["merge", "--adapter", adapter, "--output", str(output)]) == 2


def test_inspect(capsys: pytest.CaptureFixture[str], tiny_model: Path, run_folder: Path) -> None:
    wanted = {
        tiny_model: ("Hugging Face model", "llama", "4 of 8"),
        run_folder / "run": ("kind", "held-out loss", "complete", "lora_rank=2"),
        run_folder / "run" / "adapter": ("LoRA adapter", "alpha    ", "q_proj, v_proj"),
        run_folder / "pairs.jsonl": ("instruction+response", "8 (0 empty ones skipped)"),
    }
    capsys.readouterr()
    for path, parts in wanted.items():
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert all(part.strip() in shown for part in parts), shown
        assert main(["inspect", str(path), "--json"]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert main(["inspect", str(run_folder / "none")]) == 2


def test_inspect_says_what_training_takes(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["inspect", str(tiny_model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored_as"] == {"F32": facts["parameters"]}
    assert facts["size_on_disk"] == (tiny_model / "model.safetensors").stat().st_size
    assert set(facts["memory_to_train"]) == {"dense", "NF4"}
    assert facts["memory_to_train"]["dense"] > 4 * facts["parameters"]
    assert facts["trains_here"].startswith("yes, dense or NF4, on ")
    monkeypatch.setattr("entrenar.runtime.available_memory_bytes", lambda device: 1000)
    assert main(["inspect", str(tiny_model)]) == 0
    shown = capsys.readouterr().out
    assert "no, not on cpu" in shown
    assert "F32 " in shown


def estimated(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["estimate", "--model", str(model), "--json", *flags]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_estimate(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    plain, nf4, batch = (
        estimated(capsys, tiny_model, "--device", "cpu", *flags)
        for flags in ([], ["--quantize-nf4"], ["--batch-size", "8"])
    )
    assert plain["weights"] == Transformer.from_pretrained(tiny_model, device="cpu").nbytes()
    quantised = Transformer.from_pretrained(tiny_model, quantize="nf4", device="cpu")
    assert nf4["weights"] == quantised.nbytes()
    assert batch["total"] > plain["total"]
    parts = [
        "weights",
        "adapters",
        "gradients",
        "moments",
        "process",
        "activations",
        "logits",
        "scratch",
    ]
    assert plain["total"] == sum(plain[part] for part in parts)
    assert plain["fits"] is (plain["total"] <= plain["free"])
    assert plain["total_with_checkpointing"] < batch["total_without_checkpointing"]
    assert plain["largest_max_seq_len"] == 128  # the model's context
    assert main(["estimate", "--model", str(tiny_model), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "free on cpu: fits" in shown
    assert f"--batch-size {plain['largest_batch_size']} at --max-seq-len 512" in shown


def test_estimate_for_a_card(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    small, large = (estimated(capsys, tiny_model, "--card", card) for card in ("20MB", "24GB"))
    assert (small["free"], large["free"]) == (20 * 10**6, 24 * 10**9)
    assert "process" not in small
    # on a GPU weights are bfloat16 unless told otherwise
    assert 2 * small["weights"] == Transformer.from_pretrained(tiny_model, device="cpu").nbytes()
    assert 0 < small["largest_batch_size"] < large["largest_batch_size"]
    fitting = str(small["largest_batch_size"])
    assert estimated(capsys, tiny_model, "--card", "20MB", "--batch-size", fitting)["fits"]
    one_more = str(small["largest_batch_size"] + 1)
    flags = ["--card", "20MB", "--batch-size", one_more]
    assert not estimated(capsys, tiny_model, *flags)["fits"]
    assert main(["estimate", "--model", str(tiny_model), *flags]) == 0
    shown = capsys.readouterr().out
    assert "of the card 20MB: does not fit" in shown
    assert "try --quantize-nf4" in shown
    for name in ("h200", "NVIDIA H200", "H200"):
        assert estimated(capsys, tiny_model, "--card", name)["free"] == 143771 << 20


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--card", "h20"], "h200"),
        (["--card", "24"], "24GB"),
        (["--card", "0GB"], "24GB"),
        (["--card", "24GB", "--device", "cpu"], "device is cpu"),
    ],
)
def test_estimate_refuses_a_card_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, flags: list[str], said: str
) -> None:
    assert main(["estimate", "--model", str(tiny_model), *flags]) == 2
    assert said in capsys.readouterr().err


def test_estimate_needs_no_weights(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    whole = estimated(capsys, tiny_model, "--card", "24GB", "--quantize-nf4")
    alone = tmp_path / "config.json"
    config = json.loads((tiny_model / "config.json").read_text())
    alone.write_text(json.dumps(config))
    for path in (alone, tmp_path):
        assert estimated(capsys, path, "--card", "24GB", "--quantize-nf4") == whole
    # a folder that bitsandbytes quantised is held in 4 bits without being asked
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
    }
    alone.write_text(json.dumps(config))
    assert estimated(capsys, alone, "--card", "24GB") == whole
    alone.write_text("{")
    assert main(["estimate", "--model", str(alone)]) == 2


def test_plot(capsys: pytest.CaptureFixture[str], run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = str(run_folder / "run")
    assert main(["plot", run, "--output", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert main(["plot", run, "--output", str(tmp_path / "a.xyz")]) == 2
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrenar.cli.kernel_check.emulated", lambda target: {"difference": 1e-6})
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (3 if found["problems"] else 0)
    assert "agrees with float64" in found["check"]
    assert main(["doctor"]) == code
    assert "extras" in capsys.readouterr().out
    monkeypatch.setenv("ENTRENAR_BACKEND", "cuda")
    assert main(["doctor"]) == 2
    assert "ENTRENAR_BACKEND is 'cuda'" in capsys.readouterr().err


def test_units() -> None:
    assert count(1234567.8) == "1 234 567"
    assert gibibytes(3 * 2**30) == "3.00 GiB"
    assert gibibytes(2**20) == "1.0 MiB"
    assert duration(59.6) == "1:00"
    assert duration(3725) == "1:02:05"


def test_every_sampling_flag_reaches_the_draw() -> None:
    def settings(*flags: str) -> dict[str, Any]:
        _, arguments = parse(["generate", "--prompt", "a", *flags])
        return dataclasses.asdict(sampling(arguments))

    plain = settings()
    assert plain == dataclasses.asdict(GenerateConfig())
    for flag, text, value in (
        ("max-new-tokens", "3", 3),
        ("temperature", "0", 0.0),
        ("top-k", "0", 0),
        ("top-k", "1", 1),
        ("top-p", "0.5", 0.5),
        ("min-p", "0.25", 0.25),
        ("repetition-penalty", "1.5", 1.5),
        ("seed", "7", 7),
    ):
        changed = settings("--" + flag, text)
        assert changed == {**plain, flag.replace("-", "_"): value}


@pytest.mark.parametrize(
    "flags",
    [["--temperature", "nan"], ["--temperature", "-1"], ["--top-p", "0"], ["--seed", "-1"]],
)
def test_a_senseless_sampling_flag_is_refused_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """https://github.com/google-deepmind/gemma/issues/562"""
    assert main(["generate", "--model", "nowhere", "--prompt", "a", *flags]) == 2
    assert flags[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


def test_logits_that_are_not_finite_end_generation(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/robertknight/rten/issues/1089"""

    def broken(self: Transformer, ids: Any, cache: Any) -> Any:
        return np.full(self.config.vocab_size, np.nan, np.float32)

    monkeypatch.setattr(Transformer, "next_logits", broken)
    arguments = ["generate", "--model", str(tiny_model), "--device", "cpu", "--prompt", "a"]
    for temperature in ("0", "1"):
        assert main([*arguments, "--temperature", temperature]) == 1
        assert "step 0: non-finite logits" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, prompt: str
) -> None:
    """https://github.com/huggingface/transformers/issues/3678"""
    assert main(["generate", "--model", str(tiny_model), "--prompt", prompt]) == 2
    assert "--prompt is missing or empty" in capsys.readouterr().err
