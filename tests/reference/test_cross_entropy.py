"""Cross entropy in NumPy, plain and fast, on the inputs that broke others."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from entrenar.cpu import cross_entropy as fast
from entrenar.reference import cross_entropy as plain

FORMS = pytest.mark.parametrize("form", [plain, fast], ids=["reference", "cpu"])

Form = types.ModuleType


@FORMS
@pytest.mark.parametrize(
    ("vocab", "even", "peaked"),
    [
        (151_936, 11.931215, 6.932184),
        (256_000, 12.452933, math.log(255_999 + math.exp(5)) - 5),
        (65_537, math.log(65_537), math.log(65_536 + math.exp(5)) - 5),
        (46_336, math.log(46_336), math.log(46_335 + math.exp(5)) - 5),
    ],
)
def test_large_vocabularies(form: Form, vocab: int, even: float, peaked: float) -> None:
    """https://github.com/unslothai/unsloth/issues/7"""
    logits = np.zeros((2, vocab), np.float32)
    logits[1, -1] = 5
    targets = np.array([0, vocab - 1])
    losses = [
        float(form.cross_entropy_forward(logits[i : i + 1], targets[i : i + 1])[0]) for i in (0, 1)
    ]
    assert losses == pytest.approx([even, peaked], abs=2e-5)
    grad = form.cross_entropy_backward(logits, targets)
    assert np.abs(grad.sum(axis=1, dtype=np.float64)).max() < 1e-6


@FORMS
def test_no_row_counts(form: Form) -> None:
    """https://github.com/pytorch/pytorch/issues/116349"""
    logits = (np.arange(50, dtype=np.float32) / 10).reshape(5, 10)
    targets = np.full(5, -100)
    loss, counted = form.cross_entropy_forward(logits, targets)
    assert float(loss) == 0.0
    assert int(counted) == 0
    assert not form.cross_entropy_backward(logits, targets).any()
    loss, counted, grad = form.linear_cross_entropy(logits, np.ones((3, 10), np.float32), targets)
    assert (float(loss), int(counted)) == (0.0, 0)
    assert not grad.any()


@FORMS
def test_left_out_rows_are_never_looked_at(form: Form) -> None:
    """https://github.com/pytorch/pytorch/issues/11551"""
    logits = np.array([[-np.inf] * 4, [0, 1, 0, 3], [np.nan, 1, 1, 1]], np.float32)
    targets = np.array([-100, 1, -100])
    loss, counted = form.cross_entropy_forward(logits, targets)
    assert float(loss) == pytest.approx(2.21099762, abs=1e-6)
    assert int(counted) == 1
    grad = form.cross_entropy_backward(logits, targets)
    assert np.array_equal(grad[[0, 2]], np.zeros((2, 4)))
    np.testing.assert_allclose(
        grad[1], [0.04031637, -0.89040874, 0.04031637, 0.80977599], atol=1e-7
    )


@FORMS
@pytest.mark.parametrize("place", [0, 127, 128, 150, 255, 256, 299])
def test_one_finite_logit(form: Form, place: int) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1930"""
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, place] = 10
    targets = np.array([place])
    assert float(form.cross_entropy_forward(logits, targets)[0]) == 0.0
    assert not form.cross_entropy_backward(logits, targets).any()


@FORMS
def test_inputs_survive_unless_they_are_the_output(form: Form) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/272"""
    logits = np.sin(np.arange(64.0)).reshape(8, 8)
    targets = np.arange(8)
    before = logits.copy()
    grad = form.cross_entropy_backward(logits, targets)
    form.cross_entropy_forward(logits, targets)
    assert np.array_equal(logits, before)
    onto = form.cross_entropy_backward(logits, targets, out=logits)
    assert onto is logits
    np.testing.assert_allclose(logits, grad, rtol=1e-12)


@FORMS
def test_one_gradient_a_row(form: Form) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/968"""
    logits = np.array([[2, 0], [0, 0], [1, 3]], np.float32)
    grad = form.cross_entropy_backward(
        logits, np.array([-100, 1, 0]), np.array([7, 2, 0.5], np.float32)
    )
    wanted = [[0, 0], [1, -1], [-0.44039854, 0.44039854]]
    np.testing.assert_allclose(grad, wanted, atol=1e-7)


@FORMS
def test_targets_that_do_not_sum_to_one(form: Form) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/2428: the gradient took their sum to be 1.

    Soft targets are rows that share their logits, each weighted by its part of the distribution.
    """
    logits = np.array([[1, 2, 0]], np.float32)
    grad = form.cross_entropy_backward(logits, np.array([0]), np.array([0.5], np.float32))
    np.testing.assert_allclose(grad, [[-0.37763576, 0.33262048, 0.04501529]], atol=1e-7)
    smoothed = np.array([0.1 / 3 + 0.9, 0.1 / 3, 0.1 / 3], np.float32)
    rows = form.cross_entropy_backward(np.repeat(logits, 3, 0), np.arange(3), smoothed)
    assert abs(rows.sum()) < 1e-6
    exact = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(rows.sum(0), exact - smoothed, atol=1e-6)


