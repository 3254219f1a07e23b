"""What launchers launch: rows on the first axis of the grid, and nothing where there is nothing to do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from entrenar.kernels import (
    _launch,
    attention,
    cross_entropy,
    elementwise,
    embedding,
    gemm,
    layer_norm,
    lora,
    nf4,
    nf4_gemm,
    rms_norm,
    rope,
    softmax,
    swiglu,
)
from perf.calls import CALLS, CallCase, Maker

MOST_OF_OTHER_AXES = 65_535  # CUDA's limit of the second and third axis of a grid


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")


def grids(work: Callable[[], Any]) -> tuple[list[tuple[int, ...]], Any]:
    """Return the grids that ``work`` would launch, and its result; nothing is run."""
    found: list[tuple[int, ...]] = []

    def keep(op: str, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        found.append(grid)

    with _launch.launching(keep):
        result = work()
    return found, result


class Untouched(Maker):
    """Makes storage that takes no memory until it is written, which launchers do not."""

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)


@pytest.mark.parametrize(
    "case",
    [case for case in CALLS if "TxT @" not in case.shape],  # products of scores, past any memory
    ids=lambda c: f"{c.function}-{c.shape}",
)
def test_rows_are_on_the_first_axis(case: CallCase) -> None:
    """https://github.com/NVIDIA/apex/issues/411: 65536 rows passed the limit of another axis."""
    function = getattr(importlib.import_module(f"entrenar.kernels.{case.family}"), case.function)
    dtype = torch.bfloat16 if "bf16" in case.dtypes else torch.float32
    given = case.make(Untouched(dtype, tokens=MOST_OF_OTHER_AXES + 2))
    found, _ = grids(lambda: function(**given))
    assert found
    for first, *others in found:
        assert 0 < first < 2**31
        assert all(0 < axis <= MOST_OF_OTHER_AXES for axis in others), found


def test_batches_are_not_bound_by_an_axis() -> None:
    many = MOST_OF_OTHER_AXES + 2
    found, _ = grids(lambda: gemm.matmul(floats(many, 1, 1), floats(many, 1, 1)))
    assert all(axis <= MOST_OF_OTHER_AXES for grid in found for axis in grid[1:]), found


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ids(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


EMPTY: dict[str, Callable[[], Any]] = {
    "gemm_forward": lambda: gemm.gemm_forward(floats(0, 2100), floats(2100, 3)),
    "gemm_backward_a": lambda: gemm.gemm_backward_a(floats(0, 3), floats(2100, 3)),
    "rms_norm_forward": lambda: rms_norm.rms_norm_forward(floats(0, 8), floats(8), 1e-5),
    "rms_norm_backward": lambda: rms_norm.rms_norm_backward(
        floats(0, 8), floats(0, 8), floats(8), floats(0), need_grad_weight=False
    ),
    "layer_norm_forward": lambda: layer_norm.layer_norm_forward(
        floats(0, 8), floats(8), floats(8), 1e-5
    ),
    "softmax_forward": lambda: softmax.softmax_forward(floats(4, 0)),
    "softmax_backward": lambda: softmax.softmax_backward(floats(4, 0), floats(4, 0)),
    "cross_entropy_backward": lambda: cross_entropy.cross_entropy_backward(floats(0, 10), ids(0)),
    "swiglu_forward": lambda: swiglu.swiglu_forward(floats(0), floats(0)),
    "swiglu_backward": lambda: swiglu.swiglu_backward(floats(0), floats(0), floats(0)),
    "nf4_quantize": lambda: nf4.nf4_quantize(floats(0)).codes,
    "nf4_dequantize": lambda: nf4.nf4_dequantize(nf4.nf4_quantize(floats(0))),
    "nf4_gemm_forward": lambda: nf4_gemm.nf4_gemm_forward(
        floats(0, 64), Maker(torch.float32).nf4(3, 64)
    ),
    "lora_forward": lambda: lora.lora_forward(
        floats(0, 64), floats(3, 64), floats(8, 64), floats(3, 8), 2.0
    ),
    "attention_forward": lambda: attention.attention_forward(
        floats(0, 4, 16), floats(0, 2, 16), floats(0, 2, 16)
    ),
    "attention_backward": lambda: attention.attention_backward(
        *(floats(0, 4, 16), floats(0, 4, 16), floats(0, 2, 16), floats(0, 2, 16)),
        *(floats(0, 4, 16), floats(4, 0)),
    ),
    "rope_forward": lambda: rope.rope_forward(
        floats(0, 4, 16), floats(0, 2, 16), floats(9, 8), floats(9, 8), ids(0)
    ),
    "embedding_forward": lambda: embedding.embedding_forward(ids(0), floats(7, 8)),
    "add": lambda: elementwise.add(floats(0), floats(0)),
    "cast": lambda: elementwise.cast(floats(0, 5), torch.float16),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_is_launched_for_nothing(name: str) -> None:
    """https://github.com/pytorch/pytorch/issues/34202: a grid of zero programs."""
    found, result = grids(EMPTY[name])
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
    assert results
    assert all(isinstance(r, torch.Tensor) and r.numel() == 0 for r in results)
    assert found == []


def test_an_empty_batch_has_a_gradient_of_zeros_by_a_grid_that_is_not_empty() -> None:
    """https://github.com/pytorch/pytorch/issues/34202: the weight's gradient was dropped."""
    found, result = grids(lambda: gemm.gemm_backward_b(floats(0, 2100), floats(0, 3)))
    assert result.shape == (2100, 3)
    assert found
    assert all(axis > 0 for grid in found for axis in grid)
