"""The table of the documents' names: everything it names here exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "seeds.md").read_text().splitlines()
    if line.startswith("|") and "---" not in line
][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_names_exist(row: list[str]) -> None:
    if "entrenar.kernels" in row[1]:
        pytest.importorskip("triton")
    names = re.findall(r"`(entrenar\.[\w.]+)`", row[1])
    assert names, row
    for name in names:
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for part in parts[length:]:
                found = getattr(found, part)
            break
        else:
            pytest.fail(f"{name} is nowhere")
    for path in re.findall(r"`(tests/[\w/.]+)`", row[2]):
        assert (ROOT / path).is_file(), path


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 16
