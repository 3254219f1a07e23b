"""Layer normalisation over the last axis, with the residual addition fused both ways.

Forward: ``y = (x - mean) * rstd * weight + bias``, ``rstd = 1 / sqrt(var(x) + eps)`` with the biased
variance; with a residual, ``x`` is first replaced by ``x + residual``, which is stored too. Backward,
with ``h = (x - mean) * rstd`` and ``g = grad_y * weight``: ``grad_x = rstd * (g - mean(g) - h *
mean(g * h)) + grad_residual``, ``grad_weight = sum over rows of grad_y * h``, ``grad_bias = sum over
rows of grad_y``.

Rows that fit a block are read once and kept in registers, several to a program where they are
narrow. Longer rows are read twice, block by block.

Numerics: 16-bit storage is up-cast at the load, statistics and sums are float32, each result is
rounded once. The variance is summed about the mean, so a row far from zero keeps its digits. The
parameters' gradients are reduced in two stages in an order fixed by the sizes alone, with no
atomics: a program sums its rows, a second launch sums the programs. Two runs agree to the bit.
Bytes moved: forward 2 elements (4 with a residual), backward 3 (4 with its gradient), plus two floats
a row; each parameter's gradient adds ``8 * D`` for each program of the first stage.
Source: Ba, Kiros and Hinton, arXiv:1607.06450, equation 4; torch.nn.functional.layer_norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from entrenar.checks import check_dtype, check_same_dtype, check_shape
from entrenar.errors import ConfigError, ShapeMismatchError
from entrenar.kernels import _launch
from entrenar.kernels import _layer_norm_kernels as _kernels

__all__ = ["layer_norm_backward", "layer_norm_forward"]


def layer_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Normalise each row, after adding ``residual`` where there is one.

    Args:
        x: [..., D] contiguous, float32, float16 or bfloat16.
        weight: [D], dtype of ``x``.
        bias: [D], dtype of ``x``, or None.
        eps: Added to the variance, at least 0.
        residual: Shape and dtype of ``x``, or None.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(y, mean, rstd)``, or ``(y, mean, rstd, residual_sum)`` with ``residual_sum = x +
        residual``, which is then what was normalised, before its own rounding. ``y`` has the shape of
        ``x``; ``mean`` and ``rstd`` are float32 [rows].

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are none of the above.
        LayoutError: A tensor is not contiguous.
        ConfigError: ``eps`` is negative or not a number.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450, equation 4; torch.nn.functional.layer_norm.
    """
    op = "layer_norm_forward"
    _check(op, x, weight, bias, residual=residual)
    if not eps >= 0:
        raise ConfigError(f"{op}: eps is {eps}, wanted at least 0", "")
    n_rows, n_cols = math.prod(x.shape[:-1]), x.shape[-1]
    y = _launch.empty(tuple(x.shape), x.dtype, x)
    mean, rstd = (_launch.empty((n_rows,), torch.float32, x) for _ in range(2))
    total = None if residual is None else _launch.empty(tuple(x.shape), x.dtype, x)
    results = (y, mean, rstd) if total is None else (y, mean, rstd, total)
    if x.numel() == 0:
        return results
    wide = n_cols > _MAX_BLOCK_FORWARD
    rows, block, warps = _tile(n_cols, _MAX_BLOCK_FORWARD)
    _launch.launch(
        _kernels._layer_norm_forward_wide_kernel if wide else _kernels._layer_norm_forward_kernel,
        (n_rows if wide else _launch.cdiv(n_rows, rows),),
        op=op,
        stream=stream,
        reads=[t for t in (x, residual, weight, bias) if t is not None],
        writes=list(results),
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        bias_ptr=bias,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        sum_ptr=total,
        n_cols=n_cols,
        eps=float(eps),
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=warps,
        **({} if wide else {"n_rows": n_rows, "ROWS": rows}),
    )
    return results


