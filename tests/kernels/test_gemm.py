"""Products compiled: odd sizes, strides, poisoned padding, accumulation, fixed order, far offsets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from entrenar.errors import DeviceError, DTypeError, LayoutError
from entrenar.kernels import _gemm_tiles, _launch, gemm, warm
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
    tile = _gemm_tiles.choose_tile("sm_80", "fp32", 1, m, n, k)
    assert _gemm_tiles.choose_split("sm_80", 1, k, tile)[1] > 1
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


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("which", ["forward", "backward_a", "backward_b"])
def test_every_product_of_a_layer_splits(
    which: str, batched: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and both gradients, batched or not, add onto what is there, the same on every run."""
    m, n, k = {"forward": (5, 40, 700), "backward_a": (5, 700, 40), "backward_b": (700, 5, 40)}[
        which
    ]
    a, b, grad = (normals(*s, device=device) for s in ((m, k), (k, n), (m, n)))
    splits = []
    choose = gemm.choose_split

    def spy(*given: Any) -> tuple[int, int]:
        splits.append(choose(*given)[1])
        return choose(*given)

    monkeypatch.setattr(gemm, "choose_split", spy)
    call, left, right = {
        "forward": (gemm.gemm_forward, a, b),
        "backward_a": (gemm.gemm_backward_a, grad, b),
        "backward_b": (gemm.gemm_backward_b, a, grad),
    }[which]
    options: dict[str, Any] = {}
    if batched:
        left, right = (torch.stack((x, 2 * x)) for x in (left, right))
        call = gemm.matmul
        options = {"trans_a": which == "backward_b", "trans_b": which == "backward_a"}
    wanted = to_float64(left.mT if which == "backward_b" else left) @ to_float64(
        right.mT if which == "backward_a" else right
    )
    out = normals(*wanted.shape, device=device)
    wanted = wanted + to_float64(out)
    again = out.clone()
    for target in (out, again):
        call(left, right, out=target, accumulate=True, **options)
    assert splits == [2, 2]
    within(out, wanted, 701)
    assert torch.equal(out, again)


def test_parts_are_added_to_nothing_that_was_there(device: str) -> None:
    """https://github.com/ByteDance-Seed/Triton-distributed/issues/182: storage added to was not zeroed."""
    a, b = normals(3, 1100, device=device), normals(1100, 40, device=device)
    with poisoned() as given:
        got = gemm.gemm_forward(a, b)
    assert len(given) == 2  # the result, and the parts it was split into
    within(got, to_float64(a) @ to_float64(b), 1100)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_rows_lie_on_the_first_axis_of_the_grid(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/NVIDIA/apex/issues/411: the other axes end at 65535."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", target)
    grids = []
    with _launch.launching(lambda op, kernel, grid, given: grids.append(grid)):
        for dtype in (torch.float32, torch.bfloat16):
            gemm.gemm_forward(
                torch.zeros(4_200_000, 8, dtype=dtype), torch.zeros(8, 16, dtype=dtype)
            )
    assert [len(grid) for grid in grids] == [1, 1]
    assert grids[0][0] > 1 << 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_of_stride_zero(dtype: torch.dtype, device: str) -> None:
    """One row, one column or one matrix for all is read in place."""
    row, column = (
        normals(1, 40, device=device, dtype=dtype),
        normals(70, 1, device=device, dtype=dtype),
    )
    b = normals(40, 24, device=device, dtype=dtype)
    wide, tall = row.expand(70, 40), column.expand(70, 40)
    within(gemm.gemm_forward(wide, b), to_float64(wide) @ to_float64(b), 40)
    within(gemm.gemm_forward(tall, b), to_float64(tall) @ to_float64(b), 40)
    batch = normals(3, 70, 40, device=device, dtype=dtype)
    shared = b[None].expand(3, 40, 24)
    within(gemm.matmul(batch, shared), to_float64(batch) @ to_float64(b), 40)


def test_offsets_into_storage_are_64_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/triton-lang/triton/issues/832: row times stride, both 32-bit, passed 2^31.

    No offset is computed in 32 bits: what is added to a pointer has 64, and so have the products.
    """
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    seen = set()
    for target in ("sm_80", "sm_90"):
        monkeypatch.setenv("ENTRENAR_PTX_TARGET", target)
        with warm.collecting() as forms:
            for n in (1031, 1024):
                a, b = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((2, 128, 512), (2, 512, n)))
                gemm.matmul(a, b, out=torch.zeros(2, 128, n, dtype=torch.bfloat16), accumulate=True)
            gemm.matmul(a[:, :4], b)
        for form in forms:
            with _launch.driving("cpu"):
                text = form.kernel.warmup(grid=(1,), **form.arguments).asm["ttir"]
            seen.add(form.kernel.fn.__name__)
            added = re.findall(
                r"tt\.addptr .*?, (?:tensor<\S*x)?(i\d+)>?(?: loc|$)", text, re.MULTILINE
            )
            assert set(added) <= {"i64", "i32"}
            assert not re.findall(r"arith\.muli .*: tensor<\S*xi32>", text)
    assert seen == {"matmul_kernel", "described_kernel", "add_parts_kernel"}
