"""Graphs: a replay is the step to the bit, follows what changes, and refuses what it could not follow."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from entrenar import runtime
from entrenar.autograd import Stream, Tape, Tensor, current_stream, ops, tape
from entrenar.autograd.arena import Arena
from entrenar.autograd.graph import Graph
from entrenar.autograd.hazards import detect_hazards
from entrenar.errors import CaptureError, ConfigError, ShapeMismatchError
from entrenar.optable import call
from perf.launches import TinyLlama

STEPS = 20


def plain(model: TinyLlama) -> Callable[..., Any]:
    def run(ids: Any, targets: Any, lr: float, scale: float, seed: int) -> Any:
        given = (ids, targets, np.float32([lr]), np.float32([scale]), np.array([seed]))
        return model.step(*(torch.from_numpy(np.asarray(x)) for x in given))

    return run


def train(model: TinyLlama, run: Callable[..., Any], lengths: list[int]) -> list[float]:
    losses = []
    for number, length in enumerate(lengths):
        losses.append(run(*model.batch(length, number))[0].item())
    return losses


def assert_same_state(a: TinyLlama, b: TinyLlama) -> None:
    for name in ("params", "m", "v", "step", "skipped"):
        assert torch.equal(getattr(a.arena, name), getattr(b.arena, name)), name


@pytest.mark.parametrize("dropout", [0.0, 0.25], ids=["", "dropout"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwriting"])
@pytest.mark.parametrize("lengths", [(9,), (9, 14), (9, 14, 5)], ids=str)
def test_twenty_steps_are_the_ungraphed_ones_to_the_bit(
    lengths: tuple[int, ...], overwrite: bool, dropout: float
) -> None:
    """Rate, loss scale, clip factor and dropout seed change each step; lengths alternate.

    https://github.com/tracel-ai/burn/issues/5779 and https://github.com/pytorch/pytorch/issues/84967:
    the rate, the step and the mask of the first step were repeated;
    https://github.com/pytorch/pytorch/issues/87794: another length was replayed on the old shape.
    """
    order = [lengths[i % len(lengths)] for i in range(STEPS)]
    one = TinyLlama(dropout=dropout, overwrite=overwrite)
    other = TinyLlama(dropout=dropout, overwrite=overwrite)
    graph = Graph(other.step, watch=[other.arena])
    assert train(one, plain(one), order) == train(other, graph, order)
    assert_same_state(one, other)
    assert (graph.captures, graph.replays) == (len(lengths), STEPS - 2 * len(lengths))
    assert int(one.arena.step[0]) == STEPS


def test_the_first_two_steps_train_too() -> None:
    """The ancestor's capture recorded a step and took none."""
    model = TinyLlama()
    graph = Graph(model.step, watch=[model.arena])
    for done in range(1, 4):
        before = model.arena.params.clone()
        graph(*model.batch(9, done))
        assert not torch.equal(before, model.arena.params)
        assert int(model.arena.step[0]) == done
    assert (graph.captures, graph.replays) == (1, 1)


def test_losses_follow_the_batch() -> None:
    """https://github.com/ooples/AiDotNet.Tensors/issues/705: the loss stood still from the capture on."""
    model = TinyLlama()
    graph = Graph(model.step, watch=[model.arena])
    losses = train(model, graph, [9] * 8)
    assert len(set(losses)) == 8


def test_a_replay_does_no_tape_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLlama()
    graph = Graph(model.step, watch=[model.arena])
    train(model, graph, [9, 9])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the tape was used")

    monkeypatch.setattr(Tape, "__init__", refuse)
    monkeypatch.setattr(tape, "run", refuse)
    monkeypatch.setattr(model, "step", refuse)
    launches: list[runtime.LaunchRecord] = []
    with runtime.listening(launches.append):
        graph(*model.batch(9, 2))
    assert [launch.op for launch in launches] == ["graph"]
    assert graph.replays == 1


