"""`entrenar train`: what it prints and leaves, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entrenar.cli import main
from entrenar.cli.arguments import COMMANDS
from entrenar.cli.parser import parse
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--max-steps=3", "--batch-size=2", "--lora-rank=2", "--device=cpu", "--answers=1"]
QUICK += ["--max-seq-len=64"]


def train(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [
        "train",
        "--model",
        str(model),
        "--data",
        str(data),
        "--output",
        str(output),
        *QUICK,
        *more,
    ]


def failure(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    """Run, and return the one line on standard error."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("entrenar: error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def test_a_run(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    assert main(train(tiny_model, pairs_file, output, "--eval-fraction", "0.3", "--show", "1")) == 0
    shown = capsys.readouterr().out
    for part in (
        "⟦<|im_start|>user", "7 samples", "held out 3", "LoRA r=2 alpha=32 on q_proj, v_proj",
        "held-out loss before training:", "step 1/3  loss", "lr 2.00e-04", "grad norm", "tokens/s",
        "peak", "ETA", "held-out loss after step 3:", "question", "wanted", "before", "after",
        "next: entrenar generate --adapter",
    ):  # fmt: skip
        assert part in shown, part
    assert "\x1b" not in shown
    assert (output / "adapter" / "adapter_model.safetensors").is_file()
    table = tomllib.loads((output / "config.toml").read_text())
    assert table["run"]["model"] == str(tiny_model)
    assert InstructConfig.from_toml(output / "config.toml").max_steps == 3
    steps = [row["step"] for row in read_metrics(output / "metrics.jsonl") if "eval_loss" in row]
    assert steps == [0, 3]
    adapter = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tiny_model)


VALUES: dict[str, tuple[list[str], Any]] = {
    "lora_rank": (["--lora-rank", "3"], 3),
    "lora_alpha": (["--lora-alpha", "7.5"], 7.5),
    "lora_dropout": (["--lora-dropout", "0.1"], 0.1),
    "target_modules": (["--target-modules", "k_proj,o_proj"], ("k_proj", "o_proj")),
    "use_rslora": (["--use-rslora"], True),
    "learning_rate": (["--learning-rate", "1e-5"], 1e-5),
    "betas": (["--betas", "0.8,0.9"], (0.8, 0.9)),
    "eps": (["--eps", "1e-6"], 1e-6),
    "weight_decay": (["--weight-decay", "0"], 0.0),
    "warmup_steps": (["--warmup-steps", "2"], 2),
    "warmup_ratio": (["--warmup-ratio", "0.2"], 0.2),
    "schedule": (["--schedule", "linear"], "linear"),
    "epochs": (["--epochs", "2"], 2),
    "max_steps": (["--max-steps", "9"], 9),
    "batch_size": (["--batch-size", "3"], 3),
    "grad_accum_steps": (["--grad-accum-steps", "4"], 4),
    "max_seq_len": (["--max-seq-len", "32"], 32),
    "train_on": (["--train-on", "all"], "all"),
    "long_samples": (["--long-samples", "skip"], "skip"),
    "gradient_clip_norm": (["--gradient-clip-norm", "none"], None),
    "quantize_nf4": (["--quantize-nf4"], True),
    "double_quant": (["--quantize-nf4", "--double-quant"], True),
    "packing": (["--packing"], True),
    "checkpointing": (["--checkpointing", "off"], False),
    "graph": (["--graph", "false"], False),
    "prewarm": (["--prewarm"], True),
    "weight_cache": (["--quantize-nf4", "--weight-cache", "decoded"], "decoded"),
    "lm_head_device": (["--lm-head-device", "auto"], "auto"),
    "eval_fraction": (["--eval-fraction", "0.5"], 0.5),
    "profile_interval": (["--profile-interval", "5"], 5),
    "seed": (["--seed", "5"], 5),
    "dtype": (["--dtype", "float32"], "float32"),
    "device": (["--device", "cpu"], "cpu"),
}


