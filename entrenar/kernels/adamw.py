"""One AdamW step over a flat arena, in place, with decoupled weight decay.

With ``g = grad_scale * grads`` and ``t = step + 1``: ``m <- beta1 m + (1 - beta1) g``,
``v <- beta2 v + (1 - beta2) g^2``, and
``params <- params - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay params)``.

Learning rate, step, gradient factor and skip flag are read on the device, so that a replayed graph
follows the schedule and a non-finite step changes nothing without a synchronisation. One launch
updates the arena, a second of one program advances the step or the count of skipped ones.

Numerics: float32. ``1 - beta`` is formed on the host in double, ``1 - beta^t`` on the device as
``-expm1(-t * -log(beta))`` with the logarithm from the host, to a few units of the last place for
any ``t`` below 2^24. Square root and divisions are correctly rounded.
Bytes moved: 28 a parameter.
Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; torch.optim.AdamW.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_dtype, check_ndim, check_shape
from entrenar.errors import ConfigError
from entrenar.kernels import _launch

__all__ = ["adamw_step"]


@triton.jit
def _one_minus_exp(y):
    """Return ``1 - exp(-y)`` for ``y > 0`` without cancellation."""
    # below 0.5 the alternating series, eleven terms: the first left out is under 2^-40 of the sum
    small = tl.minimum(y, 0.5)
    series = 1.0 - small / 11.0
    series = 1.0 - small / 10.0 * series
    series = 1.0 - small / 9.0 * series
    series = 1.0 - small / 8.0 * series
    series = 1.0 - small / 7.0 * series
    series = 1.0 - small / 6.0 * series
    series = 1.0 - small / 5.0 * series
    series = 1.0 - small / 4.0 * series
    series = 1.0 - small / 3.0 * series
    series = 1.0 - small / 2.0 * series
    return tl.where(y < 0.5, small * series, 1.0 - tl.exp(-y))


@triton.jit
def _adamw_kernel(
    params_ptr,
    grads_ptr,
    m_ptr,
    v_ptr,
    step_ptr,
    lr_ptr,
    grad_scale_ptr,
    skip_ptr,
    n_elements,
    beta1,
    one_minus_beta1,
    minus_log_beta1,
    beta2,
    one_minus_beta2,
    minus_log_beta2,
    eps,
    weight_decay,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SKIP:
        n_elements = tl.where(tl.load(skip_ptr) == 0, n_elements, 0)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    t = (tl.load(step_ptr) + 1).to(tl.float32)
    lr = tl.load(lr_ptr)
    grad = tl.load(grads_ptr + offsets, mask=mask, other=0.0)
    if HAS_SCALE:
        grad *= tl.load(grad_scale_ptr)
    m = tl.load(m_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    params = tl.load(params_ptr + offsets, mask=mask, other=0.0)
    m = beta1 * m + one_minus_beta1 * grad
    v = beta2 * v + one_minus_beta2 * (grad * grad)
    tl.store(m_ptr + offsets, m, mask=mask)
    tl.store(v_ptr + offsets, v, mask=mask)
    m_hat = tl.div_rn(m, tl.zeros_like(m) + _one_minus_exp(t * minus_log_beta1))
    v_hat = tl.div_rn(v, tl.zeros_like(v) + _one_minus_exp(t * minus_log_beta2))
    update = tl.div_rn(m_hat, tl.sqrt_rn(v_hat) + eps) + weight_decay * params
    tl.store(params_ptr + offsets, params - lr * update, mask=mask)


@triton.jit
def _advance_kernel(step_ptr, skip_ptr, skipped_ptr, HAS_SKIP: tl.constexpr, COUNTS: tl.constexpr):
    advance = 1
    if HAS_SKIP:
        advance = tl.where(tl.load(skip_ptr) == 0, 1, 0)
    tl.store(step_ptr, tl.load(step_ptr) + advance)
    if COUNTS:
        tl.store(skipped_ptr, tl.load(skipped_ptr) + 1 - advance)


def adamw_step(
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
    *,
    stream: Any = None,
) -> None:
    """Advance ``params`` by one step of AdamW.

    Args:
        params: float32 [n] contiguous; written.
        grads: float32 [n]; read only.
        m: float32 [n], first moment; written.
        v: float32 [n], second moment; written.
        step: int64 [1], steps completed so far; becomes one more.
        lr: float32 [1].
        beta1: At least 0 and below 1.
        beta2: At least 0 and below 1.
        eps: Added to the root of the corrected second moment, at least 0.
        weight_decay: At least 0.
        grad_scale: float32 [1], a factor on the gradient such as that of clipping, or None for 1.
        skip: int32 [1]; where it is not 0 nothing changes but ``skipped``, or None.
        skipped: int64 [1], steps skipped so far; becomes one more where ``skip`` is not 0, or None.
        stream: Stream to launch on; None is torch's current one.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype is none of the above.
        LayoutError: An arena is not contiguous.
        ConfigError: A setting is out of range.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Cost: 4 reads and 3 writes a parameter; 2 launches.
    """
    op = "adamw_step"
    arenas = {"params": params, "grads": grads, "m": m, "v": v}
    scalars = {"step": step, "lr": lr, "grad_scale": grad_scale, "skip": skip}
    given = {name: t for name, t in scalars.items() if t is not None}
    _check(op, arenas, given if skipped is None else {**given, "skipped": skipped})
    _check_settings(beta1, beta2, eps, weight_decay)
    if params.numel():
        _launch.launch(
            _adamw_kernel,
            (_launch.cdiv(params.numel(), _BLOCK),),
            op=op,
            stream=stream,
            reads=[*arenas.values(), *given.values()],
            writes=[params, m, v],
            **{f"{name}_ptr": tensor for name, tensor in {**arenas, **scalars}.items()},
            n_elements=params.numel(),
            **_constants(beta1, beta2),
            eps=float(eps),
            weight_decay=float(weight_decay),
            HAS_SCALE=grad_scale is not None,
            HAS_SKIP=skip is not None,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    _advance(op, step, skip, skipped, stream)


def _advance(
    op: str,
    step: torch.Tensor,
    skip: torch.Tensor | None,
    skipped: torch.Tensor | None,
    stream: Any,
) -> None:
    """Count the step as completed or, where it is skipped, as that."""
    _launch.launch(
        _advance_kernel,
        (1,),
        op=op,
        stream=stream,
        reads=[t for t in (step, skip, skipped) if t is not None],
        writes=[step] if skipped is None else [step, skipped],
        step_ptr=step,
        skip_ptr=skip,
        skipped_ptr=skipped,
        HAS_SKIP=skip is not None,
        COUNTS=skipped is not None,
        num_warps=1,
    )


def _constants(beta1: float, beta2: float) -> dict[str, float]:
    """Return what the kernel needs of the betas, formed in double precision."""
    constants = {}
    for name, beta in {"beta1": beta1, "beta2": beta2}.items():
        constants[name] = float(beta)
        constants[f"one_minus_{name}"] = 1.0 - beta
        # 200 stands for infinity: exp(-200) is 0 in float32
        constants[f"minus_log_{name}"] = -math.log(beta) if beta > 0 else 200.0
    return constants


def _check(op: str, arenas: dict[str, torch.Tensor], scalars: dict[str, torch.Tensor]) -> None:
    params = arenas["params"]
    check_ndim(op, "params", params, 1)
    for name, arena in arenas.items():
        check_dtype(op, name, arena, "float32")
        check_shape(op, name, arena, tuple(params.shape), "views of one arena have one length")
    dtypes = {"step": "int64", "skip": "int32", "skipped": "int64"}
    for name, scalar in scalars.items():
        check_dtype(op, name, scalar, dtypes.get(name, "float32"))
        check_shape(op, name, scalar, (1,))
    _launch.prepare(op, *arenas.values(), *scalars.values())
    _launch.require_contiguous(op, **arenas)


def _check_settings(beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for name, beta in {"beta1": beta1, "beta2": beta2}.items():
        if not 0 <= beta < 1:
            raise ConfigError(f"adamw_step: {name} is {beta}, wanted at least 0 and below 1", "")
    for name, value in {"eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ConfigError(f"adamw_step: {name} is {value}, wanted at least 0", "")


# 8 parameters a thread: two 128-bit accesses to each of four arrays in flight. Chosen by that and
# by the register count of the sm_90 code, not timed.
_BLOCK = 1_024
_NUM_WARPS = 4
