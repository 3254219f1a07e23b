"""Gather rows of a table by id, and add gradients back to the rows they came from.

Forward: ``y[t] = weight[ids[t]]``. Backward: ``grad_weight[r] = sum of grad_y[t] where ids[t] = r``: one
launch sorts the tokens by id and position, another gives each run of tokens with one id to the
programs of its first, which write the row once. So there are no atomics and two runs agree to the
bit. A token's rank is counted, among all ids once for every 64 tokens: 64 MiB of cached reads and
3 G integer operations at 32768 tokens, less than the launches that sorting by digits would take.

Numerics: the gather is exact; sums are float32, rounded once. An id out of range never reads or
writes outside: forward turns its row to NaN and sets the status word, backward leaves it out; on CPU
storage without a status word it raises.
Bytes moved: 2 elements forward; backward 2, a zero for each element of the table, and 16 bytes a token.
Source: a gather and its transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from entrenar.checks import check_dtype, check_ndim, check_shape
from entrenar.errors import DataError, ShapeMismatchError
from entrenar.kernels import _launch

__all__ = ["embedding_backward", "embedding_forward"]


@triton.jit
def _embedding_forward_kernel(
    ids_ptr,
    weight_ptr,
    y_ptr,
    status_ptr,
    n_rows,
    n_cols,
    n_col_blocks,
    HAS_STATUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    token = (pid // n_col_blocks).to(tl.int64)
    cols = (pid % n_col_blocks) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    inside = (row >= 0) & (row < n_rows)
    found = cols < tl.where(inside, n_cols, 0)
    value = tl.load(weight_ptr + row * n_cols + cols, mask=found, other=float("nan"))
    tl.store(y_ptr + token * n_cols + cols, value, mask=cols < n_cols)
    if HAS_STATUS:
        # every program that sees one stores the same word
        tl.store(status_ptr, 1, mask=inside == 0)


@triton.jit
def _zero_kernel(x_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    tl.store(x_ptr + offsets, zeros, mask=offsets < n_elements)


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_order_kernel(
    ids_ptr, order_ptr, run_ptr, n_tokens, TOKENS: tl.constexpr, OTHERS: tl.constexpr
):
    """Sort tokens by id, then position: each counts what comes before it.

    ``order[rank]`` is the token; ``run[rank]`` is how many tokens name its id if it is the first of
    them, else 0.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(ids_ptr + tokens, mask=tokens < n_tokens, other=0)
    rank = tl.zeros((TOKENS,), dtype=tl.int32)
    earlier = tl.zeros((TOKENS,), dtype=tl.int32)
    alike = tl.zeros((TOKENS,), dtype=tl.int32)
    for start in range(0, n_tokens, OTHERS):
        others = start + tl.arange(0, OTHERS)
        real = (others < n_tokens)[None, :]
        theirs = tl.load(ids_ptr + others, mask=others < n_tokens, other=0)[None, :]
        same = (theirs == mine[:, None]) & real
        rank += tl.sum(((theirs < mine[:, None]) & real).to(tl.int32), axis=1)
        earlier += tl.sum((same & (others[None, :] < tokens[:, None])).to(tl.int32), axis=1)
        alike += tl.sum(same.to(tl.int32), axis=1)
    rank += earlier
    tl.store(order_ptr + rank, tokens, mask=tokens < n_tokens)
    tl.store(run_ptr + rank, tl.where(earlier == 0, alike, 0), mask=tokens < n_tokens)


