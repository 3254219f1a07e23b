"""The launch layer: what it refuses, what it announces, what it leaves to whoever stands in for it."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from entrenar import runtime  # noqa: E402
from entrenar.errors import DeviceError, DTypeError, LayoutError  # noqa: E402
from entrenar.kernels import _launch  # noqa: E402
from entrenar.kernels.elementwise import add  # noqa: E402

needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("cc")), reason="the emulator needs a C compiler"
)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")


@pytest.mark.parametrize(
    ("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**31 + 1, 2**32)]
)
def test_next_power_of_2(n: int, power: int) -> None:
    assert _launch.next_power_of_2(n) == power


@pytest.mark.parametrize(("a", "b", "wanted"), [(0, 4, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3)])
def test_cdiv(a: int, b: int, wanted: int) -> None:
    assert _launch.cdiv(a, b) == wanted


@pytest.mark.parametrize("block", [2**n for n in range(4, 17)])
def test_warps_are_a_power_of_two_from_1_to_16(block: int) -> None:
    warps = _launch.num_warps_for(block)
    assert warps in (1, 2, 4, 8, 16)


def test_storage_on_the_cpu_needs_a_backend_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
    with pytest.raises(DeviceError, match=r"=triton.*=ptx"):
        add(torch.ones(3), torch.ones(3))


def test_the_other_backend_is_refused_once_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decided at import: a later switch must not silently run something else."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(DeviceError, match="kernels of this process are compiled"):
        add(torch.ones(3), torch.ones(3))


@pytest.mark.usefixtures("emulated")
def test_storage_without_data_is_refused() -> None:
    with pytest.raises(DeviceError, match="cpu and meta"):
        _launch.prepare("add", torch.ones(3), torch.ones(3, device="meta"))


def test_float64_is_refused_by_name() -> None:
    with pytest.raises(DTypeError, match="add: b is float64"):
        _launch.check_floating("add", a=torch.ones(1), b=torch.ones(1, dtype=torch.float64), c=None)


def test_strides_are_named() -> None:
    with pytest.raises(LayoutError, match=r"x of shape \(3, 2\) has strides \(1, 3\)"):
        _launch.require_contiguous("f", x=torch.ones(2, 3).T, y=None)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_a_launch_is_announced_with_what_it_touches() -> None:
    records: list[runtime.LaunchRecord] = []
    a, b = torch.ones(5), torch.ones(5)
    with runtime.listening(records.append):
        out = add(a, b)
    (record,) = records
    assert (record.op, record.where, record.stream) == ("add", "ptx", None)
    assert record.reads == (a, b)
    assert record.writes[0] is out
    add(a, b)
    assert len(records) == 1


@pytest.mark.usefixtures("emulated")
def test_a_launch_without_programs_is_announced_and_not_run() -> None:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise AssertionError(f"launched on {grid}")

    records: list[runtime.LaunchRecord] = []
    x = torch.ones(0)
    with runtime.listening(records.append):
        _launch.launch(Kernel(), (0,), op="nothing", stream=None, reads=[x], writes=[x])
    assert [r.op for r in records] == ["nothing"]


def test_memory_of_another_stream_is_kept_until_the_launch_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher's partial results are freed as it returns, while the kernel may still run."""
    kept: list[Any] = []
    storage = SimpleNamespace(is_cuda=True, record_stream=kept.append)
    side, current = (SimpleNamespace(device=0, number=n) for n in range(2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    for stream in (None, current, SimpleNamespace(torch_stream=current)):
        _launch._keep_for(stream, [storage, None])
    assert kept == []
    for stream in (side, SimpleNamespace(torch_stream=side)):
        _launch._keep_for(stream, [storage, None, torch.ones(1)])
    assert kept == [side, side]


@pytest.mark.usefixtures("emulated")
def test_a_stand_in_gets_launches_in_place_of_the_device() -> None:
    taken: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    with _launch.launching(lambda op, kernel, grid, given: taken.append((op, grid, given))):
        add(torch.ones(5), torch.ones(5))
    ((op, grid, given),) = taken
    assert op == "add"
    assert grid == (1,)
    assert given["n"] == 5
    assert given["BLOCK"] >= 5


@pytest.mark.usefixtures("emulated")
def test_results_come_from_the_allocator_in_force() -> None:
    counted: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        counted.append(shape)
        return torch.full(shape, 7, dtype=dtype, device=device)

    a = torch.ones(3)
    with _launch.launching(lambda *launch: None), _launch.allocating(allocate):
        assert add(a, a).tolist() == [7, 7, 7]
        with _launch.allocating(lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)):
            assert add(a, a).tolist() == [0, 0, 0]
        assert add(a, a).tolist() == [7, 7, 7]
    assert counted == [(3,), (3,)]
