"""Rotary position embedding of queries and keys, in place, half rotation.

For ``i < R/2`` and the angle ``a`` of the token's position:
``(x[i], x[i + R/2]) <- (x[i] cos a - x[i + R/2] sin a, x[i + R/2] cos a + x[i] sin a)``. Dimension
``i`` is paired with ``i + R/2``, as in the weights on the Hugging Face hub. The backward pass turns
by ``-a``. One launch turns all heads of queries and keys at all positions, one warp a token, which
reads the token's row of the tables once.

Numerics: 16-bit storage is up-cast at the load; the tables and all arithmetic are float32; one
rounding at the store. A position outside the tables turns its row to NaN, which shows, where reading
past the table would not; on CPU storage it raises.
Bytes moved: two elements for each rotated dimension of q and k.
Source: Su et al., arXiv:2104.09864, equation 34; transformers' apply_rotary_pos_emb.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import DataError, LayoutError, ShapeMismatchError
from entrenar.kernels import _launch

__all__ = ["rope_backward", "rope_forward"]


@triton.jit
def _turn(
    base_ptr,
    cos,
    sin,
    n_heads,
    stride_head,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate all heads of one token, HEADS at a time."""
    cols = tl.arange(0, BLOCK)
    for start in range(0, n_heads, HEADS):
        heads = start + tl.arange(0, HEADS)
        mask = (heads < n_heads)[:, None] & (cols < HALF)[None, :]
        first_ptr = base_ptr + heads.to(tl.int64)[:, None] * stride_head + cols[None, :]
        first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
        second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(first_ptr, first * cos - second * sin, mask=mask)
        tl.store(first_ptr + HALF, second * cos + first * sin, mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    n_positions,
    n_q_heads,
    n_k_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    inside = (position >= 0) & (position < n_positions)
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.where(inside, HALF, 0)
    cos = tl.load(cos_ptr + position * HALF + cols, mask=mask, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + position * HALF + cols, mask=mask, other=float("nan"))[None, :]
    if BACKWARD:
        sin = -sin
    q_row_ptr = q_ptr + token * stride_q_token
    k_row_ptr = k_ptr + token * stride_k_token
    _turn(q_row_ptr, cos, sin, n_q_heads, stride_q_head, HALF, Q_HEADS, BLOCK)
    _turn(k_row_ptr, cos, sin, n_k_heads, stride_k_head, HALF, K_HEADS, BLOCK)


def rope_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate ``q`` and ``k`` by the angles of their positions, in place.

    Args:
        q: [T, Hq, D], float32, float16 or bfloat16, heads contiguous; written.
        k: [T, Hkv, D], dtype of ``q``; written. Both may be slices of one fused projection.
        cos: float32 [P, R/2] contiguous, R/2 at most D/2, one row a position.
        sin: As ``cos``.
        positions: int32 or int64 [T], rows of the table.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(q, k)``, the same storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: ``q`` and ``k`` differ, or a dtype is none of the above.
        LayoutError: A head or a table is not contiguous, or heads share memory.
        DataError: A position lies outside the table, on CPU storage.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.
    """
    return _rotate("rope_forward", q, k, cos, sin, positions, False, stream)


def rope_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the gradients back by the same angles, in place: the transpose of the forward pass.

    Args:
        grad_q: [T, Hq, D]; written.
        grad_k: [T, Hkv, D]; written.
        cos: As in the forward pass.
        sin: As in the forward pass.
        positions: As in the forward pass.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(grad_q, grad_k)``, the same storage.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: The dtypes differ or are not the forward pass's.
        LayoutError: A head or a table is not contiguous, or heads share memory.
        DataError: A position lies outside the table, on CPU storage.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.
    """
    return _rotate("rope_backward", grad_q, grad_k, cos, sin, positions, True, stream)


def _rotate(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    backward: bool,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(op, q, k, cos, sin, positions)
    half = cos.shape[1]
    if q.shape[0] == 0 or half == 0 or q.shape[1] + k.shape[1] == 0:
        return q, k
    block = _launch.next_power_of_2(half)
    q_heads, k_heads = (
        min(_launch.next_power_of_2(max(x.shape[1], 1)), max(_TILE // block, 1)) for x in (q, k)
    )
    _launch.launch(
        _rope_kernel,
        (q.shape[0],),
        op=op,
        stream=stream,
        reads=[q, k, cos, sin, positions],
        writes=[q, k],
        q_ptr=q,
        k_ptr=k,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        n_positions=cos.shape[0],
        n_q_heads=q.shape[1],
        n_k_heads=k.shape[1],
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        BACKWARD=backward,
        HALF=half,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        BLOCK=block,
        num_warps=1,
    )
    return q, k


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    _launch.check_storage(op, q=q, k=k, cos=cos, sin=sin, positions=positions)
    check_ndim(op, "q", q, 3)
    check_shape(op, "k", k, (q.shape[0], -1, q.shape[2]))
    check_same_dtype(op, q=q, k=k)
    _launch.check_floating(op, q=q, k=k)
    for name, table in {"cos": cos, "sin": sin}.items():
        check_dtype(op, name, table, "float32")
    check_ndim(op, "cos", cos, 2)
    check_shape(op, "sin", sin, tuple(cos.shape))
    check_dtype(op, "positions", positions, "int32", "int64")
    check_shape(op, "positions", positions, (q.shape[0],))
    if 2 * cos.shape[1] > q.shape[2]:
        raise ShapeMismatchError(
            f"{op}: cos has {cos.shape[1]} angles but a head has {q.shape[2]} dimensions",
            "an angle turns two dimensions: build the table for at most head_dim / 2",
        )
    _launch.prepare(op, q, k, cos, sin, positions)
    _launch.require_contiguous(op, cos=cos, sin=sin, positions=positions)
    for name, x in {"q": q, "k": k}.items():
        if x.numel() and x.shape[2] > 1 and x.stride(2) != 1:
            raise LayoutError(
                f"{op}: {name} has strides {tuple(x.stride())}, wanted contiguous heads",
                "the last axis must have stride 1",
            )
        if x.numel() and not all(s or n == 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            raise LayoutError(
                f"{op}: {name} has strides {tuple(x.stride())}, and heads to be written share memory",
                f"pass {name}.contiguous()",
            )
    if not positions.is_cuda and positions.numel():
        _check_range(op, positions, cos.shape[0])


def _check_range(op: str, positions: torch.Tensor, n_positions: int) -> None:
    values = positions.numpy()
    low, high = int(np.min(values)), int(np.max(values))
    if not 0 <= low <= high < n_positions:
        raise DataError(
            f"{op}: positions run from {low} to {high}, the table has {n_positions} rows",
            "build the table for the longest sequence",
        )


# Elements of each half of the heads a program holds at once: 16 a thread, so that 16-bit storage
# moves 128 bits at a time. One warp a token: each further warp would read the token's row of the tables
# again, 2.4 % of the traffic at 40 heads of 64. Chosen by counted bytes and registers, not timed.
_TILE = 512
