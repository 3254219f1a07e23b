"""Shapes nobody chose: each op on sizes that hypothesis draws, in NumPy and compiled, against its oracle."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrenar.optable import FUNCTIONS, OPS, call
from entrenar.testing import Tolerance, assert_close, round_to, to_storage

PROVE = os.environ.get("ENTRENAR_PROVE", "") not in ("", "0")
EXAMPLES = {"numpy": 100 if PROVE else 25, "ptx": 60 if PROVE else 6}
Arguments = dict[str, Any]
Case = tuple[str, Arguments]


def why_not(backend: str) -> str | None:
    if os.environ.get("ENTRENAR_BACKEND") == "triton":
        return "kernels of this process are interpreted"
    if backend == "ptx" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if backend == "ptx" and not (shutil.which("gcc") or shutil.which("cc")):
        return "the emulator needs a C compiler"
    return None


def sizes(most: int) -> st.SearchStrategy[int]:
    """Any size, with those at and around powers of two more often."""
    near = [n + d for n in (16, 32, 64, 128) for d in (-1, 0, 1) if n + d <= most]
    return st.one_of(st.integers(0, most), st.sampled_from(near or [1]))


@st.composite
def products(draw: Callable[..., Any]) -> Case:
    m, n, k = (draw(sizes(130)) for _ in range(3))
    trans_a, trans_b = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return "matmul", {
        "a": rng.standard_normal((k, m) if trans_a else (m, k)),
        "b": rng.standard_normal((n, k) if trans_b else (k, n)),
        "trans_a": trans_a,
        "trans_b": trans_b,
        "scale": draw(st.sampled_from([1.0, -0.5])),
        "bias": rng.standard_normal(n) if draw(st.booleans()) else None,
    }


@st.composite
def norms(draw: Callable[..., Any]) -> Case:
    rows, width = draw(sizes(70)), draw(sizes(300))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return "rms_norm", {
        "x": rng.standard_normal((rows, max(width, 1))) * draw(st.sampled_from([1e-3, 1.0, 1e3])),
        "weight": 1 + rng.standard_normal(max(width, 1)),
        "eps": draw(st.sampled_from([1e-6, 1e-2])),
    }


@st.composite
def distributions(draw: Callable[..., Any]) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    x = rng.standard_normal((draw(sizes(40)), draw(sizes(300)))) * draw(
        st.sampled_from([1.0, 30.0])
    )
    return "softmax", {"x": x, "causal": draw(st.booleans())}


@st.composite
def losses(draw: Callable[..., Any]) -> Case:
    rows, vocab = draw(sizes(40)), max(draw(sizes(300)), 1)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    targets = rng.integers(0, vocab, rows)
    targets[rng.random(rows) < 0.3] = -100
    return "cross_entropy", {"logits": 3 * rng.standard_normal((rows, vocab)), "targets": targets}


@st.composite
def attentions(draw: Callable[..., Any]) -> Case:
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4)
    )
    group, kv, dim = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([20, 64])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    return "attention", {
        "q": rng.standard_normal((queries, group * kv, dim)),
        "k": rng.standard_normal((keys, kv, dim)),
        "v": rng.standard_normal((keys, kv, dim)),
        "cu_seqlens_q": np.cumsum([0, *(a for a, _ in lengths)], dtype=np.int32),
        "cu_seqlens_k": np.cumsum([0, *(b for _, b in lengths)], dtype=np.int32),
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 1, 7])),
    }


@st.composite
def adapters(draw: Callable[..., Any]) -> Case:
    rows, n_in, n_out, rank = (
        draw(sizes(70)),
        draw(sizes(130)),
        draw(sizes(70)),
        draw(st.integers(1, 17)),
    )
    n_in, n_out = max(n_in, 1), max(n_out, 1)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return "lora", {
        "x": rng.standard_normal((rows, n_in)),
        "w": 0.05 * rng.standard_normal((n_out, n_in)),
        "lora_a": 0.1 * rng.standard_normal((rank, n_in)),
        "lora_b": 0.1 * rng.standard_normal((n_out, rank)),
        "scale": 2.0,
        "bias": None,
        "dropout_p": draw(st.sampled_from([0.0, 0.25])),
        "seed": draw(st.integers(0, 2**31)),
    }


@st.composite
def tables(draw: Callable[..., Any]) -> Case:
    rows, width, tokens = max(draw(sizes(40)), 1), max(draw(sizes(130)), 1), draw(sizes(70))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    ids = rng.integers(0, rows, tokens)
    return "embedding", {"ids": ids, "weight": rng.standard_normal((rows, width))}


def oracle(function: str, /, **arguments: Any) -> Any:
    module = importlib.import_module(f"entrenar.reference.{FUNCTIONS[function].family}")
    return getattr(module, function)(**arguments)


def largest(*arrays: np.ndarray) -> float:
    """Return the product of the largest magnitudes."""
    return float(np.prod([np.abs(a).max(initial=0.0) for a in arrays]))


# Magnitude of the terms that a gradient is the difference of: on a row of one or two numbers they cancel
# to far less, and the rounding of the terms is what is left.
TERMS: dict[str, Callable[[Arguments, tuple[np.ndarray, ...], list[np.ndarray]], float]] = {
    "rms_norm": lambda a, out, g: largest(g[0], a["weight"], out[1]),
    "softmax": lambda a, out, g: largest(g[0], out[0]),
    "cross_entropy": lambda a, out, g: largest(g[0]),
    "attention": lambda a, out, g: largest(g[0], a["v"]) * max(largest(a["q"]), largest(a["k"])),
}


def check(backend: str, name: str, arguments: Arguments) -> None:
    """Hold results and gradients on float32 storage to the oracle in float64."""
    op = OPS[name]
    inputs = {
        k: round_to(v, "float32") if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v
        for k, v in arguments.items()
    }

    def tolerance(got: torch.Tensor, terms: float = 0.0) -> Tolerance:
        dtype = str(got.dtype).removeprefix("torch.")
        scale = max(terms, op.scale(dict(inputs)) if op.scale else 0.0)
        return Tolerance(
            dtype, "float32", op.reduction(dict(inputs)), op.a, op.b, op.tolerance_reason, scale
        )

    storage = {k: to_storage(v, "float32") for k, v in inputs.items()}
    before = os.environ.get("ENTRENAR_BACKEND")
    os.environ["ENTRENAR_BACKEND"] = backend
    try:
        got = call(op.forward.name, **storage)
        got = got if isinstance(got, tuple) else (got,)
        saved = tuple(g.double().numpy() if g.is_floating_point() else g.numpy() for g in got)
        rng = np.random.default_rng(5)
        grads = [round_to(rng.standard_normal(saved[i].shape), "float32") for i in op.grad_outputs]
        given = tuple(to_storage(g, "float32") for g in grads)
        gradients = op.vjp(call, storage, got, given) if op.vjp else {}
    finally:
        if before is None:
            del os.environ["ENTRENAR_BACKEND"]
        else:
            os.environ["ENTRENAR_BACKEND"] = before
    wanted = oracle(op.forward.name, **copy.deepcopy(inputs))
    for i, (g, w) in enumerate(
        zip(got, wanted if isinstance(wanted, tuple) else (wanted,), strict=True)
    ):
        assert_close(g, w, tolerance(g), f"result {i}")
    slopes = op.vjp(oracle, copy.deepcopy(inputs), saved, tuple(grads)) if op.vjp else {}
    terms = TERMS[name](inputs, saved, grads) if name in TERMS else 0.0
    for key, gradient in gradients.items():
        assert_close(gradient, slopes[key], tolerance(gradient, terms), f"gradient of {key}")


STRATEGIES = {
    "matmul": products(), "rms_norm": norms(), "softmax": distributions(), "cross_entropy": losses(),
    "attention": attentions(), "lora": adapters(), "embedding": tables(),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["numpy", "ptx"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_sizes_drawn_at_random(name: str, backend: str) -> None:
    reason = why_not(backend)
    if reason:
        pytest.skip(reason)

    @settings(
        max_examples=EXAMPLES[backend],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(STRATEGIES[name])
    def run(case: Case) -> None:
        check(backend, *case)

    run()
