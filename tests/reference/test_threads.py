"""Work spread over threads: what is cut where, who runs it, and what comes back of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from entrenar.cpu import (
    attention,
    cross_entropy,
    gemm,
    lora,
    nf4,
    nf4_gemm,
    rms_norm,
    rope,
    swiglu,
    threads,
)
from entrenar.reference.nf4 import nf4_quantize


@pytest.fixture(params=[1, 3])
def hands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let work be spread over so many threads, whatever the machine has."""
    number: int = request.param
    pool = threads._Pool(number - 1)
    monkeypatch.setattr(threads, "count", lambda: number)
    monkeypatch.setattr(threads, "_pool", lambda: pool)
    return number


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize(("least", "step"), [(1, 1), (0, 1), (10, 16), (400, 7), (10**9, 1)])
def test_parts_cover_everything_once(hands: int, size: int, least: int, step: int) -> None:
    pieces = threads.parts(size, least, step)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(size))
    assert len(pieces) <= hands
    assert all(piece.start % step == 0 for piece in pieces)
    assert len(pieces) <= 1 or all(p.stop - p.start >= min(least, step) for p in pieces[:-1])


def test_pieces_run_side_by_side(hands: int) -> None:
    """As many at a time as there are threads: each waits until all of them have begun."""
    barrier = threading.Barrier(hands, timeout=30)
    threads.run([barrier.wait] * hands)
    assert barrier.n_waiting == 0


def test_every_piece_runs_once_and_is_waited_for(hands: int) -> None:
    done = np.zeros(50, np.int64)

    def piece(i: int) -> Callable[[], None]:
        def work() -> None:
            time.sleep(0.0005)
            done[i] += 1

        return work

    for turn in range(1, 4):
        threads.run([piece(i) for i in range(50)])
        assert (done == turn).all()


def test_an_error_is_raised_once_all_have_ended(hands: int) -> None:
    ended = []

    def fails() -> None:
        raise ArithmeticError("of a piece")

    def lasts() -> None:
        time.sleep(0.01)
        ended.append(1)

    with pytest.raises(ArithmeticError, match="of a piece"):
        threads.run([lasts, fails, lasts] if hands > 1 else [lasts, lasts, fails])
    assert len(ended) == 2
    threads.run([lasts, lasts])
    assert len(ended) == 4


def test_pieces_obey_the_error_state_of_the_caller(hands: int) -> None:
    def divides() -> None:
        time.sleep(0.001)
        np.divide(np.ones(2), np.zeros(2))

    with np.errstate(divide="ignore"):
        threads.run([divides] * 8)
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        threads.run([divides] * 8)


def test_a_piece_may_spread_work_itself(hands: int) -> None:
    done: list[Any] = []
    threads.run([lambda: threads.spread(done.append, 100, 1)] * 6)
    assert sum(part.stop - part.start for part in done) == 600


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (200, 300, 90), (90, 300, 201), (1, 2, 1)])
def test_product(hands: int, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAST_FLOPS", 1)
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k)).T
    out = np.full((m, 2 * n), np.nan)[:, ::2]
    assert threads.product(a, b, out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-12, atol=1e-12)


def test_blas_has_its_threads_back_after_a_block() -> None:
    blas = threads._Blas()
    held: list[int] = []
    blas.threads, blas._set = 4, held.append
    with blas.limited(), blas.limited():
        assert held == [1]
    assert held == [1, 4]
    with pytest.raises(ZeroDivisionError), blas.limited():
        raise ZeroDivisionError
    assert held == [1, 4] * 2


def test_blas_of_numpy_wheels_is_found() -> None:
    """The wheels of Linux bring an OpenBLAS, and it is the one that is set."""
    build = np.show_config(mode="dicts")
    if build["Build Dependencies"]["blas"]["name"] != "scipy-openblas":
        pytest.skip("NumPy is linked to another BLAS")
    blas = threads._Blas()
    assert blas.threads >= 1
    before = blas.threads
    assert blas._set is not None
    blas._set(before + 1)
    try:
        assert threads._Blas().threads == before + 1
    finally:
        blas._set(before)


