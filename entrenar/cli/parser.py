"""The arguments of every command; no command's own code is imported before it is chosen."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import NoReturn

from entrenar import __version__
from entrenar.cli.arguments import COMMANDS
from entrenar.errors import ConfigError
from entrenar.finetune.config import nearest

__all__ = ["build_parser", "parse"]

Command = Callable[[argparse.Namespace], int]

_EXAMPLES = """examples:
  entrenar demo
  entrenar train --model ./SmolLM2-135M-Instruct --data pairs.jsonl --output runs/first
  entrenar generate --adapter runs/first/adapter --prompt 'What does `len(obj)` do?'

exit codes: 0 ok, 1 the run failed, 2 usage, config or data, 3 environment, 130 interrupted"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the default to a help text that does not state it; keeps the lines of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and action.default not in (None, argparse.SUPPRESS):
            return f"{action.help} (default %(default)s)"
        return action.help


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
        elif message.startswith("argument COMMAND: invalid choice:"):
            unknown = message.split("'")[1]
            hint = nearest(unknown, [name for name, *_ in COMMANDS])
            message = f"there is no command {unknown}"
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
    for name, text, add, uses in COMMANDS:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n".join(["examples:", *(f"  entrenar {name} {use}".rstrip() for use in uses)]),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        command.set_defaults(module=name, parser=command)
        add(command)
    return parser