def test_every_setting_has_its_flag_and_the_flag_has_effect() -> None:
    """https://github.com/paiml/aprender/issues/518"""
    from entrenar.cli.config_flags import config_from

    assert set(VALUES) == {field.name for field in dataclasses.fields(InstructConfig)}
    for name, (flags, wanted) in VALUES.items():
        _, arguments = parse(["train", *flags])
        config, _ = config_from(arguments, None)
        assert getattr(config, name) == wanted, name


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    from entrenar.cli.config_flags import config_from

    path = tmp_path / "c.toml"
    path.write_text('seed = 4\nlora_rank = 8\n[run]\nmodel = "m"\n')
    config, run = config_from(parse(["train", "--seed", "5"])[1], str(path))
    assert (config.seed, config.lora_rank, config.epochs, run) == (5, 8, 3, {"model": "m"})


def test_the_config_of_a_run_starts_the_same_run(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    assert main(train(tiny_model, pairs_file, tmp_path / "a")) == 0
    again = [
        "train",
        "--config",
        str(tmp_path / "a" / "config.toml"),
        "--output",
        str(tmp_path / "b"),
    ]
    assert main(again) == 0
    files = [(tmp_path / n / "adapter" / "adapter_model.safetensors").read_bytes() for n in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--learning-rte", "1"], "no option --learning-rte; did you mean --learning-rate"),
        (["--learning-rate", "fast"], "--learning-rate is 'fast', wanted a number"),
        (["--epochs", "1.5"], "--epochs is '1.5', wanted a whole number"),
        (["--epochs", "0"], "epochs is 0, wanted a whole number of at least 1"),
        (["--save-every", "-1"], "save_every is -1"),
        (["--warmup-steps", "1", "--warmup-ratio", "0.1"], "wanted one of them"),
        (["--device", "gpu0"], "device is 'gpu0'"),
        (["--config", "/nowhere.toml"], "there is no configuration file /nowhere.toml"),
        (["--target-modules", "q_proj,v_porj"], "'v_porj' matches no linear layer"),
    ],
)
def test_wrong_settings(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    pairs_file: Path,
    tmp_path: Path,
    flags: list[str],
    what: str,
) -> None:
    """https://github.com/huggingface/autotrain-advanced/issues/877"""
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "run", *flags), 2)
    assert what in text
    assert not (tmp_path / "run").exists()


def test_missing_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--output is missing" in failure(capsys, ["train"], 2)
    assert "--model is missing" in failure(capsys, ["train", "--output", str(tmp_path / "r")], 2)
    assert "COMMAND" in failure(capsys, [], 2)
    assert "there is no command trian; did you mean train?" in failure(capsys, ["trian"], 2)


def test_a_model_path_that_is_wrong(
    capsys: pytest.CaptureFixture[str], pairs_file: Path, tmp_path: Path
) -> None:
    text = failure(capsys, train(tmp_path / "nowhere", pairs_file, tmp_path / "run"), 2)
    assert "nowhere" in text
    assert "no such file or folder" in text


def test_a_folder_that_is_no_model(
    capsys: pytest.CaptureFixture[str], pairs_file: Path, tmp_path: Path
) -> None:
    text = failure(capsys, train(tmp_path, pairs_file, tmp_path / "run"), 2)
    assert "has no config.json" in text


def test_a_model_without_tokenizer(
    capsys: pytest.CaptureFixture[str],
    make_model: Callable[..., Path],
    pairs_file: Path,
    tmp_path: Path,
) -> None:
    folder = make_model()
    (folder / "tokenizer.json").unlink()
    text = failure(capsys, train(folder, pairs_file, tmp_path / "run"), 2)
    assert "has no tokenizer" in text


