"""Global gradient norm and clipping over a flat arena, without a host synchronisation.

The norm takes two launches: programs each sum the squares of the blocks they stride over, then one
program adds the partial sums and forms norm, factor and skip flag. Both orders are fixed by the
length alone. Clipping in place is a third; handing the factor to ``adamw_step`` saves it.

Numerics: float32. Squares go to one of three sums by size, the large and the small ones scaled by
powers of two, so that nothing overflows or vanishes while the norm itself is representable: it is
right at 1e30 and at 1e-30. NaN and infinity carry through to the norm and set the flag.
Bytes moved: one read; clipping in place one more and a write, none where the factor is 1.
Source: Blue, doi:10.1145/355769.355771; Pascanu et al., arXiv:1211.5063, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from entrenar.checks import check_ndim
from entrenar.errors import ConfigError
from entrenar.kernels import _launch

__all__ = ["clip_factor", "clip_grad_norm", "grad_norm"]

# Blue's constants for float32: squares between the limits are safe as they are, above and below
# after scaling
_LARGE = tl.constexpr(2.0**52)
_SMALL = tl.constexpr(2.0**-63)
_SHRINK = tl.constexpr(2.0**-76)
_STRETCH = tl.constexpr(2.0**75)
_UNSHRINK = tl.constexpr(2.0**76)
_UNSTRETCH = tl.constexpr(2.0**-75)


@triton.jit
def _squares_kernel(flat_ptr, partial_ptr, n_elements, n_programs, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    large = tl.zeros((BLOCK,), dtype=tl.float32)
    medium = tl.zeros((BLOCK,), dtype=tl.float32)
    small = tl.zeros((BLOCK,), dtype=tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(pid.to(tl.int64) * BLOCK, n_elements, stride):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(flat_ptr + offsets, mask=offsets < n_elements, other=0.0).to(tl.float32)
        size = tl.abs(x)
        is_large = size > _LARGE
        is_small = size < _SMALL
        # a NaN is neither, and so reaches the medium sum
        scaled = x * tl.where(is_large, _SHRINK, tl.where(is_small, _STRETCH, 1.0))
        square = scaled * scaled
        large += tl.where(is_large, square, 0.0)
        small += tl.where(is_small, square, 0.0)
        medium += tl.where(is_large | is_small, 0.0, square)
    tl.store(partial_ptr + pid, tl.sum(large, axis=0))
    tl.store(partial_ptr + n_programs + pid, tl.sum(medium, axis=0))
    tl.store(partial_ptr + 2 * n_programs + pid, tl.sum(small, axis=0))


@triton.jit
def _norm_kernel(
    partial_ptr,
    norm_ptr,
    factor_ptr,
    skip_ptr,
    n_programs,
    max_norm,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.arange(0, BLOCK)
    mask = index < n_programs
    large = tl.sum(tl.load(partial_ptr + index, mask=mask, other=0.0), axis=0)
    medium = tl.sum(tl.load(partial_ptr + n_programs + index, mask=mask, other=0.0), axis=0)
    small = tl.sum(tl.load(partial_ptr + 2 * n_programs + index, mask=mask, other=0.0), axis=0)
    of_large = tl.sqrt_rn(large + medium * _SHRINK * _SHRINK) * _UNSHRINK
    of_medium = tl.sqrt_rn(medium + small * _UNSTRETCH * _UNSTRETCH)
    of_small = tl.sqrt_rn(small) * _UNSTRETCH
    # a NaN is not 0
    norm = tl.where(large != 0, of_large, tl.where(medium != 0, of_medium, of_small))
    tl.store(norm_ptr, norm)
    if HAS_FACTOR:
        is_finite = norm < float("inf")
        above = norm > max_norm
        factor = tl.where(above, tl.div_rn(max_norm, tl.where(above, norm, 1.0)), 1.0)
        tl.store(factor_ptr, tl.where(is_finite, factor, 0.0))
        tl.store(skip_ptr, tl.where(is_finite, 0, 1))


@triton.jit
def _scale_kernel(flat_ptr, factor_ptr, skip_ptr, n_elements, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    needed = (tl.load(skip_ptr) == 0) & (factor != 1.0)
    n_elements = tl.where(needed, n_elements, 0)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(flat_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(flat_ptr + offsets, x * factor, mask=mask)


def grad_norm(flat: torch.Tensor, *, stream: Any = None) -> torch.Tensor:
    """Return the Euclidean norm, on the device.

    Args:
        flat: [n] contiguous, float32, float16 or bfloat16.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        float32 [1]; 0 for an empty one. NaN and infinity carry through.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is none of the above.
        LayoutError: It is not contiguous.
        DeviceError: It is on the CPU and no kernel backend is set.
    """
    _check("grad_norm", flat)
    norm, _, _ = _norm("grad_norm", flat, None, stream)
    return norm


def clip_factor(
    flat: torch.Tensor, max_norm: float | None, *, stream: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm, the factor that brings it down to ``max_norm``, and whether to skip the step.

    Args:
        flat: [n] contiguous, float32, float16 or bfloat16.
        max_norm: Above 0; None or infinity for no clipping.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        ``(norm, factor, skip)``: float32 [1], float32 [1], int32 [1], on the device. The factor is
        ``min(1, max_norm / norm)``, and 1 for a norm of 0. Where the norm is not finite it is 0 and
        ``skip`` is 1.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is none of the above.
        LayoutError: It is not contiguous.
        ConfigError: ``max_norm`` is not above 0.
        DeviceError: It is on the CPU and no kernel backend is set.
    """
    limit = _check_max_norm("clip_factor", max_norm)
    _check("clip_factor", flat)
    norm, factor, skip = _norm("clip_factor", flat, limit, stream)
    return norm, factor, skip


