"""Recomputing in backward gives the same gradients, parameters included, from less memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Stream, Tape, Tensor, checkpoint, current_stream, no_grad, ops
from entrenar.errors import AutogradError
from entrenar.optable import call

RNG = np.random.default_rng(5)
W1, W2 = RNG.standard_normal((8, 6)), RNG.standard_normal((6, 8))
A, B = RNG.standard_normal((2, 6)), RNG.standard_normal((8, 2))
X = RNG.standard_normal((4, 6))


def parameters() -> tuple[Tensor, Tensor, torch.Tensor]:
    a, b = Tensor(A.copy(), requires_grad=True), Tensor(B.copy(), requires_grad=True)
    arena = torch.zeros(A.size + B.size, dtype=torch.float64)
    a.grad, b.grad = arena[: A.size].view(2, 6), arena[A.size :].view(8, 2)
    return a, b, arena


def block(a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        h = ops.lora_linear(x, Tensor(W1), a, b, 0.5, dropout_p=0.25, seed=3)
        gated = ops.swiglu(h, ops.linear(x, Tensor(W1)))
        return ops.add(x, ops.linear(gated, Tensor(W2)))

    return fn


@pytest.mark.parametrize("trainable_input", [False, True])
def test_gradients_are_equal_to_the_bit_and_reach_the_arena(trainable_input: bool) -> None:
    """Frozen inputs too: https://github.com/huggingface/transformers/issues/23170."""
    results = []
    for recompute in (False, True):
        a, b, arena = parameters()
        x = Tensor(X.copy(), requires_grad=trainable_input)
        with Tape() as tape:
            y = x
            for _ in range(2):
                y = checkpoint(block(a, b), y) if recompute else block(a, b)(y)
            loss, _ = ops.cross_entropy(y, np.array([0, 5, -100, 2]))
        tape.backward(loss)
        results.append((loss.numpy().copy(), arena, x.grad))
    (loss, arena, grad_x), (loss2, arena2, grad_x2) = results
    np.testing.assert_array_equal(loss, loss2)
    assert arena.abs().max() > 0
    assert torch.equal(arena, arena2)
    assert (grad_x is None) == (not trainable_input)
    if grad_x is not None:
        assert torch.equal(grad_x, grad_x2)


def test_nothing_inside_is_kept() -> None:
    inside: list[weakref.ref] = []

    def fn(x: Tensor) -> Tensor:
        h = ops.silu(x)
        inside.append(weakref.ref(h.data))
        return ops.multiply(h, h)

    x = Tensor(X.copy(), requires_grad=True)
    with Tape() as tape:
        y = checkpoint(fn, x)
        gc.collect()
        assert [ref() for ref in inside] == [None]
    tape.backward(y, np.ones(X.shape))
    assert len(inside) == 2
    assert inside[1]() is None


def test_nothing_trainable_means_nothing_recorded() -> None:
    with Tape() as tape:
        y = checkpoint(ops.silu, Tensor(X.copy()))
    assert len(tape) == 0
    assert not y.requires_grad


def test_without_a_tape_it_only_calls() -> None:
    x = Tensor(X.copy(), requires_grad=True)
    with Tape(), no_grad():
        y = checkpoint(ops.silu, x)
    np.testing.assert_array_equal(y.numpy(), ops.silu(x).numpy())


def test_an_activation_that_is_not_an_argument_is_refused() -> None:
    x = Tensor(X.copy(), requires_grad=True)
    with Tape():
        outside = ops.silu(x)
        with pytest.raises(AutogradError, match="pass the tensor to checkpoint as an argument"):
            checkpoint(lambda a: ops.multiply(a, outside), x)


def test_it_can_run_backward_twice() -> None:
    a, b, arena = parameters()
    with Tape() as tape:
        loss, _ = ops.cross_entropy(
            checkpoint(block(a, b), Tensor(X.copy())), np.array([0, 1, 2, 3])
        )
    tape.backward(loss, retain_graph=True)
    once = arena.clone()
    tape.backward(loss)
    torch.testing.assert_close(arena, 2 * once, rtol=1e-15, atol=0)


def test_an_output_that_is_not_used_costs_nothing() -> None:
    x, y = (Tensor(X.copy(), requires_grad=True) for _ in range(2))
    with Tape() as tape:
        first, _ = checkpoint(lambda p, q: (ops.silu(p), ops.silu(q)), x, y)
    tape.backward(first, np.ones(X.shape))
    assert x.grad is not None
    assert y.grad is None


def test_a_changed_input_is_noticed() -> None:
    x = Tensor(X.copy(), requires_grad=True)
    with Tape() as tape:
        y = checkpoint(ops.silu, x)
    with no_grad():
        ops.add_(x, Tensor(np.ones(X.shape)))
    with pytest.raises(AutogradError, match=r"checkpoint: saved tensor 0.*modified in place"):
        tape.backward(y, np.ones(X.shape))


