"""Matrix products: ``c = scale * op(a) @ op(b) + bias``, plain or batched, with transposes as strides.

16-bit operands go to the matrix units with a float32 accumulator; fp32 operands are multiplied as
IEEE float32 unless ``precision="tf32"``. Scale, bias and what ``out`` held are applied to the float32
sum, and the result is rounded once, at the store. Where the tiles of the result are few and the inner
size is long, the sum is split over k: parts go to float32 scratch and a second launch adds them in
order, so two runs agree to the bit. Tiles and splits depend on shape and dtype (and on the shared
memory of the device) alone; nothing is tuned at run time.

Bytes moved: a once per column of tiles, b once per row of tiles, c once; programs are ordered in
groups of rows so that the second-level cache serves the repeats (Triton's tutorial 03).
"""

from __future__ import annotations

from typing import Any

import torch

from entrenar.checks import check_dtype, check_ndim, check_same_dtype, check_shape
from entrenar.errors import ConfigError, LayoutError, ShapeMismatchError
from entrenar.kernels._gemm_described import Layout, describe, launch_described
from entrenar.kernels._gemm_kernels import add_parts_kernel, matmul_kernel
from entrenar.kernels._gemm_tiles import (
    GROUP_M,
    MATRIX_ROWS,
    Tile,
    architecture_of,
    choose_split,
    choose_tile,
    has_descriptors,
    kind_of,
)
from entrenar.kernels._launch import (
    cdiv,
    check_floating,
    empty,
    interpreting,
    launch,
    next_power_of_2,
    on_amd,
    prepare,
    require_contiguous,
)

__all__ = ["gemm_backward_a", "gemm_backward_b", "gemm_forward", "matmul"]


