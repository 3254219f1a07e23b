"""The row of the linear layer with a low-rank adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.nf4 import baseline_dense, weight
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

FUNCTIONS = (
    Function("lora_forward", "lora", results=("x", "x")),
    Function(
        "lora_backward",
        "lora",
        results=("(x)", "lora_a", "lora_b"),
        mutates=("grad_a_out", "grad_b_out"),
    ),
)


def _arguments(
    rng: np.random.Generator, rows: int, n_in: int, n_out: int, rank: int, nf4: str = ""
) -> Arguments:
    dense = rng.standard_normal((n_out, n_in)) * 0.05
    return {
        "x": rng.standard_normal((rows, n_in)),
        "w": weight(rng, (n_out, n_in), double=nf4 == "double") if nf4 else dense,
        "lora_a": rng.standard_normal((rank, n_in)) * 0.1,
        "lora_b": rng.standard_normal((n_out, rank)) * 0.1,
        "scale": 2.0,
    }


def _sample(
    rows: int,
    n_in: int,
    n_out: int,
    rank: int,
    nf4: str = "",
    bias: bool = False,
    dropout_p: float = 0.0,
    small: bool = True,
    on_device: bool = False,
) -> Sample:
    def make(rng: np.random.Generator) -> Arguments:
        given = _arguments(rng, rows, n_in, n_out, rank, nf4)
        given["bias"] = rng.standard_normal(n_out) if bias else None
        seed = np.array([7], dtype=np.int64) if on_device else 7
        return {**given, "dropout_p": dropout_p, "seed": seed}

    name = f"T{rows}_in{n_in}_out{n_out}_r{rank}"
    name += f"_{'nf4' if nf4 == 'single' else 'nf4double'}" * bool(nf4)
    name += "_bias" * bias + f"_drop{dropout_p}" * bool(dropout_p)
    name += "_seed_on_device" * on_device
    return Sample(name, make, small=small)


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> Mapping[str, Any]:
    names = ("x", "w", "lora_a", "lora_b", "scale", "dropout_p", "seed")
    given = {name: inputs[name] for name in names}
    grad_x, grad_a, grad_b = call("lora_backward", grad_y=grads[0], s=outputs[1], **given)
    return {"x": grad_x, "lora_a": grad_a, "lora_b": grad_b}


def _bad(name: str, value: Any) -> Any:
    def make(rng: np.random.Generator) -> Arguments:
        given = _arguments(rng, 3, 8, 5, 2)
        return {**given, name: value(rng) if callable(value) else value}

    return make


def _refuse(name: str, value: Any, error: type[Exception], match: str) -> ErrorCase:
    return ErrorCase(name, "lora_forward", _bad(name, value), error, match)


def _bytes(a: Arguments, itemsize: int) -> int:
    rows, n_in = a["x"].shape
    n_out, rank = a["lora_b"].shape
    dense = not hasattr(a["w"], "codes")
    bias = 0 if a["bias"] is None else n_out
    values = rows * (n_in + n_out + rank) + rank * (n_in + n_out) + bias
    return (values + dense * n_in * n_out) * itemsize + (0 if dense else a["w"].nbytes)


def _flops(a: Arguments) -> int:
    rows, n_in = a["x"].shape
    n_out, rank = a["lora_b"].shape
    return 2 * rows * (n_in * n_out + rank * (n_in + n_out))


def _baseline(
    x: Any,
    w: Any,
    lora_a: Any,
    lora_b: Any,
    scale: float,
    bias: Any = None,
    dropout_p: float = 0.0,
    seed: Any = 0,
) -> Any:
    """Return the same in torch; its dropout draws other numbers, so compare only without."""
    import torch

    dense = w if isinstance(w, torch.Tensor) else baseline_dense(w, x.dtype)
    s = torch.nn.functional.dropout(x, dropout_p) @ lora_a.to(x.dtype).T
    return torch.nn.functional.linear(x, dense, bias) + scale * (s @ lora_b.to(x.dtype).T), s


OPS = (
    Op(
        name="lora",
        family="lora",
        forward=FUNCTIONS[0],
        backward=(FUNCTIONS[1],),
        samples=(
            _sample(5, 12, 7, 2),
            _sample(1, 64, 16, 1),
            _sample(0, 16, 8, 4),
            _sample(17, 65, 33, 8, nf4="single"),
            _sample(9, 64, 48, 16, nf4="double", bias=True),
            _sample(21, 64, 48, 16, dropout_p=0.25),
            _sample(21, 64, 48, 16, dropout_p=0.25, on_device=True),
            _sample(9, 64, 48, 16, nf4="single", dropout_p=0.25, on_device=True),
            _sample(13, 64, 48, 16, nf4="single", dropout_p=0.5, bias=True),
            _sample(300, 128, 96, 16, small=False),
            _sample(300, 128, 80, 16, nf4="single", small=False),
        ),
        errors=(
            _refuse(
                "x", lambda rng: rng.standard_normal((3, 9)), ShapeMismatchError, "x has shape"
            ),
            _refuse(
                "lora_a", lambda rng: rng.standard_normal((2, 9)), ShapeMismatchError, "lora_a has"
            ),
            _refuse(
                "lora_b", lambda rng: rng.standard_normal((5, 3)), ShapeMismatchError, "lora_b has"
            ),
            _refuse("dropout_p", 1.0, ConfigError, "dropout_p is 1.0"),
            _refuse("seed", -1, ConfigError, "seed is -1"),
            _refuse("seed", np.zeros(2, dtype=np.int64), ShapeMismatchError, "seed has shape"),
        ),
        floats=("x", "w", "lora_a", "lora_b", "bias"),
        differentiable=("x", "lora_a", "lora_b"),
        vjp=_vjp,
        reduction=lambda a: max(*a["x"].shape, a["w"].shape[0]) + a["lora_a"].shape[0],
        a=2.0,
        b=4.0,
        rounds_inside=True,
        bytes_moved=_bytes,
        flops=_flops,
        has_dot=True,
        traffic_reason="none is meant: a product reads an operand once per tile of the other",
        torch_baseline=_baseline,
        tolerance_reason="s, dS, the dropped input and a decoded weight are rounded to x's dtype",
        source="Hu et al., LoRA, equation 3; Dettmers et al., QLoRA, equation 5",
    ),
)
