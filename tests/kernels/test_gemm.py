"""Products compiled: odd sizes, strides, poisoned padding, accumulation, fixed order, tile choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.errors import DeviceError, DTypeError, LayoutError
from entrenar.kernels import _gemm_tiles, gemm
from entrenar.testing import Tolerance, assert_close, poisoned, to_float64


def normals(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return torch.from_numpy(values).to(dtype).to(device)


def within(got: torch.Tensor, wanted: np.ndarray, k: int) -> None:
    assert_close(got, wanted, Tolerance(str(got.dtype).removeprefix("torch."), reduction=k))


def padded(x: torch.Tensor, columns: int = 3) -> torch.Tensor:
    """Return ``x`` as a window into storage whose other elements are NaN."""
    rows, n = x.shape
    wide = torch.full((rows + 2, n + 2 * columns), float("nan"), dtype=x.dtype, device=x.device)
    window = wide[1 : rows + 1, columns : columns + n]
    window.copy_(x)
    return window


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 19, 23), (16, 16, 17), (33, 1, 5), (1, 64, 65)]
)
def test_sizes_that_are_no_multiple_of_a_tile(m: int, n: int, k: int, device: str) -> None:
    """https://github.com/gpu-mode/lectures/issues/51: every element of ones times ones is k."""
    a = padded(torch.ones(m, k, device=device))
    b = padded(torch.ones(k, n, device=device))
    with poisoned():
        assert (to_float64(gemm.gemm_forward(a, b)) == k).all()


