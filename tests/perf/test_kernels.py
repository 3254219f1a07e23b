"""Timings: what is timed is complete, gated, restored between runs, and told with what it is measured by."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar import optable
from entrenar.optable import OPS
from perf import kernels, passes, peer_calls, peer_ops, shapes
from perf.__main__ import main
from perf.calls import Maker
from perf.timing import CpuTimer, Roofs, Variant, environment, quantiles, take_turns

TINY = shapes.Model("tiny", 64, 128, 4, 2, 16, 512, 2)
CASES = shapes.cases()
FIELDS = {
    "op", "pass", "function", "model", "tokens", "shape", "dtype", "device", "threads", "gate", "gate_error",
    "ms", "p20_ms", "p80_ms", "rounds", "floor_bytes", "flops", "share_of_floor", "copy_gb_s",
    "product_tflop_s", "peer", "peer_ms", "ratio", "peer_disagreement", "note", "versions", "commit", "date",
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> shapes.Model:
    """Make the tiny model known, and roofs free."""
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    monkeypatch.setattr(kernels, "measure_roofs", lambda *_: Roofs(1e10, 1e11, "assumed"))
    return TINY


def work(case: shapes.Case, tokens: int = 6, dtype: torch.dtype = torch.float32) -> passes.Work:
    op = OPS[case.op]
    kind = dtype if str(dtype).removeprefix("torch.") in op.dtypes else torch.float32
    maker = Maker(kind, values=True)
    return passes.build(op, case.make(maker, TINY.letters(tokens)), maker)


def find(op: str) -> shapes.Case:
    return next(case for case in CASES if case.op == op)


# ---- what is timed ----


def test_every_function_of_every_op_is_timed() -> None:
    timed = {(case.op, call.function) for case in CASES for call in work(case).passes}
    assert timed == {(op.name, f.name) for op in OPS.values() for f in (op.forward, *op.backward)}


@pytest.mark.parametrize("model", shapes.MODELS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("tokens", [1, 2048])
def test_every_case_has_arguments_at_every_models_sizes(model: shapes.Model, tokens: int) -> None:
    """On storage without memory, so that the largest fit; costs follow from shapes alone."""
    for case in CASES:
        op, letters = OPS[case.op], model.letters(tokens)
        given = case.make(Maker(torch.bfloat16, device="meta"), letters)
        assert op.flops(passes.described(kernels._complete(op, given))) >= 0
        sizes = case.title(letters).partition("(")[2]
        assert sizes, case
        assert all(f"{name}=" in sizes for name in case.shape if name in letters)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.shape}")
def test_both_passes_are_timed_and_pass_their_gate(case: shapes.Case) -> None:
    op, found = OPS[case.op], work(case)
    timed = {call.function for call in found.passes}
    assert timed <= {op.forward.name, *(f.name for f in op.backward)}
    if (
        op.vjp is not None and op.name != "linear_cross_entropy"
    ):  # whose forward computes the gradient
        # the gradient of a sum, and of a row added to rows, is the one that came in: there is nothing to call
        handed_on = {
            n for n in op.differentiable
            if any(found.gradient.get(n) is g for g in found.grads) or op.name in ("add", "bias_add")
        }  # fmt: skip
        computed = {n for call in found.passes for n in call.gradients}
        assert computed | handed_on >= {n for n in op.differentiable if n in found.given}
    assert 0 <= passes.gate(found, "float32") <= 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.shape}")
def test_a_call_can_be_timed_again_and_gives_the_same(case: shapes.Case) -> None:
    for call in work(case).passes:
        variant = call.variant()
        results = []
        for _ in range(2):
            if variant.before is not None:
                variant.before()
            flat = passes.as_tuple(variant.run())
            results.append([t.clone() for t in flat if isinstance(t, torch.Tensor)])
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_no_two_operands_are_alike() -> None:
    """Else a kernel that takes one for the other would pass its gate."""
    for case in CASES:
        given = case.make(Maker(torch.float32, values=True), TINY.letters(6))
        floats = [
            v for v in given.values() if isinstance(v, torch.Tensor) and v.dtype.is_floating_point
        ]
        pairs = [(a, b) for n, a in enumerate(floats) for b in floats[:n] if a.shape == b.shape]
        assert not any(torch.equal(a, b) for a, b in pairs), case.op


def test_operations_of_backward_passes() -> None:
    lora = work(find("lora"))
    forward, backward = (kernels._costs(OPS["lora"], call, lora)[1] for call in lora.passes)
    outer, inner = TINY.heads * TINY.head_dim, TINY.hidden
    assert forward == 2 * 6 * (inner * outer + 16 * (inner + outer))
    assert backward == 2 * 6 * (inner * outer + 2 * 16 * (inner + outer))
    attention = work(find("attention"))
    counts = [kernels._costs(OPS["attention"], call, attention)[1] for call in attention.passes]
    assert counts[1] == 2.5 * (counts[0] or 0)  # five products, and two forward
    norm = work(find("rms_norm"))
    assert kernels._costs(OPS["rms_norm"], norm.passes[1], norm)[1] is None


# ---- the gate ----


def faulty(function: str, spoil: Callable[[Any], None]) -> Callable[..., Any]:
    """Return the table's call, with a result of one function spoiled."""
    right = optable.call

    def call(name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = right(name, *args, **kwargs)
        if name == function:
            spoil(result[0] if isinstance(result, tuple) else result)
        return result

    return call


def last_element(result: torch.Tensor) -> None:
    result.reshape(-1)[-1] += 0.01


@pytest.mark.parametrize("function", ["rms_norm_forward", "rms_norm_backward"])
def test_a_fault_shuts_the_gate_and_no_time_is_told(
    function: str,
    tiny: shapes.Model,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(optable, "call", faulty(function, last_element))
    out = tmp_path / "rows.json"
    arguments = [
        "kernels",
        "--op",
        "rms_norm",
        "--shapes",
        "tiny",
        "--tokens",
        "6",
        "--seconds",
        "0",
    ]
    assert main([*arguments, "--device", "cpu", "--json", str(out)]) == 1
    rows = json.loads(out.read_text())
    assert {row["op"] for row in rows} == {"rms_norm", "rms_norm_residual"}
    for row in rows:
        assert row["error"].startswith("gate: "), row
        assert "elements off" in row["error"]
        assert "ms" not in row
    assert "gate: " in capsys.readouterr().out


def test_a_product_too_large_for_the_reference_is_gated_by_rows_too(
    tiny: shapes.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault shows at the timed size alone, as that of a tile that smaller sizes do not use."""

    def only_large(result: torch.Tensor) -> None:
        if len(result) > 64:
            last_element(result)

    case, letters = find("gemm"), TINY.letters(256)
    monkeypatch.setattr(passes, "MOST_FLOPS", 2 * 32 * 64 * 128)
    right = work(case, 256)
    row = kernels._gated(right, case, letters, "float32", "cpu")
    assert row["gate"] == "T=32, H=64, F=128 and rows of these sizes"
    assert 0 < row["gate_error"] <= 1
    monkeypatch.setattr(optable, "call", faulty("gemm_forward", only_large))
    with pytest.raises(AssertionError, match="rows of gemm_forward"):
        kernels._gated(work(case, 256), case, letters, "float32", "cpu")


def test_what_the_reference_can_afford() -> None:
    case, op = find("linear_cross_entropy"), OPS["linear_cross_entropy"]
    letters = shapes.MODELS["llama-3.1-8b"].letters(2048)
    found = passes.feasible(op, case, letters, lambda given: kernels._complete(op, given))
    elements = found["V"] * found["H"] + found["R"] * (found["H"] + 1)
    assert elements <= passes.MOST_ELEMENTS
    assert 4 * found["R"] * found["V"] * found["H"] <= passes.MOST_FLOPS
    assert (found["H"], found["T"]) == (4096, passes.LEAST_TOKENS)
    small = TINY.letters(6)
    assert passes.feasible(op, case, small, lambda given: kernels._complete(op, given)) == small


# ---- peers ----


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.shape}")
def test_torch_computes_the_same(case: shapes.Case) -> None:
    found = work(case)
    for call in found.passes:
        for peer in peer_calls.peers(found, call, "cpu"):
            if peer.variant is None:
                assert peer.note == "absent", peer
                continue
            for _ in range(2):  # and again: what it overwrites is restored
                if peer.variant.before is not None:
                    peer.variant.before()
                share = peer_calls.disagreement(peer.variant.run(), peer.wanted)
                assert share <= peer_calls.AGREEMENT["fp32"], (call.name, peer.package)


@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.torch_baseline], ids=lambda op: op.name
)
def test_every_baseline_is_a_peer(op: optable.Op) -> None:
    found = work(find(op.name))
    assert "torch" in [p.package for p in peer_calls.peers(found, found.passes[0], "cpu")]


LIGER_HAS = [
    case for case in CASES
    if any(i.package == peer_ops.LIGER for i in peer_ops.OTHERS.get(case.op, ()))
]  # fmt: skip


@pytest.mark.parametrize("case", LIGER_HAS, ids=lambda c: c.op)
def test_liger_computes_the_same_emulated(
    case: shapes.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU will time, run without one: our kernels and Liger's, compiled and emulated."""
    pytest.importorskip("liger_kernel")
    from entrenar.emulator import install_driver

    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_80")
    install_driver("sm_80")
    found = work(case, dtype=torch.bfloat16)
    assert 0 <= passes.gate(found, "bfloat16") <= 1
    compared = 0
    for call in found.passes:
        for peer in peer_calls.peers(found, call, "cpu"):
            if peer.package != peer_ops.LIGER:
                continue
            assert peer.variant is not None, peer.note
            compared += 1
            for _ in range(2):
                if peer.variant.before is not None:
                    peer.variant.before()
                share = peer_calls.disagreement(peer.variant.run(), peer.wanted)
                assert share <= peer_calls.AGREEMENT["bf16"], call.name
    assert compared


def test_absent_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_calls, "version", lambda package: "2" if package == "torch" else None)
    found = work(find("rms_norm"))
    on_gpu = {p.package: p.note for p in peer_calls.peers(found, found.passes[0], "cuda:0")}
    assert on_gpu == {"torch": "", "liger-kernel": "absent", "unsloth": "absent"}
    backward = [p.package for p in peer_calls.peers(found, found.passes[1], "cuda:0")]
    assert backward == ["torch", "liger-kernel"], "Unsloth computes no gradient of the weight"


@pytest.mark.parametrize(
    ("theirs", "ours", "share"),
    [
        ([4.0, 1.0], [4.0, 1.5], 0.125),
        ([math.nan, 1.0], [4.0, 1.0], math.inf),
        ([4.0, 1.0], [4.0, math.nan], math.inf),
        ([-math.inf, 1.0], [-math.inf, 1.0], 0.0),
        ([-math.inf, 1.0], [3.0, 1.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_how_far_results_are_apart(theirs: list[float], ours: list[float], share: float) -> None:
    first = (
        torch.ones(2),
        torch.ones(2),
    )  # and a result before that agrees, one after that is left out
    got = (first[0], torch.tensor(theirs), None)
    assert peer_calls.disagreement(got, (first[1], torch.tensor(ours), torch.ones(1))) == share


@pytest.mark.parametrize(("factor", "told"), [(1.01, 0.01), (math.nan, None)])
def test_a_peer_that_computes_something_else_gets_no_ratio(
    factor: float, told: float | None, tiny: shapes.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(OPS["relu"], torch_baseline=lambda x: factor * x.relu())
    monkeypatch.setitem(OPS, "relu", wrong)
    rows = list(kernels.measure("relu", ["tiny"], [6], ["fp32"], "cpu", 0.0))
    assert rows[0]["peer"] == "torch"
    found = rows[0]["peer_disagreement"]
    assert found is told if told is None else found == pytest.approx(told, rel=1e-3)
    assert rows[0]["note"].startswith("its results differ from ours by")
    assert rows[0]["ratio"] is rows[0]["peer_ms"] is None
    assert rows[0]["ms"] > 0


def test_a_peer_that_fails_does_not_lose_our_time(
    tiny: shapes.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    wrong = dataclasses.replace(OPS["relu"], torch_baseline=broken)
    monkeypatch.setitem(OPS, "relu", wrong)
    rows = list(kernels.measure("relu", ["tiny"], [6], ["fp32"], "cpu", 0.0))
    assert [r["note"] for r in rows] == ["failed: RuntimeError: no such kernel"] * 2
    assert all(r["ms"] > 0 and r["ratio"] is None for r in rows)


# ---- rows ----


def test_a_row_says_all_it_must(tiny: shapes.Model, tmp_path: Path) -> None:
    out, lines = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    arguments = [
        "kernels",
        "--op",
        "swiglu",
        "--shapes",
        "tiny",
        "--tokens",
        "1,6",
        "--seconds",
        "0",
    ]
    arguments += ["--device", "cpu", "--json", str(out), "--append", str(lines)]
    assert main(arguments) == 0
    rows = json.loads(out.read_text())
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [
        {"kind": "kernel", **row} for row in rows
    ]
    assert {(r["tokens"], r["pass"]) for r in rows} == {
        (n, p) for n in (1, 6) for p in ("forward", "backward to gate, up")
    }
    for row in rows:
        assert row.keys() == FIELDS
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["ratio"] == pytest.approx(row["ms"] / row["peer_ms"], rel=1e-3)
        floor_ms = 1e3 * max(row["floor_bytes"] / 1e10, (row["flops"] or 0) / 1e11)
        assert row["share_of_floor"] == pytest.approx(floor_ms / row["ms"], rel=1e-3)
        assert row["versions"]["torch"] == torch.__version__
        assert row["threads"].keys() == {"torch", "blas"}
    assert rows[-2]["shape"] == "TxF (T=6, F=128)"
    assert rows[-2]["floor_bytes"] == 3 * 6 * 128 * 4
    assert rows[-1]["floor_bytes"] == 5 * 6 * 128 * 4
    assert rows[-2]["flops"] == 5 * 6 * 128


def test_sizes_without_tokens_are_timed_once(tiny: shapes.Model) -> None:
    rows = list(kernels.measure("fill_", ["tiny"], [1, 6], ["fp32", "bf16"], "cpu", 0.0))
    assert [(r["shape"], r["dtype"]) for r in rows] == [
        (f"N (N={TINY.letters(1)['N']})", dtype) for dtype in ("fp32", "bf16")
    ]


def test_an_op_without_the_dtype_is_timed_in_fp32(tiny: shapes.Model) -> None:
    rows = list(kernels.measure("adamw", ["tiny"], [1], ["bf16"], "cpu", 0.0))
    assert {r["dtype"] for r in rows} == {"fp32"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "nonsense"], "no op has 'nonsense'"),
        (["--shapes", "gpt-2"], "'gpt-2' is not known; known are smollm2-135m"),
        (["--dtype", "fp8"], "'fp8' is not known"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--tokens", "many"], "--tokens is many"),
    ],
)
def test_what_is_not_known_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_emulated_kernel_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    assert main(["kernels", "--device", "cpu", "--op", "relu"]) == 2
    assert "ENTRENAR_BACKEND=ptx" in capsys.readouterr().err


# ---- turns ----


class FakeTimer:
    """Writes down what happens, and takes what a run says."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def flush(self) -> None:
        self.log.append("flush")

    def time(self, run: Callable[[], Any]) -> float:
        return float(run())


def turns(seconds: float, rounds: int, step: float) -> tuple[dict[str, list[float]], list[str]]:
    log: list[str] = []
    variants = {
        "a": Variant(lambda: log.append("a") or 2.0, lambda: log.append("restore a")),
        "b": Variant(lambda: log.append("b") or 3.0),
    }
    now = iter(float(n) * step for n in range(1000))
    found = take_turns(variants, FakeTimer(log), rounds, seconds, lambda: next(now))
    return found, log


def test_variants_take_turns_forwards_and_backwards_with_cold_caches() -> None:
    found, log = turns(seconds=1e9, rounds=2, step=0.0)
    assert found == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert log[:6] == ["restore a", "a", "restore a", "a", "b", "b"]
    assert log[6:] == [
        "restore a", "flush", "a", "flush", "b",
        "flush", "b", "restore a", "flush", "a",
    ]  # fmt: skip


def test_turns_end_with_their_time_but_not_before_five() -> None:
    assert len(turns(seconds=0.0, rounds=30, step=1.0)[0]["a"]) == 5
    assert len(turns(seconds=3.5, rounds=30, step=1.0)[0]["a"]) == 8
    assert len(turns(seconds=1e9, rounds=30, step=1.0)[0]["a"]) == 30


def test_quantiles() -> None:
    found = quantiles([float(n) for n in range(11)])
    assert found == {"ms": 5.0, "p20_ms": 2.0, "p80_ms": 8.0}


def test_a_floor_is_the_slower_of_its_two_roofs() -> None:
    roofs = Roofs(1e9, 1e12, "")
    assert roofs.floor_ms(2_000_000, None) == pytest.approx(2.0)
    assert roofs.floor_ms(2_000_000, 5 * 10**9) == pytest.approx(5.0)


def test_the_cpus_clock() -> None:
    timer = CpuTimer()
    before = timer.dirty[0]
    timer.flush()
    assert timer.dirty[0] == before + 1
    assert 64 << 20 <= timer.dirty.nbytes <= 256 << 20
    assert timer.time(lambda: torch.ones(1)) > 0


def test_the_environment_names_the_machine_and_what_is_installed() -> None:
    found = environment("cpu")
    assert "cores" in found["device"]
    assert found["versions"].keys() >= {"python", "torch", "numpy"}
    assert found["date"].endswith("+00:00")
