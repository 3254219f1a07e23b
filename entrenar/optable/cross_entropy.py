"""Rows of the cross entropy family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, DataError, DTypeError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_LOSS = ("float32", "int64")

CROSS_ENTROPY_FORWARD = Function("cross_entropy_forward", "cross_entropy", _LOSS)
CROSS_ENTROPY_BACKWARD = Function(
    "cross_entropy_backward", "cross_entropy", ("logits",), mutates=("out",)
)
CAUSAL_CROSS_ENTROPY_FORWARD = Function("causal_cross_entropy_forward", "cross_entropy", _LOSS)
CAUSAL_CROSS_ENTROPY_BACKWARD = Function(
    "causal_cross_entropy_backward", "cross_entropy", ("logits",), mutates=("out",)
)
LINEAR_CROSS_ENTROPY = Function("linear_cross_entropy", "cross_entropy", (*_LOSS, "(hidden)"))

FUNCTIONS: tuple[Function, ...] = (
    CROSS_ENTROPY_FORWARD,
    CROSS_ENTROPY_BACKWARD,
    CAUSAL_CROSS_ENTROPY_FORWARD,
    CAUSAL_CROSS_ENTROPY_BACKWARD,
    LINEAR_CROSS_ENTROPY,
)

Make = Callable[[np.random.Generator], Arguments]


def _rows(n: int, vocab: int, ignored: tuple[int, ...] = (), size: float = 2.0) -> Make:
    def make(rng: np.random.Generator) -> Arguments:
        targets = rng.integers(0, vocab, n)
        targets[list(ignored)] = -100
        return {"logits": size * rng.standard_normal((n, vocab)), "targets": targets}

    return make


def _with(make: Make, **options: Any) -> Make:
    return lambda rng: {**make(rng), **options}


def _masked(rng: np.random.Generator) -> Arguments:
    """A row whose first columns, past a block of 128, are -inf."""
    made = _rows(4, 300, ignored=(2,))(rng)
    made["logits"][0, :130] = -np.inf
    made["targets"][0] = 200
    return made


def _other_index(rng: np.random.Generator) -> Arguments:
    made = _rows(6, 9)(rng)
    made["targets"][2:4] = 3
    return {**made, "ignore_index": 3}


def _window(n: int, vocab: int, start: int, end: int) -> Make:
    def make(rng: np.random.Generator) -> Arguments:
        return {
            "logits": 2 * rng.standard_normal((n, vocab)),
            "tokens": rng.integers(0, vocab, n),
            "loss_start": start,
            "loss_end": end,
        }

    return make


def _linear(n: int, hidden: int, vocab: int, ignored: tuple[int, ...] = (), **options: Any) -> Make:
    def make(rng: np.random.Generator) -> Arguments:
        targets = rng.integers(0, vocab, n)
        targets[list(ignored)] = -100
        return {
            "hidden": rng.standard_normal((n, hidden)),
            "weight": rng.standard_normal((vocab, hidden)) / np.sqrt(hidden),
            "targets": targets,
            **options,
        }

    return make


_SAMPLES = (
    Sample("R1_V1", _rows(1, 1)),
    Sample("R5_V10", _rows(5, 10)),
    Sample("R7_V123_ignored", _rows(7, 123, ignored=(0, 4))),
    Sample("R4_V20_all_ignored", _rows(4, 20, ignored=(0, 1, 2, 3))),
    Sample("no_rows", _rows(0, 7)),
    Sample("R6_V9_other_ignore_index", _other_index),
    Sample("R3_V50_large_logits", _rows(3, 50, size=60.0)),
    Sample("R4_V300_minus_inf", _masked, small=False),
    Sample("R3_V9001_past_one_block", _rows(3, 9001, ignored=(1,)), small=False),
    Sample("R2_V65537", _rows(2, 65537), small=False),
    Sample("R1100_V33_many_rows", _rows(1100, 33, ignored=(5, 1099)), small=False, grid=False),
)

_CAUSAL_SAMPLES = (
    Sample("S2_V5", _window(2, 5, 0, 1)),
    Sample("S9_V11_window_3_7", _window(9, 11, 3, 7)),
    Sample("S6_V8_to_the_end", _window(6, 8, 2, 5)),
    Sample("S6_V8_empty_window", _window(6, 8, 4, 4)),
    Sample("S5_V9001_past_one_block", _window(5, 9001, 1, 4), small=False),
)

_LINEAR_SAMPLES = (
    Sample("R5_H8_V13", _linear(5, 8, 13)),
    Sample("R7_H12_V33_chunks_of_3", _linear(7, 12, 33, ignored=(0, 5), chunk_rows=3)),
    Sample("R3_H8_V10_all_ignored", _linear(3, 8, 10, ignored=(0, 1, 2))),
    Sample("R4_H8_V9_scaled", _linear(4, 8, 9, grad_scale=0.25)),
    Sample("no_rows", _linear(0, 8, 9)),
    Sample("R1_H20_V40", _linear(1, 20, 40)),
    Sample("R5_H8_V13_capped", _linear(5, 8, 13, ignored=(2,), softcap=1.5)),
    Sample("R6_H24_V301_capped_hardly", _linear(6, 24, 301, softcap=30.0, chunk_rows=4)),
    Sample("R33_H72_V519_chunks_of_16", _linear(33, 72, 519, (3,), chunk_rows=16), small=False),
)


def _vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> Mapping[str, Any]:
    return {"logits": call("cross_entropy_backward", grad_scale=grad_outputs[0], **inputs)}


def _causal_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> Mapping[str, Any]:
    return {"logits": call("causal_cross_entropy_backward", grad_scale=grad_outputs[0], **inputs)}


def _linear_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> Mapping[str, Any]:
    arguments = {**inputs, "grad_scale": grad_outputs[0]}
    return {"hidden": call("linear_cross_entropy", **arguments)[2]}


def _rows_bytes(inputs: Arguments, itemsize: int) -> int:
    return int(itemsize * inputs["logits"].size + 8 * len(inputs["logits"]) + 12)


def _causal_bytes(inputs: Arguments, itemsize: int) -> int:
    counted = max(inputs["loss_end"] - inputs["loss_start"], 0)
    return int(itemsize * counted * inputs["logits"].shape[1] + 8 * counted + 12)


def _linear_bytes(inputs: Arguments, itemsize: int) -> int:
    moved = 2 * inputs["hidden"].size + inputs["weight"].size
    return int(itemsize * moved + 8 * len(inputs["hidden"]) + 12)


def _rows_baseline(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    loss = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction="sum"
    )
    return loss, (targets != ignore_index).sum()


def _causal_baseline(
    logits: torch.Tensor, tokens: torch.Tensor, loss_start: int, loss_end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows_baseline(logits[loss_start:loss_end], tokens[loss_start + 1 : loss_end + 1])


def _linear_baseline(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    grad_scale: float = 1.0,
    chunk_rows: int = 256,
    need_grad: bool = True,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(need_grad)
        logits = leaf @ weight.T
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        loss, counted = _rows_baseline(logits, targets, ignore_index)
        grad = torch.autograd.grad(loss * grad_scale, leaf)[0] if need_grad else None
    return loss.detach(), counted, grad


def _target_case(target: int) -> Make:
    def make(rng: np.random.Generator) -> Arguments:
        return {"logits": np.zeros((2, 8)), "targets": np.array([0, target])}

    return make


def _refused_target(target: int) -> ErrorCase:
    return ErrorCase(
        f"target_{target}",
        "cross_entropy_forward",
        _target_case(target),
        DataError,
        rf"row 1 is {target}, wanted 0 to 7",
    )


_ERRORS = (
    *(_refused_target(target) for target in (8, -1, -101, 2**31)),
    ErrorCase(
        "target_8_backward",
        "cross_entropy_backward",
        _target_case(8),
        DataError,
        "row 1 is 8, wanted 0 to 7",
    ),
    ErrorCase(
        "targets_float",
        "cross_entropy_forward",
        lambda rng: {"logits": np.zeros((1, 8)), "targets": np.ones(1)},
        DTypeError,
        "targets is float",
    ),
    ErrorCase(
        "targets_too_few",
        "cross_entropy_forward",
        lambda rng: {"logits": np.zeros((2, 8)), "targets": np.zeros(1, np.int64)},
        ShapeMismatchError,
        r"targets has shape \(1,\), wanted \(2",
    ),
    ErrorCase(
        "logits_1d",
        "cross_entropy_forward",
        lambda rng: {"logits": np.zeros(8), "targets": np.zeros(1, np.int64)},
        ShapeMismatchError,
        "wanted 2 dimensions",
    ),
    ErrorCase(
        "logits_integers",
        "cross_entropy_forward",
        lambda rng: {"logits": np.zeros((1, 8), np.int64), "targets": np.zeros(1, np.int64)},
        DTypeError,
        "logits is int64",
    ),
    ErrorCase(
        "out_of_another_shape",
        "cross_entropy_backward",
        lambda rng: {**_rows(2, 8)(rng), "out": np.zeros((2, 7))},
        ShapeMismatchError,
        r"out has shape \(2, 7\)",
    ),
    ErrorCase(
        "grad_scale_of_another_length",
        "cross_entropy_backward",
        lambda rng: {**_rows(2, 8)(rng), "grad_scale": np.ones(3)},
        ShapeMismatchError,
        r"grad_scale has shape \(3,\)",
    ),
)

_CAUSAL_ERRORS = (
    ErrorCase(
        "window_past_the_last_prediction",
        "causal_cross_entropy_forward",
        _window(4, 6, 1, 4),
        ShapeMismatchError,
        r"window is \[1, 4\), wanted it in \[0, 3\]",
    ),
    ErrorCase(
        "window_before_the_start",
        "causal_cross_entropy_backward",
        _window(4, 6, -1, 2),
        ShapeMismatchError,
        r"window is \[-1, 2\)",
    ),
    ErrorCase(
        "token_past_the_vocabulary",
        "causal_cross_entropy_forward",
        _with(_window(4, 6, 0, 3), tokens=np.array([0, 1, 6, 2])),
        DataError,
        "row 1 is 6, wanted 0 to 5",
    ),
)

_LINEAR_ERRORS = (
    ErrorCase(
        "weight_of_another_width",
        "linear_cross_entropy",
        lambda rng: {**_linear(3, 8, 9)(rng), "weight": np.zeros((9, 7))},
        ShapeMismatchError,
        r"weight has shape \(9, 7\), wanted \(any, 8\)",
    ),
    ErrorCase(
        "chunk_rows_0",
        "linear_cross_entropy",
        _with(_linear(3, 8, 9), chunk_rows=0),
        ShapeMismatchError,
        "chunk_rows is 0",
    ),
    ErrorCase(
        "softcap_negative",
        "linear_cross_entropy",
        _with(_linear(3, 8, 9), softcap=-1.0),
        ConfigError,
        "softcap is -1.0",
    ),
    ErrorCase(
        "target_9",
        "linear_cross_entropy",
        _with(_linear(3, 8, 9), targets=np.array([0, 9, 1])),
        DataError,
        "row 1 is 9, wanted 0 to 8",
    ),
)

CROSS_ENTROPY = Op(
    name="cross_entropy",
    family="cross_entropy",
    forward=CROSS_ENTROPY_FORWARD,
    backward=(CROSS_ENTROPY_BACKWARD,),
    samples=_SAMPLES,
    errors=_ERRORS,
    floats=("logits",),
    differentiable=("logits",),
    vjp=_vjp,
    reduction=lambda inputs: sum(inputs["logits"].shape),
    a=2.0,
    b=4.0,
    tolerance_reason=(
        "a: exp and the product with grad_scale round on top of the store; b: the loss is a sum "
        "over rows of a sum over columns, and exp turns the error of a shifted logit, u * |x - m| "
        "with |x - m| of some tens, into a relative one on terms that are small by then"
    ),
    bytes_moved=_rows_bytes,
    flops=lambda inputs: 5 * inputs["logits"].size,
    traffic_bound=1.05,
    traffic_reason="the loss takes one online pass; with the gradient the logits are read twice",
    torch_baseline=_rows_baseline,
    source='torch.nn.functional.cross_entropy, reduction="sum"; online sum of arXiv:1805.02867',
)

CAUSAL_CROSS_ENTROPY = Op(
    name="causal_cross_entropy",
    family="cross_entropy",
    forward=CAUSAL_CROSS_ENTROPY_FORWARD,
    backward=(CAUSAL_CROSS_ENTROPY_BACKWARD,),
    samples=_CAUSAL_SAMPLES,
    errors=_CAUSAL_ERRORS,
    floats=("logits",),
    differentiable=("logits",),
    vjp=_causal_vjp,
    reduction=lambda inputs: sum(inputs["logits"].shape),
    a=2.0,
    b=4.0,
    tolerance_reason="as for cross_entropy, whose kernels it shares",
    bytes_moved=_causal_bytes,
    flops=lambda inputs: 5 * inputs["logits"].size,
    traffic_bound=1.05,
    traffic_reason="one online pass over the rows of the window; the other rows are not read",
    torch_baseline=_causal_baseline,
    source="the shifted loss of Hugging Face ForCausalLMLoss, over a window of positions",
)

LINEAR_CROSS_ENTROPY_OP = Op(
    name="linear_cross_entropy",
    family="cross_entropy",
    forward=LINEAR_CROSS_ENTROPY,
    backward=(LINEAR_CROSS_ENTROPY,),
    samples=_LINEAR_SAMPLES,
    errors=_LINEAR_ERRORS,
    floats=("hidden", "weight"),
    differentiable=("hidden",),
    vjp=_linear_vjp,
    reduction=lambda inputs: sum(inputs["weight"].shape) + len(inputs["hidden"]),
    a=2.0,
    b=4.0,
    rounds_inside=True,
    tolerance_reason=(
        "logits and their gradient are rounded to storage between the products; each stage adds "
        "one rounding of the order of the terms it sums"
    ),
    bytes_moved=_linear_bytes,
    flops=lambda inputs: 4 * len(inputs["hidden"]) * inputs["weight"].size,
    traffic_bound=None,
    traffic_reason="two products with a chunk of logits between them",
    has_dot=True,
    torch_baseline=_linear_baseline,
    source='Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.2',
)

OPS: tuple[Op, ...] = (CROSS_ENTROPY, CAUSAL_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_OP)