def test_scratch_is_reused_by_its_thread_alone() -> None:
    mine = threads.scratch("a test", (4, 5), np.float32)
    assert np.shares_memory(mine, threads.scratch("a test", (2, 3), np.float32))
    assert not np.shares_memory(mine, threads.scratch("another", (4, 5), np.float32))
    others: list[np.ndarray] = []
    thread = threading.Thread(
        target=lambda: others.append(threads.scratch("a test", (4, 5), np.float32))
    )
    thread.start()
    thread.join()
    assert not np.shares_memory(mine, others[0])


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _calls() -> dict[str, Callable[[], Any]]:
    x, y, z = (_rows(150, n, 64) for n in (6, 2, 3))
    w, small = nf4_quantize(_rows(300, 128)), nf4_quantize(_rows(7, 128), double_quant=True)
    angles, places = _rows(200, 32), np.arange(150) + 3
    a, b, s, rows = _rows(4, 128), _rows(300, 4), _rows(150, 4), _rows(150, 128)
    norm, rstd = _rows(128), np.abs(_rows(150))
    targets = np.arange(150) % 90
    cu = np.array([0, 3, 3, 80, 83, 150], np.int32)
    out, lse = attention.attention_forward(x, y, y)
    logits = _rows(150, 90)
    return {
        "attention_forward": lambda: attention.attention_forward(x, y, y, cu, cu),
        "attention_backward": lambda: attention.attention_backward(x, x, y, y, out, lse),
        "segments_backward": lambda: attention.attention_backward(x, x, y, y, out, lse, cu, cu),
        "linear_cross_entropy": lambda: cross_entropy.linear_cross_entropy(
            rows, _rows(90, 128), targets, 7
        ),
        "cross_entropy_backward": lambda: cross_entropy.cross_entropy_backward(logits, targets, 7),
        "lora_forward": lambda: lora.lora_forward(rows, w, a, b, 2.0, _rows(300), 0.25, 5),
        "lora_backward": lambda: lora.lora_backward(_rows(150, 300), rows, w, a, b, s, 2.0),
        "lora_dense": lambda: lora.lora_forward(rows, _rows(300, 128), a, b, 2.0),
        "matmul": lambda: gemm.matmul(
            rows, _rows(300, 128), trans_b=True, bias=_rows(300), scale=2
        ),
        "matmul_of_a_row": lambda: gemm.matmul(rows[:1], _rows(300, 128), trans_b=True),
        "nf4_gemm_forward": lambda: nf4_gemm.nf4_gemm_forward(rows, w),
        "nf4_gemm_few": lambda: nf4_gemm.nf4_gemm_forward(rows[:1], small),
        "nf4_gemm_backward": lambda: nf4_gemm.nf4_gemm_backward(_rows(150, 300), w),
        "nf4_quantize": lambda: (
            (made := nf4.nf4_quantize(_rows(300, 1024))).codes,
            made.absmax,
        ),
        "rms_norm_forward": lambda: rms_norm.rms_norm_forward(rows, norm, 1e-5, rows),
        "rms_norm_backward": lambda: rms_norm.rms_norm_backward(rows, rows, norm, rstd, rows),
        "rope_forward": lambda: rope.rope_forward(x.copy(), z.copy(), angles, angles, places),
        "swiglu_forward": lambda: swiglu.swiglu_forward(rows, _rows(150, 128)),
        "swiglu_backward": lambda: swiglu.swiglu_backward(rows, rows, _rows(150, 128)),
    }


@pytest.mark.parametrize("name", _calls())
def test_functions_on_several_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as finely as can be, over three threads, they return what one thread returns, each time."""
    call = _calls()[name]
    monkeypatch.setattr(threads, "count", lambda: 1)
    wanted = call()
    pool = threads._Pool(2)
    monkeypatch.setattr(threads, "count", lambda: 3)
    monkeypatch.setattr(threads, "_pool", lambda: pool)
    monkeypatch.setattr(threads, "LEAST_FLOPS", 1)
    monkeypatch.setattr(threads, "LEAST_VALUES", 1)
    monkeypatch.setattr(rms_norm, "_PIECE", 1000)
    monkeypatch.setattr(nf4, "PIECE", 1024)
    first = call()
    for one, alone in zip(_tuple(first), _tuple(wanted), strict=True):
        # BLAS adds in another order where a product has another shape
        np.testing.assert_allclose(one, alone, rtol=1e-5, atol=1e-4)
    for _ in range(5):
        for one, other in zip(_tuple(call()), _tuple(first), strict=True):
            np.testing.assert_array_equal(one, other)


def _tuple(result: Any) -> tuple[np.ndarray, ...]:
    return result if isinstance(result, tuple) else (result,)
