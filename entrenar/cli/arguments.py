"""What each command takes: its flags with units and defaults, and examples of its use.

A help text says what the value is and in which unit. ``parser`` adds the default where argparse knows it;
where a flag that is not given stays None, the text says what then holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from entrenar.cli.config_flags import DEMO_DEFAULTS, add_config_flags
from entrenar.cli.model_flags import add_model_flags, add_sampling_flags

__all__ = ["COMMANDS"]

_MODEL = "a Hugging Face folder or a GGUF file"
_JSON = "print one JSON object instead of lines"


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH",
        help=f"{_MODEL} (required here or in the table [run] of --config)",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="training samples, JSON Lines (required here or in the table [run] of --config)",
    )
    parser.add_argument(
        "--eval-data",
        metavar="FILE",
        help="held-out samples, JSON Lines (default: --eval-fraction of --data)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="the run's folder, new or to be resumed (required)"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings in TOML, such as the config.toml of an earlier run; flags go before it (default: "
        "none, or the run's own with --resume)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the output folder's last checkpoint"
    )
    parser.add_argument(
        "--allow-drift",
        action="store_true",
        help="resume although settings, data or model differ from the checkpoint's; each is listed",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the output folder"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings in force, which are a file for --config, and do nothing else",
    )
    _add_run_flags(parser)
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="samples to print first, with what is learned of them",
    )
    add_config_flags(parser)


def _add_run_flags(
    parser: argparse.ArgumentParser, eval_every: str = "0, before and after"
) -> None:
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="steps between checkpoints (default 0, only when stopped)",
    )
    parser.add_argument(
        "--eval-every",
        type=int,
        metavar="N",
        help=f"steps between evaluations on held-out samples (default {eval_every})",
    )
    parser.add_argument(
        "--log-every", type=int, metavar="N", help="steps between lines printed (default 1)"
    )
    parser.add_argument(
        "--keep-checkpoints",
        type=int,
        metavar="N",
        help="checkpoints that are kept, the newest; 0 keeps all (default 3)",
    )
    parser.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="end after N evaluations without a lower held-out loss, with the best adapter (default 0, "
        "never)",
    )
    parser.add_argument(
        "--answers",
        type=int,
        metavar="N",
        help="held-out questions to answer before and after (default 3)",
    )
    parser.add_argument(
        "--vram-wait",
        type=int,
        metavar="SECONDS",
        help="how long to wait for other processes to give GPU memory back (default 0, refuse at once)",
    )


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help=f"{_MODEL} (default: SmolLM2-135M from its package)"
    )
    parser.add_argument("--output", metavar="DIR", default="runs/demo", help="the run's folder")
    parser.add_argument(
        "--pairs", type=int, default=400, metavar="N", help="samples to train on, from docstrings"
    )
    parser.add_argument("--heldout", type=int, default=48, metavar="N", help="samples held out")
    _add_run_flags(parser, eval_every="10")
    add_config_flags(parser, defaults=DEMO_DEFAULTS)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--data", metavar="FILE", required=True, help="samples, JSON Lines")
    parser.add_argument(
        "--max-seq-len", type=int, default=512, metavar="N", help="tokens of a sample that are kept"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="samples computed at once"
    )
    parser.add_argument("--json", action="store_true", help=_JSON)


def _generate(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the question; - reads standard input (required)"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without a chat template"
    )
    add_sampling_flags(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="an adapter folder (default: none, the model alone is written)",
    )
    parser.add_argument(
        "--model", metavar="PATH", help=f"{_MODEL} (default: the base that the adapter names)"
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="WORD",
        help="bfloat16, float16, float32, or nf4: 4-bit linears as bitsandbytes saves them, which loses "
        "part of the adapter's update and says how much",
    )
    parser.add_argument(
        "--double-quant", action="store_true", help="with --dtype nf4: 8-bit scales"
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a model, an adapter, a run's folder or a data file")
    parser.add_argument("--json", action="store_true", help=f"{_JSON}; sizes in bytes")


def _estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH",
        required=True,
        help="a model, or the config.json of one that is not here; only the config is read",
    )
    parser.add_argument(
        "--card",
        metavar="CARD",
        help="fit this GPU: a size such as 24GB or 80GiB, or a name such as 4090 or h200 (default: the "
        "machine at hand)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings in TOML; flags go before it (default: none)"
    )
    parser.add_argument("--json", action="store_true", help=f"{_JSON}; sizes in bytes")
    add_config_flags(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder; several: compared")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the picture, by its ending PNG, SVG or PDF; several runs need one (default: loss.png and "
        "profile.png in the run's folder)",
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=f"{_JSON}; sizes in bytes")


def _vram(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=f"{_JSON}; sizes in bytes")


Add = Callable[[argparse.ArgumentParser], None]

COMMANDS: tuple[tuple[str, str, Add, tuple[str, ...]], ...] = (
    (
        "train",
        "fine-tune a model on instruction data",
        _train,
        (
            "--model ./SmolLM2-135M --data pairs.jsonl --output runs/first --max-steps 100",
            "--config runs/first/config.toml --output runs/second --learning-rate 1e-4",
            "--output runs/first --resume",
        ),
    ),
    (
        "demo",
        "fine-tune a small model on Python's own docstrings, here and now",
        _demo,
        ("", "--max-steps 10 --output runs/short"),
    ),
    (
        "evaluate",
        "measure the loss of a model on a data file",
        _evaluate,
        ("--adapter runs/first/adapter --data heldout.jsonl --json",),
    ),
    (
        "generate",
        "answer one prompt",
        _generate,
        (
            "--adapter runs/first/adapter --prompt 'What does `len(obj)` do?'",
            "--model model.gguf --raw --prompt - --temperature 0",
        ),
    ),
    ("chat", "talk with a model", _chat, ("--adapter runs/first/adapter --seed 1",)),
    (
        "merge",
        "write base model and adapter as one model",
        _merge,
        ("--adapter runs/first/adapter --output merged",),
    ),
    (
        "inspect",
        "say what a model, adapter, run or data file holds",
        _inspect,
        ("runs/first", "model.gguf --json"),
    ),
    (
        "estimate",
        "say what memory a run will need, and what fits",
        _estimate,
        (
            "--model ./Llama-3.1-8B --quantize-nf4 --card 24GB",
            "--model config.json --batch-size 8 --max-seq-len 2048 --json",
        ),
    ),
    (
        "plot",
        "draw a run, or compare several",
        _plot,
        ("runs/first", "runs/first runs/second --output both.png"),
    ),
    (
        "doctor",
        "say what this machine offers and whether it computes right",
        _doctor,
        ("", "--json"),
    ),
    ("vram", "say which processes reserved how much memory of which GPU", _vram, ("--json",)),
)
"""Name, what it does, what adds its flags, and examples of its use."""
