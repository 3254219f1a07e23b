"""The AdamW kernel compiled: traces, bias correction over a million steps, device scalars, skipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from entrenar import runtime
from entrenar.errors import DTypeError
from entrenar.kernels import _launch, adamw


def state(device: str, p: list[float]) -> dict[str, torch.Tensor]:
    return {
        "params": torch.tensor(p, device=device),
        "m": torch.zeros(len(p), device=device),
        "v": torch.zeros(len(p), device=device),
        "step": torch.zeros(1, dtype=torch.int64, device=device),
    }


def test_three_steps(device: str) -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010: decay of the wrong quantity."""
    s, lr = state(device, [1.0]), torch.tensor([0.1], device=device)
    for gradient in (0.5, -0.25, 1.0):
        adamw.adamw_step(grads=torch.tensor([gradient], device=device), lr=lr, **s)
    assert s["params"].item() == pytest.approx(0.804784672, rel=2e-7)
    assert s["m"].item() == pytest.approx(0.118, rel=2e-7)
    assert s["v"].item() == pytest.approx(0.00131193775, rel=2e-7)
    assert s["step"].item() == 3


def test_small_updates_do_not_round_away(device: str) -> None:
    """https://github.com/pytorch/ao/issues/1124: bfloat16 parameters stayed at 1; they are refused."""
    s, lr = state(device, [1.0]), torch.tensor([1e-3], device=device)
    gradient = torch.tensor([1.0], device=device)
    for _ in range(100):
        adamw.adamw_step(grads=gradient, lr=lr, weight_decay=0.0, **s)
    assert s["params"].item() == pytest.approx(0.9, rel=2e-6)
    s["params"] = s["params"].to(torch.bfloat16)
    with pytest.raises(DTypeError, match="params is bfloat16, wanted float32"):
        adamw.adamw_step(grads=gradient, lr=lr, weight_decay=0.0, **s)


def test_the_counter_is_read_as_an_integer(device: str) -> None:
    """https://github.com/ooples/AiDotNet.Tensors/issues/719: integer bits read as a float."""
    s, lr = state(device, [1.0]), torch.tensor([0.1], device=device)
    s["step"] = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(DTypeError, match="step is int32, wanted int64"):
        adamw.adamw_step(grads=torch.tensor([0.5], device=device), lr=lr, **s)


def test_eps_joins_after_the_correction(device: str) -> None:
    """https://github.com/karpathy/nanochat/issues/304: eps was divided by the correction."""
    s, lr = state(device, [0.0]), torch.tensor([1.0], device=device)
    gradient = torch.tensor([1e-8], device=device)
    adamw.adamw_step(grads=gradient, lr=lr, weight_decay=0.0, **s)
    assert s["params"].item() == pytest.approx(-0.5, rel=1e-6)
    tiny = state(device, [0.0])
    adamw.adamw_step(grads=gradient, lr=lr, weight_decay=0.0, **tiny)
    assert tiny["v"].item() == pytest.approx(1e-19, rel=1e-6)


def test_updates_exactly_once(device: str) -> None:
    """https://github.com/triton-lang/triton/issues/6547: autotuning ran an in-place kernel many times."""
    s, lr = state(device, [1.0] * 5), torch.tensor([1e-3], device=device)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        gradient = torch.tensor([1e-3] * 5, device=device)
        adamw.adamw_step(grads=gradient, lr=lr, weight_decay=0.0, **s)
    np.testing.assert_allclose(s["params"].cpu(), [0.999] * 5, rtol=1e-6)
    assert len(launches) == 2


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("done", [0, 1, 9, 299, 4_999, 999_999])
def test_bias_correction_keeps_its_digits(device: str, beta: float, done: int) -> None:
    """1 - beta**t to float32 precision: with beta1 = beta2 = beta the step is its ratio to a root."""
    s, lr = state(device, [0.0]), torch.tensor([1.0], device=device)
    s["step"] = torch.tensor([done], device=device)
    gradient = torch.tensor([1.0], device=device)
    adamw.adamw_step(grads=gradient, lr=lr, beta1=beta, beta2=0.0, eps=0.0, weight_decay=0.0, **s)
    t = done + 1
    exact = (1 - beta) / -np.expm1(t * np.log(beta))
    assert s["params"].item() == pytest.approx(-exact, rel=6e-7)


def test_learning_rate_and_factor_are_read_on_the_device(device: str) -> None:
    s, lr = state(device, [1.0] * 3), torch.tensor([0.1], device=device)
    scale = torch.tensor([1.0], device=device)
    other = state(device, [1.0] * 3)
    grads = torch.tensor([0.5, -1.0, 2.0], device=device)
    half = torch.tensor([0.25, -0.5, 1.0], device=device)
    for rate, factor in ((0.1, 1.0), (0.01, 0.5)):
        lr.fill_(rate)
        scale.fill_(factor)
        adamw.adamw_step(grads=grads, lr=lr, grad_scale=scale, **s)
        adamw.adamw_step(grads=grads if factor == 1 else half, lr=lr, **other)
    for name, tensor in s.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(device: str, bad: float) -> None:
    """https://github.com/pytorch/pytorch/issues/46849: a non-finite gradient reached the moments."""
    s, lr = state(device, [1.0, 2.0]), torch.tensor([0.1], device=device)
    adamw.adamw_step(grads=torch.tensor([1.0, 1.0], device=device), lr=lr, **s)
    before = {name: tensor.clone() for name, tensor in s.items()}
    adamw.adamw_step(
        grads=torch.tensor([1.0, bad], device=device),
        lr=lr,
        grad_scale=torch.tensor([0.0], device=device),
        skip=torch.tensor([1], dtype=torch.int32, device=device),
        **s,
    )
    for name, tensor in before.items():
        assert torch.equal(s[name], tensor), name


def test_empty_arena_still_counts(device: str) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/3207: zero-size parameters."""
    s = state(device, [])
    lr = torch.tensor([0.1], device=device)
    adamw.adamw_step(grads=torch.zeros(0, device=device), lr=lr, **s)
    assert s["step"].item() == 1


@triton.jit
def correction_kernel(y_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, adamw._one_minus_exp(tl.load(y_ptr + index)))


def test_one_minus_exp_over_its_range(device: str) -> None:
    y = np.geomspace(1e-6, 200.0, 1024).astype(np.float32)
    given = torch.from_numpy(y).to(device)
    out = torch.zeros(1024, device=device)
    _launch.launch(
        correction_kernel, (1,), op="one_minus_exp", stream=None, reads=(given,), writes=(out,),
        y_ptr=given, out_ptr=out, BLOCK=1024,
    )  # fmt: skip
    np.testing.assert_allclose(out.cpu(), -np.expm1(-y.astype(np.float64)), rtol=3e-7)
