"""Attention kernels, compiled and executed on the CPU, on the inputs that broke others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from entrenar.errors import LayoutError, ShapeMismatchError
from entrenar.kernels import attention as kernels
from entrenar.reference import attention as plain
from entrenar.testing import poisoned, to_float64


@pytest.fixture(autouse=True)
def on_device(device: str) -> Iterator[None]:
    """New storage lies where kernels run."""
    with torch.device(device):
        yield


def _normal(seed: int, *shape: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)


def _bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_query_without_keys() -> None:
    """https://github.com/pytorch/pytorch/issues/103749"""
    q, k = torch.ones(6, 1, 16), torch.ones(3, 1, 16)
    bounds = {"cu_seqlens_q": _bounds(0, 3, 6), "cu_seqlens_k": _bounds(0, 3, 3)}
    with poisoned():
        out, lse = kernels.attention_forward(q, k, k, **bounds)
        grads = kernels.attention_backward(q, q, k, k, out, lse, **bounds)
    np.testing.assert_allclose(to_float64(out[:3]), 1, rtol=1e-6)
    assert not out[3:].any()
    assert torch.isneginf(lse[0, 3:]).all()
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][3:].any()


def test_the_mask_is_aligned_at_the_last_key() -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/517"""
    for n_queries, values, wanted in (
        (2, [1.0, 2, 3, 4, 5], [2.5, 3.0]),
        (5, [1.0, 2], [0, 0, 0, 1.0, 1.5]),
    ):
        v = torch.tensor(values).reshape(-1, 1, 1)
        out, _ = kernels.attention_forward(torch.zeros(n_queries, 1, 1), v, v)
        np.testing.assert_allclose(to_float64(out[:, 0, 0]), wanted, rtol=1e-6)


def test_the_future_is_not_seen() -> None:
    """https://github.com/paiml/entrenar/issues/310"""
    q, k, v, grad = (_normal(seed, 6, 2, 16) for seed in range(4))
    out, lse = kernels.attention_forward(q, k, v)
    k2, v2 = k.clone(), v.clone()
    k2[5] += 1
    v2[5] -= 3
    changed, _ = kernels.attention_forward(q, k2, v2)
    assert torch.equal(changed[:5], out[:5])
    assert not torch.equal(changed[5], out[5])
    grad[3:] = 0
    grads = kernels.attention_backward(grad, q, k, v, out, lse)
    assert all(not g[3:].any() for g in grads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (14, 2)])
