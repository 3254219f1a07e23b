"""One AdamW step over a flat arena, in place, with decoupled weight decay."""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError

__all__ = ["adamw_step"]


def adamw_step(
    params: np.ndarray,
    grads: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    step: np.ndarray,
    lr: np.ndarray,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: np.ndarray | None = None,
    skip: np.ndarray | None = None,
    skipped: np.ndarray | None = None,
) -> None:
    """Advance ``params`` by one step of AdamW.

    With ``g = grad_scale * grads`` and ``t = step + 1``: ``m <- beta1 m + (1 - beta1) g``,
    ``v <- beta2 v + (1 - beta2) g^2``,
    ``params <- params - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay params)``.

    Args:
        params: float32 [n]; written.
        grads: float32 [n]; read only.
        m: float32 [n], first moment; written.
        v: float32 [n], second moment; written.
        step: int64 [1], steps completed so far; becomes ``t``.
        lr: float32 [1].
        beta1: At least 0 and below 1.
        beta2: At least 0 and below 1.
        eps: Added to the root of the corrected second moment, at least 0.
        weight_decay: At least 0.
        grad_scale: float32 [1], a factor on the gradient such as that of clipping, or None for 1.
        skip: int32 [1]; where it is not 0 nothing changes but ``skipped``, or None.
        skipped: int64 [1], steps skipped so far; becomes one more where ``skip`` is not 0, or None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype is none of the above.
        ConfigError: A setting is out of range.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; torch.optim.AdamW.
    """
    _check(params, grads, m, v, step, lr, grad_scale, skip, skipped)
    _check_settings(beta1, beta2, eps, weight_decay)
    if skip is not None and skip[0] != 0:
        if skipped is not None:
            skipped[0] += 1
        return
    t = int(step[0]) + 1
    gradient = grads if grad_scale is None else grads * grad_scale[0].astype(grads.dtype)
    m[...] = beta1 * m + (1 - beta1) * gradient
    v[...] = beta2 * v + (1 - beta2) * np.square(gradient)
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    update = m_hat / (np.sqrt(v_hat) + eps) + weight_decay * params
    params[...] = params - lr[0].astype(params.dtype) * update
    step[0] = t


def _check(
    params: np.ndarray,
    grads: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    step: np.ndarray,
    lr: np.ndarray,
    grad_scale: np.ndarray | None,
    skip: np.ndarray | None,
    skipped: np.ndarray | None,
) -> None:
    op = "adamw_step"
    check_dtype(op, "params", params, "float32", "float64")
    check_ndim(op, "params", params, 1)
    for name, array in {"grads": grads, "m": m, "v": v}.items():
        check_shape(op, name, array, params.shape, "views of one arena have one length")
    check_same_dtype(op, params=params, grads=grads, m=m, v=v)
    scalars = {"step": step, "lr": lr, "grad_scale": grad_scale, "skip": skip, "skipped": skipped}
    dtypes = {"step": ("int64",), "skip": ("int32",), "skipped": ("int64",)}
    for name, scalar in scalars.items():
        if scalar is not None:
            check_dtype(op, name, scalar, *dtypes.get(name, ("float32", "float64")))
            check_shape(op, name, scalar, (1,))


def _check_settings(beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for name, beta in {"beta1": beta1, "beta2": beta2}.items():
        if not 0 <= beta < 1:
            raise ConfigError(f"adamw_step: {name} is {beta}, wanted at least 0 and below 1", "")
    for name, value in {"eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ConfigError(f"adamw_step: {name} is {value}, wanted at least 0", "")
