"""Backend and device probes, launch listeners, optional packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from entrenar import runtime
from entrenar.errors import ConfigError, CudaNotAvailableError, DeviceError, MissingExtraError


def test_counting_launches_waits_and_allocations() -> None:
    import numpy as np
    import torch

    from entrenar.autograd import Tensor, ops
    from entrenar.optable import call

    x = torch.ones(4, 8)
    with runtime.counting() as outer:
        with runtime.counting() as inner:
            y = call("add", x, x)
            call("add_", y, x)
        loss, rows = ops.cross_entropy(Tensor(x), torch.tensor([1, 2, -100, 3]))
        loss.item()
    assert (inner.launches, dict(inner.by_op)) == (2, {"add": 1, "add_": 1})
    assert (inner.waits, inner.allocations, inner.allocated_bytes) == (0, 1, 4 * 8 * 4)
    assert outer.by_op == {"add": 1, "add_": 1, "cross_entropy_forward": 1}
    # the rows that count are read, then the loss
    assert (rows, outer.waits) == (3, 2)
    before = outer.launches
    call("add", x, x)
    assert outer.launches == before
    assert np.isfinite(loss.item())


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ENTRENAR", "TRITON_INTERPRET"))
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_backend_is_numpy_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
    assert runtime.backend() == "numpy"
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    assert runtime.backend() == "ptx"


def test_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "cuda")
    with pytest.raises(ConfigError, match="'cuda', wanted one of numpy, triton, ptx"):
        runtime.backend()


@pytest.mark.parametrize("target", ["80", "sm80", "sm_x", "gfx942"])
def test_unknown_ptx_target_is_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", target)
    with pytest.raises(ConfigError, match=f"'{target}'"):
        runtime.ptx_target()


def test_triton_backend_switches_interpreting_on() -> None:
    code = (
        "import os; from entrenar import runtime; assert runtime.backend() == 'triton';"
        "assert os.environ['TRITON_INTERPRET'] == '1'"
    )
    done = run(code, ENTRENAR_BACKEND="triton")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_triton_imported_without_interpreting_is_an_error(value: str) -> None:
    # https://github.com/triton-lang/triton/issues/4317
    pytest.importorskip("triton")
    code = "import triton; from entrenar import runtime; runtime.backend()"
    done = run(code, ENTRENAR_BACKEND="triton", TRITON_INTERPRET=value)
    assert done.returncode != 0
    assert "before the first import of triton" in done.stderr


@pytest.mark.parametrize("value", ["1", "true", "on"])
def test_every_spelling_that_triton_accepts_is_understood(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    # https://github.com/triton-lang/triton/issues/4317
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert runtime.interpreting_requested()


@pytest.mark.parametrize("value", ["", "0", "false", "off"])
def test_other_values_do_not_ask_for_interpreting(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    # https://github.com/triton-lang/triton/issues/4317
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not runtime.interpreting_requested()


def test_import_is_quick_and_touches_no_device() -> None:
    # https://github.com/deepseek-ai/DeepSeek-R1/issues/493
    code = (
        "import sys, time; start = time.perf_counter(); import entrenar;"
        "assert time.perf_counter() - start < 0.3;"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_kernels_are_imported_without_asking_a_driver() -> None:
    # https://github.com/deepseek-ai/DeepSeek-R1/issues/493
    pytest.importorskip("triton")
    # without a GPU the first question to the driver raises; with one, no context may have been made
    code = (
        "import importlib, pkgutil, torch, entrenar.kernels\n"
        "names = [m.name for m in pkgutil.iter_modules(entrenar.kernels.__path__)]\n"
        "assert len(names) > 15\n"
        "for name in names: importlib.import_module('entrenar.kernels.' + name)\n"
        "from triton.runtime import driver\n"
        "assert driver._active is None and not torch.cuda.is_initialized()"
    )
    done = run(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr


def test_import_works_without_triton() -> None:
    # https://github.com/deepseek-ai/DeepSeek-R1/issues/493
    code = (
        "import sys; sys.modules['triton'] = None;"
        "import torch; from entrenar import optable;"
        "y = optable.call('add', torch.ones(3), torch.ones(3)); assert y.tolist() == [2, 2, 2]"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_the_storage_decides_not_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # https://github.com/AnswerDotAI/ModernBERT/issues/152
    import torch

    from entrenar.optable import call

    monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
    monkeypatch.setattr(runtime, "cuda_available", lambda: True)
    monkeypatch.setattr(runtime, "triton_available", lambda: True)
    heard: list[runtime.LaunchRecord] = []
    with runtime.listening(heard.append):
        assert call("add", torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]
    assert [record.where for record in heard] == ["numpy"]
    with pytest.raises(DeviceError, match="arguments lie on cpu and meta, wanted one device"):
        call("add", torch.ones(2), torch.ones(2, device="meta"))


def test_cuda_without_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: False)
    assert runtime.resolve_device("auto") == "cpu"
    with pytest.raises(CudaNotAvailableError, match="sees no GPU"):
        runtime.resolve_device("cuda")
    with pytest.raises(ConfigError, match="'gpu', wanted auto, cpu, cuda"):
        runtime.resolve_device("gpu")


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: True)
    assert runtime.resolve_device("auto") == "cuda:0"
    assert runtime.resolve_device("cuda:3") == "cuda:3"


def test_missing_package_names_its_extra() -> None:
    with pytest.raises(
        MissingExtraError, match=r"drawing plots needs .*pip install 'entrenar\[plot\]'"
    ) as caught:
        runtime.require("no_such_package_here.part", extra="plot", feature="drawing plots")
    assert caught.value.exit_code == 3


def test_a_broken_package_is_not_called_missing(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_here.py").write_text("import absent_dependency_here\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="absent_dependency_here"):
        runtime.require("broken_here", extra="plot", feature="drawing plots")


def test_listeners_hear_launches_only_inside_the_block() -> None:
    heard: list[runtime.LaunchRecord] = []
    record = runtime.LaunchRecord("add", None, (), (), "numpy")
    with runtime.listening(heard.append):
        assert runtime.has_listeners()
        runtime.announce(record)
    runtime.announce(record)
    assert heard == [record]


def test_memory_readings_are_plausible() -> None:
    assert 1 << 20 < runtime.peak_memory_bytes() < 1 << 40
    assert 1 << 20 < runtime.available_memory_bytes() < 1 << 44


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    large = bytearray(300 << 20)
    large[:: 1 << 12] = b"x" * len(large[:: 1 << 12])
    code = "from entrenar import runtime; print(runtime.peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) < len(large)
