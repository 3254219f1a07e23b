"""Activation kernels compiled: extreme gates, aliasing, halves of one buffer, overflow in half."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar.errors import LayoutError
from entrenar.kernels import swiglu
from entrenar.reference import swiglu as reference

EDGES = [-1000.0, -100.0, -89.0, -88.0, -20.0, 0.0, 20.0, 1000.0]


def test_large_gates_give_no_nan(device: str) -> None:
    """https://github.com/antirez/ds4/issues/498: exp of a large negative gate gave NaN."""
    x = torch.tensor(EDGES, device=device)
    wanted = [0.0, 0.0, -1.982354e-37, -5.328050e-37, -4.122307e-08, 0.0, 20.0, 1000.0]
    slope = [0.0, 0.0, -1.960080e-37, -5.267504e-37, -3.916192e-08, 0.5, 1.0, 1.0]
    ones = torch.full_like(x, 1.0)
    for got, exact in (
        (swiglu.silu_forward(x), wanted),
        (swiglu.silu_backward(ones, x), slope),
    ):
        # what is below the normal numbers may be flushed to zero
        np.testing.assert_allclose(got.cpu()[2:], exact[2:], rtol=1e-4)
        np.testing.assert_allclose(got.cpu()[:2], exact[:2], rtol=0, atol=1.2e-38)
    large = torch.full_like(x, 1e30)
    assert np.isfinite(swiglu.swiglu_forward(x, large).cpu().numpy()).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_not_swapped(device: str, inplace: bool) -> None:
    """https://github.com/unslothai/unsloth/issues/3314: gate and up gradients in each other's place."""
    gate, up, grad = (torch.tensor([v], device=device) for v in (1.0, 2.0, 3.0))
    assert swiglu.swiglu_forward(gate, up).item() == pytest.approx(1.46211716, rel=1e-6)
    grad_gate, grad_up = swiglu.swiglu_backward(grad, gate, up, inplace)
    assert grad_gate.item() == pytest.approx(5.56602307, rel=1e-6)
    assert grad_up.item() == pytest.approx(2.19317574, rel=1e-6)
    assert (grad_gate is gate, grad_up is up) == (inplace, inplace)


@pytest.mark.parametrize("shape", [(3, 7), (5, 1030), (2, 3, 20)])
def test_halves_of_one_buffer_are_read_and_written_in_place(
    device: str, shape: tuple[int, ...]
) -> None:
    """https://github.com/unslothai/unsloth/issues/3314: gate and up as two halves of one buffer."""
    generator = np.random.default_rng(0)
    half = shape[-1]
    values = generator.standard_normal((*shape[:-1], 2 * half)).astype(np.float32)
    grad = generator.standard_normal(shape).astype(np.float32)
    both = torch.from_numpy(values.copy()).to(device)
    gate, up = both[..., :half], both[..., half:]
    wide = values.astype(np.float64)
    y = swiglu.swiglu_forward(gate, up)
    wanted = reference.swiglu_forward(wide[..., :half], wide[..., half:])
    np.testing.assert_allclose(y.cpu(), wanted, rtol=1e-5, atol=1e-6)
    swiglu.swiglu_backward(torch.from_numpy(grad).to(device), gate, up, True)
    gradients = reference.swiglu_backward(
        grad.astype(np.float64), wide[..., :half], wide[..., half:]
    )
    np.testing.assert_allclose(both.cpu(), np.concatenate(gradients, axis=-1), rtol=1e-5, atol=1e-5)


def test_transposed_storage_is_refused(device: str) -> None:
    gate = torch.full((4, 6), 1.0, device=device).t()
    with pytest.raises(LayoutError, match="gate has shape"):
        swiglu.swiglu_forward(gate, torch.full((6, 4), 1.0, device=device))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.float16, float("inf")), (torch.bfloat16, 67072.0), (torch.float32, 66981.825)],
)
def test_a_product_past_half_precision_shows(
    device: str, dtype: torch.dtype, wanted: float
) -> None:
    """https://github.com/huggingface/transformers/issues/27179: computed in float32, rounded once."""
    gate = torch.tensor([255.9], dtype=torch.float32, device=device).to(dtype)
    up = torch.tensor([261.75], dtype=torch.float32, device=device).to(dtype)
    y = swiglu.swiglu_forward(gate, up).float().item()
    assert y == pytest.approx(wanted, rel=1e-2)


def test_result_may_overwrite_an_input(device: str) -> None:
    values = np.linspace(-3, 3, 3000, dtype=np.float32)
    gate, up = torch.from_numpy(values.copy()).to(device), torch.from_numpy(values[::-1].copy())
    up = up.to(device)
    wanted = swiglu.swiglu_forward(gate, up)
    assert swiglu.swiglu_forward(gate, up, gate) is gate
    assert torch.equal(gate, wanted)


def test_row_offsets_are_64_bit() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/251: row times stride passed 2^31."""
    source = swiglu._offsets.src
    assert "row = (pid // n_col_blocks).to(tl.int64)" in source
    assert "(pid % n_col_blocks).to(tl.int64) * BLOCK" in source