def clip_grad_norm(
    flat: torch.Tensor, max_norm: float | None, *, stream: Any = None
) -> torch.Tensor:
    """Scale ``flat`` in place so that its norm is at most ``max_norm``, and return the norm before.

    Args:
        flat: [n] contiguous, float32, float16 or bfloat16; written.
        max_norm: Above 0; None or infinity for no clipping.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        The norm before scaling, float32 [1] on the device. Where it is not finite ``flat`` stays as
        it is: scaling would turn the finite entries into zeros and the others into NaN.

    Raises:
        ShapeMismatchError: ``flat`` is not one-dimensional.
        DTypeError: It is none of the above.
        LayoutError: It is not contiguous.
        ConfigError: ``max_norm`` is not above 0.
        DeviceError: It is on the CPU and no kernel backend is set.
    """
    op = "clip_grad_norm"
    limit = _check_max_norm(op, max_norm)
    _check(op, flat)
    norm, factor, skip = _norm(op, flat, limit, stream)
    if flat.numel():
        _launch.launch(
            _scale_kernel,
            (_launch.cdiv(flat.numel(), _SCALE_BLOCK),),
            op=op,
            stream=stream,
            reads=[flat, factor, skip],
            writes=[flat],
            flat_ptr=flat,
            factor_ptr=factor,
            skip_ptr=skip,
            n_elements=flat.numel(),
            BLOCK=_SCALE_BLOCK,
            num_warps=4,
        )
    return norm


def _norm(op: str, flat: torch.Tensor, limit: float | None, stream: Any) -> tuple[Any, Any, Any]:
    """Launch both stages; return norm and, with a limit, factor and skip flag."""
    n_elements = flat.numel()
    programs = min(_launch.cdiv(n_elements, _BLOCK), _MAX_PROGRAMS)
    partial = _launch.empty((3 * max(programs, 1),), torch.float32, flat)
    norm = _launch.empty((1,), torch.float32, flat)
    factor = None if limit is None else _launch.empty((1,), torch.float32, flat)
    skip = None if limit is None else _launch.empty((1,), torch.int32, flat)
    if programs:
        _launch.launch(
            _squares_kernel,
            (programs,),
            op=op,
            stream=stream,
            reads=[flat],
            writes=[partial],
            flat_ptr=flat,
            partial_ptr=partial,
            n_elements=n_elements,
            n_programs=programs,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    _launch.launch(
        _norm_kernel,
        (1,),
        op=op,
        stream=stream,
        reads=[partial] if programs else [],
        writes=[t for t in (norm, factor, skip) if t is not None],
        partial_ptr=partial,
        norm_ptr=norm,
        factor_ptr=factor,
        skip_ptr=skip,
        n_programs=programs,
        max_norm=float("inf") if limit is None else limit,
        HAS_FACTOR=limit is not None,
        BLOCK=_MAX_PROGRAMS,
        num_warps=4,
    )
    return norm, factor, skip


def _check(op: str, flat: torch.Tensor) -> None:
    check_ndim(op, "flat", flat, 1)
    _launch.check_floating(op, flat=flat)
    _launch.prepare(op, flat)
    _launch.require_contiguous(op, flat=flat)


def _check_max_norm(op: str, max_norm: float | None) -> float:
    if max_norm is None:
        return float("inf")
    if not max_norm > 0:
        raise ConfigError(
            f"{op}: max_norm is {max_norm}, wanted more than 0", "pass None to switch clipping off"
        )
    return float(max_norm)


# At most 1024 programs of 8 warps fill the 132 multiprocessors of an H100 or H200 once, and their
# partial sums are one block of the second stage. Not timed.
_BLOCK, _NUM_WARPS, _MAX_PROGRAMS = 2_048, 8, 1_024
_SCALE_BLOCK = 1_024