def test_a_bad_line_seven(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/1694"""
    lines = pairs_file.read_text().splitlines()
    lines[6] = '{"instruction": "x"'
    pairs_file.write_text("\n".join(lines))
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "run"), 2)
    assert "pairs.jsonl:7 is not valid JSON at column 20" in text
    assert not (tmp_path / "run").exists()


def test_a_sample_cut_before_its_response_is_reported_and_all_such_is_an_error(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """https://github.com/alibaba/FederatedScope/issues/625"""
    with pairs_file.open("a") as file:
        file.write(json.dumps({"instruction": "x" * 100, "response": "lost"}) + "\n")
    assert main(train(tiny_model, pairs_file, tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert (
        "1 samples have no response token left within 64 tokens: skipped (first: line 11)" in shown
    )
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["skipped"] == 1
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "b", "--max-seq-len", "12"), 2)
    assert "has a response token left after cutting at 12 tokens" in text


def test_an_output_folder_that_is_not_empty(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    assert main(train(tiny_model, pairs_file, output)) == 0
    before = (output / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    text = failure(capsys, train(tiny_model, pairs_file, output), 2)
    assert "--resume" in text
    assert "--overwrite" in text
    failure(capsys, train(tiny_model, tmp_path / "none.jsonl", output, "--overwrite"), 2)
    assert (output / "metrics.jsonl").read_bytes() == before
    assert main(train(tiny_model, pairs_file, output, "--overwrite", "--seed", "1")) == 0
    assert (output / "metrics.jsonl").read_bytes() != before


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_extra(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    pairs_file: Path,
    tmp_path: Path,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "run"), 3)
    assert f"needs the package '{package}'" in text
    assert "pip install 'entrenar[train]'" in text


def test_no_gpu(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "run", "--device", "cuda"), 3)
    assert "sees no GPU" in text


def test_a_run_that_diverges_fails(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/autotrain-advanced/issues/877"""
    more = ["--learning-rate", "1e30", "--schedule", "constant", "--max-steps", "60"]
    text = failure(capsys, train(tiny_model, pairs_file, tmp_path / "run", *more), 1)
    assert "were not finite" in text
    assert "--learning-rate" in text
    assert not (tmp_path / "run" / "adapter").exists()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert "loss" not in rows[-1]
    assert rows[-1]["non_finite"] >= 20


def test_a_model_that_is_not_finite_fails(
    capsys: pytest.CaptureFixture[str],
    make_model: Callable[..., Path],
    pairs_file: Path,
    tmp_path: Path,
) -> None:
    folder = make_model()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, folder / "model.safetensors")
    more = ["--eval-fraction", "0.2", "--answers", "0"]
    assert main(train(folder, pairs_file, tmp_path / "run", *more)) == 1
    captured = capsys.readouterr()
    assert "held-out loss before training: not finite" in captured.out
    assert "loss not finite" in captured.out
    assert "none of the 3 steps was finite, so nothing was learned" in captured.err


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_no_samples(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, content: str
) -> None:
    """https://github.com/openspeech-team/openspeech/issues/217"""
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    assert "no samples in" in failure(capsys, train(tiny_model, path, tmp_path / "run"), 2)


def test_fewer_samples_than_a_batch(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/openspeech-team/openspeech/issues/217"""
    path = tmp_path / "d.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n' * 3)
    more = ["--batch-size", "8", "--eval-fraction", "0.1", "--max-steps", "1"]
    assert main(train(tiny_model, path, tmp_path / "run", *more)) == 0
    assert "of 3 samples is none: there is no evaluation" in capsys.readouterr().out


def test_interrupt_saves_and_resume_gives_the_uninterrupted_run(
    tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/autotrain-advanced/issues/877"""
    more = ["--max-steps", "40", "--answers", "0"]
    command = [sys.executable, "-m", "entrenar"]
    whole = train(tiny_model, pairs_file, tmp_path / "whole", *more)
    assert main(whole) == 0
    with subprocess.Popen(
        [*command, *train(tiny_model, pairs_file, tmp_path / "parts", *more)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step  2/40"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert f"entrenar train --output {tmp_path / 'parts'} --resume" in rest
    assert not (tmp_path / "parts" / "adapter").exists()
    assert main(["train", "--output", str(tmp_path / "parts"), "--resume"]) == 0
    files = [
        (tmp_path / n / "adapter" / "adapter_model.safetensors").read_bytes()
        for n in ("whole", "parts")
    ]
    assert files[0] == files[1]


def test_resume_refuses_another_model_and_says_at_once_where_it_continues(
    tiny_model: Path, pairs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, steps = tmp_path / "run", ["--max-steps", "4", "--save-every", "2", "--answers", "0"]
    assert main(train(tiny_model, pairs_file, run, *steps)) == 0
    shutil.rmtree(run / "adapter")  # as if it had ended in between
    shutil.rmtree(run / "checkpoints" / "step-000004")
    metrics = (run / "metrics.jsonl").read_bytes()
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    resume = ["train", "--output", str(run), "--resume"]
    assert main([*resume, "--model", str(other)]) == 2
    assert f"began with the model {tiny_model}, not {other}" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert main([*resume, "--model", f"{tiny_model}/."]) == 0
    text = capsys.readouterr().out
    assert text.count("note: continued from") == 1
    assert text.index("note: continued from") < text.index("step 3/4")


def test_of_two_runs_at_once_in_one_folder_the_second_is_refused(
    tiny_model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    arguments = train(tiny_model, pairs_file, tmp_path / "run", "--max-steps", "20")
    command = [sys.executable, "-m", "entrenar", *arguments]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    errors = sorted(process.communicate()[1] for process in both)
    assert sorted(process.returncode for process in both) == [0, 2]
    assert errors[0] == b""
    assert b"another run is writing into" in errors[1] or b"holds an earlier run" in errors[1]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 20


def test_an_error_of_a_stream_has_no_file_name(
    pairs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*rest: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("entrenar.cli.console.Console.facts", full)
    assert main(["inspect", str(pairs_file)]) == 1
    assert capsys.readouterr().err == f"entrenar: error: {os.strerror(errno.ENOSPC)}\n"


def test_a_terminal_of_another_encoding(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    """https://github.com/openai/tiktoken/issues/82"""
    pairs_file.write_text(
        '{"instruction": "caf\u00e9 \\ud83d\\ude00", "output": "\u2028\u00e9"}\n' * 2
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    arguments = train(tiny_model, pairs_file, tmp_path / "run", "--show", "2", "--max-steps", "1")
    done = subprocess.run(
        [sys.executable, "-m", "entrenar", *arguments], env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"\\xe9" in done.stdout


def test_help_is_quick_and_needs_no_torch() -> None:
    """https://github.com/deepseek-ai/DeepSeek-R1/issues/493"""
    code = (
        "import sys, time\nfrom entrenar.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try:\n        main([command, '--help'])\n"
        "    except SystemExit as e:\n        assert e.code == 0\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
        # the processor's time of this process alone: others share the machine
        "assert time.process_time() < 2, time.process_time()"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    names = [name for name, *_ in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--gradient-clip-norm X" in done.stdout
    assert "(default q_proj,v_proj)" in done.stdout


@pytest.mark.parametrize(
    ("stand_in", "what"),
    [
        ("None", "torch cannot be imported: .*; install it with pip install 'torch>="),
        ("types.ModuleType('torch')", "torch is 2.1.0, wanted at least 2"),
    ],
)
def test_torch_that_is_missing_or_old_is_one_sentence(
    pairs_file: Path, tmp_path: Path, stand_in: str, what: str
) -> None:
    """https://github.com/hiyouga/EasyR1/issues/439"""
    arguments = train(tmp_path, pairs_file, tmp_path / "run")
    code = (
        f"import sys, types; torch = sys.modules['torch'] = {stand_in}\n"
        "if torch: torch.__version__ = '2.1.0'\n"
        "import entrenar; from entrenar.cli import main\n"
        f"assert entrenar.InstructConfig().lora_rank == 16\nsys.exit(main({arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert re.search(what, line), line


def test_safetensors_that_is_missing_is_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None\nfrom entrenar.cli import main\n"
        f"sys.exit(main(['generate', '--model', {str(tiny_model)!r}, '--prompt', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert re.search("'safetensors' cannot be imported.*pip install safetensors", line), line


def test_the_oldest_torch_is_that_of_the_package() -> None:
    from entrenar import cli

    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, cli.OLDEST_TORCH))}" in stated


def test_the_printed_config_is_a_file_for_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'lora_rank = 3\nlearning_rate = 0.01\n\n[run]\nmodel = "m"\ndata = "d \\"x\\""\n'
    )
    flags = ["--config", str(file), "--lora-rank", "5", "--gradient-clip-norm", "none"]
    assert main(["train", *flags, "--answers", "7", "--print-config"]) == 0
    printed = capsys.readouterr().out
    found = tomllib.loads(printed)
    # a flag before the file, the file before the default
    assert (found["lora_rank"], found["learning_rate"], found["batch_size"]) == (5, 0.01, 1)
    assert found["gradient_clip_norm"] == "none"
    assert found["run"]["answers"] == 7
    assert found["run"]["data"] == 'd "x"'
    file.write_text(printed)
    assert main(["train", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert list(tmp_path.iterdir()) == [file]


def test_the_config_of_a_run_is_printed_where_it_is_resumed(
    tiny_model: Path, pairs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(train(tiny_model, pairs_file, output)) == 0
    capsys.readouterr()
    assert main(["train", "--output", str(output), "--resume", "--print-config"]) == 0
    assert capsys.readouterr().out == (output / "config.toml").read_text()
