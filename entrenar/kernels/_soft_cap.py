"""The soft cap of scores and logits: ``cap * tanh(x / cap)``, near ``x`` where that is small.

Numerics: float32, within 4 units of roundoff of the exact value. Below 0.3 the hyperbolic tangent is its
series, whose first term left out is 5e-8 of it there; above, ``(1 - e) / (1 + e)`` with ``e = exp(-2 |y|)``,
which loses two bits at 0.3 and none further on. The hardware's own ``tanh`` is good to 11 bits alone.
Source: Gemma Team, "Gemma 2" (arXiv:2408.00118), section 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["soft_cap"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap(x, cap):
    """Return ``cap * tanh(x / cap)`` of float32 values; infinities become the cap, NaN stays."""
    y = x / cap
    far = tl.abs(y)
    near = tl.minimum(far, 0.3)
    square = near * near
    series = 2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0))
    series = near * (1.0 - square * (1.0 / 3.0 - square * series))
    e = tl.exp2(far * (-2.0 * _LOG2E))
    t = tl.where(far < 0.3, series, (1.0 - e) / (1.0 + e))
    return cap * tl.where(y < 0.0, -t, t)
