"""Products with NF4 weights on a CPU: pieces, accumulation, threads, and what stays in memory."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

from entrenar.cpu import nf4 as fast
from entrenar.cpu import nf4_gemm as fast_gemm
from entrenar.cpu import threads
from entrenar.errors import ShapeMismatchError
from entrenar.reference import nf4_gemm as plain
from entrenar.reference.nf4 import NF4Weight, nf4_dequantize, nf4_quantize


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(300, 64), (128, 37), (200, 96), (5, 1), (64, 130)])
def test_pieces_of_rows(
    shape: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight larger than the scratch is decoded in pieces of whole blocks."""
    monkeypatch.setattr(fast, "SCRATCH_VALUES", 5000)
    monkeypatch.setattr(fast_gemm, "PRODUCT_VALUES", 600)
    rng = np.random.default_rng(0)
    w = nf4_quantize(rng.standard_normal(shape), double_quant=True)
    x = rng.standard_normal((20, shape[1])).astype(dtype)
    grad = rng.standard_normal((20, shape[0])).astype(dtype)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(
        fast_gemm.nf4_gemm_forward(x, w), plain.nf4_gemm_forward(x, w), **close
    )
    wanted = plain.nf4_gemm_backward(grad, w)
    np.testing.assert_allclose(fast_gemm.nf4_gemm_backward(grad, w), wanted, **close)
    held = x.copy()
    assert fast_gemm.nf4_gemm_backward(grad, w, held, accumulate=True) is held
    np.testing.assert_allclose(held, x + wanted, **close)


def test_threads_have_scratch_of_their_own() -> None:
    rng = np.random.default_rng(1)
    weights = [nf4_quantize(rng.standard_normal((96, 128))) for _ in range(4)]
    x = rng.standard_normal((9, 128)).astype(np.float32)
    wanted = [plain.nf4_gemm_forward(x, w) for w in weights]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda w: fast_gemm.nf4_gemm_forward(x, w), weights))
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def test_no_decoded_weight_is_kept() -> None:
    """The next weight overwrites the scratch, which does not grow past its limit."""
    rng = np.random.default_rng(2)
    first, second = (nf4_quantize(rng.standard_normal((64, 64))) for _ in range(2))
    grad = np.ones((3, 64), np.float32)
    fast_gemm.nf4_gemm_backward(grad, first)
    rows = threads.scratch("nf4", (64, 64), np.float32)
    np.testing.assert_array_equal(rows, nf4_dequantize(first, "float32"))
    fast_gemm.nf4_gemm_backward(grad, second)
    np.testing.assert_array_equal(rows, nf4_dequantize(second, "float32"))
    large = NF4Weight(np.zeros(1, np.uint8), np.zeros(1, np.float32), (70000, 4096), "float32")
    assert fast.rows_per_piece(large) * 4096 <= fast.SCRATCH_VALUES


@pytest.mark.parametrize("module", [plain, fast_gemm], ids=["reference", "cpu"])
def test_refuses_the_storage_of_another_weight(module: object) -> None:
    w = nf4_quantize(np.ones((4, 64)))
    other = NF4Weight(w.codes, w.absmax, (8, 64), "float32")
    with pytest.raises(ShapeMismatchError, match="codes"):
        module.nf4_gemm_forward(np.ones((2, 64)), other)  # type: ignore[attr-defined]
