"""Small Triton kernels, compiled for a target and executed, against torch and NumPy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

from entrenar.emulator import (  # noqa: E402
    EmulatorError,
    active_driver,
    install_driver,
    run_compiled,
    uninstall_driver,
)

tl = triton.language

TARGETS = ["sm_80", "sm_90"]
RNG = np.random.default_rng(3)


def normals(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape, np.float32))


def run(kernel: Any, constants: dict[str, Any], grid: Any, *given: Any, **options: Any) -> Any:
    info = run_compiled(kernel, None, constants, grid, list(given), **options)
    assert info.warnings == []
    return info


@triton.jit
def _unary_kernel(x_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x_ptr + i, mask=i < n, other=1)
    if OP == "exp":
        y = tl.exp(v)
    elif OP == "log":
        y = tl.log(v)
    elif OP == "sqrt":
        y = tl.sqrt_rn(v)
    elif OP == "rsqrt":
        y = tl.rsqrt(v)
    elif OP == "erf":
        y = tl.erf(v)
    elif OP == "sigmoid":
        y = tl.sigmoid(v)
    elif OP == "reciprocal":
        y = tl.div_rn(1.0 + v * 0, v)
    elif OP == "cast":
        y = v.to(out_ptr.dtype.element_ty)
    else:
        y = v // 7 + v % 13
    tl.store(out_ptr + i, y, mask=i < n)


UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (torch.exp, 3e-6),
    "log": (lambda x: torch.log(x.abs() + 0), 2e-6),
    "sqrt": (torch.sqrt, 6e-8),
    "rsqrt": (torch.rsqrt, 1e-6),
    "erf": (torch.erf, 2e-6),
    "sigmoid": (torch.sigmoid, 3e-6),
    "reciprocal": (torch.reciprocal, 6e-8),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str) -> None:
    function, tolerance = UNARY[name]
    x = normals(1001).abs() * 3 + 0.01
    if name in ("exp", "erf", "sigmoid"):
        x[::2] *= -1
    out = torch.zeros_like(x)
    run(_unary_kernel, {"OP": name, "BLOCK": 256}, (4,), x, out, x.numel())
    wanted = function(x.double())
    assert ((out - wanted).abs() <= tolerance * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_conversions_are_exact(to: torch.dtype, target: str) -> None:
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.0, 65520.0, 1e-8, 6e-8, 1e-40, 0.1, -2.5])
    x = torch.cat([normals(500) * 100, edges])
    x = x[x.abs() >= 1.5e-38].contiguous() if to == torch.int32 else x
    source = x.bfloat16() if to == torch.float32 else x
    out = torch.zeros(source.shape, dtype=to)
    run(_unary_kernel, {"OP": "cast", "BLOCK": 256}, (3,), source, out, x.numel(), target=target)
    bits = {4: torch.int32, 2: torch.int16}[out.element_size()]
    assert torch.equal(out.view(bits), source.to(to).view(bits))


def test_integer_division_truncates() -> None:
    x = torch.from_numpy(RNG.integers(-(2**31), 2**31 - 1, 500, dtype=np.int32))
    out = torch.zeros_like(x)
    run(_unary_kernel, {"OP": "divide", "BLOCK": 512}, (1,), x, out, x.numel())
    assert torch.equal(out, (torch.div(x, 7, rounding_mode="trunc") + torch.fmod(x, 13)).int())


@triton.jit
def _reduce_kernel(
    x_ptr, sum_ptr, max_ptr, at_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr
):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    j = tl.arange(0, M if AXIS == 1 else N)
    tl.store(sum_ptr + j, tl.sum(x, AXIS))
    tl.store(max_ptr + j, tl.max(x, AXIS))
    tl.store(at_ptr + j, tl.argmax(x, AXIS))


@pytest.mark.parametrize(("m", "n", "warps"), [(64, 32, 4), (16, 256, 8), (4, 4, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions(m: int, n: int, warps: int, axis: int) -> None:
    x = normals(m, n)
    rows = m if axis == 1 else n
    total, top, at = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
    constants = {"M": m, "N": n, "AXIS": axis}
    run(_reduce_kernel, constants, (1,), x, total, top, at, num_warps=warps, racecheck=True)
    torch.testing.assert_close(total, x.sum(axis), rtol=1e-5, atol=1e-5)
    assert torch.equal(top, x.amax(axis))
    assert torch.equal(at, x.argmax(axis).int())


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _order_kernel(x_ptr, scan_ptr, sort_ptr, turn_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    tl.store(scan_ptr + i * N + j, tl.associative_scan(x, 1, _add))
    tl.store(sort_ptr + i * N + j, tl.sort(x, 1))
    tl.store(turn_ptr + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(x))


@pytest.mark.parametrize("warps", [1, 4])
def test_scan_sort_transpose(warps: int) -> None:
    x = torch.from_numpy(RNG.integers(-9, 9, (16, 64)).astype(np.float32))
    scanned, ordered, turned = torch.zeros(16, 64), torch.zeros(16, 64), torch.zeros(64, 16)
    constants = {"M": 16, "N": 64}
    run(
        _order_kernel, constants, (1,), x, scanned, ordered, turned, num_warps=warps, racecheck=True
    )
    assert torch.equal(scanned, x.cumsum(1))
    assert torch.equal(ordered, x.sort(1)[0])
    assert torch.equal(turned, x.T.contiguous())


@triton.jit
def _atomic_kernel(x_ptr, sum_ptr, top_ptr, lock_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.atomic_add(sum_ptr + i % 13, x, mask=i < n)
    tl.atomic_max(top_ptr + i % 5, i, mask=i < n)
    tl.atomic_cas(lock_ptr, tl.program_id(0), tl.program_id(0) + 1)


def test_atomics() -> None:
    n = 3000
    x = torch.from_numpy(RNG.integers(0, 3, n).astype(np.float32))
    total, top = torch.zeros(13), torch.zeros(5, dtype=torch.int32)
    lock = torch.zeros(1, dtype=torch.int32)
    run(_atomic_kernel, {"BLOCK": 512}, (6,), x, total, top, lock, n)
    assert torch.equal(total, torch.zeros(13).index_add(0, torch.arange(n) % 13, x))
    assert top.tolist() == [2995, 2996, 2997, 2998, 2999]
    assert lock.item() == 6


@triton.jit
def _dot_kernel(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, IEEE: tl.constexpr
):
    i, j, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + i * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + j)
    tl.store(c_ptr + i * N + j, tl.dot(a, b, input_precision="ieee" if IEEE else "tf32"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k", "warps"), [(16, 16, 16, 1), (64, 64, 32, 4)])
def test_products(target: str, dtype: torch.dtype, m: int, n: int, k: int, warps: int) -> None:
    a, b, c = normals(m, k).to(dtype), normals(k, n).to(dtype), torch.zeros(m, n)
    constants = {"M": m, "N": n, "K": k, "IEEE": True}
    info = run(_dot_kernel, constants, (1,), a, b, c, num_warps=warps, target=target, counters=True)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=2e-5)
    if dtype != torch.float32:
        assert info.counters["matrix_flops"] == 2 * m * n * k
        wide = target == "sm_90" and m == 64
        assert any(name.startswith("wgmma") for name in info.counters["matrix"]) == wide


@triton.jit
def _pipelined_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, 32):
        ks = k + tl.arange(0, 32)
        inside = (rows < M)[:, None] & (ks < K)[None, :]
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=inside, other=0.0)
        inside = (ks < K)[:, None] & (cols < N)[None, :]
        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=inside, other=0.0)
        acc = tl.dot(a, b, acc)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=inside)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("late", [False, True])
def test_asynchronous_copies(target: str, late: bool) -> None:
    """A pipelined loop gives the same whether a copy happens at once or only at its wait."""
    a, b, c = normals(70, 144).bfloat16(), normals(144, 72).bfloat16(), torch.zeros(70, 72)
    run(
        _pipelined_kernel, {"BLOCK": 64}, (2, 2), a, b, c, 70, 72, 144,
        target=target, num_stages=3, late_async=late, racecheck=True, initcheck=True,
    )  # fmt: skip
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=5e-5)


@triton.jit
def _mapped_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([i, k]), b.load([k, j]), acc)
    c.store([i, j], acc.to(c_ptr.dtype.element_ty))


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 256), (120, 72, 200)])
def test_tensor_maps(m: int, n: int, k: int) -> None:
    """Bulk copies through tensor maps, with mbarriers and wgmma, also past the edges."""
    a, b = normals(m, k).half(), normals(k, n).half()
    c = torch.zeros(m, n, dtype=torch.float16)
    constants = {"BM": 64, "BN": 64, "BK": 64}
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    run(_mapped_kernel, constants, grid, a, b, c, m, n, k, target="sm_90", racecheck=True)
    wanted = a.double() @ b.double()
    assert ((c.double() - wanted).abs() <= wanted.abs() * 2**-11 * 1.001 + 1e-3).all()


@triton.jit
def _twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n, other=0), mask=i < n)


@triton.jit
def _unmasked_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


def test_as_tritons_driver() -> None:
    """One kernel through two drivers in turn: what was compiled for one is not run on the other."""
    before = active_driver()
    x = normals(1000)
    for target in ("sm_80", "sm_90", "sm_80"):
        driver = install_driver(target, counters=True)
        assert active_driver() is driver
        out = torch.zeros(1000)
        _twice_kernel[(4,)](x, out, 1000, BLOCK=256)
        assert torch.equal(out, 2 * x)
        assert driver.last.counters["distinct"]["stored"] == 4000
        assert driver.last.metadata.target.arch == int(target[3:])
    if before is not None:
        install_driver(before.target)
    elif torch.cuda.is_available():
        uninstall_driver()


def test_a_missing_mask_is_caught() -> None:
    """The launch is refused that would have read or written past its arrays unnoticed."""
    with pytest.raises(EmulatorError, match="which has 4000 bytes"):
        run_compiled(
            _unmasked_kernel, None, {"BLOCK": 256}, (4,), [normals(1000), torch.zeros(1000)]
        )
