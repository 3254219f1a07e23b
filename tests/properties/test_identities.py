"""What must hold for any input: sums, inverses, linearity."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar.optable import FUNCTIONS, OPS, Op
from entrenar.reference.nf4 import nf4_dequantize, nf4_quantize
from entrenar.reference.rope import rope_backward, rope_forward
from entrenar.reference.softmax import softmax_forward
from entrenar.testing import rng

SEEDS = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def oracle(function: str, /, **arguments: Any) -> Any:
    module = importlib.import_module(f"entrenar.reference.{FUNCTIONS[function].family}")
    return getattr(module, function)(**arguments)


@FAST
@given(SEEDS, st.integers(1, 20), st.floats(-500, 500))
def test_softmax_sums_to_one_and_ignores_a_shift(seed: int, n: int, shift: float) -> None:
    x = 5 * np.random.default_rng(seed).standard_normal((3, n))
    y = softmax_forward(x)
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-14)
    np.testing.assert_allclose(softmax_forward(x + shift), y, rtol=1e-11, atol=1e-13)


@FAST
@given(SEEDS, st.integers(1, 6), st.integers(1, 8))
def test_rotation_keeps_lengths_and_turns_back(seed: int, tokens: int, half: int) -> None:
    random = np.random.default_rng(seed)
    q, k = (
        random.standard_normal((tokens, 3, 2 * half)),
        random.standard_normal((tokens, 1, 2 * half)),
    )
    angles = random.standard_normal((9, half))
    tables = (np.cos(angles), np.sin(angles), random.integers(0, 9, tokens))
    turned_q, turned_k = rope_forward(q.copy(), k.copy(), *tables)
    np.testing.assert_allclose(
        np.linalg.norm(turned_q, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-13
    )
    back_q, back_k = rope_backward(turned_q, turned_k, *tables)
    np.testing.assert_allclose(back_q, q, atol=1e-14)
    np.testing.assert_allclose(back_k, k, atol=1e-14)


@FAST
@given(SEEDS, st.integers(0, 300), st.sampled_from([32, 64, 128]))
def test_quantising_what_was_decoded_changes_nothing(seed: int, n: int, block: int) -> None:
    w = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    once = nf4_quantize(w, block)
    twice = nf4_quantize(nf4_dequantize(once), block)
    assert np.array_equal(once.codes, twice.codes)
    np.testing.assert_allclose(once.absmax, twice.absmax, rtol=1e-6)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.vjp], ids=lambda op: op.name)
def test_gradients_are_linear_in_what_arrives(op: Op) -> None:
    sample = next(s for s in op.samples if s.small)
    inputs = sample.make(rng(op.name, sample.id))
    outputs = oracle(op.forward.name, **copy.deepcopy(inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    random = rng(op.name, "linear")
    shapes = [np.shape(outputs[i]) for i in op.grad_outputs]
    first, second = ([np.asarray(random.standard_normal(s)) for s in shapes] for _ in range(2))
    assert op.vjp is not None

    def gradient(grads: list[np.ndarray]) -> Any:
        return op.vjp(oracle, copy.deepcopy(inputs), outputs, tuple(g.copy() for g in grads))

    mixed = gradient([2 * a - 3 * b for a, b in zip(first, second, strict=True)])
    one, other = gradient(first), gradient(second)
    for name in op.differentiable:
        if inputs.get(name) is None:
            continue
        np.testing.assert_allclose(
            mixed[name], 2 * one[name] - 3 * other[name], rtol=1e-9, atol=1e-11, err_msg=name
        )