def test_a_step_that_is_not_finite_is_left_out_in_a_replay_too() -> None:
    model = TinyLlama()
    graph = Graph(model.step, watch=[model.arena])
    train(model, graph, [9, 9, 9])
    before = model.arena.state_dict()
    ids, targets, lr, _, seed = model.batch(9, 3)
    with np.errstate(all="ignore"):
        loss, _, skip = graph(ids, targets, lr, float("inf"), seed)
    assert (skip.item(), int(model.arena.skipped[0])) == (1, 1)
    assert np.isfinite(loss.item())
    after = model.arena.state_dict()
    before.pop("skipped")
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    graph(*model.batch(9, 4))
    assert (int(model.arena.step[0]), int(model.arena.skipped[0])) == (4, 1)


def test_forms_are_few_and_the_oldest_goes() -> None:
    model = TinyLlama(layers=1)
    graph = Graph(model.step, watch=[model.arena], capacity=2)
    train(model, graph, [5, 6, 5, 6, 5, 7])
    assert len(graph) == 2
    assert graph.captures == 2
    train(model, graph, [5, 5])  # 5 was used after 6
    assert graph.captures == 2
    train(model, graph, [6, 6])
    assert (graph.captures, len(graph)) == (3, 2)
    with pytest.raises(ConfigError, match="capacity is 0"):
        Graph(model.step, capacity=0)


def test_whatever_is_baked_in_is_part_of_the_key() -> None:
    """Clipping on and off share neither capture nor results."""
    one, other = TinyLlama(), TinyLlama()
    graph = Graph(other.step, watch=[other.arena])
    for number in range(9):
        for model, run in ((one, plain(one)), (other, graph)):
            model.max_norm = (1e-3, None)[number % 2]
            batch = model.batch(9, number)
            run(*batch, **({} if run is not graph else {"key": model.max_norm}))
    assert_same_state(one, other)
    assert graph.captures == 2


def test_a_moved_arena_is_captured_anew() -> None:
    """https://github.com/vllm-project/vllm/issues/48941: replays went on with the old weights."""
    x = [Tensor(torch.ones(4))]
    graph = Graph(lambda scale: ops.multiply(x[0], Tensor(scale)), watch=x)
    scale = np.full(4, 2.0, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(graph(scale).numpy(), [2.0] * 4)
    x[0] = Tensor(torch.full((4,), 3.0))
    graph._watch = tuple(x)
    for _ in range(3):
        np.testing.assert_array_equal(graph(scale).numpy(), [6.0] * 4)
    assert graph.captures == 2


def test_results_are_those_of_the_last_replay() -> None:
    graph = Graph(lambda x: ops.scale(Tensor(x), 2.0))
    values = [graph(np.float32([n])) for n in range(4)]
    assert values[2] is values[3]
    assert values[3].item() == 6.0


# what is refused

WEIGHT = torch.full((3,), 2.0)


def waits(x: torch.Tensor) -> Tensor:
    y = ops.silu(Tensor(x))
    return ops.scale(y, float(y.numpy()[0]))


def reads(x: torch.Tensor) -> Tensor:
    y = ops.gelu(Tensor(x))
    return ops.scale(y, float(y.data[0]))


def synchronises(x: torch.Tensor) -> Tensor:
    y = ops.relu(Tensor(x))
    current_stream("cpu").synchronize()
    return y


def brings_its_own(x: torch.Tensor) -> Tensor:
    return ops.multiply(Tensor(x), Tensor(np.ones(3, dtype=np.float32)))


def copies_its_own(x: torch.Tensor) -> Tensor:
    y = ops.silu(Tensor(x))
    y.data.copy_(torch.from_numpy(np.ones(3, dtype=np.float32)))
    return y


COUNTER = [0]


def counts_up(x: torch.Tensor) -> Tensor:
    COUNTER[0] += 1
    return ops.scale(Tensor(x), float(COUNTER[0]))


def host_array_changes(x: torch.Tensor) -> Tensor:
    COUNTER[0] += 1
    heads = ops.reshape(Tensor(x), (3, 1, 1))
    return ops.attention(heads, heads, heads, np.array([0, COUNTER[0] % 3, 3], dtype=np.int32))


def never_the_same(x: torch.Tensor) -> Tensor:
    COUNTER[0] += 1
    y = Tensor(x)
    for _ in range(COUNTER[0]):
        y = ops.silu(y)
    return y


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (waits, r"silu_forward: the host waits for its result"),
        (reads, r"gelu_forward: the host reads its result"),
        (synchronises, r"relu_forward: the host waits"),
        (brings_its_own, r"multiply: reads torch.float32 \(3,\) that the step allocated outside"),
        (copies_its_own, r"copy_: reads .* allocated outside"),
        (counts_up, r"scale was given 2.0, and 1.0 in the step before"),
        (host_array_changes, r"attention_forward: reads torch.int32 \(3,\) that"),
    ],
)
def test_what_a_replay_could_not_follow_is_refused_by_name(step: Any, match: str) -> None:
    """Refused at the capture, and everything goes on working after it.

    https://github.com/ooples/AiDotNet.Tensors/issues/705: memory allocated during a capture.
    """
    COUNTER[0] = 0
    x = np.float32([1.0, 2.0, 3.0])
    graph = Graph(step)
    graph(x)
    with pytest.raises(CaptureError, match=match):
        graph(x)
    assert (graph.captures, graph.replays) == (0, 0)
    assert current_stream("cpu") is not graph.stream
    assert not runtime.has_listeners()
    assert not runtime.has_sync_listeners()
    assert call("scale", torch.ones(2), 2.0).tolist() == [2.0, 2.0]
    with Tape() as after:
        leaf = Tensor(np.ones(2), requires_grad=True)
        y = ops.silu(leaf)
    after.backward(y, np.ones(2))


