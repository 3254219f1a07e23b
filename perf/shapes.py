"""Forward arguments of every op at the sizes of real models, for timing.

Each op of the table has at least one case; its backward calls follow from the row's own gradient. A size
letter stands in a case's name for what the model and the number of tokens make of it:

    T tokens   R rows with a loss, half of T   P keys: T, or 2048 cached ones for a single query
    H hidden   F feed-forward   A query heads   K key heads   D head dimension   V vocabulary
    N parameters of rank-16 adapters on q_proj and v_proj of every layer
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from perf.calls import Maker

__all__ = ["MODELS", "Case", "Model", "cases"]

Arguments = dict[str, Any]
RANK, CACHED = 16, 2048


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder, from its config.json."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    def letters(self, tokens: int) -> dict[str, int]:
        """Return what each size letter stands for."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "T": tokens, "R": max(tokens // 2, 1), "P": CACHED if tokens == 1 else tokens,
            "H": self.hidden, "F": self.inner, "A": self.heads, "K": self.kv_heads,
            "D": self.head_dim, "V": self.vocab,
            "N": self.layers * RANK * (2 * self.hidden + q + kv),
        }  # fmt: skip


MODELS = {
    model.name: model
    for model in (
        Model("smollm2-135m", 576, 1536, 9, 3, 64, 49_152, 30),
        Model("qwen2.5-1.5b", 1536, 8960, 12, 2, 128, 151_936, 28),
        Model("qwen2.5-7b", 3584, 18_944, 28, 4, 128, 152_064, 28),
        Model("llama-3.1-8b", 4096, 14_336, 32, 8, 128, 128_256, 32),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at sizes given by letters.

    Attributes:
        op: Its row of the table.
        shape: Sizes in letters.
        make: ``make(maker, letters)`` returns keyword arguments of the forward function.
    """

    op: str
    shape: str
    make: Callable[[Maker, dict[str, int]], Arguments]

    def title(self, letters: dict[str, int]) -> str:
        """Return the shape with the letters it uses spelled out."""
        used = [f"{k}={n}" for k, n in letters.items() if k in self.shape]
        return f"{self.shape} ({', '.join(used)})"


def _products() -> Iterator[Case]:
    def weight(m: Maker, rows: int, cols: int) -> torch.Tensor:
        return m.floats(rows, cols) / math.sqrt(cols)

    def linear(inner: str, outer: str, rows: str = "T", bias: bool = False) -> Callable[..., Any]:
        def make(m: Maker, n: dict[str, int]) -> Arguments:
            k, out = (math.prod(n[c] for c in name) for name in (inner, outer))
            given = {"a": m.floats(n[rows], k), "b": weight(m, out, k), "trans_b": True}
            return {**given, "bias": m.floats(out)} if bias else given

        return make

    yield Case(
        "nf4_gemm", "TxH, nf4 double weight FxH",
        lambda m, n: {"x": m.floats(n["T"], n["H"]), "w": m.nf4(n["F"], n["H"], True)},
    )  # fmt: skip
    yield Case(
        "lora", "TxH, nf4 double weight ADxH, rank 16",
        lambda m, n: {
            "x": m.floats(n["T"], n["H"]),
            "w": m.nf4(n["A"] * n["D"], n["H"], True),
            "lora_a": 0.1 * m.floats(RANK, n["H"], dtype=torch.float32),
            "lora_b": 0.1 * m.floats(n["A"] * n["D"], RANK, dtype=torch.float32),
            "scale": 2.0,
            "dropout_p": 0.0,
            "seed": 0,
        },
    )  # fmt: skip
    yield Case(
        "gemm", "TxH @ HxF",
        lambda m, n: {"a": m.floats(n["T"], n["H"]), "b": weight(m, n["H"], n["F"])},
    )  # fmt: skip
    yield Case("linear", "TxH, weight ADxH, bias AD", linear("H", "AD", bias=True))
    yield Case("linear", "TxH, weight FxH", linear("H", "F"))
    yield Case("linear", "TxF, weight HxF", linear("F", "H"))
    yield Case("linear", "RxH, weight VxH", linear("H", "V", rows="R"))
    yield Case(
        "matmul", "AxTxD @ AxDxP",
        lambda m, n: {"a": m.floats(n["A"], n["T"], n["D"]), "b": m.floats(n["A"], n["D"], n["P"])},
    )  # fmt: skip


def _attention() -> Iterator[Case]:
    def rotated(m: Maker, n: dict[str, int]) -> Arguments:
        half, length = n["D"] // 2, n["P"]
        rates = 10_000 ** -(torch.arange(half, device=m.device) / half)
        angles = torch.arange(length, device=m.device)[:, None] * rates
        return {
            "q": m.floats(n["T"], n["A"], n["D"]),
            "k": m.floats(n["T"], n["K"], n["D"]),
            "cos": angles.cos().contiguous(),
            "sin": angles.sin().contiguous(),
            "positions": m.integers(n["T"], length),
        }

    yield Case(
        "attention", "T queries, P keys, A/K heads of D, causal",
        lambda m, n: {
            "q": m.floats(n["T"], n["A"], n["D"]),
            "k": m.floats(n["P"], n["K"], n["D"]),
            "v": m.floats(n["P"], n["K"], n["D"]),
        },
    )  # fmt: skip
    yield Case("rope", "T, A/K heads of D", rotated)
    yield Case(
        "softmax", "AxTxP causal",
        lambda m, n: {"x": m.floats(n["A"], n["T"], n["P"]), "scale": n["D"] ** -0.5, "causal": True},
    )  # fmt: skip


def _rows() -> Iterator[Case]:
    def norm(bias: bool, residual: bool) -> Callable[..., Any]:
        def make(m: Maker, n: dict[str, int]) -> Arguments:
            given: Arguments = {
                "x": m.floats(n["T"], n["H"]),
                "weight": m.floats(n["H"]),
                "eps": 1e-5,
            }
            if bias:
                given["bias"] = m.floats(n["H"])
            return {**given, "residual": m.floats(n["T"], n["H"])} if residual else given

        return make

    for name, bias in (("rms_norm", False), ("layer_norm", True)):
        yield Case(name, "TxH", norm(bias, False))
        yield Case(f"{name}_residual", "TxH", norm(bias, True))
    yield Case(
        "swiglu", "TxF",
        lambda m, n: {"gate": m.floats(n["T"], n["F"]), "up": m.floats(n["T"], n["F"])},
    )  # fmt: skip
    for name in ("silu", "gelu", "relu"):
        yield Case(name, "TxF", lambda m, n: {"x": m.floats(n["T"], n["F"])})
    yield Case(
        "embedding", "T of VxH",
        lambda m, n: {"ids": m.integers(n["T"], n["V"]), "weight": m.floats(n["V"], n["H"])},
    )  # fmt: skip


def _losses() -> Iterator[Case]:
    yield Case(
        "cross_entropy", "RxV",
        lambda m, n: {"logits": m.floats(n["R"], n["V"]), "targets": m.integers(n["R"], n["V"])},
    )  # fmt: skip
    yield Case(
        "causal_cross_entropy", "R+1 rows of V",
        lambda m, n: {
            "logits": m.floats(n["R"] + 1, n["V"]),
            "tokens": m.integers(n["R"] + 1, n["V"]),
            "loss_start": 0,
            "loss_end": n["R"],
        },
    )  # fmt: skip
    yield Case(
        "linear_cross_entropy", "RxH, weight VxH",
        lambda m, n: {
            "hidden": m.floats(n["R"], n["H"]),
            "weight": m.floats(n["V"], n["H"]) / math.sqrt(n["H"]),
            "targets": m.integers(n["R"], n["V"]),
        },
    )  # fmt: skip


def _flat() -> Iterator[Case]:
    yield Case(
        "nf4_quantize", "FxH double",
        lambda m, n: {"w": 0.05 * m.floats(n["F"], n["H"]), "double_quant": True},
    )  # fmt: skip
    yield Case("nf4_dequantize", "FxH double", lambda m, n: {"w": m.nf4(n["F"], n["H"], True)})
    yield Case(
        "adamw", "N",
        lambda m, n: {
            "params": m.floats(n["N"]),
            "grads": m.floats(n["N"]),
            "m": 0.1 * m.floats(n["N"]),
            "v": 0.01 * m.floats(n["N"]).square(),
            "step": torch.tensor([9], device=m.device),
            "lr": torch.tensor([1e-3], device=m.device),
        },
    )  # fmt: skip
    yield Case("grad_norm", "N", lambda m, n: {"flat": m.floats(n["N"])})
    for name in ("clip_factor", "clip_grad_norm"):
        yield Case(name, "N", lambda m, n: {"flat": m.floats(n["N"]), "max_norm": 1.0})
    yield Case("fill_", "N", lambda m, n: {"x": m.floats(n["N"]), "value": 0.0})


def _elementwise() -> Iterator[Case]:
    def arrays(*names: str, **settings: Any) -> Callable[..., Any]:
        return lambda m, n: {**{k: m.floats(n["T"], n["H"]) for k in names}, **settings}

    yield Case("add", "TxH", arrays("a", "b"))
    yield Case("add_", "TxH", arrays("dst", "src"))
    yield Case("multiply", "TxH", arrays("a", "b"))
    yield Case("scale", "TxH", arrays("x", s=0.5))
    yield Case(
        "bias_add", "TxAD",
        lambda m, n: {
            "x": m.floats(n["T"], n["A"] * n["D"]), "bias": m.floats(n["A"] * n["D"])
        },
    )  # fmt: skip
    yield Case(
        "cast", "TxH",
        lambda m, n: {
            "x": m.floats(n["T"], n["H"]),
            "dtype": torch.bfloat16 if m.dtype == torch.float32 else torch.float32,
        },
    )  # fmt: skip


def cases() -> tuple[Case, ...]:
    """Return every case, first what a QLoRA step spends its time in: a run that is cut short has that."""
    families = (_products, _attention, _losses, _rows, _flat, _elementwise)
    return tuple(case for family in families for case in family())