def test_a_function_that_changes_its_mind_is_refused() -> None:
    calls = []

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(None)
        return (ops.silu(x),) * len(calls)

    with Tape() as tape:
        (y,) = checkpoint(fn, Tensor(X.copy(), requires_grad=True))
    with pytest.raises(
        AutogradError,
        match=r"returned 2 tensors .* when run again, 1 tensors \(float64 \(4, 6\)\) the first",
    ):
        tape.backward(y, np.ones(X.shape))
    with Tape(), pytest.raises(AutogradError, match="returned a float"):
        checkpoint(lambda x: 1.0, Tensor(X.copy(), requires_grad=True))
    calls.clear()

    def shrink(x: Tensor) -> Tensor:
        calls.append(None)
        return ops.narrow(ops.silu(x), 0, 0, len(calls))

    with Tape() as tape:
        y = checkpoint(shrink, Tensor(X.copy(), requires_grad=True))
    with pytest.raises(AutogradError, match=r"float64 \(2, 6\)\) when run again"):
        tape.backward(y, np.ones((1, 6)))


def test_what_is_not_a_tensor_is_refused_by_name() -> None:
    x = Tensor(X.copy(), requires_grad=True)
    with Tape():
        with pytest.raises(AutogradError, match="argument 1 is of type float, wanted a Tensor"):
            checkpoint(ops.scale, x, 2.0)  # type: ignore[arg-type]
        with pytest.raises(AutogradError, match="returned a ndarray, wanted Tensors"):
            checkpoint(lambda a: (ops.silu(a), a.numpy()), x)
        with pytest.raises(AutogradError, match="returned a tuple of nothing"):
            checkpoint(lambda a: (), x)


def test_a_function_that_writes_to_its_input_is_refused() -> None:
    x, one = Tensor(X.copy(), requires_grad=True), Tensor(np.ones(X.shape))
    with Tape():
        h = ops.scale(x, 2.0)
        with pytest.raises(AutogradError, match=r"wrote to argument 0 of shape \(4, 6\) in place"):
            checkpoint(lambda a: ops.add_(a, one), h)


def deep(a: Tensor, b: Tensor, level: int, recompute: bool) -> Callable[[Tensor], Tensor]:
    """Blocks with dropout, each level around the one below."""

    def fn(x: Tensor) -> Tensor:
        if level == 0:
            return block(a, b)(x)
        inner = deep(a, b, level - 1, recompute)
        h = checkpoint(inner, x) if recompute else inner(x)
        return ops.add(h, block(a, b)(ops.silu(h)))

    return fn


@pytest.mark.parametrize("what", ["parameter", "frozen", "bias", "seed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_write_to_what_the_function_read_is_noticed(what: str, recompute: bool) -> None:
    """An optimiser step, a new seed or a new weight before backward: it would compute with other values."""
    a, b, arena = parameters()
    frozen, bias = Tensor(W1.copy(), name="frozen"), Tensor(np.ones(8), name="bias")
    seed = torch.tensor([3])

    def fn(x: Tensor) -> Tensor:
        h = ops.lora_linear(x, frozen, a, b, 0.5, dropout_p=0.25, seed=seed)
        return ops.silu(ops.add(h, bias))

    with Tape() as tape:
        x = ops.scale(Tensor(X.copy(), requires_grad=True), 1.0)
        y = checkpoint(fn, x) if recompute else fn(x)
    written = {"parameter": a.data, "frozen": frozen.data, "bias": bias.data, "seed": seed}[what]
    if what == "bias" and not recompute:
        return  # no backward reads it
    if what == "seed":
        seed.fill_(4)
    else:
        call("fill_", written, 0.5, stream=current_stream("cpu"))
    with pytest.raises(AutogradError, match="modified in place after the forward pass"):
        tape.backward(y, np.ones(y.shape))
    assert float(arena.abs().max()) == 0.0


def test_a_constant_made_inside_is_not_kept() -> None:
    made: list[weakref.ref] = []

    def fn(x: Tensor) -> Tensor:
        constant = Tensor(np.full(X.shape, 2.0))
        made.append(weakref.ref(constant.data))
        return ops.multiply(x, constant)

    with Tape() as tape:
        y = checkpoint(fn, Tensor(X.copy(), requires_grad=True))
    gc.collect()
    assert made[0]() is None
    tape.backward(y, np.ones(X.shape))


@pytest.mark.parametrize("depth", [1, 3])
def test_nested_with_dropout_is_equal_to_the_bit(depth: int) -> None:
    results = []
    for recompute in (False, True):
        a, b, arena = parameters()
        x = Tensor(X.copy(), requires_grad=True)
        with Tape() as tape:
            y = deep(a, b, depth, recompute)(x)
        tape.backward(y, np.ones(X.shape))
        results.append((y.data, arena, x.grad))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_it_is_recomputed_on_the_stream_it_ran_on() -> None:
    main, side = Stream("cpu"), Stream("cpu")
    x = Tensor(X.copy(), requires_grad=True)
    launches: list[runtime.LaunchRecord] = []
    with Tape(main) as tape:
        with side:
            y = checkpoint(lambda a: ops.multiply(ops.silu(a), a), x)
        z = ops.scale(y, 2.0)
    with runtime.listening(launches.append):
        tape.backward(z, np.ones(X.shape))
    again = [r for r in launches if r.op in ("silu_forward", "silu_backward")]
    assert [r.stream for r in again] == [side, side]