def test_a_step_that_is_never_the_same_is_refused() -> None:
    COUNTER[0] = 0
    graph = Graph(never_the_same)
    for _ in range(4):
        graph(np.float32([1.0]))
    with pytest.raises(
        CaptureError, match="made other calls in each of 5 runs: nothing then, silu"
    ):
        graph(np.float32([1.0]))


def test_a_cache_filled_in_the_first_step_is_no_reason_to_refuse() -> None:
    """https://github.com/triton-lang/triton/issues/10596: what happens once happens before the capture."""
    cache: list[Tensor] = []

    def step(x: torch.Tensor) -> Tensor:
        if not cache:
            cache.append(ops.scale(Tensor(WEIGHT), 0.5))
        return ops.multiply(Tensor(x), cache[0])

    graph = Graph(step)
    for n in range(5):
        np.testing.assert_array_equal(graph(np.full(3, n, dtype=np.float32)).numpy(), [n] * 3)
    assert graph.captures == 1


def test_a_failed_capture_leaves_parameters_as_they_were() -> None:
    """Also where it fails after the update; once the fault is gone the same graph captures."""
    model, faulty = TinyLlama(layers=1), [True]

    def step(*inputs: torch.Tensor) -> Any:
        results = model.step(*inputs)
        if faulty[0]:
            results[0].item()
        return results

    graph = Graph(step, watch=[model.arena])
    graph(*model.batch(9, 0))
    before = model.arena.state_dict()
    with pytest.raises(CaptureError, match="the host waits"):
        graph(*model.batch(9, 1))
    for name, array in model.arena.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    faulty[0] = False
    reference = TinyLlama(layers=1)
    order = [0, 1, 2, 3]
    expected = [plain(reference)(*reference.batch(9, n))[0].item() for n in order][1:]
    assert [graph(*model.batch(9, n))[0].item() for n in order[1:]] == expected
    assert graph.captures == 1
    assert_same_state(model, reference)


