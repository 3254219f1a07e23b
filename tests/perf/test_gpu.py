"""What of the GPU measurements can be tested without a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import gpu, kernels, plot
from perf.__main__ import COMMANDS, main

Rows = list[dict[str, Any]]


class Clock:
    """A clock that children move, in place of waiting."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(
    folder: Path, todo: list[gpu.Part], taking: dict[str, float], seconds: float = 100.0
) -> tuple[bool, Rows, list[tuple[str, float]]]:
    """Run parts whose children take so many seconds, hang where that is past their limit, then pass."""
    clock, asked = Clock(), []

    def child(command: tuple[str, ...], log: Path, limit: float) -> tuple[int | None, str]:
        asked.append((command[0], limit))
        clock.now += min(taking[command[0]], limit)
        cut = taking[command[0]] > limit
        return (None if cut else 0), "3 passed, 1 skipped in 2s"

    results = gpu.Results(folder)
    good = gpu.run_parts(iter(todo), results, seconds, child, clock)
    return good, [json.loads(line) for line in results.rows.read_text().splitlines()], asked


def part(name: str, share: float, **more: Any) -> gpu.Part:
    return gpu.Part(name, (name,), share, **more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_sentence_and_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", "--out", str(tmp_path / "out"), "--minutes", "1"]) == 3
    found = capsys.readouterr()
    assert "no GPU" in found.err
    assert len(found.err.splitlines()) == 1
    assert not found.out
    assert not (tmp_path / "out").exists()


def test_parts_run_in_order_and_each_is_told(tmp_path: Path) -> None:
    todo = [part("suite", 0.4, tests=True), part("times", 0.5)]
    good, rows, asked = run(tmp_path, todo, {"suite": 20.0, "times": 30.0})
    assert good
    assert asked == [("suite", 40.0), ("times", 50.0)]
    assert [(r["kind"], r["part"], r["exit_code"], r["seconds"]) for r in rows] == [
        ("tests", "suite", 0, 20.0),
        ("part", "times", 0, 30.0),
    ]
    assert (rows[0]["passed"], rows[0]["skipped"], rows[0]["failed"]) == (3, 1, 0)


def test_a_part_that_hangs_is_cut_at_its_share_and_the_next_runs(tmp_path: Path) -> None:
    todo = [part("hangs", 0.3), part("times", 0.5)]
    good, rows, _ = run(tmp_path, todo, {"hangs": 1e9, "times": 10.0})
    assert good, "timings that are cut off keep what they have"
    assert rows[0]["exit_code"] is None
    assert rows[0]["cut_off_after_s"] == 30.0
    assert rows[1]["exit_code"] == 0


def test_tests_that_are_cut_off_are_a_failure(tmp_path: Path) -> None:
    good, rows, _ = run(tmp_path, [part("suite", 0.3, tests=True)], {"suite": 1e9})
    assert not good
    assert rows[0]["exit_code"] is None


def test_a_part_that_fails_is_a_failure(tmp_path: Path) -> None:
    todo = iter([part("times", 0.5)])
    assert not gpu.run_parts(todo, gpu.Results(tmp_path), 100.0, lambda *given: (1, ""), Clock())


def test_the_whole_ends_within_its_time_even_if_every_part_hangs(tmp_path: Path) -> None:
    todo = [part(f"p{n}", 0.4) for n in range(6)]
    _, rows, asked = run(tmp_path, todo, {f"p{n}": 1e9 for n in range(6)})
    assert sum(limit for _, limit in asked) <= 100.0 - gpu.RESERVE_S
    assert [limit for _, limit in asked] == [40.0, 40.0, 15.0]
    assert [r["part"] for r in rows if r["kind"] == "not run"] == ["p3", "p4", "p5"]


def test_rows_that_a_part_wrote_reach_the_results(tmp_path: Path) -> None:
    written = tmp_path / "launches.json"
    written.write_text(json.dumps([{"mode": "graphed", "launches": 1, "kind": "mine"}]))
    _, rows, _ = run(tmp_path, [part("launches", 0.5, rows=written)], {"launches": 1.0})
    assert rows[0] == {"kind": "launches", "mode": "graphed", "launches": 1}
    assert not written.exists()


def test_a_child_that_hangs_is_ended_with_its_own_child(tmp_path: Path) -> None:
    log, alive = tmp_path / "log.txt", tmp_path / "alive"
    grandchild = f"import time; time.sleep(3); open({str(alive)!r}, 'w')"
    code = (
        "import subprocess, sys, time; print('started', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    )
    log.write_text("before\n")
    start = time.monotonic()
    found, output = gpu.run_child((sys.executable, "-c", code), log, 2.0)
    assert found is None
    assert time.monotonic() - start < 20
    assert output == "started\n"
    assert log.read_text() == "before\nstarted\n"
    time.sleep(3.2)
    assert not alive.exists()


def test_a_childs_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    command = (sys.executable, "-c", "import sys; print('1 failed in 3s'); sys.exit(1)")
    code, output = gpu.run_child(command, log, 60.0)
    assert code == 1
    assert gpu.parse_counts(output)["failed"] == 1


def test_every_part_is_a_command_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = list(gpu.parts(gpu.Results(tmp_path), Path("model")))
    assert todo[0].tests, "correctness comes before times"
    for found in todo:
        module, name, *arguments = found.command[2:]
        if module == "pytest":
            assert (gpu.ROOT / name).is_dir()
            continue
        assert module == "perf"
        assert name in COMMANDS
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known = capsys.readouterr().out
        assert all(word in known for word in arguments if word.startswith("--")), found
        if name == "kernels":
            kernels._parser().parse_args(arguments)
    assert "step" not in [p.name for p in gpu.parts(gpu.Results(tmp_path), None)]


def test_rows_of_real_children_are_kept_and_drawn(tmp_path: Path) -> None:
    """The last part as it stands, but for its device and a single op; and one that prints pytest's counts."""
    results = gpu.Results(tmp_path)
    last = list(gpu.parts(results, None))[-1]
    command = tuple("cpu" if word == "cuda:0" else word for word in last.command)
    counts = (sys.executable, "-c", "print('5 passed in 1s')")
    todo = [
        gpu.Part("suite", counts, 0.4, tests=True),
        gpu.Part("times", (*command, "--op", "scale"), 0.9),
    ]
    assert gpu.run_parts(iter(todo), results, 120.0)
    rows = [json.loads(line) for line in results.rows.read_text().splitlines()]
    assert [r["kind"] for r in rows] == ["tests", *["kernel"] * 4, "part"]
    assert rows[0]["passed"] == 5
    assert {(r["tokens"], r["pass"]) for r in rows[1:5]} == {
        (n, p) for n in (512, 2048) for p in ("forward", "backward to x")
    }
    assert all(r["ratio"] == pytest.approx(r["ms"] / r["peer_ms"], rel=1e-3) for r in rows[1:5])
    assert len(plot.read_rows(results.rows)) == 4
    log = results.log.read_text()
    assert log.index("5 passed") < log.index("scale forward") < log.index("part=times")


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("12 passed, 3 skipped in 4.1s", {"passed": 12, "failed": 0, "skipped": 3, "error": 0}),
        ("2 failed, 1 error in 4s", {"passed": 0, "failed": 2, "skipped": 0, "error": 1}),
        ("", {"passed": 0, "failed": 0, "skipped": 0, "error": 0}),
    ],
)
def test_counts_of_a_test_run(output: str, wanted: dict[str, int]) -> None:
    assert gpu.parse_counts(output) == wanted


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_an_unknown_command_lists_those_there_are(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr().err
    assert all(f"  {name} " in found for name in COMMANDS)