def gemm_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return ``a @ b``.

    Args:
        a: [m, k]; fp32, fp16 or bf16, any strides.
        b: [k, n], dtype of ``a``, any strides.
        out: [m, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or a new [m, n]; zeros where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    _check_pair("gemm_forward", "a", a, "b", b)
    check_shape("gemm_forward", "b", b, (a.shape[1], -1), "the inner sizes of a and b must agree")
    return _product("gemm_forward", a, b, None, 1.0, out, accumulate, precision, stream)


def gemm_backward_a(
    grad_c: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of ``a`` in ``c = a @ b``: ``grad_c @ b.T``, the transpose by strides.

    Args:
        grad_c: [m, n]; fp32, fp16 or bf16, any strides.
        b: [k, n], dtype of ``grad_c``, any strides.
        out: [m, k] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    op = "gemm_backward_a"
    _check_pair(op, "grad_c", grad_c, "b", b)
    check_shape(op, "b", b, (-1, grad_c.shape[1]), "grad_c and b share their columns")
    return _product(op, grad_c, b.transpose(0, 1), None, 1.0, out, accumulate, precision, stream)


def gemm_backward_b(
    a: torch.Tensor,
    grad_c: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return the gradient of ``b`` in ``c = a @ b``: ``a.T @ grad_c``, the transpose by strides.

    Args:
        a: [m, k]; fp32, fp16 or bf16, any strides.
        grad_c: [m, n], dtype of ``a``, any strides.
        out: [k, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage.
        ConfigError: Another precision, or ``accumulate`` without ``out``.
    """
    op = "gemm_backward_b"
    _check_pair(op, "a", a, "grad_c", grad_c)
    check_shape(op, "grad_c", grad_c, (a.shape[0], -1), "a and grad_c share their rows")
    return _product(op, a.transpose(0, 1), grad_c, None, 1.0, out, accumulate, precision, stream)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: str = "ieee",
    stream: Any = None,
) -> torch.Tensor:
    """Return ``scale * (op(a) @ op(b)) + bias``, ``op`` transposing the last two axes where asked.

    Args:
        a: [m, k] or [B, m, k] after ``op``; fp32, fp16 or bf16, any strides.
        b: [k, n] after ``op``, shared by the batch, or [B, k, n]; dtype of ``a``, any strides.
        trans_a: ``a`` is stored [k, m].
        trans_b: ``b`` is stored [n, k].
        bias: [n] in the dtype of ``a``, contiguous, or None.
        scale: Factor of the product, not of the bias.
        out: [m, n] or [B, m, n] of any of these dtypes to write to, or None for new storage.
        accumulate: Add to what ``out`` holds, in float32, before the one rounding.
        precision: ``"ieee"``, or ``"tf32"``: fp32 operands rounded to 10 bits of mantissa.
        stream: The stream to launch on; torch's current one where None.

    Returns:
        ``out``, or new storage in the dtype of ``a``; the bias alone, or zeros, where k is 0.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are not fp32, fp16 or bf16.
        LayoutError: Elements of ``out`` share storage, or ``bias`` is not contiguous.
        ConfigError: Another precision, or ``accumulate`` without ``out``.

    Numerics: Sums in float32, in an order fixed by the shape; one rounding at the store.
    """
    check_ndim("matmul", "a", a, 2, 3)
    check_ndim("matmul", "b", b, *((2,) if a.ndim == 2 else (2, 3)))
    check_dtype("matmul", "a", a)
    check_same_dtype("matmul", a=a, b=b, bias=bias)
    left = a.transpose(-1, -2) if trans_a else a
    right = b.transpose(-1, -2) if trans_b else b
    if left.shape[-1] != right.shape[-2]:
        raise ShapeMismatchError(
            f"matmul: a has {left.shape[-1]} columns and b {right.shape[-2]} rows once transposed, "
            "wanted the same",
            "check trans_a and trans_b",
        )
    if right.ndim == 3:
        check_shape("matmul", "b", b, (a.shape[0], -1, -1), "a and b share the batch")
    if bias is not None:
        check_shape("matmul", "bias", bias, (right.shape[-1],), "one bias per column of b")
        require_contiguous("matmul", bias=bias)
    return _product("matmul", left, right, bias, float(scale), out, accumulate, precision, stream)


def _check_pair(op: str, name_x: str, x: torch.Tensor, name_y: str, y: torch.Tensor) -> None:
    check_ndim(op, name_x, x, 2)
    check_ndim(op, name_y, y, 2)
    check_dtype(op, name_x, x)
    check_same_dtype(op, **{name_x: x, name_y: y})


def _product(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor | None,
    accumulate: bool,
    precision: str,
    stream: Any,
) -> torch.Tensor:
    """Launch ``scale * a @ b + bias`` on [.., m, k] and [.., k, n] of any strides."""
    shape = (*a.shape[:-1], b.shape[-1])
    _check_out(op, out, shape, accumulate, precision)
    given = {name: t for name, t in (("a", a), ("b", b), ("out", out)) if t is not None}
    check_floating(op, **given)
    prepare(op, *given.values(), *(() if bias is None else (bias,)))
    c = empty(shape, a.dtype, like=a) if out is None else out
    if c.numel() == 0:
        return c
    rows = c
    if (
        b.ndim == 2
        and a.ndim == 3
        and a.stride(0) == a.shape[1] * a.stride(1)
        and c.is_contiguous()
    ):
        # rows of the whole batch lie evenly: one product with more rows fills the tiles better
        a, rows = a.flatten(0, 1), c.flatten(0, 1)
    order = {"op": op, "stream": stream}
    _launch_product(order, a, b, bias, scale, rows, accumulate, precision)
    return c


def _check_out(
    op: str, out: torch.Tensor | None, shape: tuple[int, ...], accumulate: bool, precision: str
) -> None:
    if precision not in ("ieee", "tf32"):
        raise ConfigError(f"{op}: precision is {precision!r}, wanted 'ieee' or 'tf32'", "")
    if out is None:
        if accumulate:
            raise ConfigError(f"{op}: accumulate without out, wanted storage to add to", "pass out")
        return
    check_dtype(op, "out", out)
    check_shape(op, "out", out, shape)
    if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)):
        raise LayoutError(
            f"{op}: out has strides {out.stride()}, wanted storage of its own for each element",
            "expanded storage cannot be written to; make it contiguous",
        )


def _launch_product(
    order: dict[str, Any],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    c: torch.Tensor,
    accumulate: bool,
    precision: str,
) -> None:
    batch = a.shape[0] if a.ndim == 3 else 1
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    architecture = architecture_of(a.device)
    layouts = _described(a, b, architecture)
    kind = "16-bit" if layouts else kind_of(a, b, precision)
    tile = choose_tile(architecture, kind, batch, m, n, k)
    if layouts and tile.m < MATRIX_ROWS:
        # matrix instructions of few rows take their operands from registers: nothing is gained
        layouts, kind = None, kind_of(a, b, precision)
        tile = choose_tile(architecture, kind, batch, m, n, k)
    tiles = batch * cdiv(m, tile.m) * cdiv(n, tile.n)
    split = choose_split(architecture, tiles, k, tile)
    splits = split[1]
    target = c if splits == 1 else empty((splits, batch, m, n), torch.float32, like=a)
    finish: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "ACCUMULATE": accumulate,
        "scale": scale,
        "bias_ptr": a if bias is None else bias,
    }
    extra = () if bias is None else (bias,)
    extra = (*extra, c) if accumulate else extra
    reads = (a, b, *extra) if splits == 1 else (a, b)
    sizes = (batch, m, n, k)
    if layouts:
        launch_described(
            order, (a, layouts[0]), (b, layouts[1]), target, finish, reads, sizes, split, tile,
            architecture,
        )  # fmt: skip
    else:
        _launch_through_pointers(order, a, b, target, finish, reads, sizes, split, tile, precision)
    if splits > 1:
        _launch_add_parts(order, target, c, finish, extra, (batch, m, n))


def _described(a: torch.Tensor, b: torch.Tensor, architecture: str) -> tuple[Layout, Layout] | None:
    """Return the layouts of both operands where the product can go through tensor descriptors."""
    if not has_descriptors(architecture) or a.element_size() != 2 or a.shape[-1] == 0:
        return None
    left = describe(a)
    right = describe(b) if left else None
    return (left, right) if left and right else None


def _launch_through_pointers(
    order: dict[str, Any],
    a: torch.Tensor,
    b: torch.Tensor,
    target: torch.Tensor,
    finish: dict[str, Any],
    reads: tuple[torch.Tensor, ...],
    sizes: tuple[int, int, int, int],
    split: tuple[int, int],
    tile: Tile,
    precision: str,
) -> None:
    batch, m, n, k = sizes
    k_per_split, splits = split
    launch(
        matmul_kernel,
        (batch * cdiv(m, tile.m) * cdiv(n, tile.n) * splits,),
        **order,
        reads=reads,
        writes=(target,),
        a_ptr=a,
        b_ptr=b,
        out_ptr=target,
        M=m,
        N=n,
        K=k,
        k_per_split=k_per_split,
        stride_ab=a.stride(0) if a.ndim == 3 else 0,
        stride_am=a.stride(-2),
        stride_ak=a.stride(-1),
        stride_bb=b.stride(0) if b.ndim == 3 else 0,
        stride_bk=b.stride(-2),
        stride_bn=b.stride(-1),
        stride_os=target.stride(0) if splits > 1 else 0,
        stride_ob=target.stride(-3) if target.ndim > 2 else 0,
        stride_om=target.stride(-2),
        stride_on=target.stride(-1),
        **finish,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=GROUP_M,
        SPLIT_K=splits,
        EVEN_K=k % tile.k == 0,
        PRECISION="ieee" if on_amd() or interpreting() else precision,
        UPCAST_DOT=interpreting(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _launch_add_parts(
    order: dict[str, Any],
    parts: torch.Tensor,
    c: torch.Tensor,
    finish: dict[str, Any],
    extra: tuple[torch.Tensor, ...],
    sizes: tuple[int, int, int],
) -> None:
    batch, m, n = sizes
    block_n = min(next_power_of_2(n), 256)
    block_m = min(next_power_of_2(m), max(1024 // block_n, 1))
    launch(
        add_parts_kernel,
        (batch * cdiv(m, block_m) * cdiv(n, block_n),),
        **order,
        reads=(parts, *extra),
        writes=(c,),
        parts_ptr=parts,
        out_ptr=c,
        M=m,
        N=n,
        n_parts=parts.shape[0],
        stride_part=parts.stride(0),
        stride_ob=c.stride(0) if c.ndim == 3 else 0,
        stride_om=c.stride(-2),
        stride_on=c.stride(-1),
        **finish,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
