"""Where a result goes: to the caller's array, or to a new one."""

from __future__ import annotations

import numpy as np

__all__ = ["store"]


def store(value: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """Return ``value``, or ``out`` after it was written there in its dtype."""
    if out is None:
        return value
    out[...] = value
    return out