def test_bf16_operands_are_not_read_as_integers(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/11584: a product of ones gave 1e10."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    assert (to_float64(gemm.gemm_forward(ones, ones)) == 16).all()


def test_float32_products_keep_the_bits_that_tf32_drops(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/1800: entries 1 + k/4096 lost their last bits."""
    a = 1 + np.arange(64 * 64).reshape(64, 64) / 4096
    b = a[::-1].copy()
    got = gemm.gemm_forward(*(torch.from_numpy(x).float().to(device) for x in (a, b)))
    np.testing.assert_allclose(to_float64(got), a @ b, rtol=1e-5)


def test_zero_rows_give_a_zero_weight_gradient(device: str) -> None:
    """https://github.com/pytorch/pytorch/issues/34202: an empty batch lost its weight's gradient."""
    x, grad = torch.zeros(0, 2100, device=device), torch.zeros(0, 3, device=device)
    assert gemm.gemm_forward(x, torch.zeros(2100, 3, device=device)).shape == (0, 3)
    with poisoned():
        grad_w = gemm.gemm_backward_b(x, grad)
    assert grad_w.shape == (2100, 3)
    assert (to_float64(grad_w) == 0).all()


def test_backward_keeps_gradients_near_1e5_finite_and_exact(device: str) -> None:
    """fp32 gradients are multiplied as IEEE float32, transposed or not, unless told otherwise."""
    grad = 1e5 * normals(33, 70, device=device)
    b = normals(40, 70, device=device)
    within(gemm.gemm_backward_a(grad, b), to_float64(grad) @ to_float64(b).T, 70)
    a = normals(33, 40, device=device)
    within(gemm.gemm_backward_b(a, grad), to_float64(a).T @ to_float64(grad), 33)


def test_tf32_is_coarser_and_only_on_request(device: str) -> None:
    a, b = normals(64, 128, device=device), normals(128, 64, device=device)
    wanted = to_float64(a) @ to_float64(b)
    ieee = np.abs(to_float64(gemm.gemm_forward(a, b)) - wanted).max()
    tf32 = np.abs(to_float64(gemm.gemm_forward(a, b, precision="tf32")) - wanted).max()
    assert ieee < 1e-4
    assert 1e-4 < tf32 < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_accumulation_rounds_once(dtype: torch.dtype, device: str) -> None:
    a, b = normals(20, 30, device=device, dtype=dtype), normals(30, 10, device=device, dtype=dtype)
    out = normals(20, 10, device=device, dtype=dtype)
    wanted = to_float64(out) + to_float64(a) @ to_float64(b)
    assert gemm.gemm_forward(a, b, out=out, accumulate=True) is out
    within(out, wanted, 31)


def test_16_bit_products_into_fp32_keep_the_accumulator(device: str) -> None:
    a = normals(8, 50, device=device, dtype=torch.bfloat16)
    b = normals(50, 6, device=device, dtype=torch.bfloat16)
    out = torch.empty(8, 6, device=device)
    gemm.gemm_forward(a, b, out=out)
    within(out, to_float64(a) @ to_float64(b), 50)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_split_sums_finish_like_whole_ones(trans_a: bool, trans_b: bool, device: str) -> None:
    """Scale, bias and accumulation come after the parts are added, and the order is fixed."""
    m, n, k = 3, 40, 1100
    a = normals(*((k, m) if trans_a else (m, k)), device=device)
    b = normals(*((n, k) if trans_b else (k, n)), device=device)
    bias, out = normals(n, device=device), normals(m, n, device=device)
    assert _gemm_tiles.choose_split(1, k, 32)[1] > 1
    left = to_float64(a).T if trans_a else to_float64(a)
    right = to_float64(b).T if trans_b else to_float64(b)
    wanted = 0.5 * left @ right + to_float64(bias) + to_float64(out)
    again = out.clone()
    for target in (out, again):
        gemm.matmul(a, b, trans_a, trans_b, bias, 0.5, out=target, accumulate=True)
    within(out, wanted, k)
    assert torch.equal(out, again)


def test_a_batch_shares_one_matrix_without_a_copy(device: str) -> None:
    a = normals(3, 5, 9, device=device)
    b = normals(9, 7, device=device)
    wanted = to_float64(a) @ to_float64(b)
    within(gemm.matmul(a, b), wanted, 9)
    strided = torch.empty(3, 10, 9, device=device)[:, ::2]
    strided.copy_(a)
    within(gemm.matmul(strided, b), wanted, 9)
    target = torch.empty(3, 7, 5, device=device).transpose(1, 2)
    within(gemm.matmul(a, b, out=target), wanted, 9)


def test_what_a_kernel_cannot_take_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(4, 4, device=device)
    with pytest.raises(LayoutError, match="out has strides"):
        gemm.gemm_forward(a, a, out=torch.zeros(1, 4, device=device).expand(4, 4))
    with pytest.raises(DTypeError, match="a is float64"):
        gemm.gemm_forward(a.double(), a.double())
    if device == "cpu":
        monkeypatch.setenv("ENTRENAR_BACKEND", "numpy")
        with pytest.raises(DeviceError, match="ENTRENAR_BACKEND=triton"):
            gemm.gemm_forward(a, a)


def test_tiles_follow_shape_and_memory() -> None:
    hopper, ada, least = 227 << 10, 99 << 10, 64 << 10
    assert _gemm_tiles.choose_tile("16-bit", 1, 8192, 8192, hopper)[:3] == (128, 256, 64)
    assert _gemm_tiles.choose_tile("16-bit", 1, 4, 4096, hopper).m == 16
    assert _gemm_tiles.choose_tile("16-bit", 1, 4096, 16, hopper).n == 16
    for kind in ("16-bit", "16-bit unaligned", "fp32", "fp32 unaligned", "tf32"):
        for m in (1, 16, 63, 64, 200, 2048, 8192):
            for n in (1, 16, 256, 1536, 4096):
                for shared in (hopper, ada, least):
                    tile = _gemm_tiles.choose_tile(kind, 1, m, n, shared)
                    itemsize = 2 if kind.startswith("16-bit") else 4
                    assert (tile.m + tile.n) * tile.k * itemsize * tile.stages <= shared
                    assert tile.m >= 64 or m < 64 or itemsize == 4


@pytest.mark.parametrize("k", [0, 1, 255, 256, 511, 1031, 11008])
@pytest.mark.parametrize("tiles", [1, 2, 66, 67, 500])
def test_parts_cover_the_inner_size_once(tiles: int, k: int) -> None:
    for block in (16, 64, 128):
        each, parts = _gemm_tiles.choose_split(tiles, k, block)
        assert parts >= 1
        assert (parts - 1) * each < max(k, 1) <= parts * each
        assert parts == 1 or tiles * parts <= 2 * 132
