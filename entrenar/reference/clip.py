"""Global gradient norm and clipping over a flat arena."""

from __future__ import annotations

import numpy as np

from entrenar.checks import check_dtype, check_ndim
from entrenar.errors import ConfigError

__all__ = ["clip_factor", "clip_grad_norm", "grad_norm"]


def grad_norm(flat: np.ndarray) -> np.ndarray:
    """Return the Euclidean norm.

    Args:
        flat: [n], any floating dtype.

    Returns:
        float32 [1] (float64 for a float64 ``flat``); 0 for an empty one. It neither overflows nor
        vanishes while the norm itself is representable; NaN and infinity carry through.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is not floating.
    """
    check_dtype("grad_norm", "flat", flat)
    check_ndim("grad_norm", "flat", flat, 1)
    wide = flat.astype(np.promote_types(flat.dtype, np.float32))
    largest = np.max(np.abs(wide), initial=0)
    if largest == 0 or not np.isfinite(largest):
        return np.array([largest], dtype=wide.dtype)
    return np.array([largest * np.sqrt(np.sum(np.square(wide / largest)))], dtype=wide.dtype)


def clip_factor(
    flat: np.ndarray, max_norm: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the norm, the factor that brings it down to ``max_norm``, and whether to skip the step.

    Args:
        flat: [n], any floating dtype.
        max_norm: Above 0; None or infinity for no clipping.

    Returns:
        ``(norm, factor, skip)``: float32 [1], float32 [1], int32 [1] (the first two float64 for a
        float64 ``flat``). The factor is ``min(1, max_norm / norm)``, and 1 for a norm of 0. Where
        the norm is not finite it is 0 and ``skip`` is 1.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is not floating.
        ConfigError: ``max_norm`` is not above 0.
    """
    return factor_of(grad_norm(flat), check_max_norm("clip_factor", max_norm))


def factor_of(norm: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(norm, factor, skip)`` of a norm [1] and the most it may be."""
    if not np.isfinite(norm[0]):
        return norm, np.zeros_like(norm), np.ones(1, dtype=np.int32)
    factor = limit / norm[0] if norm[0] > limit else 1.0
    return norm, np.array([factor], dtype=norm.dtype), np.zeros(1, dtype=np.int32)


def clip_grad_norm(flat: np.ndarray, max_norm: float | None) -> np.ndarray:
    """Scale ``flat`` in place so that its norm is at most ``max_norm``, and return the norm before.

    Args:
        flat: [n], any floating dtype; written.
        max_norm: Above 0; None or infinity for no clipping.

    Returns:
        The norm before scaling, as :func:`grad_norm` returns it. Where it is not finite ``flat``
        stays as it is: scaling would turn the finite entries into zeros and the others into NaN.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is not floating.
        ConfigError: ``max_norm`` is not above 0.
    """
    limit = check_max_norm("clip_grad_norm", max_norm)
    norm, factor, skip = factor_of(grad_norm(flat), limit)
    if not skip[0]:
        flat[...] = flat * factor[0]
    return norm


def check_max_norm(op: str, max_norm: float | None) -> float:
    """Return the limit as a number, infinity for None.

    Raises:
        ConfigError: It is not above 0.
    """
    if max_norm is None:
        return float("inf")
    if not max_norm > 0:
        raise ConfigError(
            f"{op}: max_norm is {max_norm}, wanted more than 0", "pass None to switch clipping off"
        )
    return float(max_norm)