@FORMS
def test_a_broadcast_gradient(form: Form) -> None:
    """https://github.com/ROCm/TransformerEngine/issues/623"""
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    targets = np.array([0, 1, 2, 0])
    spread = np.broadcast_to(np.float32(1), (4,))
    wanted = form.cross_entropy_backward(logits, targets, np.ones(4, np.float32))
    assert np.array_equal(form.cross_entropy_backward(logits, targets, spread), wanted)


@FORMS
def test_rows_that_are_not_adjacent(form: Form) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/2734"""
    base = np.arange(64, dtype=np.float32).reshape(4, 2, 8) % 7
    targets = np.array([0, 1, 2, 3])
    logits = base.transpose(1, 0, 2)[0]
    assert not logits.flags.c_contiguous
    copied = np.ascontiguousarray(logits)
    assert float(form.cross_entropy_forward(logits, targets)[0]) == float(
        form.cross_entropy_forward(copied, targets)[0]
    )
    assert np.array_equal(
        form.cross_entropy_backward(logits, targets), form.cross_entropy_backward(copied, targets)
    )


@FORMS
def test_the_loss_without_a_gradient(form: Form) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/507"""
    logits = np.array([[1, 2, 3], [0, 0, 0], [2, 0, -2], [-1, 4, 1]], np.float32)
    targets = np.array([2, 0, 1, 1])
    eye = np.eye(3, dtype=np.float32)
    with_grad = form.linear_cross_entropy(logits, eye, targets)
    without = form.linear_cross_entropy(logits, eye, targets, need_grad=False)
    assert without[2] is None
    assert float(without[0]) == float(with_grad[0])
    assert float(without[0]) / 4 == pytest.approx(0.92603378, abs=1e-7)


@FORMS
def test_logits_far_apart(form: Form) -> None:
    """https://github.com/FluxML/NNlib.jl/issues/68"""
    logits = np.array([[-431, 279, 427]], np.float32)
    targets = np.array([0])
    with np.errstate(all="raise"):
        assert float(form.cross_entropy_forward(logits, targets)[0]) == 858.0
        grad = form.cross_entropy_backward(logits, targets)
        huge = np.array([[3e38, 3e38], [-1e30, -1e30]], np.float32)
        loss = form.cross_entropy_forward(huge, np.array([0, 1]))[0]
    assert np.array_equal(grad, [[-1, 0, 1]])
    assert float(loss) == pytest.approx(2 * math.log(2))


@FORMS
@pytest.mark.parametrize(("targets", "ignore"), [([0, 1, 7, 7], 7), ([0, 1, -100, -100], -100)])
def test_left_out_rows_are_not_counted(form: Form, targets: list[int], ignore: int) -> None:
    """https://github.com/flagos-ai/FlagGems/issues/73"""
    logits = np.zeros((4, 5), np.float32)
    loss, counted = form.cross_entropy_forward(logits, np.array(targets), ignore)
    assert int(counted) == 2
    assert float(loss) / int(counted) == pytest.approx(1.60943791)


@FORMS
def test_what_must_be_noticed_is_nan(form: Form) -> None:
    """A counted row with NaN, +inf or only -inf has no loss, and its gradient says so."""
    rows = np.array([[0, np.nan], [np.inf, 0], [-np.inf, -np.inf]], np.float32)
    for row in rows:
        assert np.isnan(form.cross_entropy_forward(row[None], np.array([1]))[0])
        assert np.isnan(form.cross_entropy_backward(row[None], np.array([1]))).any()
    unlikely = np.array([[0, -np.inf]], np.float32)
    assert form.cross_entropy_forward(unlikely, np.array([1]))[0] == np.inf
    assert np.array_equal(form.cross_entropy_backward(unlikely, np.array([1])), [[1, -1]])


def test_chunks_do_not_change_the_result() -> None:
    rng = np.random.default_rng(5)
    hidden, weight = rng.standard_normal((23, 6)), rng.standard_normal((11, 6))
    targets = rng.integers(0, 11, 23)
    targets[[0, 9]] = -100
    whole = plain.linear_cross_entropy(hidden, weight, targets)
    logits = hidden @ weight.T
    np.testing.assert_allclose(whole[0], plain.cross_entropy_forward(logits, targets)[0])
    np.testing.assert_allclose(whole[2], plain.cross_entropy_backward(logits, targets) @ weight)
    for form in (plain, fast):
        for chunk in (1, 2, 7, 22, 23, 400):
            loss, counted, grad = form.linear_cross_entropy(
                hidden, weight, targets, chunk_rows=chunk
            )
            assert int(counted) == 21
            np.testing.assert_allclose(loss, whole[0], rtol=1e-12)
            np.testing.assert_allclose(grad, whole[2], rtol=1e-10, atol=1e-13)


def test_the_fast_form_holds_one_small_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of the size of all logits, whatever ``chunk_rows`` allows."""
    rows: list[int] = []
    real = fast._softmax_in_place

    def spy(logits: np.ndarray, targets: np.ndarray, probabilities: bool = True) -> np.ndarray:
        rows.append(len(logits))
        return real(logits, targets, probabilities)

    monkeypatch.setattr(fast, "_softmax_in_place", spy)
    monkeypatch.setattr(fast, "CHUNK_BYTES", 4 * 40 * 8)
    hidden, weight = np.ones((20, 3), np.float32), np.ones((40, 3), np.float32)
    fast.linear_cross_entropy(hidden, weight, np.zeros(20, np.int64))
    assert rows == [7, 7, 6]
