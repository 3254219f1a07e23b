"""What of the GPU measurements can be tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perf import gpu
from perf.__main__ import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", "--out", str(tmp_path / "out"), "--minutes", "1"]) == 3
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quantiles() -> None:
    found = gpu.quantiles([float(n) for n in range(11)])
    assert found == {"ms": 5.0, "ms_20": 2.0, "ms_80": 8.0}


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
    assert "traffic" in capsys.readouterr().err
