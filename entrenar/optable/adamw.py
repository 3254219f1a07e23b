"""The row of the AdamW step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entrenar.errors import ConfigError, DTypeError, ShapeMismatchError
from entrenar.optable.row import Arguments, ErrorCase, Function, Op, Sample

__all__ = ["FUNCTIONS", "OPS"]

_STEP = Function("adamw_step", "adamw", mutates=("params", "m", "v", "step", "skipped"))
FUNCTIONS: tuple[Function, ...] = (_STEP,)


def _single(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32).astype(np.float64)


def _make(
    n: int,
    done: int = 0,
    scale: float | None = None,
    skip: int | None = None,
    **settings: float,
) -> Callable[[np.random.Generator], Arguments]:
    def make(rng: np.random.Generator) -> Arguments:
        arguments: Arguments = {
            "params": rng.standard_normal(n),
            "grads": rng.standard_normal(n),
            "m": 0.1 * rng.standard_normal(n) if done else np.zeros(n),
            "v": 0.01 + np.square(0.1 * rng.standard_normal(n)) if done else np.zeros(n),
            "step": np.array([done], dtype=np.int64),
            "lr": _single(1e-3),
            **settings,
        }
        if scale is not None:
            arguments["grad_scale"] = _single(scale)
        if skip is not None:
            arguments["skip"] = np.array([skip], dtype=np.int32)
            arguments["skipped"] = np.array([3], dtype=np.int64)
        return arguments

    return make


def _baseline(
    params: torch.Tensor,
    grads: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
) -> None:
    """Run torch's functional AdamW on the same storage; its own step counter is a float."""
    from torch.optim.adamw import adamw

    if skip is not None and int(skip):
        if skipped is not None:
            skipped += 1
        return
    counter = step.to(torch.float32).reshape(())
    adamw(
        [params],
        [grads if grad_scale is None else grads * grad_scale],
        [m],
        [v],
        [],
        [counter],
        foreach=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(lr),
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    step.fill_(int(counter))


def _bytes(inputs: Arguments, itemsize: int) -> int:
    return 7 * inputs["params"].size * itemsize + 20


def _with(**changes: Any) -> Callable[[np.random.Generator], Arguments]:
    return lambda rng: {**_make(5)(rng), **changes}


OPS: tuple[Op, ...] = (
    Op(
        name="adamw",
        family="adamw",
        forward=_STEP,
        samples=(
            Sample("n37_first_step", _make(37)),
            Sample("n1", _make(1)),
            Sample("n0", _make(0)),
            Sample("n100_step_10", _make(100, done=9)),
            Sample("n64_step_1000000", _make(64, done=999_999, beta2=0.9999)),
            Sample("n50_beta2_0.9999_first_step", _make(50, beta2=0.9999, weight_decay=0.1)),
            Sample("n33_betas_0", _make(33, beta1=0.0, beta2=0.0, done=3)),
            Sample("n45_eps_dominates", _make(45, eps=0.5)),
            Sample("n70_scaled", _make(70, done=4, scale=0.125, skip=0)),
            Sample("n70_skipped", _make(70, done=4, skip=1)),
            Sample("n10007_several_blocks", _make(10_007, done=2), small=False),
        ),
        errors=(
            ErrorCase("lengths_differ", "adamw_step", _with(m=np.zeros(4)),
                      ShapeMismatchError, "m has shape"),
            ErrorCase("step_is_int32", "adamw_step", _with(step=np.zeros(1, dtype=np.int32)),
                      DTypeError, "step is int32"),
            ErrorCase("skipped_is_int32", "adamw_step", _with(skipped=np.zeros(1, dtype=np.int32)),
                      DTypeError, "skipped is int32"),
            ErrorCase("beta_is_1", "adamw_step", _with(beta2=1.0), ConfigError, "beta2 is 1.0"),
            ErrorCase("negative_decay", "adamw_step", _with(weight_decay=-0.1),
                      ConfigError, "weight_decay is -0.1"),
        ),
        floats=("params", "grads", "m", "v"),
        dtypes=("float32",),
        reduction=lambda inputs: 8,
        a=2.0,
        tolerance_reason="about a dozen float32 operations an element, none of which cancels but "
        "the last: params less a step of at most about the learning rate",
        bytes_moved=_bytes,
        flops=lambda inputs: 16 * inputs["params"].size,
        traffic_bound=1.05,
        traffic_reason="one pass: four reads and three writes an element",
        torch_baseline=_baseline,
        source="Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; torch.optim.AdamW",
    ),
)  # fmt: skip
