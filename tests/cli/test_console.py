"""What is printed on a terminal, with and without colour."""

from __future__ import annotations

import sys

import pytest

from entrenar.cli.console import Console


def on_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool = True) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: answer)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)


def show() -> None:
    console = Console()
    console.heading("heading")
    console.facts({"model": "[bold]path[/bold]"})
    console.status("working")
    console.line("step 1", style="bold")
    console.status("still working")
    console.status(None)
    console.masked([("<user>", False), ("answer", True)])
    console.block("question", "What does `a[0]` do?")


def test_colour_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    on_terminal(monkeypatch)
    show()
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "[bold]path[/bold]" in shown  # text from files is not markup
    assert "`a[0]`" in shown


@pytest.mark.parametrize("why", ["NO_COLOR", "rich is not installed", "no terminal"])
def test_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    on_terminal(monkeypatch, why != "no terminal")
    if why == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    elif why == "rich is not installed":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    show()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u27e6<user>\u27e7answer" in shown
    assert "  question What does `a[0]` do?" in shown
