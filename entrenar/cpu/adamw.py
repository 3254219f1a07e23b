"""The AdamW step on a CPU: a piece of the arena at a time, without leaving the cache."""

from __future__ import annotations

import numpy as np

from entrenar.reference import adamw as plain

__all__ = ["adamw_step"]

_PIECE = 32_768


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
    """Advance the parameters; as ``entrenar.reference.adamw.adamw_step``.

    The plain form runs once on nothing first: it makes the checks, honours ``skip``, and advances
    ``step`` or ``skipped``.
    """
    before = int(step[0]) if step.size else 0
    rest = (step, lr, beta1, beta2, eps, weight_decay, grad_scale, skip, skipped)
    if not _one_length(params, grads, m, v):
        plain.adamw_step(params, grads, m, v, *rest)
        return
    none = slice(0)
    plain.adamw_step(params[none], grads[none], m[none], v[none], *rest)
    t = int(step[0])
    if t == before:
        return
    rate, decay = float(lr[0]), float(lr[0]) * weight_decay
    rate_m, root_v = rate / (1 - beta1**t), (1 - beta2**t) ** 0.5
    factor = 1.0 if grad_scale is None else float(grad_scale[0])
    scratch = np.empty(min(_PIECE, params.size), params.dtype)
    for start in range(0, params.size, _PIECE):
        piece = slice(start, start + _PIECE)
        p, mp, vp = params[piece], m[piece], v[piece]
        g = grads[piece] if factor == 1.0 else grads[piece] * params.dtype.type(factor)
        work = scratch[: p.size]
        mp *= beta1
        np.multiply(g, 1 - beta1, out=work)
        mp += work
        vp *= beta2
        np.square(g, out=work)
        work *= 1 - beta2
        vp += work
        np.sqrt(vp, out=work)
        work /= root_v
        work += eps
        np.divide(mp, work, out=work)
        work *= rate_m
        if decay:
            # p - p * (lr wd), not p * (1 - lr wd): the factor would round the decay away
            work += p * params.dtype.type(decay)
        p -= work


def _one_length(params: np.ndarray, *others: np.ndarray) -> bool:
    return params.ndim == 1 and all(
        a.shape == params.shape and a.dtype == params.dtype for a in others
    )
