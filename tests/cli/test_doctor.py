"""What `entrenar doctor` and training say of machines that lack something, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar import runtime
from entrenar.cli import doctor, kernel_check, machine, main
from entrenar.errors import CudaNotAvailableError, VramError
from entrenar.gpu import Card

H200 = Card("GPU-1", "NVIDIA H200", 1 << 37, 0)
Machine = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine with these cards, a torch that sees them or not, triton or not."""

    def be(
        cards: tuple[Card, ...] | None = (),
        sees: bool = False,
        triton: bool = True,
        cuda: str | None = None,
        capability: tuple[int, int] = (9, 0),
        visible: str | None = None,
    ) -> None:
        def read() -> tuple[Card, ...]:
            if cards is None:
                raise VramError("nvidia-smi failed", "")
            return cards

        monkeypatch.setattr(machine, "read_cards", read)
        monkeypatch.setattr(runtime, "cuda_available", lambda: sees)
        monkeypatch.setattr(runtime, "triton_available", lambda: triton)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(sys, "platform", "linux")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return be


def said() -> tuple[list[str], list[str]]:
    findings = machine.Findings()
    machine.check_gpu(findings)
    return findings.problems, findings.notes


def test_no_gpu_is_a_note_that_says_what_computes(pretend: Machine) -> None:
    pretend()
    problems, notes = said()
    assert problems == []
    (note,) = notes
    assert note.startswith("no GPU was found, so everything is computed by NumPy on the CPU")
    assert "use a machine with an NVIDIA GPU" in note


def test_no_triton_is_a_note_on_a_cpu_and_a_problem_on_a_gpu(pretend: Machine) -> None:
    pretend(triton=False)
    problems, notes = said()
    assert problems == []
    assert "triton is not installed" in notes[1]
    assert "pip install triton" in notes[1]
    pretend(cards=(H200,), sees=True, triton=False, cuda="12.8")
    problems, notes = said()
    assert notes == []
    (problem,) = problems
    assert problem.startswith("there is a GPU, but triton is not installed")
    assert "pip install triton" in problem


def test_a_torch_without_cuda_on_a_machine_with_a_gpu_is_a_problem(pretend: Machine) -> None:
    pretend(cards=(H200,), cuda=None)
    (problem,), notes = said()
    assert notes == []
    assert problem.startswith("this machine has a GPU (NVIDIA H200), but torch ")
    assert "is built for the CPU only" in problem
    assert "install a CUDA build" in problem


def test_other_reasons_that_torch_does_not_see_a_gpu(pretend: Machine) -> None:
    pretend(cards=(H200,), cuda="12.8")
    assert "driver is likely older" in said()[0][0]
    pretend(cards=(H200,), cuda="12.8", visible="")
    problems, (note,) = said()
    assert problems == []
    assert "CUDA_VISIBLE_DEVICES='' hides" in note
    pretend(cards=None)
    assert "nvidia-smi is installed but fails" in said()[0][0]
    pretend(cards=(H200,), sees=True, cuda="12.8")
    assert said() == ([], [])
    pretend(cards=(H200,), sees=True, cuda="12.8", capability=(6, 1))
    assert "compute capability 6.1, kernels need at least 7.5" in said()[0][0]


