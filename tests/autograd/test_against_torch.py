"""Whole small graphs on the tape against torch's autograd."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from entrenar import runtime
from entrenar.autograd import Tape, Tensor, checkpoint, ops

T, HEADS, KV, D, FF, V = 6, 4, 2, 4, 12, 17
H = HEADS * D
SEGMENTS = [0, 4, 6]
POSITIONS = [0, 1, 2, 3, 0, 1]
TARGETS = [3, -100, 5, 16, 0, -100]
SHAPES = {
    "embed": (V, H), "norm1": (H,), "q": (H, H), "q_bias": (H,), "k": (KV * D, H), "v": (KV * D, H),
    "q_norm": (D,), "o": (H, H), "norm2": (H,), "gate": (FF, H), "up": (FF, H), "down": (H, FF),
    "norm3": (H,), "a": (2, H), "b": (H, 2),
}  # fmt: skip
ANGLES = np.outer(np.arange(8), 10000.0 ** -(np.arange(D // 2) / (D // 2)))


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) * 0.4 for name, shape in SHAPES.items()}


def ours(w: dict[str, Tensor], ids: np.ndarray, recompute: bool) -> Tensor:
    cu = torch.tensor(SEGMENTS, dtype=torch.int32)
    dtype = torch.float64 if w["embed"].dtype == torch.float64 else torch.float32
    cos, sin = (torch.from_numpy(f(ANGLES)).to(dtype) for f in (np.cos, np.sin))

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        n = ops.rms_norm(x, w["norm1"], 1e-5)
        q = ops.reshape(ops.linear(n, w["q"], w["q_bias"]), (T, HEADS, D))
        k = ops.reshape(ops.linear(n, w["k"]), (T, KV, D))
        v = ops.reshape(ops.linear(n, w["v"]), (T, KV, D))
        q = ops.rms_norm(q, w["q_norm"], 1e-5)
        q, k = ops.rope(q, k, cos, sin, torch.tensor(POSITIONS), inplace=True)
        mixed = ops.reshape(ops.attention(q, k, v, cu, cu), (T, H))
        frozen = w["o"].detach()
        attended = ops.lora_linear(mixed, frozen, w["a"], w["b"], 2.0)
        n, residual = ops.rms_norm_residual(attended, x, w["norm2"], 1e-5)
        gated = ops.swiglu(ops.linear(n, w["gate"]), ops.linear(n, w["up"]))
        return ops.linear(gated, w["down"]), residual

    x = ops.embedding(ids, w["embed"])
    y, residual = checkpoint(block, x) if recompute else block(x)
    hidden, _ = ops.rms_norm_residual(y, residual, w["norm3"], 1e-5)
    loss, counted = ops.cross_entropy(ops.linear(hidden, w["embed"]), np.array(TARGETS))
    return ops.scale(loss, 1 / counted)


def theirs(w: dict[str, torch.Tensor], ids: np.ndarray) -> torch.Tensor:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angle = torch.from_numpy(ANGLES)[POSITIONS][:, None]
        one, two = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    x = w["embed"][torch.from_numpy(ids)]
    n = norm(x, w["norm1"])
    q = rotate(norm((n @ w["q"].T + w["q_bias"]).view(T, HEADS, D), w["q_norm"]))
    k = rotate((n @ w["k"].T).view(T, KV, D)).repeat_interleave(HEADS // KV, 1)
    v = (n @ w["v"].T).view(T, KV, D).repeat_interleave(HEADS // KV, 1)
    parts = []
    for start, end in itertools.pairwise(SEGMENTS):
        q_, k_, v_ = (t[start:end].transpose(0, 1) for t in (q, k, v))
        parts.append(F.scaled_dot_product_attention(q_, k_, v_, is_causal=True).transpose(0, 1))
    mixed = torch.cat(parts).reshape(T, H)
    x = x + mixed @ w["o"].detach().T + 2.0 * (mixed @ w["a"].T) @ w["b"].T
    n = norm(x, w["norm2"])
    x = x + (F.silu(n @ w["gate"].T) * (n @ w["up"].T)) @ w["down"].T
    logits = norm(x, w["norm3"]) @ w["embed"].T
    return F.cross_entropy(logits, torch.tensor(TARGETS))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_decoder_block_with_tied_embedding(recompute: bool, overwrite: bool) -> None:
    values, ids = weights(0), np.array([1, 1, 8, 3, 16, 0])
    mine = {name: Tensor(v.copy(), requires_grad=True) for name, v in values.items()}
    with Tape(overwrite_activations=overwrite) as tape:
        loss = ours(mine, ids, recompute)
    tape.backward(loss)
    peer = {name: torch.tensor(v, requires_grad=True) for name, v in values.items()}
    want = theirs(peer, ids)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    for name, tensor in mine.items():
        if name == "o":
            assert tensor.grad is None
            continue
        torch.testing.assert_close(
            tensor.grad, peer[name].grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.08), (torch.float16, 0.02)]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_narrow_storage_is_near_float64(dtype: torch.dtype, rtol: float, overwrite: bool) -> None:
    """Relative to the norm of each gradient; 16-bit storage rounds every activation."""
    ids = np.array([1, 1, 8, 3, 16, 0])
    rounded = {n: torch.from_numpy(v).to(dtype) for n, v in weights(0).items()}
    mine = {n: Tensor(v.clone(), requires_grad=True) for n, v in rounded.items()}
    with Tape(overwrite_activations=overwrite) as tape:
        loss = ours(mine, ids, recompute=True)
    tape.backward(loss)
    peer = {n: v.double().requires_grad_() for n, v in rounded.items()}
    theirs(peer, ids).backward()
    for name, tensor in mine.items():
        if name == "o":
            continue
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        error = (tensor.grad.double() - peer[name].grad).norm() / peer[name].grad.norm()
        assert error < rtol, name


@pytest.mark.skipif(not runtime.triton_available(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        (torch.float32, 2e-5),
        pytest.param(
            torch.bfloat16,
            0.08,
            marks=pytest.mark.skipif(
                "ENTRENAR_PROVE" not in os.environ, reason="runs in make prove"
            ),
        ),
    ],
)
def test_kernels_give_the_same_gradients(
    dtype: torch.dtype, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole block through the compiled kernels, executed by the emulator."""
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    test_narrow_storage_is_near_float64(dtype, rtol, True)
