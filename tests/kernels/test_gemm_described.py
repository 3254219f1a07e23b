"""Products through tensor descriptors: every storage order, batches, edges, persistence, who chooses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from entrenar.kernels import _gemm_described, _launch, gemm
from entrenar.kernels._gemm_tables import Tile
from entrenar.kernels._gemm_tiles import architecture_of, has_descriptors
from entrenar.testing import Tolerance, assert_close, poisoned, to_float64

SMALL = Tile(64, 64, 64, 4, 4, "")
WIDE = Tile(128, 256, 64, 8, 4, "")


def normals(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return torch.from_numpy(values).to(dtype).to(device)


def within(got: torch.Tensor, wanted: np.ndarray, terms: int) -> None:
    assert_close(got, wanted, Tolerance(str(got.dtype).removeprefix("torch."), reduction=terms))


@pytest.fixture
def hopper(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device with tensor descriptors, where two programs share all tiles."""
    if device == "cuda" and not has_descriptors(architecture_of(torch.device("cuda", 0))):
        pytest.skip("this GPU has no tensor descriptors")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_90")
    monkeypatch.setattr(_gemm_described, "programs_at_a_time", lambda *_: 2)
    return device


def force(monkeypatch: pytest.MonkeyPatch, tile: Tile, splits: int = 1) -> None:
    """Have products take one tile, and their inner size in this many parts."""
    monkeypatch.setattr(gemm, "choose_tile", lambda *_: tile)

    def split(architecture: str, tiles: int, k: int, tile: Tile) -> tuple[int, int]:
        each = -(-k // splits // tile.k) * tile.k
        return each, -(-k // each)

    monkeypatch.setattr(gemm, "choose_split", split)


def launched(call: Any, *arguments: Any, **more: Any) -> list[dict[str, Any]]:
    """Return the arguments of each kernel a launcher launches, its name under ``kernel``."""
    found = []

    def keep(op: str, kernel: Any, grid: Any, given: dict[str, Any]) -> None:
        found.append({**given, "kernel": kernel.fn.__name__, "grid": grid})

    with _launch.launching(keep):
        call(*arguments, **more)
    return found


def stored(
    m: int, n: int, transposed: bool, dtype: torch.dtype, device: str, batch: int | None = None
) -> torch.Tensor:
    """Return [m, n] values as stored, a window into NaN whose rows start at multiples of 16 bytes."""
    rows, columns = (n, m) if transposed else (m, n)
    lead = () if batch is None else (batch,)
    size = (*lead, rows + 3, -(-columns // 8) * 8 + 16)
    window = torch.full(size, float("nan"), dtype=dtype, device=device)[
        ..., 1 : 1 + rows, 8 : 8 + columns
    ]
    window.copy_(normals(*lead, rows, columns, dtype=dtype, device=device))
    return window


def turned(x: torch.Tensor, transposed: bool) -> np.ndarray:
    return to_float64(x).swapaxes(-1, -2) if transposed else to_float64(x)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_every_storage_order(
    trans_a: bool, trans_b: bool, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tiles of two programs; edges and what lies beside the operands are NaN."""
    force(monkeypatch, SMALL)
    m, n, k = 129, 70, 131
    a, b = (
        stored(m, k, trans_a, torch.bfloat16, hopper),
        stored(k, n, trans_b, torch.bfloat16, hopper),
    )
    assert launched(gemm.matmul, a, b, trans_a, trans_b)[0]["kernel"] == "described_kernel"
    with poisoned():
        got = gemm.matmul(a, b, trans_a, trans_b)
    within(got, turned(a, trans_a) @ turned(b, trans_b), k)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 1, 1), (65, 64, 63), (127, 129, 65), (64, 17, 64)])
def test_sizes_around_a_tile(
    m: int, n: int, k: int, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/gpu-mode/lectures/issues/51: every element of ones times ones is k."""
    force(monkeypatch, SMALL)
    a = stored(m, k, False, torch.bfloat16, hopper).fill_(1)
    b = stored(k, n, True, torch.bfloat16, hopper).fill_(1)
    assert launched(gemm.matmul, a, b, False, True)[0]["kernel"] == "described_kernel"
    with poisoned():
        assert (to_float64(gemm.matmul(a, b, False, True)) == k).all()


@pytest.mark.parametrize(
    ("out_dtype", "accumulate", "width"),
    [
        (torch.float16, True, 264),
        (torch.float16, False, 259),
        (torch.float32, False, 264),
        (torch.float32, True, 259),
    ],
)
def test_the_widest_tile_is_stored_in_parts(
    out_dtype: torch.dtype,
    accumulate: bool,
    width: int,
    hopper: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a descriptor, and through pointers where rows of the result start anywhere (259)."""
    force(monkeypatch, WIDE)
    m, k = 130, 72
    a = normals(m, k, dtype=torch.float16, device=hopper)
    b = normals(width, k, dtype=torch.float16, device=hopper)
    bias = normals(width, dtype=torch.float16, device=hopper)
    out = torch.full((m + 2, width + (0 if width % 8 else 8)), 7.0, dtype=out_dtype, device=hopper)
    target = out[1:-1, :width]
    target.copy_(normals(m, width, dtype=out_dtype, device=hopper))
    wanted = 0.5 * to_float64(a) @ to_float64(b).T + to_float64(bias)
    wanted = wanted + to_float64(target) if accumulate else wanted
    arguments = {"bias": bias, "scale": 0.5, "out": target, "accumulate": accumulate}
    (launch,) = launched(gemm.matmul, a, b, False, True, **arguments)
    assert launch["kernel"] == "described_kernel"
    assert launch["C_DESCRIBED"] == (width % 8 == 0)
    assert launch["PARTS"] >= 2
    gemm.matmul(a, b, False, True, **arguments)
    within(target, wanted, k + 2)
    assert (out[0] == 7).all()
    assert (out[-1] == 7).all()
    assert (out[:, width:] == 7).all()


@pytest.mark.parametrize("shared", ["neither", "a", "b"])
def test_batches_and_matrices_shared_by_one(
    shared: str, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, SMALL)
    batch, m, n, k = 3, 66, 70, 40
    a = stored(m, k, True, torch.bfloat16, hopper, batch)
    b = stored(k, n, False, torch.bfloat16, hopper, batch)
    a = a[:1].expand_as(a) if shared == "a" else a
    b = b[0] if shared == "b" else b
    assert launched(gemm.matmul, a, b, True)[0]["kernel"] == "described_kernel"
    with poisoned():
        got = gemm.matmul(a, b, True)
    within(got, turned(a, True) @ to_float64(b), k)


def test_parts_of_the_inner_size(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part ends inside a tile; scale, bias and accumulation come after the parts are added."""
    force(monkeypatch, SMALL, splits=3)
    batch, m, n, k = 2, 70, 66, 300
    a, b = (
        normals(batch, *s, dtype=torch.bfloat16, device=hopper)
        for s in ((m, k + 4), (k + 4, n + 6))
    )
    a, b = a[..., :k], b[:, :k, :n]
    bias = normals(n, dtype=torch.bfloat16, device=hopper)
    out = normals(batch, m, n, dtype=torch.float32, device=hopper)
    wanted = 2 * to_float64(a) @ to_float64(b) + to_float64(bias) + to_float64(out)
    first, second = launched(gemm.matmul, a, b, out=out)
    assert (first["kernel"], first["SPLIT_K"]) == ("described_kernel", 3)
    assert (first["ACCUMULATE"], second["kernel"]) == (False, "add_parts_kernel")
    gemm.matmul(a, b, bias=bias, scale=2.0, out=out, accumulate=True)
    within(out, wanted, k + 2)


def test_how_many_programs_share_the_tiles_changes_no_bit(
    hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, SMALL)
    a, b = (normals(200, 200, dtype=torch.bfloat16, device=hopper) for _ in range(2))
    results = []
    for programs in (1, 3, 16):
        monkeypatch.setattr(_gemm_described, "programs_at_a_time", lambda *_, p=programs: p)
        results.append(gemm.gemm_forward(a, b))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_backward_products_transpose_by_descriptor(
    hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, SMALL)
    grad, b, a = (
        normals(*s, dtype=torch.bfloat16, device=hopper) for s in ((80, 72), (64, 72), (80, 64))
    )
    within(gemm.gemm_backward_a(grad, b), to_float64(grad) @ to_float64(b).T, 72)
    within(gemm.gemm_backward_b(a, grad), to_float64(a).T @ to_float64(grad), 80)


def test_the_launcher_chooses_by_architecture_and_layout(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("the architecture is that of the GPU")
    a = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    odd = torch.zeros(2048, 2049, dtype=torch.bfloat16)
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_80")
    assert launched(gemm.gemm_forward, a, a)[0]["kernel"] == "matmul_kernel"
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_90")
    (launch,) = launched(gemm.gemm_forward, a, a)
    assert launch["kernel"] == "described_kernel"
    assert (launch["BLOCK_M"], launch["BLOCK_N"], launch["BLOCK_K"]) == (128, 256, 64)
    assert (launch["num_warps"], launch["num_stages"], launch["grid"]) == (8, 4, (128,))
    many = torch.zeros(2048, 32_768, dtype=torch.bfloat16)
    assert launched(gemm.gemm_forward, a, many)[0]["grid"] == (132,)
    for x, y in (
        (odd[:, :-1], a),  # rows at odd multiples of 2 bytes
        (
            odd.view(-1)[1 : 1 + 2048 * 2048].view(2048, 2048),
            a,
        ),  # an address that is no multiple of 16
        (a[:1].expand(2048, 2048), a),  # one row for all
        (a.float(), a.float()),
        (a[:4], a),  # too few rows for the matrix instructions that read shared memory
    ):
        assert launched(gemm.gemm_forward, x, y)[0]["kernel"] == "matmul_kernel"


def test_layouts_of_storage() -> None:
    x = torch.zeros(6, 40, 24, dtype=torch.bfloat16)
    describe = _gemm_described.describe
    assert describe(x) == ((6, 40, 24), (960, 24, 1), False, False)
    assert describe(x.mT) == ((6, 40, 24), (960, 24, 1), True, False)
    assert describe(x[2]) == ((1, 40, 24), (960, 24, 1), False, True)
    assert describe(x[:1].expand(6, 40, 24)) == ((1, 40, 24), (960, 24, 1), False, True)
    assert describe(x[:, :1, :3]) == ((6, 1, 3), (960, 8, 1), False, False)
    assert describe(x[0, :, ::2]) is None
    assert describe(x[0, :, 4:]) is None
    assert describe(x[0, :1].expand(40, 24)) is None
