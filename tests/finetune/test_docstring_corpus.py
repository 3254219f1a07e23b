"""Pairs of the standard library: many, the same each time, the held-out ones really held out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entrenar.errors import DataError
from entrenar.finetune.corpus import read_corpus
from entrenar.finetune.docstring_corpus import (
    SIMILAR,
    DocstringPair,
    build_docstring_pairs,
    split_pairs,
    write_pairs,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pairs() -> list[DocstringPair]:
    return build_docstring_pairs()


def words(pair: DocstringPair) -> frozenset[str]:
    return frozenset("".join(c if c.isalpha() else " " for c in pair.response.lower()).split())


def test_there_are_thousands_and_none_twice(pairs: list[DocstringPair]) -> None:
    assert len(pairs) > 2000
    assert (
        len({p.instruction for p in pairs})
        == len({p.response.lower() for p in pairs})
        == len(pairs)
    )


def test_known_ones(pairs: list[DocstringPair]) -> None:
    found = {p.instruction: p.response for p in pairs}
    assert found["What does `textwrap.dedent(text)` do?"] == (
        "Remove any common leading whitespace from every line in `text`."
    )
    assert found["What does `len(obj)` do?"] == "Return the number of items in a container."


def test_nothing_with_side_effects_or_private_is_in_it(pairs: list[DocstringPair]) -> None:
    heads = {p.name.partition(".")[0] for p in pairs}
    assert not heads & {
        "antigravity",
        "this",
        "idlelib",
        "test",
        "turtle",
        "turtledemo",
        "ensurepip",
    }
    assert not any(part.startswith("_") for p in pairs for part in p.name.split("."))


def test_no_module_is_imported() -> None:
    code = (
        "import sys; from entrenar.finetune.docstring_corpus import build_docstring_pairs as b;"
        "old = set(sys.modules); b(); print([m for m in set(sys.modules) - old if 'sysconfig' not in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_script_gives_the_same_files_each_time(
    pairs: list[DocstringPair], tmp_path: Path
) -> None:
    script = ROOT / "examples" / "build_docstring_pairs.py"
    command = [sys.executable, str(script), "--output", str(tmp_path / "made")]
    env = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    for name, part in zip(("train", "heldout"), split_pairs(pairs), strict=True):
        write_pairs(tmp_path / "mine.jsonl", part)
        made = (tmp_path / "made" / f"{name}.jsonl").read_bytes()
        assert made == (tmp_path / "mine.jsonl").read_bytes()
    corpus = read_corpus(tmp_path / "made" / "train.jsonl")
    assert corpus.format == "instruction+response"
    assert not corpus.ignored_keys


def test_held_out_pairs_resemble_no_training_pair(pairs: list[DocstringPair]) -> None:
    train, heldout = split_pairs(pairs)
    assert 0.05 * len(pairs) < len(heldout) < 0.2 * len(pairs)
    assert len(train) + len(heldout) == len(pairs)
    learned = [words(p) for p in train]
    for pair in heldout[:150]:
        mine = words(pair)
        assert all(len(mine & other) < SIMILAR * len(mine | other) for other in learned), pair


def test_near_duplicates_stay_together() -> None:
    near = [
        DocstringPair(
            f"What does `m{i}.f()` do?", f"Return the first of all {w} items here.", f"m{i}.f"
        )
        for i, w in enumerate(["big", "small", "green", "old", "new", "odd", "even", "red"] * 5)
    ]
    train, heldout = split_pairs(near)
    assert not train or not heldout


def test_a_library_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no Python source"):
        build_docstring_pairs(tmp_path)


def test_source_that_does_not_parse_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "good.py").write_text(
        'def f(a, b: int = 3):\n    """Return a and b as one pair of values. More."""\n'
    )
    found = build_docstring_pairs(tmp_path)
    assert [(p.instruction, p.response) for p in found] == [
        ("What does `good.f(a, b=3)` do?", "Return a and b as one pair of values.")
    ]
    assert write_pairs(tmp_path / "out.jsonl", found) == 1
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "instruction": found[0].instruction,
        "response": found[0].response,
    }
