"""The document on the engine: its snippets run as they stand, and it stays short."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
WORDS_A_PAGE = 500


def snippets(text: str) -> list[tuple[int, str]]:
    """Return (line, source) of each python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [(text[: m.start(1)].count("\n"), m.group(1)) for m in found]


def test_every_snippet_runs() -> None:
    text = PAGE.read_text()
    blocks = snippets(text)
    assert len(blocks) == text.count("```python") >= 8
    names: dict[str, object] = {"__name__": "engine_doc"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for line, source in blocks:
            # blank lines in front, so that an error names the line of the document
            exec(compile("\n" * line + source, str(PAGE), "exec"), names)
    assert "checkpoint" in printed.getvalue()


def test_it_is_under_three_pages_of_prose() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.M | re.S)
    assert len(prose.split()) < 3 * WORDS_A_PAGE


def test_files_it_names_exist() -> None:
    package = PAGE.parents[1] / "entrenar"
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text())
    assert len(named) > 8
    for name in named:
        places = (package / "autograd" / name, package / name, PAGE.parents[1] / name)
        assert any(p.exists() for p in places), name
