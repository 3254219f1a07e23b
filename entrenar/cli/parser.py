"""The arguments of every command; no command's own code is imported before it is chosen."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import NoReturn

from entrenar import __version__
from entrenar.cli.config_flags import add_config_flags
from entrenar.cli.model_flags import add_model_flags, add_sampling_flags
from entrenar.errors import ConfigError
from entrenar.finetune.config import nearest

__all__ = ["build_parser", "parse"]

Command = Callable[[argparse.Namespace], int]

_EXAMPLES = """examples:
  entrenar demo
  entrenar train --model ./SmolLM2-135M-Instruct --data pairs.jsonl --output runs/first
  entrenar generate --adapter runs/first/adapter --prompt 'What does `len(obj)` do?'

exit codes: 0 ok, 1 the run failed, 2 usage, config or data, 3 environment, 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as ``ConfigError``, with the nearest names."""

    def error(self, message: str) -> NoReturn:
        known = [flag for action in self._actions for flag in action.option_strings]
        hint = f"see {self.prog} --help"
        if message.startswith("unrecognized arguments:"):
            unknown = message.partition(":")[2].split()[0]
            close = nearest(unknown.partition("=")[0].lstrip("-"), [k.lstrip("-") for k in known])
            if close.startswith("did you mean"):
                hint = close.replace("mean ", "mean --").replace(" or ", " or --")
            message = f"there is no option {unknown}"
        raise ConfigError(f"{self.prog}: {message}", hint)


def parse(argv: Sequence[str] | None) -> tuple[Command, argparse.Namespace]:
    """Parse the arguments and import the command they name.

    Raises:
        ConfigError: The arguments are wrong.
    """
    parser = build_parser()
    # Parsed in two steps, so that an unknown option is reported by its command with its own names.
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error("unrecognized arguments: " + " ".join(unknown))
    module = importlib.import_module(f"entrenar.cli.{arguments.module}")
    return module.run, arguments


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="entrenar",
        description="QLoRA fine-tuning of Llama-type language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"entrenar {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, add in _COMMANDS:
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        command.set_defaults(module=name, parser=command)
        add(command)
    return parser


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--data", metavar="FILE", help="training samples, JSON Lines")
    parser.add_argument("--eval-data", metavar="FILE", help="held-out samples, JSON Lines")
    parser.add_argument("--output", metavar="DIR", help="the run's folder")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML; flags go before it")
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
    _add_run_flags(parser)
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print N samples and what is learned of them",
    )
    add_config_flags(parser)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, metavar="N", help="steps between evaluations")
    parser.add_argument("--log-every", type=int, metavar="N", help="steps between lines printed")
    parser.add_argument(
        "--keep-checkpoints", type=int, metavar="N", help="the newest N are kept; 0: all; default 3"
    )
    parser.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="end after N evaluations without a lower held-out loss, with the best adapter; default 0: "
        "never",
    )
    parser.add_argument(
        "--answers", type=int, metavar="N", help="held-out questions to answer before and after"
    )
    parser.add_argument(
        "--vram-wait",
        type=int,
        metavar="SECONDS",
        help="wait so long for other processes to give GPU memory back; default 0, refuse at once",
    )


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="another model than the package's")
    parser.add_argument("--output", metavar="DIR", default="runs/demo", help="default runs/demo")
    parser.add_argument("--pairs", type=int, default=400, metavar="N", help="default 400")
    parser.add_argument("--heldout", type=int, default=48, metavar="N", help="default 48")
    _add_run_flags(parser)
    add_config_flags(parser)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--data", metavar="FILE", required=True, help="samples, JSON Lines")
    parser.add_argument("--max-seq-len", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _generate(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="the question; - reads standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without a chat template"
    )
    add_sampling_flags(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="DIR", help="an adapter folder; without it the model alone is written"
    )
    parser.add_argument("--model", metavar="PATH", help="the base; the adapter's own otherwise")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="WORD",
        help="bfloat16 (default), float16, float32, or nf4: 4-bit linears as bitsandbytes saves "
        "them, which loses part of the adapter's update and says how much",
    )
    parser.add_argument(
        "--double-quant", action="store_true", help="with --dtype nf4: 8-bit scales"
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a model, an adapter, a run's folder or a data file")
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")


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
        help="fit this GPU instead of the machine at hand: a size such as 24GB or 80GiB, or a name such "
        "as 4090 or h200",
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML; flags go before it")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    add_config_flags(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--output", metavar="FILE", help="default: the run's loss.png")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _vram(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")


_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("train", "fine-tune a model on instruction data", _train),
    ("demo", "fine-tune a small model on Python's own docstrings, here and now", _demo),
    ("evaluate", "measure the loss of a model on a data file", _evaluate),
    ("generate", "answer one prompt", _generate),
    ("chat", "talk with a model", _chat),
    ("merge", "write base model and adapter as one model", _merge),
    ("inspect", "say what a model, adapter, run or data file holds", _inspect),
    ("estimate", "say what memory a run will need", _estimate),
    ("plot", "draw a run's losses", _plot),
    ("vram", "say which processes reserved how much memory of which GPU", _vram),
    ("doctor", "say what this machine offers and whether it computes right", _doctor),
)