def layer_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_residual: torch.Tensor | None = None,
    need_grad_weight: bool = True,
    need_grad_bias: bool = True,
    *,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the normalised input, of the weight and of the bias.

    Args:
        grad_y: [..., D].
        x: [..., D], what was normalised: ``residual_sum`` where there was one.
        weight: [D].
        mean: float32 [rows], from the forward pass.
        rstd: float32 [rows], from the forward pass.
        grad_residual: Gradient that reaches ``x`` past the norm, added in the same pass, or None.
        need_grad_weight: False for a frozen weight: its sums are then not computed at all.
        need_grad_bias: False for a frozen bias or none.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(grad_x, grad_weight, grad_bias)``, dtypes of ``x`` and ``weight``; a gradient that was not
        asked for is None.

    Raises:
        ShapeMismatchError: Sizes do not fit.
        DTypeError: Dtypes differ, or are none of the above.
        LayoutError: A tensor is not contiguous.
        DeviceError: Devices differ, or it is the CPU and no kernel backend is set.

    Numerics: ``grad_weight`` and ``grad_bias`` are summed in float32 in an order that depends on the
        sizes alone.
    """
    op = "layer_norm_backward"
    _launch.check_storage(op, grad_y=grad_y, mean=mean, rstd=rstd)
    _check(op, x, weight, None, mean, rstd, grad_y=grad_y, grad_residual=grad_residual)
    grad_x = _launch.empty(tuple(x.shape), x.dtype, x)
    needs = (need_grad_weight, need_grad_bias)
    partial = None
    if x.numel():
        inputs = {"grad_y_ptr": grad_y, "x_ptr": x, "mean_ptr": mean, "rstd_ptr": rstd}
        launcher = _backward_wide if x.shape[-1] > _MAX_BLOCK_BACKWARD else _backward_tiles
        partial = launcher(op, stream, grad_x, weight, grad_residual, needs, inputs)
    grads = iter(_reduce(op, stream, partial, weight, sum(needs)))
    return grad_x, *(next(grads) if need else None for need in needs)  # type: ignore[return-value]


def _backward_tiles(
    op: str,
    stream: Any,
    grad_x: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    needs: tuple[bool, bool],
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor | None:
    """Launch over tiles of whole rows; return the partial sums [kinds, programs, D] if asked for."""
    n_rows, n_cols = math.prod(grad_x.shape[:-1]), grad_x.shape[-1]
    rows, block, warps = _tile(n_cols, _MAX_BLOCK_BACKWARD)
    n_tiles = _launch.cdiv(n_rows, rows)
    each = _rows_each(n_tiles) if any(needs) else 1
    programs = _launch.cdiv(n_tiles, each)
    partial = _partial(needs, programs, grad_x)
    _launch.launch(
        _kernels._layer_norm_backward_kernel,
        (programs,),
        op=op,
        stream=stream,
        reads=[t for t in (*inputs.values(), weight, grad_residual) if t is not None],
        writes=[grad_x] if partial is None else [grad_x, partial],
        **inputs,
        weight_ptr=weight,
        grad_residual_ptr=grad_residual,
        grad_x_ptr=grad_x,
        partial_ptr=partial,
        n_rows=n_rows,
        n_cols=n_cols,
        n_tiles=each,
        HAS_RESIDUAL=grad_residual is not None,
        NEED_WEIGHT=needs[0],
        NEED_BIAS=needs[1],
        ROWS=rows,
        BLOCK=block,
        # sums of each element besides: half as many elements a thread
        num_warps=min(2 * warps, 16) if any(needs) else warps,
    )
    return partial


def _backward_wide(
    op: str,
    stream: Any,
    grad_x: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    needs: tuple[bool, bool],
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor | None:
    """Launch for rows past a block; return the partial sums [kinds, programs, D] if asked for."""
    n_rows, n_cols = math.prod(grad_x.shape[:-1]), grad_x.shape[-1]
    _launch.launch(
        _kernels._layer_norm_backward_wide_kernel,
        (n_rows,),
        op=op,
        stream=stream,
        reads=[t for t in (*inputs.values(), weight, grad_residual) if t is not None],
        writes=[grad_x],
        **inputs,
        weight_ptr=weight,
        grad_residual_ptr=grad_residual,
        grad_x_ptr=grad_x,
        n_cols=n_cols,
        HAS_RESIDUAL=grad_residual is not None,
        BLOCK=_WIDE_BLOCK,
        num_warps=_WIDE_WARPS,
    )
    each = _rows_each(n_rows)
    programs = _launch.cdiv(n_rows, each)
    partial = _partial(needs, programs, grad_x)
    if partial is None:
        return None
    _launch.launch(
        _kernels._layer_norm_partial_wide_kernel,
        (programs, _launch.cdiv(n_cols, _PARTIAL_BLOCK)),
        op=op,
        stream=stream,
        reads=list(inputs.values()),
        writes=[partial],
        **inputs,
        partial_ptr=partial,
        n_rows=n_rows,
        n_cols=n_cols,
        rows_each=each,
        NEED_WEIGHT=needs[0],
        NEED_BIAS=needs[1],
        BLOCK=_PARTIAL_BLOCK,
        num_warps=4,
    )
    return partial


def _partial(needs: tuple[bool, bool], programs: int, grad_x: torch.Tensor) -> torch.Tensor | None:
    if not any(needs):
        return None
    return _launch.empty((sum(needs), programs, grad_x.shape[-1]), torch.float32, grad_x)


def _reduce(
    op: str, stream: Any, partial: torch.Tensor | None, weight: torch.Tensor, kinds: int
) -> list[torch.Tensor]:
    """Sum partial gradients [kinds, programs, D] into [D] each; zeros where there were no rows."""
    grads = [_launch.empty(tuple(weight.shape), weight.dtype, weight) for _ in range(kinds)]
    n_cols = weight.shape[0]
    if not grads or n_cols == 0:
        return grads
    _launch.launch(
        _kernels._layer_norm_reduce_kernel,
        (_launch.cdiv(n_cols, _REDUCE_BLOCK),),
        op=op,
        stream=stream,
        reads=[] if partial is None else [partial],
        writes=grads,
        partial_ptr=grads[0] if partial is None else partial,
        first_ptr=grads[0],
        second_ptr=grads[-1],
        n_partials=0 if partial is None else partial.shape[1],
        n_cols=n_cols,
        KINDS=kinds,
        ROWS=_REDUCE_ROWS,
        BLOCK=_REDUCE_BLOCK,
        num_warps=4,
    )
    return grads


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    **like_x: torch.Tensor | None,
) -> None:
    _launch.check_storage(op, x=x, weight=weight)
    _launch.check_floating(op, x=x, weight=weight, bias=bias, **like_x)
    if x.dim() < 1:
        raise ShapeMismatchError(f"{op}: x has no dimensions, wanted at least 1", "reshape x")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            hint = f"pass the {name} of the same layer"
            check_shape(op, name, parameter, (x.shape[-1],), hint)
    given = {name: t for name, t in like_x.items() if t is not None}
    for name, tensor in given.items():
        check_shape(op, name, tensor, tuple(x.shape))
    check_same_dtype(op, x=x, weight=weight, bias=bias, **given)
    statistics = {"mean": mean, "rstd": rstd}
    for name, array in statistics.items():
        if array is not None:
            check_dtype(op, name, array, "float32")
            check_shape(op, name, array, (math.prod(x.shape[:-1]),))
    tensors = {"x": x, "weight": weight, "bias": bias, **given, **statistics}
    _launch.prepare(op, *tensors.values())
    _launch.require_contiguous(op, **tensors)


def _tile(n_cols: int, max_block: int) -> tuple[int, int, int]:
    """Return rows a program, columns a block and warps: about ``_TILE`` elements, 16 a thread."""
    if n_cols > max_block:
        return 1, _WIDE_BLOCK, _WIDE_WARPS
    block = _launch.next_power_of_2(n_cols)
    rows = max(_TILE // block, 1)
    return min(rows, 32), block, min(max(rows * block // 512, 1), 16)


def _rows_each(n_tiles: int) -> int:
    """Return tiles a program, so that there are few partial sums and still enough programs."""
    return max(_launch.cdiv(n_tiles, _MAX_PARTIALS), min(_MIN_TILES, n_tiles), 1)


# From register counts (no spill; 16 elements a thread), not timed.
_MAX_BLOCK_FORWARD = 16_384
_MAX_BLOCK_BACKWARD = 8_192
_WIDE_BLOCK, _WIDE_WARPS = 4_096, 8
_TILE = 2_048
# Two programs for each of the 132 multiprocessors of an H100 or H200, but at least eight tiles each:
# there are two sums, and they stay near a fifth of the traffic.
_MAX_PARTIALS, _MIN_TILES = 264, 8
_PARTIAL_BLOCK = 1_024
_REDUCE_ROWS, _REDUCE_BLOCK = 32, 64
