"""Public reports of launches that missed their stream or device, at the border to torch, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Stream, Tape, Tensor, ops
from entrenar.errors import DeviceError
from entrenar.optable import call

triton = pytest.importorskip("triton")

from entrenar.kernels import _launch, nf4_gemm  # noqa: E402


class Kernel:
    """Stands in for a compiled kernel; notes what is current where it is launched."""

    def __init__(self, now: dict[str, Any]) -> None:
        self.now = now
        self.seen: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **_: self.seen.append(dict(self.now))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch holds as current device and stream; device 0 and its default stream at first."""
    now: dict[str, Any] = {"device": torch.device("cuda:0"), "stream": "default"}

    def setting(name: str) -> Any:
        @contextlib.contextmanager
        def enter(value: Any) -> Iterator[None]:
            before = now[name]
            now[name] = value
            try:
                yield
            finally:
                now[name] = before

        return enter

    # an earlier test may have emulated, and there is no GPU to give Triton back to
    monkeypatch.setattr(_launch, "_leave_emulator", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", setting("device"))
    monkeypatch.setattr(torch.cuda, "stream", setting("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now["stream"])
    return now


def storage(device: str = "cuda:0") -> Any:
    return SimpleNamespace(device=torch.device(device), is_cuda=True, record_stream=lambda s: None)


def torch_stream(number: int, handle: int, device: str = "cuda:0") -> Any:
    return SimpleNamespace(stream_id=number, cuda_stream=handle, device=torch.device(device))


def launch(kernel: Kernel, stream: Any, tensor: Any) -> None:
    _launch.launch(kernel, (1,), op="probe", stream=stream, reads=[tensor], writes=[tensor])


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_each_launch_lands_on_the_stream_it_was_given(card: dict[str, Any], ours: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/178547: the handle was cached when it was imported."""
    kernel = Kernel(card)
    wanted = [torch_stream(3, 0x7F00), torch_stream(4, 0x7F80), torch_stream(3, 0x7F00)]
    for stream in wanted:
        launch(kernel, Stream(torch_stream=stream) if ours else stream, storage())
    assert [seen["stream"] for seen in kernel.seen] == wanted
    assert card["stream"] == "default"
    card["stream"] = wanted[1]
    launch(kernel, None, storage())
    assert kernel.seen[-1]["stream"] is wanted[1]


def test_blocks_on_two_streams_launch_on_both() -> None:
    """https://github.com/pytorch/pytorch/issues/178547"""
    one, two = Stream("cpu"), Stream("cpu")
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        with one:
            ops.silu(x)
        with two:
            ops.silu(x)
        with Tape(two) as tape, one:
            y = ops.silu(x)
        tape.backward(y, np.ones((2, 2)))
    streams = [r.stream for r in launches]
    assert streams[:3] == [one, two, one]
    assert streams[3:] == [one] * len(streams[3:])
    assert len(streams) >= 4


def test_the_launcher_is_given_the_stream_and_never_its_number(card: dict[str, Any]) -> None:
    """https://github.com/pytorch/pytorch/issues/127531: an id passed for the handle crashed."""
    stream = torch_stream(3, 0x7F00)
    kernel = Kernel(card)
    launch(kernel, Stream(torch_stream=stream), storage())
    assert kernel.seen[0]["stream"] is stream
    assert "0x7f00" in repr(Stream(torch_stream=stream))
    # scratch of two streams with one id, on two devices, must not be the same
    handles = [nf4_gemm._stream_id(torch_stream(3, h), torch.device("cuda")) for h in (7, 8)]
    assert handles == [7, 8]


def test_a_launch_runs_on_the_device_of_its_storage(card: dict[str, Any]) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/1303: device 0 was current, storage lay on 1."""
    kernel = Kernel(card)
    for stream in (None, torch_stream(1, 0x10, "cuda:1")):
        launch(kernel, stream, storage("cuda:1"))
    assert [seen["device"] for seen in kernel.seen] == [torch.device("cuda:1")] * 2
    assert card["device"] == torch.device("cuda:0")


def test_storage_on_two_devices_is_refused_and_both_are_named() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/1303"""
    with pytest.raises(DeviceError, match="probe: arguments lie on cuda:0 and cuda:1"):
        _launch.prepare("probe", storage("cuda:0"), storage("cuda:1"))
    with pytest.raises(DeviceError, match="lie on cpu and meta"):
        call("add", torch.ones(2), torch.ones(2, device="meta"), stream=Stream("cpu"))