def test_an_error_of_the_step_comes_through_as_it_is() -> None:
    sizes = [3, 4]

    def step(x: torch.Tensor) -> Tensor:
        return ops.add(Tensor(x), Tensor(WEIGHT[: sizes[0]]))

    graph = Graph(step)
    graph(np.ones(3, dtype=np.float32))
    sizes[0] = 2
    with pytest.raises(ShapeMismatchError, match="do not broadcast"):
        graph(np.ones(3, dtype=np.float32))
    sizes[0] = 3
    assert graph(np.ones(3, dtype=np.float32)).numpy().tolist() == [3.0] * 3


def test_a_replay_is_ordered_with_what_other_streams_do() -> None:
    """https://github.com/sgl-project/sglang/issues/27436: copies and replay were not ordered."""
    weight = Tensor(torch.ones(3))
    graph = Graph(lambda x: ops.multiply(Tensor(x), weight), watch=[weight])
    side = Stream("cpu")
    with detect_hazards() as detector:
        for n in range(5):
            y = graph(np.full(3, 2.0, dtype=np.float32))
            with side:
                z = ops.scale(y, 1.0)
                ops.add_(weight, Tensor(np.ones(3, dtype=np.float32)))
            assert z.numpy().tolist() == [2.0 * (n + 1)] * 3
    assert detector.waits > 10
    assert graph.replays == 3


def test_inputs_may_be_freed_or_overwritten_at_once() -> None:
    """https://github.com/meta-pytorch/torchrec/issues/4231: the source of a copy was reused too early."""
    graph = Graph(lambda x: ops.scale(Tensor(x), 1.0))
    buffer = np.zeros(3, dtype=np.float32)
    for n in range(4):
        buffer[:] = n
        y = graph(buffer)
        buffer[:] = -1.0
        assert y.numpy().tolist() == [n] * 3


def test_a_graph_keeps_no_history() -> None:
    model = TinyLlama(layers=1)
    graph = Graph(model.step, watch=[model.arena])
    train(model, graph, [9, 9, 9])
    gc.collect()
    before = len(gc.get_objects())
    train(model, graph, [9] * 20)
    gc.collect()
    assert len(gc.get_objects()) - before < 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_replays_to_the_bit(dtype: torch.dtype) -> None:
    weight = torch.linspace(-1, 1, 12).to(dtype).view(4, 3)

    def step(x: torch.Tensor) -> Tensor:
        h = ops.linear(Tensor(x), Tensor(weight))
        return ops.cast(ops.softmax(ops.silu(h)), torch.float32)

    graph = Graph(step, watch=[weight])
    for n in range(4):
        x = torch.linspace(n, n + 1, 6).to(dtype).view(2, 3)
        np.testing.assert_array_equal(graph(x).numpy(), step(x).numpy())
    assert graph.replays == 2


def test_emulated_kernels_replay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder repeats launchers as it repeats NumPy: kernels compiled for sm_80 here."""
    pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    if runtime.interpreting_requested():
        pytest.skip("kernels of this process are interpreted")
    arena = Arena({"w": (3,)})
    arena.tensors["w"].data.copy_(torch.tensor([1.0, 2.0, 3.0]))

    def step(x: torch.Tensor, lr: torch.Tensor) -> tuple[Tensor, Tensor]:
        arena.zero_grad()
        with Tape() as recording:
            y = ops.multiply(Tensor(x), arena.tensors["w"])
        recording.backward(y, torch.ones(3))
        return y, arena.update(lr, 1.0)[0]

    graph = Graph(step, watch=[arena])
    seen = []
    for n in range(4):
        y, norm = graph(np.full(3, n + 1.0, dtype=np.float32), 0.1 / (n + 1))
        seen.append((y.numpy().copy(), norm.item(), arena.params.clone()))
    assert graph.replays == 2
    assert int(arena.step[0]) == 4
    replayed, arena = seen, Arena({"w": (3,)})
    arena.tensors["w"].data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for n, (y, norm, params) in enumerate(replayed):
        mine, my_norm = step(torch.full((3,), n + 1.0), torch.tensor([0.1 / (n + 1)]))
        np.testing.assert_array_equal(mine.numpy(), y)
        assert my_norm.item() == norm
        assert torch.equal(arena.params, params)