def test_the_sentence_comes_first_and_decides_the_exit_code(
    pretend: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_check, "emulated", lambda target: {"difference": 1e-6})
    for cards, code, first in (
        ((), 0, "note: no GPU was found"),
        ((H200,), 3, "problem: this machine has a GPU (NVIDIA H200), but torch"),
    ):
        pretend(cards=cards)
        assert main(["doctor"]) == code
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(first)
        assert (lines[-1] == "everything needed is here") is (code == 0)
        assert main(["doctor", "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert (found["problems"] + found["notes"])[0] in lines[0]


def test_training_says_it_too(
    pretend: Machine,
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    pairs_file: Path,
    tmp_path: Path,
) -> None:
    pretend(cards=(H200,))
    flags = ["--model", str(tiny_model), "--data", str(pairs_file), "--max-steps", "1"]
    for number, (device, says) in enumerate((("auto", True), ("cpu", False))):
        output = ["--output", str(tmp_path / str(number)), "--device", device]
        assert main(["train", *flags, *output]) == 0
        shown = capsys.readouterr().out
        assert ("is built for the CPU only" in shown) is says


def test_a_gpu_asked_for_and_not_there(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: False)
    assert main(["generate", "--model", str(tiny_model), "--prompt", "a", "--device", "cuda"]) == 3
    shown = capsys.readouterr().err
    assert "torch sees no GPU" in shown or "sees no GPU" in shown
    assert CudaNotAvailableError.exit_code == 3


def test_a_missing_triton_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(arguments: Any) -> int:
        raise ModuleNotFoundError("No module named 'triton'", name="triton.language")

    monkeypatch.setattr(doctor, "run", without)
    assert main(["doctor"]) == 3
    assert "pip install triton" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend: Machine
) -> None:
    pretend()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ENTRENAR_EMULATOR_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked / "cache"))
    findings = machine.Findings()
    paths = machine.check_caches(findings)
    assert paths == {"emulator": str(tmp_path / "not" / "yet"), "triton": str(blocked / "cache")}
    (problem,) = findings.problems
    assert problem.startswith(f"the triton cache {blocked / 'cache'} cannot be written")
    assert "set TRITON_CACHE_DIR" in problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]  # nothing is left behind


def test_a_kernel_is_compiled_and_held_to_numpy() -> None:
    pytest.importorskip("triton")
    found = kernel_check.emulated("sm_80")
    if "needs a C compiler" in str(found.get("error")):
        pytest.skip("no C compiler")
    assert 0 < found["difference"] < 1e-5  # a tenth of what the doctor lets pass


@pytest.mark.parametrize(
    ("result", "problem", "shown"),
    [
        ({"difference": 2e-4}, "is off by 2.0e-04, wanted less than 1e-04", "wrong"),
        ({"difference": float("nan")}, "is off by nan", "wrong"),
        ({"error": "the compiler crashed", "kind": "crash"}, "the compiler crashed", "failed"),
    ],
)
def test_a_kernel_that_fails_is_a_problem(
    pretend: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, object],
    problem: str,
    shown: str,
) -> None:
    pretend()
    monkeypatch.setattr(kernel_check, "emulated", lambda target: result)
    assert main(["doctor", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert any(problem in sentence for sentence in found["problems"])
    assert found["kernel"] == shown


def test_no_c_compiler_is_a_note(pretend: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    error = {
        "error": "the emulator needs a C compiler and found neither gcc nor cc",
        "kind": "EmulatorError",
    }
    monkeypatch.setattr(kernel_check, "emulated", lambda target: error)
    found, findings = doctor.diagnose()
    assert findings.problems == []
    assert found["kernel"] == "not run: no C compiler"
    assert any("C compiler" in note for note in findings.notes)


def test_a_compiler_that_takes_its_process_along_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = subprocess.CompletedProcess([], -11, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: dead)
    assert kernel_check.emulated() == {"error": "exit code -11", "kind": "crash"}

    def hung(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", hung)
    assert kernel_check.emulated()["kind"] == "TimeoutExpired"


def test_missing_packages_are_problems(pretend: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    monkeypatch.setattr(kernel_check, "emulated", lambda target: {"difference": 1e-6})
    monkeypatch.setattr(doctor, "package_version", lambda name: "2.1.0+cu118")
    find = doctor.importlib.util.find_spec
    gone = ("safetensors", "jinja2", "rich")
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda n, *a: None if n in gone else find(n, *a)
    )
    found, findings = doctor.diagnose()
    shown = "\n".join(findings.problems)
    assert "torch is 2.1.0+cu118, wanted at least" in shown
    assert "safetensors is not installed" in shown
    assert "pip install 'entrenar[train]'" in shown
    assert (found["extras"]["train"], found["extras"]["ui"]) == (False, False)
