"""Calls of every launcher at the sizes of a real model, for offline compilation, traffic and timing.

Llama-3.2-1B: hidden 2048, feed-forward 8192, 32 query and 8 key heads of 64, vocabulary 128256; heads
of 128 as in the larger models. A call is made by a :class:`Maker`, which decides device, dtype, how many
tokens, and whether values matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from entrenar.kernels.nf4_weight import NF4Weight

__all__ = ["CALLS", "DTYPES", "CallCase", "Maker"]

HIDDEN, FORWARD, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 32, 8, 64, 128_256
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the storage of a call.

    Attributes:
        dtype: Storage dtype of activations and weights.
        tokens: Rows of activations.
        device: Where storage lies.
        values: Whether to fill it; storage that is only compiled for stays zero and is never touched.
        rng: Where values come from; one after the other, so that no two operands are alike.
    """

    dtype: torch.dtype
    tokens: int = 512
    device: str = "cpu"
    values: bool = False
    rng: np.random.Generator = dataclasses.field(
        default_factory=lambda: np.random.default_rng(0), compare=False
    )

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return floating storage; normal numbers where values matter."""
        if not self.values:
            return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device == "cpu":
            numbers = torch.from_numpy(self.rng.standard_normal(shape, np.float32))
            return numbers.to(dtype or self.dtype)
        generator = torch.Generator(self.device).manual_seed(int(self.rng.integers(2**62)))
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(
            dtype or self.dtype
        )

    def integers(self, n: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return ``n`` integers below ``high``, no two alike where they fit."""
        return torch.arange(n, device=self.device).remainder(high).to(dtype)

    def nf4(self, rows: int, cols: int, double: bool = False) -> NF4Weight:
        """Return an NF4 weight of the dtype under test."""
        n = rows * cols
        blocks = n // 64
        codes = self.integers(n // 2, 256, torch.uint8)
        scales = torch.full((blocks,), 0.05, device=self.device)
        nested: Arguments = {"absmax": scales}
        if double:
            nested = {
                "absmax": None,
                "absmax_codes": self.integers(blocks, 256, torch.uint8),
                "absmax2": torch.full((math.ceil(blocks / 256),), 0.05, device=self.device),
                "offset": torch.full((1,), 0.05, device=self.device),
            }
        return NF4Weight(codes, shape=(rows, cols), dtype=self.dtype, **nested)


Make = Callable[[Maker], Arguments]


@dataclasses.dataclass(frozen=True)
class CallCase:
    """A call of ``entrenar.kernels.<family>.<function>``.

    Attributes:
        op: The row of the table it belongs to.
        family: The kernel file.
        function: The launcher.
        shape: What sizes it has, readable.
        make: Returns keyword arguments.
        dtypes: Names of the dtypes it is made for.
    """

    op: str
    family: str
    function: str
    shape: str
    make: Make
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")


def _gemm() -> Iterator[tuple[str, str, str, Make]]:
    square: Make = lambda m: {"a": m.floats(m.tokens, HIDDEN), "b": m.floats(HIDDEN, HIDDEN)}  # noqa: E731
    yield "gemm", "gemm_forward", "TxH @ HxH", square
    yield (
        "gemm",
        "gemm_backward_a",
        "TxH @ (HxH).T",
        lambda m: {"grad_c": m.floats(m.tokens, HIDDEN), "b": m.floats(HIDDEN, HIDDEN)},
    )
    yield (
        "gemm",
        "gemm_backward_b",
        "(TxH).T @ TxH",
        lambda m: {"a": m.floats(m.tokens, HIDDEN), "grad_c": m.floats(m.tokens, HIDDEN)},
    )
    yield (
        "linear",
        "matmul",
        "TxH @ (FxH).T + bias",
        lambda m: {
            "a": m.floats(m.tokens, HIDDEN),
            "b": m.floats(FORWARD, HIDDEN),
            "trans_b": True,
            "bias": m.floats(FORWARD),
        },
    )
    yield (
        "linear",
        "matmul",
        "1xH @ (FxH).T",
        lambda m: {"a": m.floats(1, HIDDEN), "b": m.floats(FORWARD, HIDDEN), "trans_b": True},
    )
    yield (
        "matmul",
        "matmul",
        "batch of 8, TxT @ Tx64",
        lambda m: {"a": m.floats(8, m.tokens, m.tokens), "b": m.floats(8, m.tokens, 64)},
    )
    yield (
        "matmul",
        "matmul",
        "unaligned TxH+1 @ H+1xH+3, accumulated",
        lambda m: {
            "a": m.floats(m.tokens, HIDDEN + 1),
            "b": m.floats(HIDDEN + 1, HIDDEN + 3),
            "out": m.floats(m.tokens, HIDDEN + 3, dtype=torch.float32),
            "accumulate": True,
        },
    )


def _rms_norm() -> Iterator[tuple[str, str, str, Make]]:
    def forward(residual: bool, *tail: int) -> Make:
        def make(m: Maker) -> Arguments:
            given = {"x": m.floats(m.tokens, *tail), "weight": m.floats(tail[-1]), "eps": 1e-6}
            return {**given, "residual": m.floats(m.tokens, *tail)} if residual else given

        return make

    def backward(residual: bool, *tail: int) -> Make:
        def make(m: Maker) -> Arguments:
            rows = m.tokens * math.prod(tail[:-1])
            return {
                "grad_y": m.floats(m.tokens, *tail),
                "x": m.floats(m.tokens, *tail),
                "weight": m.floats(tail[-1]),
                "rstd": m.floats(rows, dtype=torch.float32),
                "grad_residual": m.floats(m.tokens, *tail) if residual else None,
                "need_grad_weight": not residual,
            }

        return make

    for tail, name in (((HIDDEN,), "TxH"), ((HEADS, HEAD_DIM), "Tx32x64"), ((24_576,), "Tx24576")):
        yield "rms_norm", "rms_norm_forward", name, forward(False, *tail)
        yield "rms_norm", "rms_norm_backward", name, backward(False, *tail)
    yield "rms_norm_residual", "rms_norm_forward", "TxH with residual", forward(True, HIDDEN)
    yield (
        "rms_norm_residual",
        "rms_norm_backward",
        "TxH with residual, weight frozen",
        backward(True, HIDDEN),
    )


def _layer_norm() -> Iterator[tuple[str, str, str, Make]]:
    def forward(residual: bool, width: int) -> Make:
        def make(m: Maker) -> Arguments:
            given = {"x": m.floats(m.tokens, width), "weight": m.floats(width)}
            given |= {"bias": m.floats(width), "eps": 1e-5}
            return {**given, "residual": m.floats(m.tokens, width)} if residual else given

        return make

    def backward(residual: bool, width: int) -> Make:
        def make(m: Maker) -> Arguments:
            return {
                "grad_y": m.floats(m.tokens, width),
                "x": m.floats(m.tokens, width),
                "weight": m.floats(width),
                "mean": m.floats(m.tokens, dtype=torch.float32),
                "rstd": m.floats(m.tokens, dtype=torch.float32),
                "grad_residual": m.floats(m.tokens, width) if residual else None,
                "need_grad_weight": not residual,
                "need_grad_bias": not residual,
            }

        return make

    for width, name in ((HIDDEN, "TxH"), (FORWARD, "TxF"), (24_576, "Tx24576")):
        yield "layer_norm", "layer_norm_forward", name, forward(False, width)
        yield "layer_norm", "layer_norm_backward", name, backward(False, width)
    yield "layer_norm_residual", "layer_norm_forward", "TxH with residual", forward(True, HIDDEN)
    frozen = "TxH with residual, parameters frozen"
    yield "layer_norm_residual", "layer_norm_backward", frozen, backward(True, HIDDEN)


def _softmax() -> Iterator[tuple[str, str, str, Make]]:
    for n in (4096, 65_536):
        yield "softmax", "softmax_forward", f"Tx{n}", lambda m, n=n: {"x": m.floats(m.tokens, n)}
        yield (
            "softmax",
            "softmax_backward",
            f"Tx{n}",
            lambda m, n=n: {"grad_y": m.floats(m.tokens, n), "y": m.floats(m.tokens, n)},
        )
    yield (
        "softmax",
        "softmax_forward",
        "causal TxT",
        lambda m: {"x": m.floats(m.tokens, m.tokens), "scale": 0.125, "causal": True},
    )


def _cross_entropy() -> Iterator[tuple[str, str, str, Make]]:
    def rows(m: Maker) -> Arguments:
        n = max(m.tokens // 8, 1)
        return {"logits": m.floats(n, VOCAB), "targets": m.integers(n, VOCAB)}

    def window(m: Maker) -> Arguments:
        n = max(m.tokens // 8, 2)
        given = {"logits": m.floats(n, VOCAB), "tokens": m.integers(n, VOCAB)}
        return {**given, "loss_start": 0, "loss_end": n - 1}

    yield "cross_entropy", "cross_entropy_forward", "T/8 x V", rows
    yield "cross_entropy", "cross_entropy_backward", "T/8 x V", rows
    yield (
        "cross_entropy",
        "cross_entropy_backward",
        "T/8 x V in place",
        lambda m: {**(given := rows(m)), "out": given["logits"]},
    )
    yield "causal_cross_entropy", "causal_cross_entropy_forward", "T/8 x V", window
    yield "causal_cross_entropy", "causal_cross_entropy_backward", "T/8 x V", window
    yield (
        "linear_cross_entropy",
        "linear_cross_entropy",
        "TxH @ (VxH).T",
        lambda m: {
            "hidden": m.floats(m.tokens, HIDDEN),
            "weight": m.floats(VOCAB, HIDDEN),
            "targets": m.integers(m.tokens, VOCAB),
        },
    )


def _attention() -> Iterator[tuple[str, str, str, Make]]:
    def forward(heads: int, kv: int, dim: int, **options: Any) -> Make:
        def make(m: Maker) -> Arguments:
            q, k = m.floats(m.tokens, heads, dim), m.floats(m.tokens, kv, dim)
            given = {"q": q, "k": k, "v": m.floats(m.tokens, kv, dim), **options}
            if given.pop("packed", False):
                bounds = (0, m.tokens // 3, m.tokens)
                given["cu_seqlens_q"] = torch.tensor(bounds, dtype=torch.int32).to(m.device)
            if keys := given.pop("decode", 0):
                given.update(
                    q=m.floats(1, heads, dim), k=m.floats(keys, kv, dim), v=m.floats(keys, kv, dim)
                )
            return given

        return make

    def backward(make: Make) -> Make:
        def made(m: Maker) -> Arguments:
            given = make(m)
            rows, heads, _ = given["q"].shape
            lse = m.floats(heads, rows, dtype=torch.float32)
            return {
                **given,
                "grad_out": m.floats(*given["q"].shape),
                "out": m.floats(*given["q"].shape),
                "lse": lse,
            }

        return made

    for name, make in (
        ("T, 32/8 heads of 64", forward(HEADS, KV_HEADS, HEAD_DIM)),
        ("T, 32/8 heads of 128, two segments", forward(HEADS, KV_HEADS, 128, packed=True)),
        ("T, 2/2 heads of 80", forward(2, 2, 80)),
        ("T, 2/2 heads of 96", forward(2, 2, 96)),
        ("T, 4/1 heads of 128", forward(4, 1, 128)),
        ("T, 14/2 heads of 64, window 128", forward(14, 2, 64, window=128)),
        ("T, 8/8 heads of 256", forward(8, 8, 256)),
        ("T, 8/4 heads of 256, window 128, capped", forward(8, 4, 256, window=128, softcap=50.0)),
    ):
        yield "attention", "attention_forward", name, make
        yield "attention", "attention_backward", name, backward(make)
    yield (
        "attention",
        "attention_forward",
        "1 query, 2048 keys",
        forward(HEADS, KV_HEADS, HEAD_DIM, decode=2048),
    )


def _rope() -> Iterator[tuple[str, str, str, Make]]:
    def make(prefix: str) -> Make:
        return lambda m: {
            f"{prefix}q": m.floats(m.tokens, HEADS, HEAD_DIM),
            f"{prefix}k": m.floats(m.tokens, KV_HEADS, HEAD_DIM),
            "cos": m.floats(m.tokens, HEAD_DIM // 2, dtype=torch.float32),
            "sin": m.floats(m.tokens, HEAD_DIM // 2, dtype=torch.float32),
            "positions": m.integers(m.tokens, m.tokens),
        }

    yield "rope", "rope_forward", "T, 32/8 heads of 64", make("")
    yield "rope", "rope_backward", "T, 32/8 heads of 64", make("grad_")


def _swiglu() -> Iterator[tuple[str, str, str, Make]]:
    yield (
        "swiglu",
        "swiglu_forward",
        "TxF",
        lambda m: {"gate": m.floats(m.tokens, FORWARD), "up": m.floats(m.tokens, FORWARD)},
    )
    yield (
        "swiglu",
        "swiglu_backward",
        "TxF in place",
        lambda m: {
            "grad_y": m.floats(m.tokens, FORWARD),
            "gate": m.floats(m.tokens, FORWARD),
            "up": m.floats(m.tokens, FORWARD),
            "inplace": True,
        },
    )
    for name, more in (("silu", {}), ("gelu", {}), ("gelu", {"approximate": "tanh"}), ("relu", {})):
        yield (
            name,
            f"{name}_forward",
            f"TxF{' tanh' * bool(more)}",
            lambda m, more=more: {"x": m.floats(m.tokens, FORWARD), **more},
        )
        yield (
            name,
            f"{name}_backward",
            f"TxF{' tanh' * bool(more)}",
            lambda m, more=more: {
                "grad_y": m.floats(m.tokens, FORWARD),
                "x": m.floats(m.tokens, FORWARD),
                **more,
            },
        )


def _nf4() -> Iterator[tuple[str, str, str, Make]]:
    for double in (False, True):
        note = " double" * double
        yield (
            "nf4_quantize",
            "nf4_quantize",
            f"TxH{note}",
            lambda m, d=double: {"w": m.floats(m.tokens, HIDDEN), "double_quant": d},
        )
        yield (
            "nf4_dequantize",
            "nf4_dequantize",
            f"TxH{note}",
            lambda m, d=double: {"w": m.nf4(m.tokens, HIDDEN, d)},
        )


def _nf4_gemm() -> Iterator[tuple[str, str, str, Make]]:
    for rows, double in ((0, True), (0, False), (1, True), (16, True)):
        name = f"{rows or 'T'}xH @ (FxH nf4{' double' * double}).T"
        yield (
            "nf4_gemm",
            "nf4_gemm_forward",
            name,
            lambda m, r=rows, d=double: {
                "x": m.floats(r or m.tokens, HIDDEN),
                "w": m.nf4(FORWARD, HIDDEN, d),
            },
        )
        yield (
            "nf4_gemm",
            "nf4_gemm_backward",
            name,
            lambda m, r=rows, d=double: {
                "grad_y": m.floats(r or m.tokens, FORWARD),
                "w": m.nf4(FORWARD, HIDDEN, d),
            },
        )


def _lora() -> Iterator[tuple[str, str, str, Make]]:
    def make(nf4: bool, rows: int, backward: bool, dropout: float = 0.0) -> Make:
        def made(m: Maker) -> Arguments:
            t = rows or m.tokens
            given: Arguments = {
                "x": m.floats(t, HIDDEN),
                "w": m.nf4(HIDDEN, HIDDEN, True) if nf4 else m.floats(HIDDEN, HIDDEN),
                "lora_a": m.floats(16, HIDDEN, dtype=torch.float32),
                "lora_b": m.floats(HIDDEN, 16, dtype=torch.float32),
                "scale": 2.0,
                "dropout_p": dropout,
                "seed": 1,
            }
            if backward:
                given["grad_y"], given["s"] = m.floats(t, HIDDEN), m.floats(t, 16)
                given["grad_a_out"] = m.floats(16, HIDDEN, dtype=torch.float32)
                given["grad_b_out"] = m.floats(HIDDEN, 16, dtype=torch.float32)
            return given

        return made

    for nf4 in (False, True):
        kind = "nf4" if nf4 else "dense"
        for rows in (0, 1):
            name = f"{rows or 'T'}xH, {kind} HxH, r=16"
            yield "lora", "lora_forward", name, make(nf4, rows, backward=False)
        yield "lora", "lora_backward", f"TxH, {kind} HxH, r=16", make(nf4, 0, backward=True)
    yield "lora", "lora_forward", "TxH, nf4 HxH, r=16, dropout", make(True, 0, False, 0.1)
    yield "lora", "lora_backward", "TxH, nf4 HxH, r=16, dropout", make(True, 0, True, 0.1)


def _flat() -> Iterator[tuple[str, str, str, Make]]:
    def step(m: Maker) -> Arguments:
        n = m.tokens * HIDDEN
        state = {name: m.floats(n) for name in ("params", "grads", "m")}
        return {
            **state,
            "v": torch.zeros(n, device=m.device),
            "step": m.integers(1, 1),
            "lr": m.floats(1),
            "grad_scale": m.floats(1),
            "skip": m.integers(1, 1, torch.int32),
        }

    yield "adamw", "adamw_step", "T*H", step
    yield "grad_norm", "grad_norm", "T*H", lambda m: {"flat": m.floats(m.tokens * HIDDEN)}
    for name in ("clip_factor", "clip_grad_norm"):
        yield name, name, "T*H", lambda m: {"flat": m.floats(m.tokens * HIDDEN), "max_norm": 1.0}


def _elementwise() -> Iterator[tuple[str, str, str, Make]]:
    def pair(first: str, second: str) -> Make:
        return lambda m: {first: m.floats(m.tokens, HIDDEN), second: m.floats(m.tokens, HIDDEN)}

    yield "add", "add", "TxH", pair("a", "b")
    yield "add_", "add_", "TxH", pair("dst", "src")
    yield "multiply", "multiply", "TxH", pair("a", "b")
    yield "scale", "scale", "TxH", lambda m: {"x": m.floats(m.tokens, HIDDEN), "s": 0.5}
    yield (
        "bias_add",
        "bias_add",
        "TxH",
        lambda m: {"x": m.floats(m.tokens, HIDDEN), "bias": m.floats(HIDDEN)},
    )
    yield "bias_add", "bias_backward", "TxH", lambda m: {"grad_y": m.floats(m.tokens, HIDDEN)}
    yield (
        "cast",
        "cast",
        "TxH to fp32",
        lambda m: {"x": m.floats(m.tokens, HIDDEN), "dtype": torch.float32},
    )
    yield "fill_", "fill_", "TxH", lambda m: {"x": m.floats(m.tokens, HIDDEN), "value": 0.5}


def _embedding() -> Iterator[tuple[str, str, str, Make]]:
    rows = 16_384  # a table as tall as the vocabulary would only be mostly unread
    yield (
        "embedding",
        "embedding_forward",
        "T of 16384 rows x H",
        lambda m: {"ids": m.integers(m.tokens, rows), "weight": m.floats(rows, HIDDEN)},
    )
    yield (
        "embedding",
        "embedding_backward",
        "T of 2048 rows x H",
        lambda m: {
            "grad_y": m.floats(m.tokens, HIDDEN),
            "ids": m.integers(m.tokens, 2048),
            "n_rows": 2048,
        },
    )


_FAMILIES = {
    "gemm": _gemm, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "softmax": _softmax,
    "cross_entropy": _cross_entropy, "attention": _attention, "rope": _rope, "swiglu": _swiglu,
    "nf4": _nf4, "nf4_gemm": _nf4_gemm, "lora": _lora, "elementwise": _elementwise,
    "embedding": _embedding,
}  # fmt: skip
CALLS: tuple[CallCase, ...] = (
    *(CallCase(op, family, function, shape, make)
      for family, calls in _FAMILIES.items() for op, function, shape, make in calls()),
    *(CallCase(op, "adamw" if op == "adamw" else "clip", function, shape, make, ("fp32",))
      for op, function, shape, make in _flat()),
)  # fmt: skip
