"""Attention in NumPy, plain and fast, on the inputs that broke others."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from entrenar.cpu import attention as fast
from entrenar.reference import attention as plain

FORMS = pytest.mark.parametrize("form", [plain, fast], ids=["reference", "cpu"])

Form = types.ModuleType


def _bounds(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@FORMS
def test_a_query_without_keys(form: Form) -> None:
    """https://github.com/pytorch/pytorch/issues/103749"""
    q, k = np.ones((6, 1, 2), np.float32), np.ones((3, 1, 2), np.float32)
    bounds = {"cu_seqlens_q": _bounds(0, 3, 6), "cu_seqlens_k": _bounds(0, 3, 3)}
    with np.errstate(all="raise"):
        out, lse = form.attention_forward(q, k, k, **bounds)
        grads = form.attention_backward(q, q, k, k, out, lse, **bounds)
    np.testing.assert_allclose(out[:3], 1, rtol=1e-6)
    assert np.array_equal(out[3:], np.zeros((3, 1, 2)))
    assert np.isneginf(lse[0, 3:]).all()
    assert np.isfinite(lse[0, :3]).all()
    assert all(np.isfinite(grad).all() for grad in grads)
    assert not grads[0][3:].any()


@FORMS
@pytest.mark.parametrize(
    ("n_queries", "values", "wanted"),
    [(2, [1, 2, 3, 4, 5], [2.5, 3.0]), (5, [1, 2], [0, 0, 0, 1.0, 1.5])],
)
def test_the_mask_is_aligned_at_the_last_key(
    form: Form, n_queries: int, values: list[float], wanted: list[float]
) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/517"""
    v = np.array(values, np.float32).reshape(-1, 1, 1)
    out, _ = form.attention_forward(np.zeros((n_queries, 1, 1), np.float32), v, v)
    np.testing.assert_allclose(out[:, 0, 0], wanted, rtol=1e-6)


@FORMS
def test_the_future_is_not_seen(form: Form) -> None:
    """https://github.com/paiml/entrenar/issues/310"""
    rng = np.random.default_rng(1)
    q, k, v, grad = (rng.standard_normal((6, 2, 16)).astype(np.float32) for _ in range(4))
    out, lse = form.attention_forward(q, k, v)
    k2, v2 = k.copy(), v.copy()
    k2[5] += 1
    v2[5] -= 3
    changed, _ = form.attention_forward(q, k2, v2)
    assert np.array_equal(changed[:5], out[:5])
    assert not np.array_equal(changed[5], out[5])
    grad[3:] = 0  # a loss on positions 0 to 2 alone
    grads = form.attention_backward(grad, q, k, v, out, lse)
    assert all(not g[3:].any() for g in grads)


@pytest.mark.parametrize(
    ("causal", "window", "kv_heads", "scale", "packed"),
    list(itertools.product((True, False), (0, 3), (1, 2, 4), (None, 0.7), (False, True))),
)
def test_both_forms_take_every_option(
    causal: bool, window: int, kv_heads: int, scale: float | None, packed: bool
) -> None:
    """https://github.com/facebookresearch/xformers/issues/212"""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((9, 4, 4))
    k, v = rng.standard_normal((2, 11, kv_heads, 4))
    options = {"causal": causal, "window": window, "scale": scale}
    if packed:
        options |= {"cu_seqlens_q": _bounds(0, 4, 4, 9), "cu_seqlens_k": _bounds(0, 3, 5, 11)}
    out, lse = plain.attention_forward(q, k, v, **options)
    fast_out, fast_lse = fast.attention_forward(q, k, v, **options)
    np.testing.assert_allclose(fast_out, out, atol=1e-12)
    np.testing.assert_allclose(fast_lse, lse, atol=1e-12)
    grad = rng.standard_normal(q.shape)
    for a, b in zip(
        fast.attention_backward(grad, q, k, v, out, lse, **options),
        plain.attention_backward(grad, q, k, v, out, lse, **options),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)


@FORMS
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (14, 2), (3, 3), (5, 1)])
def test_neighbouring_query_heads_share_a_key_head(form: Form, heads: int, kv_heads: int) -> None:
    """https://github.com/apple/axlearn/issues/842"""
    v = 10.0 ** np.arange(kv_heads).reshape(1, kv_heads, 1)
    out, _ = form.attention_forward(np.ones((1, heads, 1)), np.ones((1, kv_heads, 1)), v)
    np.testing.assert_allclose(out[0, :, 0], np.repeat(v.ravel(), heads // kv_heads))


@FORMS
def test_as_many_tokens_as_heads(form: Form) -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/issues/2681"""
    rng = np.random.default_rng(3)
    q, (k, v) = rng.standard_normal((4, 4, 2)), rng.standard_normal((2, 4, 2, 2))
    out, _ = form.attention_forward(q, k, v)
    for i, h in itertools.product(range(4), range(4)):
        weights = np.exp(k[: i + 1, h // 2] @ q[i, h] / np.sqrt(2))
        np.testing.assert_allclose(out[i, h], weights / weights.sum() @ v[: i + 1, h // 2])


@FORMS
@pytest.mark.parametrize("length", [1, 2, 7, 17, 63, 65, 127, 129])
def test_any_length(form: Form, length: int) -> None:
    """https://github.com/triton-lang/triton/issues/2059"""
    rng = np.random.default_rng(length)
    room = np.full((length + 64, 1, 32), np.nan, np.float32)
    q, k, v = (room.copy()[:length] for _ in range(3))
    q[...], k[...] = rng.standard_normal((2, length, 1, 32))
    v[...] = 1
    out, _ = form.attention_forward(q, k, v)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@FORMS
def test_segments_do_not_leak(form: Form) -> None:
    """What one segment holds, NaN included, changes no bit of another."""
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 12, 2, 8))
    bounds = _bounds(0, 5, 9, 12)
    out, lse = form.attention_forward(q, k, v, bounds)
    alone, _ = form.attention_forward(q[5:9], k[5:9], v[5:9])
    np.testing.assert_allclose(out[5:9], alone, rtol=1e-12)
    for x in (q, k, v):
        x[9:] = np.nan
    poisoned, _ = form.attention_forward(q, k, v, bounds)
    assert np.array_equal(poisoned[:9], out[:9])
    grad = np.ones(q.shape)
    grads = form.attention_backward(grad, q, k, v, out, lse, bounds)
    assert all(np.isfinite(g[:9]).all() for g in grads)


def test_strided_views_work() -> None:
    """Queries, keys and values as views of one fused product."""
    fused = np.random.default_rng(6).standard_normal((7, 6, 8))
    q, k, v = fused[:, :4], fused[:, 4:5], fused[:, 5:]
    wanted = plain.attention_forward(*(np.ascontiguousarray(x) for x in (q, k, v)))
    for form in (plain, fast):
        for got, want in zip(form.attention_forward(q, k, v), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    q, (k, v) = rng.standard_normal((21, 4, 6)), rng.standard_normal((2, 21, 2, 6))
    grad = rng.standard_normal(q.shape)
    for window in (0, 5):
        out, lse = plain.attention_forward(q, k, v, window=window)
        wanted = plain.attention_backward(grad, q, k, v, out, lse, window=window)
        for rows in (1, 4, 20):
            monkeypatch.setattr(fast, "BLOCK_ROWS", rows)
            np.testing.assert_allclose(
                fast.attention_forward(q, k, v, window=window)[0], out, atol=1e-12
            )
            got = fast.attention_backward(grad, q, k, v, out, lse, window=window)
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, w, atol=1e-12)
