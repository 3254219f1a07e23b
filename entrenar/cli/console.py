"""What the commands print: plain lines everywhere, colour where the terminal takes it."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from typing import Any

__all__ = ["Console", "count", "duration", "gibibytes"]


def count(number: float) -> str:
    """Return a number with thousands separated, such as ``"12 345"``."""
    return f"{int(number):,}".replace(",", " ")


def gibibytes(size: float) -> str:
    """Return bytes as GiB, or as MiB below a tenth of one."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Console:
    """Prints lines to standard output.

    On a terminal with rich installed and ``NO_COLOR`` unset, headings and numbers are coloured and
    :meth:`status` keeps a line at the bottom; elsewhere every line is plain text.

    Args:
        label: Of a process beside the one that prints: its notices alone are shown, on standard
            error and behind this; empty for the one that prints.
    """

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._rich: Any = None
        self._status: Any = None
        wants_colour = not label and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        if wants_colour and importlib.util.find_spec("rich") is not None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line."""
        if self._label:
            return
        if self._rich is None:
            print(text, flush=True)
        else:
            self._rich.print(text, style=style or None, markup=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print a blank line and a heading."""
        self.line()
        self.line(text, style="bold")

    def facts(self, rows: dict[str, str]) -> None:
        """Print names and values in two aligned columns."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.line(f"  {name:<{width}}  {value}")

    def notice(self, text: str) -> None:
        """Print something that went otherwise than asked."""
        if self._label:
            print(f"{self._label}: note: {text}", file=sys.stderr, flush=True)
        self.line(f"note: {text}", style="yellow")

    def block(self, label: str, text: str) -> None:
        """Print a labelled paragraph, wrapped and indented."""
        first = f"  {label:<9}"
        body = " ".join(text.split()) or "(nothing)"
        wrapped = textwrap.wrap(body, 96 - len(first), break_long_words=False) or [""]
        for number, part in enumerate(wrapped):
            self.line((first if number == 0 else " " * len(first)) + part)

    def masked(self, pieces: list[tuple[str, bool]]) -> None:
        """Print a sample: text that carries loss as it is, the rest dimmed (in ⟦ ⟧ without colour)."""
        if self._label:
            return
        if self._rich is None:
            print("".join(text if kept else f"⟦{text}⟧" for text, kept in pieces), flush=True)
            return
        from rich.text import Text

        shown = Text()
        for text, kept in pieces:
            shown.append(text, style="green" if kept else "dim")
        self._rich.print(shown)

    def status(self, text: str | None) -> None:
        """Show ``text`` on the terminal's last line until the next one; None removes it."""
        if self._rich is None:
            return
        if self._status is None and text is not None:
            self._status = self._rich.status(text)
            self._status.start()
        elif text is not None:
            self._status.update(text)
        elif self._status is not None:
            self._status.stop()
            self._status = None