@triton.jit
def _embedding_backward_kernel(
    grad_y_ptr,
    ids_ptr,
    order_ptr,
    run_ptr,
    grad_weight_ptr,
    n_rows,
    n_cols,
    n_col_blocks,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the run of tokens that starts at this rank, for one block of columns."""
    pid = tl.program_id(0)
    rank = pid // n_col_blocks
    cols = (pid % n_col_blocks) * BLOCK + tl.arange(0, BLOCK)
    n_alike = tl.load(run_ptr + rank)
    if n_alike == 0:
        return
    row = tl.load(ids_ptr + tl.load(order_ptr + rank)).to(tl.int64)
    if (row >= 0) & (row < n_rows):
        total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        for start in range(0, n_alike, TOKENS):
            place = start + tl.arange(0, TOKENS)
            inside = place < n_alike
            tokens = tl.load(order_ptr + rank + place, mask=inside, other=0).to(tl.int64)
            mask = inside[:, None] & (cols < n_cols)[None, :]
            offsets = tokens[:, None] * n_cols + cols[None, :]
            total += tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_weight_ptr + row * n_cols + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def embedding_forward(
    ids: torch.Tensor,
    weight: torch.Tensor,
    status: torch.Tensor | None = None,
    *,
    stream: Any = None,
) -> torch.Tensor:
    """Return ``weight[ids]``.

    Args:
        ids: int64 or int32 [T], each at least 0 and below V.
        weight: [V, H] contiguous, float32, float16 or bfloat16.
        status: int32 [1] whose word becomes 1 where an id is out of range, or None. It is never set
            to 0. The row of such an id is NaN.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        [T, H], dtype of ``weight``.

    Raises:
        ShapeMismatchError: Numbers of dimensions do not fit.
        DTypeError: A dtype is none of the above.
        LayoutError: A tensor is not contiguous.
        DataError: An id is out of range, on CPU storage without ``status``.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.
    """
    op = "embedding_forward"
    _check_ids(op, ids)
    _launch.check_storage(op, weight=weight)
    check_ndim(op, "weight", weight, 2)
    _launch.check_floating(op, weight=weight)
    if status is not None:
        check_dtype(op, "status", status, "int32")
        check_shape(op, "status", status, (1,))
    _launch.prepare(op, ids, weight, *([] if status is None else [status]))
    _launch.require_contiguous(op, ids=ids, weight=weight)
    n_rows, n_cols = weight.shape
    if status is None:
        _check_range(op, ids, n_rows)
    y = _launch.empty((ids.shape[0], n_cols), weight.dtype, weight)
    if y.numel() == 0:
        return y
    block = min(_launch.next_power_of_2(n_cols), _MAX_BLOCK)
    n_col_blocks = _launch.cdiv(n_cols, block)
    _launch.launch(
        _embedding_forward_kernel,
        (ids.shape[0] * n_col_blocks,),
        op=op,
        stream=stream,
        reads=[ids, weight],
        writes=[y] if status is None else [y, status],
        ids_ptr=ids,
        weight_ptr=weight,
        y_ptr=y,
        status_ptr=status,
        n_rows=n_rows,
        n_cols=n_cols,
        n_col_blocks=n_col_blocks,
        HAS_STATUS=status is not None,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
    )
    return y


def embedding_backward(
    grad_y: torch.Tensor, ids: torch.Tensor, n_rows: int, *, stream: Any = None
) -> torch.Tensor:
    """Add each row of ``grad_y`` to the row of its id, in order of position.

    Args:
        grad_y: [T, H] contiguous, float32, float16 or bfloat16.
        ids: int64 or int32 [T], each at least 0 and below ``n_rows``.
        n_rows: Rows of the table, V.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        [V, H], dtype of ``grad_y``; rows whose id does not occur are 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: A dtype is none of the above.
        LayoutError: A tensor is not contiguous.
        DataError: An id is out of range, on CPU storage.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Numerics: sums are float32 in an order fixed by ``ids``, rounded once; no atomics.
    """
    op = "embedding_backward"
    _check_ids(op, ids)
    _launch.check_storage(op, grad_y=grad_y)
    _launch.check_floating(op, grad_y=grad_y)
    check_shape(op, "grad_y", grad_y, (ids.shape[0], -1))
    if n_rows < 0:
        raise ShapeMismatchError(f"{op}: n_rows is {n_rows}, wanted at least 0", "")
    _launch.prepare(op, grad_y, ids)
    _launch.require_contiguous(op, grad_y=grad_y, ids=ids)
    _check_range(op, ids, n_rows)
    n_tokens, n_cols = grad_y.shape
    grad_weight = _launch.empty((n_rows, n_cols), grad_y.dtype, grad_y)
    if grad_weight.numel() == 0:
        return grad_weight
    _launch.launch(
        _zero_kernel,
        (_launch.cdiv(grad_weight.numel(), _ZERO_BLOCK),),
        op=op,
        stream=stream,
        reads=[],
        writes=[grad_weight],
        x_ptr=grad_weight,
        n_elements=grad_weight.numel(),
        BLOCK=_ZERO_BLOCK,
        num_warps=4,
    )
    if n_tokens == 0:
        return grad_weight
    _launch_runs(op, stream, grad_y, ids, grad_weight)
    return grad_weight


def _launch_runs(
    op: str,
    stream: Any,
    grad_y: torch.Tensor,
    ids: torch.Tensor,
    grad_weight: torch.Tensor,
) -> None:
    """Sort the tokens, then write each row that one of them names."""
    n_tokens, n_cols = grad_y.shape
    order, run = (_launch.empty((n_tokens,), torch.int32, ids) for _ in range(2))
    _launch.launch(
        _embedding_order_kernel,
        (_launch.cdiv(n_tokens, _ORDER_TOKENS),),
        op=op,
        stream=stream,
        reads=[ids],
        writes=[order, run],
        ids_ptr=ids,
        order_ptr=order,
        run_ptr=run,
        n_tokens=n_tokens,
        TOKENS=_ORDER_TOKENS,
        OTHERS=_ORDER_TOKENS,
        num_warps=4,
    )
    block = min(_launch.next_power_of_2(n_cols), _BACKWARD_BLOCK)
    n_col_blocks = _launch.cdiv(n_cols, block)
    _launch.launch(
        _embedding_backward_kernel,
        (n_tokens * n_col_blocks,),
        op=op,
        stream=stream,
        reads=[grad_y, ids, order, run],
        writes=[grad_weight],
        grad_y_ptr=grad_y,
        ids_ptr=ids,
        order_ptr=order,
        run_ptr=run,
        grad_weight_ptr=grad_weight,
        n_rows=grad_weight.shape[0],
        n_cols=n_cols,
        n_col_blocks=n_col_blocks,
        TOKENS=_BACKWARD_TOKENS,
        BLOCK=block,
        num_warps=4,
    )


def _check_ids(op: str, ids: torch.Tensor) -> None:
    _launch.check_storage(op, ids=ids)
    check_dtype(op, "ids", ids, "int64", "int32")
    check_ndim(op, "ids", ids, 1)


def _check_range(op: str, ids: torch.Tensor, n_rows: int) -> None:
    if ids.is_cuda or ids.numel() == 0:
        return
    values = ids.numpy()
    low, high = int(np.min(values)), int(np.max(values))
    if not 0 <= low <= high < n_rows:
        raise DataError(
            f"{op}: ids run from {low} to {high}, the table has {n_rows} rows",
            "tokenise with the tokenizer of the same checkpoint",
        )


# A row of up to 2048 elements is one program. Backward keeps a tile of tokens by columns in
# registers, 16 elements a thread: most ids occur a few times. The order is counted in tiles of 32
# comparisons a thread. Chosen from register counts of the sm_90 code, not timed.
_MAX_BLOCK = 2_048
_BACKWARD_TOKENS, _BACKWARD_BLOCK = 4, 512
_ORDER_TOKENS = 64
_ZERO_BLOCK = 4_096
