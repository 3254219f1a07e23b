"""Every command's help: each flag says what it is and its default, and each example parses."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from entrenar.cli import demo
from entrenar.cli.arguments import COMMANDS
from entrenar.cli.config_flags import DEMO_DEFAULTS, config_from
from entrenar.cli.parser import build_parser, parse
from entrenar.cli.train import RunSettings
from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig

NAMES = [name for name, *_ in COMMANDS]
WANTED = {
    "train", "evaluate", "generate", "chat", "merge", "inspect", "estimate", "plot", "doctor", "vram",
    "demo",
}  # fmt: skip


def command(name: str) -> argparse.ArgumentParser:
    (subparsers,) = (
        a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    parser = subparsers.choices[name]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def texts(name: str) -> dict[str, str]:
    """Return each argument's help as it is shown, by flag or name, on one line."""
    parser = command(name)
    found = {}
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            formatter = parser._get_formatter()
            formatter.add_argument(action)
            key = action.option_strings[0] if action.option_strings else action.dest
            found[key] = " ".join(formatter.format_help().split())
    return found


def test_every_command_is_there() -> None:
    assert set(NAMES) == WANTED
    shown = build_parser().format_help()
    assert all(re.search(rf"^    {name} ", shown, re.MULTILINE) for name in NAMES)
    assert (
        "exit codes: 0 ok, 1 the run failed, 2 usage, config or data, 3 environment, 130" in shown
    )


def test_the_readme_has_a_line_for_every_command() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| `entrenar (\w+)` \|", text, re.MULTILINE)
    assert rows == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_says_what_it_is_and_its_default(name: str) -> None:
    parser = command(name)
    shown = texts(name)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        key = action.option_strings[0] if action.option_strings else action.dest
        assert len(action.help or "") >= 8, f"{name} {key} has no help"
        assert not str(action.help).startswith("default"), f"{name} {key} says its default alone"
        if not action.option_strings or action.required or action.nargs == 0:
            if isinstance(action, argparse.BooleanOptionalAction):
                assert re.search(r"\(default (on|off)\)$", shown[key]), shown[key]
            continue
        stated = re.findall(r"\((?:default:? |required)[^()]*(?:\([^()]*\)[^()]*)*\)", shown[key])
        assert len(stated) == 1, f"{name} {key} states {len(stated)} defaults: {shown[key]}"
        if action.default is not None:
            assert stated == [f"(default {action.default})"]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_parses(name: str) -> None:
    shown = command(name).format_help()
    lines = shown[shown.index("examples:") :].splitlines()[1:]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["entrenar", name]
        run, arguments = parse(words[1:])
        assert run.__module__ == f"entrenar.cli.{name}"
        if hasattr(arguments, "lora_rank"):
            config_from(arguments, None)  # values are of the settings' kinds


def test_stated_defaults_are_those_in_force() -> None:
    demo_texts, train_texts = texts("demo"), texts("train")
    config = {**InstructConfig().to_dict(), **DEMO_DEFAULTS}
    for name, wanted in DEMO_DEFAULTS.items():
        word = {True: "on", False: "off"}[wanted] if isinstance(wanted, bool) else f"{wanted:g}"
        assert f"(default {word})" in demo_texts["--" + name.replace("_", "-")]
    _, arguments = parse(["demo"])
    assert config_from(arguments, None, DEMO_DEFAULTS)[0].to_dict() == config
    fields = {field.name: field.default for field in dataclasses.fields(RunSettings)}
    for name in [name for name, default in fields.items() if isinstance(default, int)]:
        flag = "--" + name.replace("_", "-")
        assert re.search(rf"\(default {fields[name]}\b", train_texts[flag]), flag
    assert f"(default {demo._EVAL_EVERY})" in demo_texts["--eval-every"]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_flag_is_refused_with_the_nearest_of_its_command(name: str) -> None:
    flags = [f for a in command(name)._actions for f in a.option_strings if f.startswith("--")]
    flag = max(flags, key=len)
    needed = [w for a in command(name)._actions if a.required for w in [*a.option_strings[:1], "x"]]
    with pytest.raises(ConfigError) as caught:
        parse([name, *needed, flag + "x"])
    assert f"there is no option {flag}x" in str(caught.value)
    assert flag in caught.value.hint


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "mean train"), ("zzz", "known are train, demo")]
)
def test_an_unknown_command_is_refused_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no command {word}") as caught:
        parse([word, "--model", "x"])
    assert hint in caught.value.hint
