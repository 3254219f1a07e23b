"""Elements past 2³¹: the last rows of huge arrays give what the same rows give alone, to the bit.

Arrays lie in sparse files, of which the pages that are touched take memory; of each launch the first and
the last programs alone are executed.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar.kernels import _launch
from entrenar.kernels.nf4_weight import NF4Weight

FAR = 2**31
SPARSE = 2**24  # elements from which an array lies in a file
ROWS = 4  # that are compared, at the end of each array
BLOCKS = 40  # at both ends of each grid; each kernel below covers ROWS with as many
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int64: np.int64,
         torch.int32: np.int32, torch.uint8: np.uint8}  # fmt: skip


@dataclasses.dataclass
class Maker:
    """Makes arguments whose first axis is rows: all of them, or the last few alone.

    Attributes:
        folder: Where sparse files go; None makes the last rows alone.
        rows: Rows of the whole.
    """

    folder: Path | None
    rows: int
    number: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def storage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, in a sparse file where they are many."""
        if self.folder is None or math.prod(shape) < SPARSE:
            return torch.zeros(shape, dtype=dtype)
        path = self.folder / f"array{next(self.number)}"
        array = np.memmap(path, NUMPY[dtype], "w+", shape=shape)
        return torch.from_numpy(array).view(dtype)

    def rows_of(
        self, *tail: int, dtype: torch.dtype = torch.bfloat16, high: int = 0
    ) -> torch.Tensor:
        """Return [rows, *tail] whose last rows hold numbers, the same for whole and part."""
        whole = self.storage((ROWS if self.folder is None else self.rows, *tail), dtype)
        rng = np.random.default_rng(math.prod(tail) + high)
        if high:
            values = torch.from_numpy(rng.integers(0, high, (ROWS, *tail)))
        else:
            values = torch.from_numpy(rng.standard_normal((ROWS, *tail)).astype(np.float32))
        whole[-ROWS:] = values.to(dtype)
        return whole

    def small(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return an argument without rows."""
        values = np.random.default_rng(math.prod(shape)).standard_normal(shape)
        return torch.from_numpy(values.astype(np.float32)).to(dtype)


Build = Callable[[Maker], dict[str, Any]]
WIDE = 1 << 20
FLOAT = torch.float32


def flat(*names: str, **more: Any) -> Build:
    """Arguments of one row of elements each; rows are ROWS elements there."""
    return lambda m: {**{name: m.rows_of() for name in names}, **more}


def nf4_rows(m: Maker) -> NF4Weight:
    """A weight of one block a row."""
    codes = m.rows_of(32, dtype=torch.uint8, high=256)
    absmax = m.rows_of(dtype=FLOAT)
    return NF4Weight(codes.view(-1), absmax, (absmax.shape[0], 64), torch.bfloat16)


def bounds(m: Maker) -> torch.Tensor:
    """The last rows as a sequence of their own, after one of all others, or alone."""
    return (
        torch.tensor([0, m.rows - ROWS, m.rows][int(m.folder is None) :])
        .sub(m.rows - ROWS if m.folder is None else 0)
        .to(torch.int32)
    )


# launcher, elements of a row (1: flat), arguments, which results or arguments hold rows
CASES: dict[str, tuple[str, int, Build, tuple[str, ...]]] = {
    "add": ("elementwise.add", 1, flat("a", "b"), ("0",)),
    "add_": ("elementwise.add_", 1, flat("dst", "src"), ("dst",)),
    "multiply": ("elementwise.multiply", 1, flat("a", "b"), ("0",)),
    "scale": ("elementwise.scale", 1, flat("x", s=0.5), ("0",)),
    "cast": ("elementwise.cast", 1, flat("x", dtype=torch.float32), ("0",)),
    "silu_forward": ("swiglu.silu_forward", 1, flat("x"), ("0",)),
    "gelu_backward": ("swiglu.gelu_backward", 1, flat("grad_y", "x"), ("0",)),
    "relu_forward": ("swiglu.relu_forward", 1, flat("x"), ("0",)),
    "bias_add": (
        "elementwise.bias_add", 4096, lambda m: {"x": m.rows_of(4096), "bias": m.small(4096)}, ("0",),
    ),
    "swiglu_forward": (
        "swiglu.swiglu_forward", 4096, lambda m: {"gate": m.rows_of(4096), "up": m.rows_of(4096)}, ("0",),
    ),
    "swiglu_backward": (
        "swiglu.swiglu_backward",
        4096,
        lambda m: {n: m.rows_of(4096) for n in ("grad_y", "gate", "up")} | {"inplace": True},
        ("gate", "up"),
    ),
    "softmax_forward": ("softmax.softmax_forward", 4096, lambda m: {"x": m.rows_of(4096)}, ("0",)),
    "softmax_backward": (
        "softmax.softmax_backward", 4096, lambda m: {"grad_y": m.rows_of(4096), "y": m.rows_of(4096)}, ("0",),
    ),
    "softmax_forward, rows past a block": (
        "softmax.softmax_forward", WIDE, lambda m: {"x": m.rows_of(WIDE)}, ("0",),
    ),
    "rms_norm_forward": (
        "rms_norm.rms_norm_forward",
        4096,
        lambda m: {"x": m.rows_of(4096), "weight": m.small(4096), "eps": 1e-6},
        ("0", "1"),
    ),
    "rms_norm_forward, residual": (
        "rms_norm.rms_norm_forward",
        4096,
        lambda m: {
            "x": m.rows_of(4096), "weight": m.small(4096), "eps": 1e-6, "residual": m.rows_of(4096),
        },
        ("0", "1", "2"),
    ),
    "layer_norm_forward": (
        "layer_norm.layer_norm_forward",
        4096,
        lambda m: {"x": m.rows_of(4096), "weight": m.small(4096), "bias": m.small(4096), "eps": 1e-6},
        ("0",),
    ),
    "rms_norm_backward": (
        "rms_norm.rms_norm_backward",
        4096,
        lambda m: {
            "grad_y": m.rows_of(4096), "x": m.rows_of(4096), "weight": m.small(4096),
            "rstd": m.rows_of(dtype=FLOAT), "need_grad_weight": False,
        },
        ("0",),
    ),
    "layer_norm_backward": (
        "layer_norm.layer_norm_backward",
        4096,
        lambda m: {
            "grad_y": m.rows_of(4096), "x": m.rows_of(4096), "weight": m.small(4096),
            "mean": m.rows_of(dtype=FLOAT), "rstd": m.rows_of(dtype=FLOAT),
            "need_grad_weight": False, "need_grad_bias": False,
        },
        ("0",),
    ),
    "adamw_step": (
        "adamw.adamw_step",
        1,
        lambda m: {
            **{name: m.rows_of(dtype=FLOAT) for name in ("params", "grads", "m")},
            "v": m.rows_of(dtype=FLOAT, high=9),
            "step": torch.zeros(1, dtype=torch.int64), "lr": torch.full((1,), 0.1),
        },
        ("params", "m", "v"),
    ),
    "nf4_quantize": ("nf4.nf4_quantize", 64, lambda m: {"w": m.rows_of(64)}, ("0", "1")),
    "nf4_dequantize": (
        "nf4.nf4_dequantize",
        64,
        lambda m: {"w": nf4_rows(m)},
        ("0",),
    ),
    "gemm_forward": (
        "gemm.gemm_forward", 64, lambda m: {"a": m.rows_of(64), "b": m.small(64, 32)}, ("0",),
    ),
    "lora_forward": (
        "lora.lora_forward",
        64,
        lambda m: {
            "x": m.rows_of(64), "w": m.small(32, 64), "lora_a": m.small(8, 64),
            "lora_b": m.small(32, 8), "scale": 0.5,
        },
        ("0", "1"),
    ),
    "attention_forward": (
        "attention.attention_forward",
        128,
        lambda m: {**{n: m.rows_of(1, 128) for n in "qkv"}, "cu_seqlens_q": bounds(m), "window": 8},
        ("0",),
    ),
    "attention_backward": (
        "attention.attention_backward",
        128,
        lambda m: {
            **{n: m.rows_of(1, 128) for n in ("grad_out", "q", "k", "v", "out")},
            "lse": m.rows_of(dtype=FLOAT).view(1, -1), "cu_seqlens_q": bounds(m),
            "window": 8,
        },
        ("0", "1", "2"),
    ),
    "cross_entropy_backward": (
        "cross_entropy.cross_entropy_backward",
        256_000,
        lambda m: {"logits": m.rows_of(256_000), "targets": m.rows_of(dtype=torch.int64, high=250)},
        ("0",),
    ),
    "embedding_forward": (
        "embedding.embedding_forward",
        4096,
        lambda m: {
            "ids": m.rows_of(dtype=torch.int64, high=250), "weight": m.small(256, 4096),
        },
        ("0",),
    ),
    "rope_forward": (
        "rope.rope_forward",
        32 * 128,
        lambda m: {
            "q": m.rows_of(32, 128), "k": m.rows_of(8, 128), "cos": m.small(256, 64, dtype=FLOAT),
            "sin": m.small(256, 64, dtype=FLOAT),
            "positions": m.rows_of(dtype=torch.int64, high=250),
        },
        ("q", "k"),
    ),
}  # fmt: skip


def launcher_of(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"entrenar.kernels.{module}"), function)


def last_rows(case: str, maker: Maker) -> list[torch.Tensor]:
    """Run a case and return the last rows of what it computes."""
    name, _, build, where = CASES[case]
    given = build(maker)
    with _launch.allocating(lambda shape, dtype, device: maker.storage(shape, dtype)):
        result = launcher_of(name)(**given)
    if isinstance(result, NF4Weight):
        result = (result.codes.view(-1, 32), result.absmax)
    results = result if isinstance(result, tuple) else (result,)
    found = [results[int(w)] if w.isdigit() else given[w] for w in where]
    return [t[-ROWS:].clone() for t in found]


@pytest.fixture
def driver(device: str) -> Iterator[Any]:
    if device != "cpu":
        pytest.skip("the emulator executes a part of a grid")
    from entrenar.emulator import install_driver

    yield install_driver("sm_80")
    install_driver("sm_80")


@pytest.mark.parametrize("case", CASES)
def test_last_rows_of_a_huge_array(case: str, driver: Any, tmp_path: Path) -> None:
    columns = CASES[case][1]
    rows = FAR // columns + ROWS + 3
    assert rows * columns > FAR
    alone = last_rows(case, Maker(None, ROWS))
    driver.opts["edges"] = BLOCKS
    far = last_rows(case, Maker(tmp_path, rows))
    for got, wanted in zip(far, alone, strict=True):
        assert wanted.any()
        if case.startswith("attention"):
            # tiles fit the mean length of a sequence, and with them the order of a sum
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7)
        else:
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out", "out"])
@pytest.mark.usefixtures("driver")
def test_rows_of_attention_may_lie_far_apart(name: str, tmp_path: Path) -> None:
    """Rows 2²⁵ elements apart, so that the offsets inside one block of 128 rows pass 2³¹."""
    from entrenar.kernels import attention

    rows, apart = 130, 2**25
    rng = np.random.default_rng(0)
    given = {
        n: torch.from_numpy(rng.standard_normal((rows, 1, 16)).astype(np.float32)).bfloat16()
        for n in ("q", "k", "v", "grad_out", "out")
    }
    lse = torch.from_numpy(rng.standard_normal((1, rows)).astype(np.float32))
    storage = np.memmap(tmp_path / "far", np.uint16, "w+", shape=(rows * apart,))
    far = torch.from_numpy(storage).view(torch.bfloat16).as_strided((rows, 1, 16), (apart, 16, 1))
    far.copy_(given[name])
    moved = {**given, name: far}
    results = []
    for arguments in (given, moved):
        grads = attention.attention_backward(lse=lse, **arguments)
        q, k, v = (arguments[n] for n in "qkv")
        results.append((*grads, *attention.attention_forward(q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
