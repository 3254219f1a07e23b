"""Sums, products, bias, scaling, casts and fills, element by element.

Every kernel computes in float32 and rounds once, to nearest even, at the store. Storage is fp32,
fp16 or bf16, contiguous, of any shape; where ``out`` may be an input, it is exactly that input, not
storage that overlaps it in part. Bytes moved: each operand once, the result once. A block that lies
wholly inside the array is read without a mask, so that an odd length costs 128-bit accesses only in
its last block. ``bias_backward`` sums rows in an order fixed by the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_alike, check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import DTypeError
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    check_storage,
    empty,
    launch,
    next_power_of_2,
    prepare,
    require_contiguous,
)

__all__ = [
    "add",
    "add_",
    "bias_add",
    "bias_backward",
    "cast",
    "fill_",
    "multiply",
    "scale",
]


@triton.jit
def _block_offsets(pid, BLOCK: tl.constexpr):
    # 64-bit before the product: past 2^31 elements an int32 offset turns negative
    return pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _combine(a, b, MULTIPLY: tl.constexpr):
    return a * b if MULTIPLY else a + b


@triton.jit
def _binary_kernel(a_ptr, b_ptr, out_ptr, n, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = _block_offsets(pid, BLOCK)  # [BLOCK]
    if (pid.to(tl.int64) + 1) * BLOCK <= n:
        a = tl.load(a_ptr + offsets).to(tl.float32)
        b = tl.load(b_ptr + offsets).to(tl.float32)
        y = _combine(a, b, MULTIPLY)
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty))
    else:
        inside = offsets < n
        a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        y = _combine(a, b, MULTIPLY)
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unary_kernel(x_ptr, out_ptr, n, factor, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = _block_offsets(pid, BLOCK)  # [BLOCK]
    if (pid.to(tl.int64) + 1) * BLOCK <= n:
        y = tl.load(x_ptr + offsets).to(tl.float32)
        if SCALE:
            y = y * factor
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty))
    else:
        inside = offsets < n
        y = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            y = y * factor
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fill_kernel(x_ptr, n, value, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = _block_offsets(pid, BLOCK)  # [BLOCK]
    y = tl.full((BLOCK,), value, tl.float32).to(x_ptr.dtype.element_ty)
    if (pid.to(tl.int64) + 1) * BLOCK <= n:
        tl.store(x_ptr + offsets, y)
    else:
        tl.store(x_ptr + offsets, y, mask=offsets < n)


@triton.jit
def _bias_add_kernel(
    x_ptr, bias_ptr, out_ptr, n_rows, n_cols, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    blocks_n = tl.cdiv(n_cols, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // blocks_n).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    cols = (pid % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = x + bias[None, :]
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _column_sum_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    n_cols,
    rows_per_program,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum one stretch of rows of one block of columns into a row of ``out``."""
    blocks_n = tl.cdiv(n_cols, BLOCK_N)
    pid = tl.program_id(0)
    stretch = (pid // blocks_n).to(tl.int64)
    cols = (pid % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_cols = cols < n_cols
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    first = stretch * rows_per_program
    for start in range(0, rows_per_program, BLOCK_T):
        local = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        rows = first + local
        inside = ((local < rows_per_program) & (rows < n_rows))[:, None] & in_cols[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        total += tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    summed = tl.sum(total, axis=0)
    target = out_ptr + stretch * n_cols + cols
    tl.store(target, summed.to(out_ptr.dtype.element_ty), mask=in_cols)


def add(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, stream: Any = None
) -> torch.Tensor:
    """Return ``a + b``.

    Args:
        a: Any shape; fp32, fp16 or bf16, contiguous.
        b: Shape and dtype of ``a``.
        out: Shape and dtype of ``a`` to write to, or None; may be ``a`` or ``b``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    return _binary("add", a, b, out, stream, multiply=False)


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, stream: Any = None
) -> torch.Tensor:
    """Return ``a * b``.

    Args:
        a: Any shape; fp32, fp16 or bf16, contiguous.
        b: Shape and dtype of ``a``.
        out: Shape and dtype of ``a`` to write to, or None; may be ``a`` or ``b``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    return _binary("multiply", a, b, out, stream, multiply=True)


def add_(dst: torch.Tensor, src: torch.Tensor, stream: Any = None) -> torch.Tensor:
    """Add ``src`` to ``dst`` in place and return ``dst``.

    Args:
        dst: Any shape; fp32, fp16 or bf16, contiguous.
        src: Shape of ``dst``, any of these dtypes: a 16-bit gradient may go into fp32 storage.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Shapes differ.
        DTypeError: A dtype is not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    check_dtype("add_", "dst", dst)
    check_dtype("add_", "src", src)
    check_shape("add_", "src", src, tuple(dst.shape))
    _ready("add_", dst=dst, src=src)
    _launch_binary("add_", dst, src, dst, stream, multiply=False)
    return dst


def scale(
    x: torch.Tensor, s: float, out: torch.Tensor | None = None, stream: Any = None
) -> torch.Tensor:
    """Return ``s * x``.

    Args:
        x: Any shape; fp32, fp16 or bf16, contiguous.
        s: The factor, rounded to float32.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: ``out`` has another shape.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    check_alike("scale", x=x, out=out)
    _ready("scale", x=x, out=out)
    y = empty(x.shape, x.dtype, like=x) if out is None else out
    _launch_unary("scale", x, y, float(s), stream, scaled=True)
    return y


def cast(x: torch.Tensor, dtype: torch.dtype, stream: Any = None) -> torch.Tensor:
    """Return ``x`` rounded to another dtype, to nearest and ties to even.

    Args:
        x: Any shape; fp32, fp16 or bf16, contiguous.
        dtype: torch.float32, torch.float16 or torch.bfloat16; the dtype of ``x`` gives a copy.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        DTypeError: Either dtype is another one.
        LayoutError: ``x`` is not contiguous.

    Numerics: NaN stays NaN, infinities and signed zeros stay; what is past the largest finite value
        rounds to infinity, subnormals are kept.
    """
    check_dtype("cast", "x", x)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise DTypeError(f"cast: dtype is {name}, wanted float32, float16 or bfloat16", "")
    _ready("cast", x=x)
    y = empty(x.shape, dtype, like=x)
    _launch_unary("cast", x, y, 1.0, stream, scaled=False)
    return y


def fill_(x: torch.Tensor, value: float, stream: Any = None) -> torch.Tensor:
    """Set every element of ``x`` to ``value`` and return ``x``.

    Args:
        x: Any shape; fp32, fp16 or bf16, contiguous.
        value: Rounded to float32, then to the dtype of ``x``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        DTypeError: ``x`` is not fp32, fp16 or bf16.
        LayoutError: ``x`` is not contiguous.
    """
    check_dtype("fill_", "x", x)
    _ready("fill_", x=x)
    n = x.numel()
    if n:
        block = _FLAT_BLOCK[x.element_size()]
        launch(
            _fill_kernel,
            (cdiv(n, block),),
            op="fill_",
            stream=stream,
            reads=(),
            writes=(x,),
            x_ptr=x,
            n=n,
            value=float(value),
            BLOCK=block,
            num_warps=_FLAT_WARPS,
        )
    return x


def bias_add(
    x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None = None, stream: Any = None
) -> torch.Tensor:
    """Return ``x + bias``, the same bias for every row.

    Args:
        x: [T, n]; fp32, fp16 or bf16, contiguous.
        bias: [n], dtype of ``x``.
        out: Shape and dtype of ``x`` to write to, or None; may be ``x``.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: An argument is not contiguous.
    """
    check_ndim("bias_add", "x", x, 2)
    check_alike("bias_add", x=x, out=out)
    check_same_dtype("bias_add", x=x, bias=bias)
    check_shape("bias_add", "bias", bias, (x.shape[1],), "one bias per column")
    _ready("bias_add", x=x, bias=bias, out=out)
    y = empty(x.shape, x.dtype, like=x) if out is None else out
    n_rows, n_cols = x.shape
    if n_rows and n_cols:
        block_n = min(next_power_of_2(n_cols), 1024)
        block_t = min(next_power_of_2(n_rows), max(4096 // block_n, 1))
        launch(
            _bias_add_kernel,
            (cdiv(n_rows, block_t) * cdiv(n_cols, block_n),),
            op="bias_add",
            stream=stream,
            reads=(x, bias),
            writes=(y,),
            x_ptr=x,
            bias_ptr=bias,
            out_ptr=y,
            n_rows=n_rows,
            n_cols=n_cols,
            BLOCK_T=block_t,
            BLOCK_N=block_n,
            num_warps=4 if block_t * block_n <= 2048 else 8,
        )
    return y


def bias_backward(grad_y: torch.Tensor, stream: Any = None) -> torch.Tensor:
    """Return the gradient of a bias: the sum over rows.

    Args:
        grad_y: [T, n]; fp32, fp16 or bf16, contiguous.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        [n], dtype of ``grad_y``; zeros where T is 0.

    Raises:
        ShapeMismatchError: ``grad_y`` is not 2-D.
        DTypeError: ``grad_y`` is not fp32, fp16 or bf16.
        LayoutError: ``grad_y`` is not contiguous.

    Numerics: Stretches of rows are summed in float32, then the stretches, both in an order fixed by
        the shape: no atomics, the same to the bit on every run and every device.
    """
    check_ndim("bias_backward", "grad_y", grad_y, 2)
    check_dtype("bias_backward", "grad_y", grad_y)
    _ready("bias_backward", grad_y=grad_y)
    n_rows, n_cols = grad_y.shape
    out = empty((n_cols,), grad_y.dtype, like=grad_y)
    if n_cols == 0:
        return out
    rows_each = _rows_per_stretch(n_rows, n_cols)
    stretches = max(cdiv(n_rows, rows_each), 1)
    if stretches == 1:
        _launch_column_sum(grad_y, out, n_rows, n_cols, rows_each, stream)
        return out
    partial = empty((stretches, n_cols), torch.float32, like=grad_y)
    _launch_column_sum(grad_y, partial, n_rows, n_cols, rows_each, stream)
    _launch_column_sum(partial, out, stretches, n_cols, stretches, stream)
    return out


def _binary(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    stream: Any,
    multiply: bool,
) -> torch.Tensor:
    check_storage(op, a=a, b=b)
    check_alike(op, a=a, b=b, out=out)
    _ready(op, a=a, b=b, out=out)
    y = empty(a.shape, a.dtype, like=a) if out is None else out
    _launch_binary(op, a, b, y, stream, multiply)
    return y


def _launch_binary(
    op: str, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, stream: Any, multiply: bool
) -> None:
    n = a.numel()
    if n == 0:
        return
    block = _FLAT_BLOCK[a.element_size()]
    launch(
        _binary_kernel,
        (cdiv(n, block),),
        op=op,
        stream=stream,
        reads=(a, b),
        writes=(y,),
        a_ptr=a,
        b_ptr=b,
        out_ptr=y,
        n=n,
        MULTIPLY=multiply,
        BLOCK=block,
        num_warps=_FLAT_WARPS,
    )


def _launch_unary(
    op: str, x: torch.Tensor, y: torch.Tensor, factor: float, stream: Any, scaled: bool
) -> None:
    n = x.numel()
    if n == 0:
        return
    block = _FLAT_BLOCK[min(x.element_size(), y.element_size())]
    launch(
        _unary_kernel,
        (cdiv(n, block),),
        op=op,
        stream=stream,
        reads=(x,),
        writes=(y,),
        x_ptr=x,
        out_ptr=y,
        n=n,
        factor=factor,
        SCALE=scaled,
        BLOCK=block,
        num_warps=_FLAT_WARPS,
    )


def _launch_column_sum(
    x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, rows_each: int, stream: Any
) -> None:
    block_n = _column_block(n_cols)
    block_t = min(next_power_of_2(max(rows_each, 1)), max(2048 // block_n, 1))
    launch(
        _column_sum_kernel,
        (max(cdiv(n_rows, rows_each), 1) * cdiv(n_cols, block_n),),
        op="bias_backward",
        stream=stream,
        reads=(x,),
        writes=(out,),
        x_ptr=x,
        out_ptr=out,
        n_rows=n_rows,
        n_cols=n_cols,
        rows_per_program=rows_each,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        num_warps=4,
    )


def _ready(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: t for name, t in tensors.items() if t is not None}
    check_floating(op, **given)
    require_contiguous(op, **given)
    prepare(op, *given.values())


# Not measured here: elements a program, so that each of 256 threads makes two 128-bit accesses an
# operand, and stretches enough for two programs on each of 132 processors.
_FLAT_BLOCK = {2: 4096, 4: 2048}
_FLAT_WARPS = 8
_STRETCH_PROGRAMS = 264
_MIN_STRETCH_ROWS = 32


def _column_block(n_cols: int) -> int:
    return min(next_power_of_2(n_cols), 256)


def _rows_per_stretch(n_rows: int, n_cols: int) -> int:
    """Return the rows that one program sums; of the shape alone, so that the order is fixed."""
    wanted = cdiv(_STRETCH_PROGRAMS, cdiv(n_cols, _column_block(n_cols)))
    return max(cdiv(n_rows, wanted), _MIN_STRETCH_ROWS)
