"""Pictures of result rows: made whole, labelled, and refused where there is nothing to draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar import runtime
from entrenar.errors import DataError, MissingExtraError
from perf import plot
from perf.__main__ import main

PNG = b"\x89PNG\r\n\x1a\n"


def row(op: str, share: float, **more: Any) -> dict[str, Any]:
    return {
        "op": op, "pass": "forward", "model": "m", "tokens": 8, "shape": "TxH (T=8, H=4)", "dtype": "fp32",
        "device": "a machine", "ms": 2.0, "floor_bytes": 1000, "flops": 64_000, "share_of_floor": share,
        "copy_gb_s": 10.0, "product_tflop_s": 0.1, "peer": "torch", "peer_ms": 4.0, **more,
    }  # fmt: skip


ROWS = [
    row("gemm", 0.5),
    row("gemm", 0.5, peer="bitsandbytes", peer_ms=1.0),
    row("add", 0.2, flops=None, peer_ms=None),
]


@pytest.fixture(autouse=True)
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_both_pictures_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = saved(tmp_path / "rows.json", ROWS), tmp_path / "pictures"
    assert main(["plot", str(source), "--out", str(out)]) == 0
    names = ["roofline.png", "share_of_floor.png"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert all((out / name).read_bytes().startswith(PNG) for name in names)
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]


def test_rows_of_several_peers_are_one_call(tmp_path: Path) -> None:
    rows = plot.read_rows(saved(tmp_path / "rows.json", ROWS))
    assert [(r["op"], r["peers"]) for r in rows] == [
        ("gemm", {"torch": 4.0, "bitsandbytes": 1.0}),
        ("add", {}),
    ]


def test_json_lines_with_rows_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kinds = [{"kind": "tests", "passed": 3}, ROWS[0], {"op": "gemm", "error": "gate: off"}]
    path.write_text("\n".join(map(json.dumps, kinds)) + "\n\n")
    assert [r["op"] for r in plot.read_rows(path)] == ["gemm"]


def test_the_roofline(tmp_path: Path) -> None:
    axes = plot.roofline(plot.read_rows(saved(tmp_path / "rows.json", ROWS))).axes[0]
    assert "FLOP/B" in axes.get_xlabel()
    assert "TFLOP/s" in axes.get_ylabel()
    assert "a machine" in axes.get_title()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (roof,) = axes.get_lines()
    # 64 operations a byte: past the ridge at 10, so the product's rate is the roof there
    for x, y in zip(*roof.get_data(), strict=True):
        assert y == pytest.approx(min(10.0 * x / 1e3, 0.1))
    assert [tuple(p) for c in axes.collections for p in c.get_offsets()] == [
        (pytest.approx(64.0), pytest.approx(64_000 / 2.0 / 1e9))
    ]
    assert {t.get_text() for t in axes.get_legend().get_texts()} >= {"gemm"}


def test_the_shares(tmp_path: Path) -> None:
    axes = plot.share_of_floor(plot.read_rows(saved(tmp_path / "rows.json", ROWS))).axes[0]
    assert "share of the floor (%)" in axes.get_xlabel()
    assert axes.get_ylabel() == "call"
    assert [bar.get_width() for bar in axes.patches] == [20.0, 50.0]
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "add forward, TxH",
        "gemm forward, TxH",
    ]
    ticks = {c.get_label(): c.get_offsets().tolist() for c in axes.collections}
    assert ticks == {"bitsandbytes": [[100.0, 1.0]], "torch": [[25.0, 1.0]]}


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "tests"}', "[1, 2]", "{"])
def test_no_rows_is_said(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert main(["plot", str(path), "--out", str(tmp_path / "out")]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_filter_that_leaves_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "rows.json", ROWS)
    assert main(["plot", str(source), "--op", "rope", "--out", str(tmp_path)]) == 2
    assert "'rope' in its op" in capsys.readouterr().err


def test_no_counted_operations_is_said(tmp_path: Path) -> None:
    rows = plot.read_rows(saved(tmp_path / "rows.json", ROWS[2:]))
    with pytest.raises(DataError, match="no row counts operations"):
        plot.roofline(rows)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(package: str, *, extra: str, feature: str) -> None:
        raise MissingExtraError(feature, package, extra)

    monkeypatch.setattr(runtime, "require", absent)
    assert main(["plot", str(saved(tmp_path / "rows.json", ROWS)), "--out", str(tmp_path)]) == 3
    assert "entrenar[plot]" in capsys.readouterr().err
