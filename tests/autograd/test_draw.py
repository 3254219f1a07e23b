"""Pictures of a tape: what they show, that they are the same each time, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from entrenar.autograd import Stream, Tape, Tensor, checkpoint, ops
from entrenar.errors import ConfigError

NAME = 'layers.0."up"\\weight\nnext'


def leaf(shape: tuple[int, ...], name: str = "") -> Tensor:
    return Tensor(np.ones(shape, np.float32), requires_grad=True, name=name)


def recorded() -> Tape:
    """Seven ops on two streams, with a split, a diamond, a checkpoint and an odd name."""
    side = Stream("cpu")
    x, w, a, b = leaf((100, 4)), leaf((8, 4), NAME), leaf((2, 4), "lora_A"), leaf((8, 2), "lora_B")
    with Tape(Stream("cpu")) as tape:
        h = ops.linear(x, w)
        left, _ = ops.split(h, (4, 4))
        with side:
            m = ops.lora_linear(left, Tensor(np.ones((8, 4), np.float32)), a, b, 2.0)
        y = checkpoint(ops.silu, ops.swiglu(m, h))
        ops.cross_entropy(ops.scale(y, 2.0), np.arange(100) % 8)
    return tape


def test_the_table_shows_forms_streams_and_bytes() -> None:
    text = recorded().draw()
    rows = [
        re.split(r"\s{2,}", line)
        for line in text.replace(NAME.replace("\n", " "), "NAME").splitlines()
    ]
    f = "float32 "
    assert rows[0] == ["#", "op", "stream", "inputs", "outputs", "saves", "from outside"]
    assert rows[1:8] == [
        # x and the weight are the caller's: 100 * 4 * 4 + 8 * 4 * 4 bytes
        ["0", "linear", "0", "leaf 0, NAME, -", f + "(100, 8)", "0 B", "1.7 KiB"],
        ["1", "split", "0", "#0", f + "(100, 4), " + f + "(100, 4)", "0 B", "0 B"],
        # the whole of h, which a view of it keeps, and x @ A.T: 100 * (8 + 2) * 4 bytes
        ["2", "lora_linear", "1", "#1.0, lora_A, lora_B, -", f + "(100, 8)", "3.9 KiB", "224 B"],
        ["3", "swiglu", "0", "#2, #0", f + "(100, 8)", "6.2 KiB", "0 B"],
        ["4", "checkpoint", "0", "#3", f + "(100, 8)", "3.1 KiB", "0 B"],
        ["5", "scale", "0", "#4", f + "(100, 8)", "0 B", "0 B"],
        ["6", "cross_entropy", "0", "#5", f + "()", "3.1 KiB", "0 B"],
    ]
    # each piece of storage once: h, s, m, the input of checkpoint, the logits; x, w, lora's frozen three
    assert text.splitlines()[8] == (
        "7 ops on 2 streams, 4 leaves; saved for backward: 13.3 KiB made on the tape, 1.9 KiB from "
        "outside"
    )


def test_equal_tapes_give_equal_pictures(tmp_path: Path) -> None:
    first, second = recorded(), recorded()
    assert first.draw() == second.draw()
    assert first.draw(tmp_path / "a.dot") == second.draw(tmp_path / "b.gv")
    assert (tmp_path / "a.dot").read_bytes() == (tmp_path / "b.gv").read_bytes()
    assert first.draw(tmp_path / "a.txt") == first.draw() == (tmp_path / "a.txt").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.dot", "a.txt", "b.gv"]


def test_dot_draws_it_with_names_as_they_are(tmp_path: Path) -> None:
    source = recorded().draw(tmp_path / "tape.dot")
    assert r'label="layers.0.\"up\"\\weight next\nfloat32 (8, 4)"' in source
    assert len(re.findall(r"^  op\d+ \[", source, re.M)) == 7
    assert len(re.findall(r"^  leaf\d+ \[", source, re.M)) == 4
    assert re.findall(r"^  (\w+) -> op2", source, re.M) == ["op1", "leaf2", "leaf3"]
    if shutil.which("dot") is None:
        pytest.skip("graphviz is not installed")
    recorded().draw(tmp_path / "tape.svg")
    texts = [
        e.text for e in ElementTree.parse(tmp_path / "tape.svg").iter() if e.tag.endswith("}text")
    ]
    assert 'layers.0."up"\\weight next' in texts
    assert {"2: lora_linear", "stream 1, saves 3.9 KiB", "and 224 B from outside"} <= set(texts)


def test_backward_empties_the_picture() -> None:
    x = leaf((1,), "x")
    with Tape() as tape:
        y = ops.scale(x, 2.0)
        z = ops.multiply(y, y)
    tape.backward(y)
    assert "freed" in tape.draw()  # the input of the product, whose own op is gone
    assert tape.draw().count("\n") == 3
    with pytest.raises(Exception, match="already freed"):
        tape.backward(z)
    assert (
        Tape()
        .draw()
        .endswith(
            "0 ops on 0 streams, 0 leaves; saved for backward: 0 B made on the tape, 0 B from outside\n"
        )
    )


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = recorded()
    with pytest.raises(ConfigError, match=r"ends in '\.jpeg', wanted \.txt, \.dot"):
        tape.draw(tmp_path / "tape.jpeg")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tape\.svg needs Graphviz.*install graphviz, or write .*tape\.dot"
    ):
        tape.draw(tmp_path / "tape.svg")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/dot")
    failed = subprocess.CompletedProcess([], 1, b"", b"syntax error")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ConfigError, match="dot failed: syntax error"):
        tape.draw(tmp_path / "tape.svg")
    assert list(tmp_path.iterdir()) == []
