"""Rows of the elementwise activations: SwiGLU, SiLU, GELU, ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.optable.row import Arguments, Call, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_SWIGLU = Function(
    "swiglu_forward", "swiglu", results=("gate",), mutates=("out",), alike=("gate", "up", "out")
)
_SWIGLU_BACKWARD = Function(
    "swiglu_backward",
    "swiglu",
    results=("gate", "up"),
    mutates=("gate", "up"),
    alike=("grad_y", "gate", "up"),
)
_SILU = Function("silu_forward", "swiglu", results=("x",))
_SILU_BACKWARD = Function("silu_backward", "swiglu", results=("x",), alike=("grad_y", "x"))
_GELU = Function("gelu_forward", "swiglu", results=("x",))
_GELU_BACKWARD = Function("gelu_backward", "swiglu", results=("x",), alike=("grad_y", "x"))
_RELU = Function("relu_forward", "swiglu", results=("x",))
_RELU_BACKWARD = Function("relu_backward", "swiglu", results=("x",), alike=("grad_y", "x"))
FUNCTIONS: tuple[Function, ...] = (
    _SWIGLU, _SWIGLU_BACKWARD, _SILU, _SILU_BACKWARD, _GELU, _GELU_BACKWARD, _RELU, _RELU_BACKWARD,
)  # fmt: skip

_EDGES = np.array([-1000.0, -100.0, -89.0, -88.0, -20.0, -1e-3, 0.0, 20.0, 1000.0])


def _gated(*shape: int) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {
        "gate": 3 * rng.standard_normal(shape),
        "up": rng.standard_normal(shape),
    }


def _gated_edges(rng: np.random.Generator) -> Arguments:
    return {"gate": _EDGES.copy(), "up": rng.standard_normal(_EDGES.size)}


def _plain(*shape: int, **settings: str) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        x = 2 * rng.standard_normal(shape)
        # away from 0, where relu has no derivative for finite differences to meet
        return {"x": x + 0.1 * np.sign(x), **settings}

    return make


def _plain_samples(**settings: str) -> tuple[Sample, ...]:
    suffix = "".join(f"_{value}" for value in settings.values())
    return (
        Sample(f"3x37{suffix}", _plain(3, 37, **settings)),
        Sample(f"one{suffix}", _plain(1, **settings)),
        Sample(f"empty{suffix}", _plain(0, **settings)),
        Sample(f"5003_several_blocks{suffix}", _plain(5003, **settings), small=False),
    )


def _swiglu_vjp(
    call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
) -> dict[str, Any]:
    grad_gate, grad_up = call(
        "swiglu_backward", grad_y=grad_outputs[0], gate=inputs["gate"], up=inputs["up"]
    )
    return {"gate": grad_gate, "up": grad_up}


def _plain_vjp(function: str) -> Callable[..., dict[str, Any]]:
    def vjp(
        call: Call, inputs: Arguments, outputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
    ) -> dict[str, Any]:
        return {"x": call(function, grad_y=grad_outputs[0], **inputs)}

    return vjp


def _swiglu_baseline(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.nn.functional.silu(gate) * up
    return y if out is None else out.copy_(y)


def _gelu_baseline(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _silu_baseline(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def _relu_baseline(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x)


def _shapes_differ(rng: np.random.Generator) -> Arguments:
    return {"gate": rng.standard_normal((3, 8)), "up": rng.standard_normal((3, 7))}


def _grad_differs(rng: np.random.Generator) -> Arguments:
    return {**_gated(3, 8)(rng), "grad_y": rng.standard_normal((8, 3))}


def _grad_x_differs(rng: np.random.Generator) -> Arguments:
    return {"grad_y": rng.standard_normal(4), "x": rng.standard_normal(5)}


def _plain_op(
    name: str,
    forward: Function,
    backward: Function,
    samples: tuple[Sample, ...],
    flops: int,
    baseline: Callable[..., Any],
    source: str,
    reason: str,
    errors: tuple[ErrorCase, ...] = (),
) -> Op:
    return Op(
        name=name,
        family="swiglu",
        forward=forward,
        backward=(backward,),
        samples=samples,
        errors=(
            ErrorCase("grad_of_another_size", backward.name, _grad_x_differs,
                      ShapeMismatchError, "grad_y has shape"),
            *errors,
        ),
        floats=("x",),
        differentiable=("x",),
        vjp=_plain_vjp(backward.name),
        reduction=lambda inputs: 4,
        scale=lambda inputs: 1.0,
        tolerance_reason=reason + "; a slope is a sum of terms up to 1 that may cancel",
        bytes_moved=lambda inputs, itemsize: 2 * inputs["x"].size * itemsize,
        flops=lambda inputs: flops * inputs["x"].size,
        traffic_bound=1.05,
        traffic_reason="one pass, one read and one write an element",
        torch_baseline=baseline,
        source=source,
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    Op(
        name="swiglu",
        family="swiglu",
        forward=_SWIGLU,
        backward=(_SWIGLU_BACKWARD,),
        samples=(
            Sample("T7_F123", _gated(7, 123)),
            Sample("one", _gated(1)),
            Sample("T0_F8", _gated(0, 8)),
            Sample("gates_from_-1000_to_1000", _gated_edges),
            Sample("5x1001_several_blocks", _gated(5, 1001), small=False),
            Sample("T300_F1536", _gated(300, 1536), small=False, grid=False),
        ),
        errors=(
            ErrorCase("up_of_another_size", "swiglu_forward", _shapes_differ,
                      ShapeMismatchError, "up has shape"),
            ErrorCase("grad_of_another_shape", "swiglu_backward", _grad_differs,
                      ShapeMismatchError, "grad_y has shape"),
        ),
        floats=("gate", "up"),
        differentiable=("gate", "up"),
        vjp=_swiglu_vjp,
        reduction=lambda inputs: 4,
        scale=lambda inputs: float(np.abs(inputs["up"]).max(initial=0.0)),
        tolerance_reason="one rounding at the store; exp, a division and at most four products "
        "in float32, a few units of its last place together; the slope of silu is a sum of two "
        "terms up to 1 that cancel near -1.28, and meets up",
        bytes_moved=lambda inputs, itemsize: 3 * inputs["gate"].size * itemsize,
        flops=lambda inputs: 5 * inputs["gate"].size,
        traffic_bound=1.05,
        traffic_reason="one pass, two reads and one write an element",
        torch_baseline=_swiglu_baseline,
        source="Shazeer, arXiv:2002.05202, equation 6",
    ),
    _plain_op(
        "silu", _SILU, _SILU_BACKWARD, _plain_samples(), 4,
        _silu_baseline,
        "Elfwing et al., arXiv:1702.03118",
        "one rounding at the store; exp, a division and two products in float32",
    ),
    _plain_op(
        "gelu", _GELU, _GELU_BACKWARD,
        _plain_samples(approximate="none") + _plain_samples(approximate="tanh"), 12,
        _gelu_baseline,
        "Hendrycks and Gimpel, arXiv:1606.08415, section 2",
        "one rounding at the store; erf (or tanh, its argument a cubic) is good to a few units of "
        "float32's last place of 1, which the left tail sees as absolute",
        errors=(
            ErrorCase("unknown_approximation", "gelu_forward", _plain(4, approximate="quick"),
                      ConfigError, "approximate is 'quick'"),
        ),
    ),
    _plain_op(
        "relu", _RELU, _RELU_BACKWARD, _plain_samples(), 1,
        _relu_baseline,
        "max(x, 0), with derivative 0 at 0",
        "exact: a comparison and a copy",
    ),
)  # fmt: skip
