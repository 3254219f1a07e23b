"""AdamW in NumPy, plain and fast, against written traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar.cpu import adamw as fast
from entrenar.reference import adamw as plain

BOTH = pytest.mark.parametrize("module", [plain, fast], ids=["plain", "fast"])


def state(p: list[float], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {
        "params": np.array(p, dtype),
        "m": np.zeros(len(p), dtype),
        "v": np.zeros(len(p), dtype),
        "step": np.zeros(1, np.int64),
    }


def lr_of(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array([value], dtype)


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_three_steps(module: Any, dtype: Any) -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010: decay of the wrong quantity."""
    s = state([1.0], dtype)
    for gradient in (0.5, -0.25, 1.0):
        module.adamw_step(grads=np.array([gradient], dtype), lr=lr_of(0.1, dtype), **s)
    np.testing.assert_allclose(s["params"], [0.804784672], rtol=2e-7)
    np.testing.assert_allclose(s["m"], [0.118], rtol=2e-7)
    np.testing.assert_allclose(s["v"], [0.00131193775], rtol=2e-7)
    assert s["step"].tolist() == [3]


@BOTH
def test_decay_is_decoupled(module: Any) -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010: 1.88, not 1.881."""
    s = state([2.0])
    module.adamw_step(grads=np.ones(1, np.float32), lr=lr_of(0.1), weight_decay=0.1, **s)
    np.testing.assert_allclose(s["params"], [1.88], rtol=1e-6)


@BOTH
def test_eps_joins_after_the_correction(module: Any) -> None:
    """https://github.com/karpathy/nanochat/issues/304: eps was divided by the correction."""
    s = state([0.0])
    module.adamw_step(grads=np.array([1e-8], np.float32), lr=lr_of(1.0), weight_decay=0.0, **s)
    np.testing.assert_allclose(s["params"], [-0.5], rtol=1e-6)


@BOTH
def test_zero_gradient_gives_no_nan(module: Any) -> None:
    """https://github.com/google-deepmind/optax/issues/1769: 0 / 0 where eps had vanished."""
    s = state([1.0])
    with np.errstate(all="raise"):
        module.adamw_step(grads=np.zeros(1, np.float32), lr=lr_of(1e-3), weight_decay=0.0, **s)
    assert s["params"][0] == 1
    assert s["m"][0] == s["v"][0] == 0


@BOTH
def test_decay_alone_acts_over_many_steps(module: Any) -> None:
    """https://github.com/pytorch/ao/issues/1124: updates that round away."""
    s = state([1.0])
    for _ in range(1000):
        module.adamw_step(grads=np.zeros(1, np.float32), lr=lr_of(1e-4), weight_decay=0.1, **s)
    np.testing.assert_allclose(s["params"], [0.99004978], rtol=2e-5)
    s = state([1.0])  # a thousandth a step, which bfloat16 would round away each time
    for _ in range(100):
        module.adamw_step(grads=np.ones(1, np.float32), lr=lr_of(1e-3), weight_decay=0.0, **s)
    np.testing.assert_allclose(s["params"], [0.9], rtol=2e-6)


@BOTH
def test_step_counts_past_256(module: Any) -> None:
    """https://github.com/pytorch/ao/issues/4915: a bf16 counter stops at 256."""
    s = state([0.0])
    for _ in range(300):
        module.adamw_step(grads=np.ones(1, np.float32), lr=lr_of(1e-3), weight_decay=0.0, **s)
    assert s["step"].dtype == np.int64
    assert s["step"][0] == 300
    np.testing.assert_allclose(s["v"], [0.259293], rtol=1e-4)
    np.testing.assert_allclose(s["params"], [-0.3], rtol=1e-4)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_step_changes_nothing(module: Any, bad: float) -> None:
    """https://github.com/pytorch/pytorch/issues/46849: a non-finite gradient reached the moments."""
    s = state([1.0, 2.0])
    module.adamw_step(grads=np.ones(2, np.float32), lr=lr_of(0.1), **s)
    before = {name: array.copy() for name, array in s.items()}
    skip = np.ones(1, np.int32)
    scale = np.zeros(1, np.float32)
    grads = np.array([1.0, bad], np.float32)
    module.adamw_step(grads=grads, lr=lr_of(0.1), grad_scale=scale, skip=skip, **s)
    for name, array in before.items():
        np.testing.assert_array_equal(s[name], array)


@BOTH
def test_empty_arena_still_counts(module: Any) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/3207: zero-size parameters."""
    s = state([])
    module.adamw_step(grads=np.zeros(0, np.float32), lr=lr_of(0.1), **s)
    assert s["step"][0] == 1


def test_clip_then_step_moves_the_parameter_by_the_clipped_gradient() -> None:
    """https://github.com/paiml/aprender/issues/2112: the factor was computed and thrown away."""
    from entrenar.reference.clip import clip_factor

    grads = np.array([3.0, 4.0])
    norm, factor, skip = clip_factor(grads, 1.0)
    s = state([0.0, 0.0], np.float64)
    plain.adamw_step(
        grads=grads, lr=lr_of(1.0, np.float64), beta1=0.0, beta2=0.0, weight_decay=0.0, eps=1.0,
        grad_scale=factor, skip=skip, **s,
    )  # fmt: skip
    assert norm[0] == 5
    clipped = np.array([0.6, 0.8])
    np.testing.assert_allclose(s["m"], clipped)
    np.testing.assert_allclose(s["params"], -clipped / (clipped + 1.0))
