"""The trainer's surface: what the ancestor's tests demanded, and what they let pass."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Stream, trainer
from entrenar.autograd.hazards import detect_hazards
from entrenar.autograd.trainer import CudaTrainer, Trainer, cuda_training_available
from entrenar.errors import (
    AllocationFailedError,
    ConfigError,
    CudaNotAvailableError,
    ShapeMismatchError,
)

DEVICES = ["cpu", *(["cuda:0"] if cuda_training_available() else [])]


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(request.param)


def test_it_says_what_it_runs_on(on: Trainer) -> None:
    assert on.device_name()
    assert on.total_memory() > 2**20
    assert 0 < (on.free_memory_mb() or 0) <= on.total_memory() >> 20
    assert on.context == on.stream.device
    for part in ("Trainer", "device", "memory_gb", "step=0"):
        assert part in repr(on)


def test_values_go_up_and_come_down(on: Trainer) -> None:
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    buffer = on.upload(values)
    values[0, 0] = 9.0  # the buffer is a copy
    down = on.download(buffer)
    np.testing.assert_array_equal(down, [[1.0, 2.0], [3.0, 4.0]])
    down[0, 0] = 7.0
    assert on.download(buffer)[0, 0] == 1.0
    assert on.zeros(0).shape == (0,)
    assert on.upload([]).shape == (0,)


def test_zeros_are_filled_on_the_device(on: Trainer) -> None:
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        buffer = on.zeros(100)
    assert [(launch.op, launch.stream) for launch in launches] == [("fill_", on.stream)]
    np.testing.assert_array_equal(on.download(buffer), np.zeros(100))
    with pytest.raises(ConfigError, match="sizes of at least 0"):
        on.zeros(-1)


def test_a_product_and_its_gradients(on: Trainer) -> None:
    rng = np.random.default_rng(0)
    a, b, grad = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (3, 4), (2, 4)))
    up = {name: on.upload(x.ravel()) for name, x in {"a": a, "b": b, "grad": grad}.items()}
    c, grad_a, grad_b = on.zeros(8), on.zeros(6), on.zeros(12)
    on.matmul_forward(up["a"], up["b"], c, 2, 3, 4)
    on.matmul_backward(up["a"], up["b"], up["grad"], grad_a, grad_b, 2, 3, 4)
    for buffer, exact in ((c, a @ b), (grad_a, grad @ b.T), (grad_b, a.T @ grad)):
        np.testing.assert_allclose(on.download(buffer).reshape(exact.shape), exact, atol=1e-6)


def test_only_the_gradients_asked_for_are_computed(on: Trainer) -> None:
    a, b, grad = on.zeros(6), on.zeros(12), on.zeros(8)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        on.matmul_backward(a, b, grad, None, on.zeros(12), 2, 3, 4)
        on.matmul_backward(a, b, grad, on.zeros(6), None, 2, 3, 4)
        on.matmul_backward(a, b, grad, None, None, 2, 3, 4)
    assert [x.op for x in launches if x.op != "fill_"] == ["gemm_backward_b", "gemm_backward_a"]


def test_lengths_are_checked_before_anything_runs(on: Trainer) -> None:
    six, eight = on.zeros(6), on.zeros(8)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        with pytest.raises(ShapeMismatchError, match="b has 8 elements, wanted 12"):
            on.matmul_forward(six, eight, eight, 2, 3, 4)
        with pytest.raises(ShapeMismatchError, match="grad_b has 6 elements, wanted 12"):
            on.matmul_backward(six, on.upload(np.ones(12)), eight, six, six, 2, 3, 4)
        with pytest.raises(ShapeMismatchError, match="v_state has 8 elements, wanted 6"):
            on.adamw_step(six, six, six, eight, 0.1)
        with pytest.raises(ConfigError, match="-1 by 3"):
            on.matmul_forward(six, six, six, -1, 3, 2)
    assert launches == []


def test_steps_are_counted_and_reset(on: Trainer) -> None:
    params, grads = on.upload([1.0, 2.0, 3.0]), on.upload([0.1, 0.1, 0.1])
    m, v = on.zeros(3), on.zeros(3)
    assert on.step_count() == 0
    on.adamw_step(params, grads, m, v, 0.001, 0.9, 0.999, 1e-8, 0.0)
    assert on.step_count() == 1
    # the first step of AdamW is the learning rate, whatever the gradient
    np.testing.assert_allclose(on.download(params), [0.999, 1.999, 2.999], rtol=1e-6)
    assert "step=1" in repr(on)
    on.reset_step()
    assert on.step_count() == 0


def test_the_step_belongs_to_the_state(on: Trainer) -> None:
    """Two parameters stepped in turn: each one's bias correction is that of its own first step."""
    states = [(on.upload([1.0]), on.zeros(1), on.zeros(1)) for _ in range(2)]
    grads = on.upload([0.5])
    for params, m, v in states:
        on.adamw_step(params, grads, m, v, 0.1, weight_decay=0.0)
    assert [on.download(p)[0] for p, _, _ in states] == [pytest.approx(0.9, rel=1e-6)] * 2
    on.adamw_step(states[0][0], grads, states[0][1], states[0][2], 0.1, weight_decay=0.0)
    assert [on.step_count(m) for _, m, _ in states] == [2, 1]
    on.reset_step(states[0][1])
    assert [on.step_count(m) for _, m, _ in states] == [0, 1]
    assert on.step_count() == 1
    del params, m, v, states
    gc.collect()
    assert on.step_count() == 0


