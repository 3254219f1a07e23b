"""Sizes a reader can hold in the head, and a root folder without clutter."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 600, 80, 120
ROOT_HOLDS = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "docs", "entrenar", "examples", "perf", "pyproject.toml", "tests",
}  # fmt: skip
# The C-emitting interpreter came as one piece and is taken apart with its own tests beside it.
EXEMPT = ("entrenar/emulator/",)


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [f for f in done.stdout.split("\n") if f and (ROOT / f).exists()]


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(d) for d in node.decorator_list)


def long_functions(source: str) -> list[tuple[str, int]]:
    """Return (name, lines) of each function past its budget."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > (MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES):
                found.append((node.name, length))
    return found


def sources() -> list[str]:
    return [
        f
        for f in tracked()
        if f.endswith(".py") and f.startswith(("entrenar/", "perf/")) and not f.startswith(EXEMPT)
    ]


def test_no_file_is_past_its_budget() -> None:
    lengths = {f: (ROOT / f).read_text().count("\n") for f in sources()}
    assert {f: n for f, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_past_its_budget() -> None:
    long = {f: long_functions((ROOT / f).read_text()) for f in sources()}
    assert {f: found for f, found in long.items() if found} == {}


def test_a_planted_long_function_is_found() -> None:
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
    assert long_functions(f"def f():\n{body}\n") == [("f", MAX_FUNCTION_LINES + 1)]


def test_root_holds_only_what_belongs() -> None:
    assert {f.split("/")[0] for f in tracked()} <= ROOT_HOLDS


def test_no_file_is_pickled_or_unpickled() -> None:
    """No pickle anywhere: files from others are untrusted."""
    wrong = []
    for f in tracked():
        if f.endswith(".py") and f.startswith(("entrenar/", "perf/", "examples/")):
            source = (ROOT / f).read_text()
            if (
                "import pickle" in source
                or "allow_pickle=True" in source
                or "torch.load(" in source
            ):
                wrong.append(f)
    assert wrong == []
