"""Results of two revisions are matched by what names a row, regressions first; perf/README.md is checked."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perf import report
from perf.__main__ import COMMANDS, main

README = Path(report.__file__).with_name("README.md")


def row(op: str, **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "shape": "TxH",
        "dtype": "fp32",
        "device": "a machine",
        "peer": "torch",
        **more,
    }


def test_regressions_come_first_whichever_way_is_better() -> None:
    base = [row("add", ratio=1.0, share_of_floor=0.5, ms=4.0), row("scale", ratio=1.0, ms=1.0)]
    now = [row("add", ratio=0.5, share_of_floor=0.2, ms=4.0), row("scale", ratio=1.5, ms=1.0)]
    changed, gone, new = report.compare(base, now)
    assert [(r["row"].split(",")[0], r["measure"], r["worse"]) for r in changed] == [
        ("add", "share_of_floor", pytest.approx(2.5)),
        ("scale", "ratio", pytest.approx(1.5)),
        ("add", "ms", 1.0),
        ("scale", "ms", 1.0),
        ("add", "ratio", pytest.approx(0.5)),
    ]
    assert gone == new == []


def test_rows_that_only_one_side_has_are_named() -> None:
    base, now = [row("add", ms=1.0), row("old", ms=1.0)], [row("add", ms=1.0), row("new", ms=1.0)]
    _, gone, new = report.compare(base, now)
    assert [t.split(",")[0] for t in gone] == ["old"]
    assert [t.split(",")[0] for t in new] == ["new"]


def test_rows_of_another_machine_dtype_or_peer_are_not_compared() -> None:
    base = [row("add", ms=1.0)]
    for other in (
        {"device": "another"},
        {"dtype": "bf16"},
        {"peer": "liger-kernel"},
        {"tokens": 1},
    ):
        changed, gone, new = report.compare(base, [row("add", ms=9.0, **other)])
        assert (changed, len(gone), len(new)) == ([], 1, 1), other


def test_a_peers_version_and_a_date_do_not_name_a_row() -> None:
    base = [row("add", peer="torch 2.11", date="a", ms=1.0)]
    now = [row("add", peer="torch 2.13", date="b", ms=1.0)]
    assert [r["worse"] for r in report.compare(base, now)[0]] == [1.0]


def test_nested_measures_and_failures_are_compared() -> None:
    base = [{"op": "a", "ours": {"per_element": {"instructions": 2.0}}, "failed": []}]
    now = [{"op": "a", "ours": {"per_element": {"instructions": 3.0}}, "failed": ["x", "y"]}]
    found = {r["measure"]: r["worse"] for r in report.compare(base, now)[0]}
    assert found == {"failed": math.inf, "ours.per_element.instructions": 1.5}


def test_the_last_of_several_runs_counts() -> None:
    changed, _, _ = report.compare([row("add", ms=1.0)], [row("add", ms=9.0), row("add", ms=1.0)])
    assert [r["worse"] for r in changed] == [1.0]


def test_what_is_no_measure_is_left_alone() -> None:
    rows = [row("add", ms=None, exact=True, share=float("nan"), gate_error=0.3, note="x")]
    assert report.measures(rows) == {}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one revision whose results the tree has changed."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    folder = tmp_path / report.FOLDER
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(json.dumps([row("add", ratio=1.0), row("old", ratio=1.0)]))
    (folder / "gpu.jsonl").write_text(json.dumps(row("add", ratio=1.0)) + "\n")
    (folder / "removed.json").write_text(json.dumps([row("add", ratio=1.0)]))
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "results"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    (folder / "kernels.json").write_text(json.dumps([row("add", ratio=1.3), row("new", ratio=1.0)]))
    (folder / "gpu.jsonl").write_text(json.dumps(row("add", ratio=1.01)) + "\n")
    (folder / "removed.json").unlink()
    return tmp_path


def test_the_tree_is_compared_with_a_revision(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--base", "HEAD"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["worse", "base", "now", "measure", "file", "row"]
    assert lines[1].split()[:5] == ["1.300", "1", "1.3", "ratio", "kernels.json"]
    assert lines[2] == "1 of 2 measures within 2%"
    assert [line.partition(":")[0] for line in lines[3:]] == [
        "gone from kernels.json",
        "new in kernels.json",
    ]


def test_a_regression_can_fail_the_command(repository: Path) -> None:
    assert main(["report", "--base", "HEAD", "--fail-over", "0.5"]) == 0
    assert main(["report", "--base", "HEAD", "--fail-over", "0.2"]) == 1
    assert main(["report", "--base", "HEAD", "--fail-over", "0.2", "--files", "gpu*"]) == 0


def test_every_measure_as_json(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["report", "--base", "HEAD", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(r["file"], r["worse"]) for r in rows] == [("kernels.json", 1.3), ("gpu.jsonl", 1.01)]


def test_an_unknown_revision_is_said(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--base", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_file_that_is_no_result_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / report.FOLDER / "kernels.json").write_text("{")
    assert main(["report", "--base", "HEAD"]) == 2
    assert "kernels.json" in capsys.readouterr().err


# ---- perf/README.md ----


def test_the_readme_has_every_command_and_no_other() -> None:
    named = set(re.findall(r"python -m perf ([a-z_]+)", README.read_text()))
    assert named == set(COMMANDS)


def test_the_readme_has_every_result_file() -> None:
    results = README.parent / "results"
    named = set(re.findall(r"`([\w.]+\.(?:jsonl?|txt))`", README.read_text()))
    assert {p.name for p in results.iterdir()} <= named


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_the_readme_uses_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of each command knows the options that its examples use."""
    lines = re.findall(rf"^ +python -m perf {name}\b(.*)$", README.read_text(), re.MULTILINE)
    assert lines, f"no example of {name}"
    options = set(re.findall(r"--[a-z-]+", " ".join(lines)))
    if not options:
        return
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert options <= known