def test_clipping_stays_on_the_device_and_tells_the_norm(on: Trainer) -> None:
    grads = on.upload([10.0] * 4)
    waited: list[runtime.SyncRecord] = []
    with runtime.listening(on_sync=waited.append):
        norm = on.clip_gradients(grads, 1.0)
    assert not [r for r in waited if r.kind == "synchronize"]
    assert norm.item() == 20.0
    np.testing.assert_allclose(on.download(grads), [0.5] * 4, rtol=1e-6)
    huge = on.upload([1e30, 1e30])
    assert on.clip_gradients(huge, 1.0).item() == pytest.approx(2**0.5 * 1e30, rel=1e-6)
    bad = on.upload([1.0, float("inf")])
    on.clip_gradients(bad, 1.0)
    np.testing.assert_array_equal(on.download(bad), [1.0, np.inf])
    with pytest.raises(ConfigError, match="max_norm is 0"):
        on.clip_gradients(grads, 0.0)


def test_a_download_waits_for_what_was_given_before(on: Trainer) -> None:
    buffer = on.zeros(4)
    seen: list[str] = []
    with runtime.listening(on_sync=lambda r: seen.append(r.kind)):
        on.download(buffer)
    assert "synchronize" in seen


def test_everything_runs_on_the_trainers_stream_and_in_order(on: Trainer) -> None:
    """https://github.com/pytorch/pytorch/issues/178547: launched on the default stream, whatever was active."""
    other = Trainer(str(on.context))
    streams = []
    with detect_hazards(), runtime.listening(lambda launch: streams.append(launch.stream)):
        x = on.upload(np.ones((8, 8)))
        y, z = on.zeros(64), on.zeros(64)
        on.matmul_forward(x, x, y, 8, 8, 8)
        other.matmul_forward(y, x, z, 8, 8, 8)  # ordered after the first by the buffer itself
        on.matmul_forward(z, x, y, 8, 8, 8)
        np.testing.assert_array_equal(on.download(y), np.full(64, 512.0))
    assert set(streams) == {on.stream, other.stream}


def test_as_a_block_it_is_the_current_stream_and_waits_at_the_end(on: Trainer) -> None:
    from entrenar.autograd import current_stream

    seen: list[str] = []
    with runtime.listening(on_sync=lambda r: seen.append(r.kind)), on as entered:
        assert entered is on
        assert current_stream(on.context) is on.stream
        seen.clear()
    assert "synchronize" in seen
    with pytest.raises(KeyError), on:
        raise KeyError
    assert current_stream(on.context) is not on.stream


def test_raw_storage_is_taken_too(on: Trainer) -> None:
    raw = torch.full((4,), 2.0, device=on.context)
    if raw.is_cuda:
        torch.cuda.synchronize()
    out = on.zeros(4)
    on.matmul_forward(raw, raw, out, 2, 2, 2)
    np.testing.assert_array_equal(on.download(out), [8.0] * 4)


def test_trainers_in_threads_do_not_disturb_each_other() -> None:
    results: dict[int, float] = {}

    def work(seed: int) -> None:
        mine = Trainer("cpu")
        x = mine.upload(np.full((16, 16), 1.0 + seed))
        y = mine.zeros(256)
        for _ in range(20):
            mine.matmul_forward(x, x, y, 16, 16, 16)
        results[seed] = float(mine.download(y)[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: 16.0, 1: 64.0, 2: 144.0}


def test_auto_on_the_cpu_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: False)
    trainer._say_cpu_once.cache_clear()
    with pytest.warns(UserWarning, match="sees no GPU: training on the CPU"):
        assert Trainer().context == torch.device("cpu")
    Trainer("auto")  # no second warning, which the settings here would turn into an error
    Trainer("cpu")


def test_without_a_gpu_the_cuda_trainer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: False)
    assert not cuda_training_available()
    for make in (CudaTrainer, lambda: CudaTrainer.with_device(0), lambda: Trainer("cuda:1")):
        with pytest.raises(CudaNotAvailableError, match="sees no GPU"):
            make()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CudaNotAvailableError, match=r"cuda:3 was asked for, but there are 1 GPUs"):
        CudaTrainer.with_device(3)


def test_memory_that_is_not_there_is_refused(on: Trainer) -> None:
    with pytest.raises(AllocationFailedError, match="has no room for"):
        on.zeros((1 << 60,))


def test_streams_are_each_trainers_own() -> None:
    assert Trainer("cpu").stream != Trainer("cpu").stream
    assert isinstance(Trainer("cpu").stream, Stream)
