"""Faults planted in compiled kernels and in Triton source: each is reported, in every way of running."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

import triton
import triton.language as tl

from entrenar.emulator import EmulatorError, run_compiled

ORDERS = ("forward", "reverse", "random")
COLUMNS = 781


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n, PAST: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n + PAST
    x = tl.load(x_ptr + tl.program_id(0) * n + cols, mask=mask, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * n + cols, e / tl.sum(e, 0), mask=mask)


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + cols, mask=cols < n, other=0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n + eps)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * n + cols, x * rstd * w, mask=cols < n)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * BN + n[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * BN + n[None, :], total)


@triton.jit
def half_written_kernel(x_ptr, y_ptr, total_ptr, n, WRITTEN: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + cols, x, mask=cols < WRITTEN)
    tl.debug_barrier()
    y = tl.load(y_ptr + cols, mask=cols < n, other=0.0)
    tl.store(total_ptr, tl.sum(y, 0))


@triton.jit
def vector_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = np.random.default_rng(5).standard_normal(shape, np.float32)
    return torch.from_numpy(numbers).to(dtype)


def run(kernel: Any, constants: dict[str, Any], grid: int, *given: Any, **options: Any) -> Any:
    return run_compiled(kernel, None, constants, (grid,), list(given), **options)


def without(
    kernel: Any, constants: dict[str, Any], pattern: str, *given: Any
) -> list[Callable[..., Any]]:
    """Return runs of a kernel's PTX, each with one place that matches deleted."""
    info = run(kernel, constants, 4, *given, racecheck=True)
    assert not info.reports
    whole, runs = info.program.ptx, []
    for place in re.finditer(pattern, whole):
        faulty = whole[: place.start()] + whole[place.end() :]

        def again(faulty: str = faulty, **options: Any) -> Any:
            edit = {"edit_ptx": lambda _: faulty}
            return run(kernel, constants, 4, *given, racecheck=True, **edit, **options)

        runs.append(again)
    return runs


def rows() -> tuple[Any, ...]:
    return floats(4, COLUMNS), torch.zeros(4, COLUMNS), COLUMNS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["softmax", "rms_norm"])
def test_a_row_without_one_barrier_races_in_every_run(
    name: str, order: str, counts: Callable[[int, int], int]
) -> None:
    x, y, n = rows()
    if name == "softmax":
        kernel, given, constants = softmax_kernel, (x, y, n), {"PAST": 0, "BLOCK": 1024}
    else:
        kernel, given, constants = rms_norm_kernel, (x, floats(n), y, n, 1e-6), {"BLOCK": 1024}
    runs = without(kernel, constants, r"bar\.sync[^;]*;", *given)
    assert len(runs) >= 2
    for again in runs:
        for seed in range(counts(2, 20) if order == "random" else 1):
            reports = again(wave_order=order, seed=seed + 1).reports
            assert any("race" in r.kind for r in reports)
            assert all(kernel.fn.__name__ in str(r) for r in reports)


@pytest.mark.parametrize("late", [True, False])
def test_a_missing_wait_for_an_asynchronous_copy_is_reported(late: bool) -> None:
    a, b = floats(64, 256, dtype=torch.bfloat16), floats(256, 64, dtype=torch.bfloat16)
    constants = {"BM": 64, "BN": 64, "BK": 32}
    runs = without(
        product_kernel, constants, r"cp\.async\.wait_group[^;]*;", a, b, torch.zeros(64, 64), 256
    )
    found = [again(late_async=late).reports for again in runs]
    assert any(found)
    for reports in filter(None, found):
        assert any("cp.async" in str(r) for r in reports)


def test_a_mask_off_by_one_meets_the_guard() -> None:
    x, y, n = rows()
    run(softmax_kernel, {"PAST": 0, "BLOCK": 1024}, 4, x, y, n)
    with pytest.raises(EmulatorError, match=r"ld\.global") as caught:
        run(softmax_kernel, {"PAST": 1, "BLOCK": 1024}, 4, x, y, n)
    assert f"of x_ptr, which has {4 * 4 * COLUMNS} bytes" in str(caught.value)


def test_a_result_that_stays_unwritten_is_reported() -> None:
    x, total = floats(COLUMNS), torch.zeros(1)
    for written in (COLUMNS, COLUMNS - 1):
        y = torch.zeros(COLUMNS)
        constants = {"WRITTEN": written, "BLOCK": 1024}
        info = run(half_written_kernel, constants, 1, x, y, total, COLUMNS, uninit=["y_ptr"])
        reports = [r for r in info.reports if "uninitialised" in r.kind]
        assert bool(reports) == (written < COLUMNS)
        assert all("y_ptr" in str(r) and "half_written_kernel" in str(r) for r in reports)


def test_a_vector_access_off_its_alignment_is_reported() -> None:
    """An address that the compiler was told divides by 16, and does not."""
    x, y = floats(1024), torch.zeros(1024)
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    attributes = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}

    def go(first: int) -> Any:
        constants, given = {"BLOCK": 512}, [x[first:], y]
        return run_compiled(vector_kernel, signature, constants, (1,), given, attrs=attributes)

    go(0)
    with pytest.raises(EmulatorError, match="misaligned"):
        go(1)
