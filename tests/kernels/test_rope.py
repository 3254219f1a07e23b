"""The rope kernel compiled: head counts, slices of a fused projection, far positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.kernels import _launch, rope
from entrenar.reference import rope as reference


def tables(n_positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(n_positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def on(device: str, *arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(a)).to(device) for a in arrays]


def test_pairs_are_halves_not_neighbours(device: str) -> None:
    """https://github.com/paiml/aprender/issues/2252: adjacent pairs under the name of half rotation."""
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]], np.float32)
    q, k, cos, sin, positions = on(device, x, x, *tables(2, 2), np.array([1]))
    rope.rope_forward(q, k, cos, sin, positions)
    np.testing.assert_allclose(q.cpu()[0, 0], [-1.984111, 1.959901, 2.462378, 4.0198], atol=1e-6)
    assert torch.equal(q, k)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (3, 3), (14, 2), (40, 1)])
def test_every_kv_head_turns(device: str, heads: int, kv_heads: int) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/342: a single kv head stayed as it was."""
    values = [np.ones((3, n, 128), np.float32) for n in (heads, kv_heads)]
    cos, sin = tables(3, 64)
    q, k, *rest = on(device, *values, cos, sin, np.arange(3))
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        rope.rope_forward(q, k, *rest)
    assert len(launches) == 1
    wide = [v.astype(np.float64) for v in values]
    reference.rope_forward(*wide, cos, sin, np.arange(3))
    np.testing.assert_allclose(q.cpu(), wide[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(k.cpu(), wide[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(k.cpu()[0], np.ones((kv_heads, 128)))


def test_slices_of_one_projection_turn_in_place(device: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 4 * 16)).astype(np.float32)
    cos, sin = tables(9, 8)
    index = np.array([8, 0, 3, 3, 1], np.int32)
    fused, *rest = on(device, values, cos, sin, index)
    q, k = fused[:, :32].view(5, 2, 16), fused[:, 32:48].view(5, 1, 16)
    rope.rope_forward(q, k, *rest)
    wanted = values.astype(np.float64).copy()
    heads = [wanted[:, :32].reshape(5, 2, 16).copy(), wanted[:, 32:48].reshape(5, 1, 16).copy()]
    reference.rope_forward(*heads, cos, sin, index)
    wanted[:, :32], wanted[:, 32:48] = heads[0].reshape(5, 32), heads[1].reshape(5, 16)
    np.testing.assert_allclose(fused.cpu(), wanted, rtol=1e-5, atol=1e-6)


def test_far_positions_do_not_alias_in_bfloat16(device: str) -> None:
    """https://github.com/huggingface/transformers/issues/29285: a bf16 position 15962 is 15936."""
    cos, sin = (t(np.arange(16_000.0)[:, None]).astype(np.float32) for t in (np.cos, np.sin))
    x = np.array([[[1.0, 0.0]]] * 3, np.float32)
    q, k, *rest = on(device, x, x, cos, sin, np.array([4095, 15_962, 257]))
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    rope.rope_forward(q, k, *rest)
    wanted = [-0.06597600, -0.90801590, np.cos(257.0)]
    np.testing.assert_allclose(q.float().cpu()[:, 0, 0], wanted, rtol=2**-8)


def test_a_position_past_the_table_turns_to_nan_on_a_device(device: str) -> None:
    """What a GPU does, where values cannot be checked before the launch: never reads outside."""
    cos, sin = tables(4, 2)
    q, k, c, s, index = on(
        device, *[np.ones((3, 1, 4), np.float32)] * 2, cos, sin, np.array([0, 4, -1])
    )
    _launch.launch(
        rope._rope_kernel, (3,), op="rope_forward", stream=None, reads=(), writes=(q, k),
        q_ptr=q, k_ptr=k, cos_ptr=c, sin_ptr=s, positions_ptr=index, n_positions=4, n_q_heads=1,
        n_k_heads=1, stride_q_token=4, stride_q_head=4, stride_k_token=4, stride_k_head=4,
        BACKWARD=False, HALF=2, Q_HEADS=1, K_HEADS=1, BLOCK=2, num_warps=1,
    )  # fmt: skip
    assert np.isfinite(q.cpu().numpy()[0]).all()
    assert np.isnan(q.cpu().numpy()[1:]).all()
