"""The cross-stream oracle: a chain of sums on one stream, then a product that must read its end.

x starts at 1 and is added to 100 times; its rows are then summed by a product, so that every entry of
4096 columns is 101 * 4096 = 413 696. On a device that overlaps streams a product that is not ordered
after the chain reads x half way. Where work runs in order, as it does but on a GPU, the arithmetic always
comes out right, and the missing order shows as a hazard.

https://github.com/paiml/aprender/issues/2251
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.autograd import Stream, Tensor, no_grad, run
from entrenar.autograd.hazards import detect_hazards
from entrenar.errors import StreamHazardError
from tests.ops.test_suite import VARIABLE, why_not

SUMS = 100
# Columns and rows. The interpreter takes milliseconds a program and the emulator a good part of one, so
# there the matrix is scaled to 2 programs a sum; the chain keeps its length, which is what it is about.
SIZES = {"cpu": 4096, "cuda": 4096, "ptx": 48, "interpret": 48}


@pytest.fixture(params=VARIABLE)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    reason = why_not(request.param, request.config.getoption("--backend"))
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    monkeypatch.setenv("ENTRENAR_BACKEND", VARIABLE[request.param])
    return request.param


def buffers(backend: str, n: int) -> list[torch.Tensor]:
    device = "cuda" if backend == "cuda" else "cpu"
    made = [torch.full((n, n), 1.0, device=device) for _ in range(3)]
    made += [torch.full((n, 1), value, device=device) for value in (1.0, 0.0)]
    if device == "cuda":
        torch.cuda.synchronize()
    return made


def chain(x: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    """Add ``delta`` to ``x`` again and again, from one buffer to the other and back."""
    for _ in range(SUMS):
        run("add", x, delta, out=y)
        x, y = y, x
    return x


def test_bound_to_the_chain_every_entry_is_right(backend: str) -> None:
    """The product is on another stream, and waits for the chain without being told."""
    n = SIZES.get(backend, SIZES["ptx"])
    x, y, delta, ones, out = (Tensor(t) for t in buffers(backend, n))
    one, two = Stream(x.device), Stream(x.device)
    with detect_hazards() as detector, no_grad():
        with one:
            x = chain(x, y, delta)
        with two.entered():
            run("gemm_forward", x, ones, out=out)
        result = out.numpy()
    assert detector.launches > SUMS
    np.testing.assert_array_equal(result, np.full((n, 1), (1.0 + SUMS) * n, dtype=np.float32))
    if n == 4096:
        assert result[0, 0] == 413_696.0


def test_unbound_it_is_a_hazard(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with no stream waiting for another, as where a library runs on a stream of its own."""
    n = SIZES[backend] if backend == "cuda" else SIZES["ptx"]
    x, y, delta, ones, out = (Tensor(t) for t in buffers(backend, n))
    one, two = Stream(x.device), Stream(x.device)
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    with detect_hazards({"x": x, "y": y}), no_grad():
        with one.entered():
            x = chain(x, y, delta)
        with (
            two.entered(),
            pytest.raises(
                StreamHazardError, match=r"read after write: gemm_forward .*'x'"
            ) as caught,
        ):
            run("gemm_forward", x, ones, out=out)
    assert caught.value.hazard.first.op == "add"
    assert (caught.value.hazard.first.stream, caught.value.hazard.second.stream) == (one, two)