def test_neighbouring_query_heads_share_a_key_head(heads: int, kv_heads: int) -> None:
    """https://github.com/apple/axlearn/issues/842"""
    v = torch.tensor([1.0, 10]).reshape(1, kv_heads, 1)
    out, _ = kernels.attention_forward(torch.ones(1, heads, 1), torch.ones(1, kv_heads, 1), v)
    assert out[0, :, 0].tolist() == [1.0] * (heads // 2) + [10.0] * (heads // 2)


@pytest.mark.parametrize("length", [1, 2, 7, 17, 63, 65, 127, 129])
def test_any_length(length: int) -> None:
    """https://github.com/triton-lang/triton/issues/2059"""
    room = [torch.full((length + 64, 1, 32), float("nan")) for _ in range(3)]
    q, k, v = (x[:length] for x in room)
    q.copy_(_normal(0, length, 1, 32))
    k.copy_(_normal(1, length, 1, 32))
    v.fill_(1)
    out, lse = kernels.attention_forward(q, k, v)
    np.testing.assert_allclose(to_float64(out), 1, rtol=1e-6)
    grads = kernels.attention_backward(torch.ones_like(q), q, k, v, out, lse)
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_a_segment_longer_than_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/251: row times stride passed 2^31."""
    assert kernels._passes_31_bits(torch.empty_strided((80_000, 1, 1), (0, 1, 1))) is False
    far = torch.empty(1).as_strided((1, 1, 1), (1 << 31, 1, 1))
    assert kernels._passes_31_bits(torch.ones(1, 1, 1), far)
    q, k, v, grad = (_normal(i, 70, 2, 16) for i in range(4))
    results = []
    for wide in (False, True):
        monkeypatch.setattr(kernels, "_passes_31_bits", lambda *arrays, wide=wide: wide)
        out, lse = kernels.attention_forward(q, k, v)
        results.append((out, *kernels.attention_backward(grad, q, k, v, out, lse)))
        single = _normal(4, 9, 1, 1)  # whose strides of 1 are constants of the kernel
        kernels.attention_forward(single, single, single)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_segments_do_not_leak() -> None:
    """What one segment holds, NaN included, changes no bit of another."""
    q, k, v = (_normal(seed, 40, 2, 16) for seed in range(3))
    bounds = _bounds(0, 17, 17, 30, 40)
    out, lse = kernels.attention_forward(q, k, v, bounds)
    grad = _normal(3, 40, 2, 16)
    grads = kernels.attention_backward(grad, q, k, v, out, lse, bounds)
    for x in (q, k, v, grad):
        x[17:30] = float("nan")
    bad_out, bad_lse = kernels.attention_forward(q, k, v, bounds)
    bad_grads = kernels.attention_backward(grad, q, k, v, bad_out, bad_lse, bounds)
    for clean, bad in ((out, bad_out), *zip(grads, bad_grads, strict=True)):
        assert torch.equal(clean[:17], bad[:17])
        assert torch.equal(clean[30:], bad[30:])
        assert torch.isnan(bad[17:30]).any()


def test_many_segments_of_many_lengths() -> None:
    """More segments than one lane of the search holds, empty and long ones among them."""
    rng = np.random.default_rng(9)
    lengths = rng.integers(0, 9, 40)
    lengths[[3, 20]] = [70, 35]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    n = int(bounds[-1])
    q, k, v, grad = (
        _normal(0, n, 2, 16),
        _normal(1, n, 1, 16),
        _normal(2, n, 1, 16),
        _normal(3, n, 2, 16),
    )
    with poisoned():
        out, lse = kernels.attention_forward(q, k, v, torch.tensor(bounds))
        grads = kernels.attention_backward(grad, q, k, v, out, lse, torch.tensor(bounds))
    arrays = [to_float64(x) for x in (q, k, v)]
    wanted, wanted_lse = plain.attention_forward(*arrays, bounds)
    np.testing.assert_allclose(to_float64(out), wanted, atol=5e-6)
    wanted_grads = plain.attention_backward(to_float64(grad), *arrays, wanted, wanted_lse, bounds)
    for got, want in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(to_float64(got), want, atol=2e-5)


@pytest.mark.parametrize("bad", [(0, 900, 5), (7, 3, 5), (0, -4, 99), (-9, 2, 5)])
def test_bad_bounds_stay_in_bounds(bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host cannot look, the emulator's guards see that nothing outside is touched."""
    monkeypatch.setattr(kernels, "_check_bounds_on_cpu", lambda *_: None)
    q, k, v = (_normal(seed, 5, 2, 16) for seed in range(3))
    with poisoned():
        out, lse = kernels.attention_forward(q, k, v, _bounds(*bad))
        kernels.attention_backward(q, q, k, v, out, lse, _bounds(*bad))


def test_views_of_one_fused_product() -> None:
    fused = _normal(5, 19, 6, 16)
    q, k, v = fused[:, :4], fused[:, 4:5], fused[:, 5:]
    wanted = kernels.attention_forward(*(x.contiguous() for x in (q, k, v)))
    for got, want in zip(kernels.attention_forward(q, k, v), wanted, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(LayoutError, match="contiguous features"):
        kernels.attention_forward(q.transpose(0, 2), k.transpose(0, 2), v.transpose(0, 2))


def test_a_head_too_wide_is_refused() -> None:
    q = torch.zeros(2, 1, 257)
    with pytest.raises(ShapeMismatchError, match="1 to 256 features"):
        kernels.attention_forward(q, q, q)


@pytest.mark.parametrize("window", [0, 70])
def test_two_runs_agree_to_the_bit(window: int) -> None:
    q, k, v, grad = _normal(0, 150, 4, 64), _normal(1, 150, 2, 64), _normal(2, 150, 2, 64), None
    grad = _normal(3, 150, 4, 64)
    q, k, v, grad = (x.half() for x in (q, k, v, grad))

    def run() -> list[Any]:
        out, lse = kernels.attention_forward(q, k, v, window=window)
        return [out, lse, *kernels.attention_backward(grad, q, k, v, out, lse, window=window)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize(("head_dim", "softcap"), [(40, 0.0), (64, 3.0)])
def test_features_read_in_parts_give_the_same(
    head_dim: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wide heads take on GPUs whose registers do not hold them: 32 features at a time."""
    q, k, v, grad = (_normal(i, 37, h, head_dim) for i, h in enumerate((4, 2, 2, 4)))
    given = {"cu_seqlens_q": _bounds(0, 9, 37), "window": 20, "softcap": softcap}
    outcomes = []
    for chunk in (0, 32):
        tile = kernels._Tile(16, 16, 4, 1, chunk)
        for name in ("_forward_tile", "_key_gradient_tile", "_query_gradient_tile"):
            monkeypatch.setattr(kernels, name, lambda *sizes, tile=tile: tile)
        with poisoned():
            out, lse = kernels.attention_forward(q, k, v, **given)
            grads = kernels.attention_backward(grad, q, k, v, out, lse, **given)
        outcomes.append([to_float64(t) for t in (out, lse, *grads)])
    for whole, parts in zip(*outcomes, strict=True):
        # sums of at most 128 products in another order
        np.testing.assert_allclose(parts, whole, rtol=0, atol=2e-5 * np.abs(whole).max())
