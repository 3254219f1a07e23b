"""Causal grouped-query attention over packed segments, without an [S, S] array.

    s = scale q kᵀ;  lse[i] = log sum_j exp(s[i, j]);  out[i] = sum_j exp(s[i, j] - lse[i]) v[j]
    p = exp(s - lse);  dV = pᵀ dO;  dS = p (dO Vᵀ - delta);  dQ = scale dS K;  dK = scale dSᵀ Q
    delta[i] = sum_d dO[i, d] O[i, d]
    with a soft cap c: s = c tanh(scale q kᵀ / c), and dS is multiplied by 1 - (s / c)²

Shapes: q [T, Hq, D], k and v [Tk, Hkv, D], any T and Tk, D up to 256; lse [Hq, T] fp32. Query head
h reads key/value head h // (Hq / Hkv) in place. Segments follow one another; a program finds its
own from cu_seqlens on the device, so nothing is padded, copied or known to the host.

Numerics: products accumulate in fp32, exponentials are base 2, the running maximum and sum are
fp32; probabilities and score gradients are rounded to the storage dtype before their product. The
causal mask is aligned at the bottom right. Keys past a segment's end are never loaded. A query
that sees no key gives zeros and lse = -inf, and zero gradients. The backward pass is three
kernels, one output block a program, no atomics: the query heads of a key/value head are summed in
order inside one program, so that two runs agree to the bit.

Bytes: q, k, v, out and lse once, and k and v again from L2 for each block of queries. Blocks that
the causal mask or the window hides are not visited; blocks wholly visible are not masked.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from entrenar import checks
from entrenar.errors import ConfigError, DataError, LayoutError, ShapeMismatchError
from entrenar.kernels import _attention_gradient_kernels as _gradients
from entrenar.kernels import _attention_kernels as _kernels
from entrenar.kernels import _launch
from entrenar.kernels._gemm_tiles import architecture_of

__all__ = ["attention_backward", "attention_forward"]

_LOG2E = math.log2(math.e)

MAX_HEAD_DIM = 256


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of each query over the visible keys of its own segment.

    Args:
        q: [T, Hq, D] fp32, fp16 or bf16; features contiguous, any strides of rows and heads.
        k: [Tk, Hkv, D]; Hkv divides Hq.
        v: [Tk, Hkv, D].
        cu_seqlens_q: int32 [B+1], where each segment's queries start, and T; None is one segment.
        cu_seqlens_k: The same of the keys; None takes ``cu_seqlens_q``.
        scale: Factor of the scores; None is 1/sqrt(D).
        causal: Key j is visible to query i only if j <= i + Lk - Lq.
        window: If above 0, only keys with j > i + Lk - Lq - window are visible.
        softcap: If above 0, scores s become ``softcap * tanh(s / softcap)`` before the mask.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        out [T, Hq, D] of q's dtype and lse [Hq, T] fp32. A query that sees no key gets zeros and
        -inf.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or D is above 256.
        DTypeError: Arrays are not floating or not of one dtype, or ``cu_seqlens`` are not int32.
        LayoutError: Features are not contiguous.
        DataError: ``cu_seqlens`` on the CPU do not rise from 0 to the number of rows; bounds on a
            device are kept inside the arrays instead.
        ConfigError: The window or the soft cap is negative.
    """
    op = "attention_forward"
    segments = _check(op, q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap)
    out = _launch.empty(q.shape, q.dtype, q)
    lse = _launch.empty((q.shape[1], q.shape[0]), torch.float32, q)
    tile = _forward_tile(q, segments.mean_queries(q))
    grid = (segments.blocks(q.shape[0], tile.block_m), q.shape[1])
    if q.shape[0] == 0:
        return out, lse
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    _launch.launch(
        _kernels._attention_forward_kernel,
        grid,
        op=op,
        stream=stream,
        reads=(q, k, v, *segments.storage()),
        writes=(out, lse),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=lse,
        **_strides(q=q, k=k, v=v, o=out),
        **_common(q, k, segments, causal, window, softcap, tile),
        WIDE=_passes_31_bits(q, k, v, out),
        scale_log2=scale * _LOG2E,
    )
    return out, lse


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of attention from its saved output and logsumexp.

    Args:
        grad_out: [T, Hq, D] gradient arriving at ``out``, of the dtype of q.
        q: [T, Hq, D] queries of the forward pass.
        k: [Tk, Hkv, D] keys.
        v: [Tk, Hkv, D] values.
        out: [T, Hq, D] output of the forward pass.
        lse: [Hq, T] fp32 logsumexp of the forward pass.
        cu_seqlens_q: As in the forward pass.
        cu_seqlens_k: As in the forward pass.
        scale: As in the forward pass.
        causal: As in the forward pass.
        window: As in the forward pass.
        softcap: As in the forward pass.
        stream: Stream to launch on; None is torch's current one.

    Returns:
        grad_q [T, Hq, D], grad_k [Tk, Hkv, D], grad_v [Tk, Hkv, D], contiguous. A query that saw
        no key gives zeros.

    Raises:
        ShapeMismatchError: Sizes do not fit together, or D is above 256.
        DTypeError: Arrays are not floating or not of one dtype.
        LayoutError: Features are not contiguous.
        DataError: ``cu_seqlens`` on the CPU do not rise from 0 to the number of rows.
        ConfigError: The window or the soft cap is negative.
    """
    op = "attention_backward"
    segments = _check(op, q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap)
    _check_saved(op, grad_out, q, out, lse)
    grads = [_launch.empty(x.shape, x.dtype, x) for x in (q, k, v)]
    delta = _launch.empty(lse.shape, torch.float32, lse)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    if q.shape[0]:
        _launch_delta(op, grad_out, out, delta, stream)
    inputs = {"q": q, "k": k, "v": v, "grad": grad_out, "lse": lse, "delta": delta}
    given: dict[str, Any] = {f"{name}_ptr": array for name, array in inputs.items()}
    given |= {"scale": scale, "scale_log2": scale * _LOG2E}
    settings = (segments, causal, window, softcap, stream)
    if k.shape[0]:
        tile = _key_gradient_tile(q, segments.mean_keys(k), softcap > 0)
        grid = (segments.blocks(k.shape[0], tile.block_n), k.shape[1])
        outputs = {"grad_k_ptr": grads[1], "grad_v_ptr": grads[2]}
        kernel = _gradients._attention_key_gradient_kernel
        _launch_gradient(op, kernel, grid, tile, given, outputs, settings)
    if q.shape[0]:
        tile = _query_gradient_tile(q, segments.mean_queries(q), softcap > 0)
        grid = (segments.blocks(q.shape[0], tile.block_m), q.shape[1])
        kernel = _gradients._attention_query_gradient_kernel
        _launch_gradient(op, kernel, grid, tile, given, {"grad_q_ptr": grads[0]}, settings)
    return grads[0], grads[1], grads[2]


def _launch_gradient(
    op: str,
    kernel: Any,
    grid: tuple[int, int],
    tile: _Tile,
    given: dict[str, Any],
    outputs: dict[str, torch.Tensor],
    settings: tuple[_Segments, bool, int, float, Any],
) -> None:
    """Launch the kernel of the key or of the query gradient, which take the same inputs."""
    segments, causal, window, softcap, stream = settings
    q, k, v, grad_out = (given[f"{name}_ptr"] for name in ("q", "k", "v", "grad"))
    writes = tuple(outputs.values())
    _launch.launch(
        kernel,
        grid,
        op=op,
        stream=stream,
        reads=(q, k, v, grad_out, given["lse_ptr"], given["delta_ptr"], *segments.storage()),
        writes=writes,
        **outputs,
        **given,
        **_strides(q=q, k=k, v=v, g=grad_out, d=writes[0]),
        **_common(q, k, segments, causal, window, softcap, tile),
        WIDE=_passes_31_bits(q, k, v, grad_out, *writes),
    )


def _launch_delta(
    op: str, grad_out: torch.Tensor, out: torch.Tensor, delta: torch.Tensor, stream: Any
) -> None:
    n_rows, heads, head_dim = out.shape
    block_d = _block_d(head_dim)
    block_m = max(_DELTA_ELEMENTS // block_d, 8)
    _launch.launch(
        _gradients._attention_delta_kernel,
        (_launch.cdiv(n_rows, block_m), heads),
        op=op,
        stream=stream,
        reads=(grad_out, out),
        writes=(delta,),
        grad_ptr=grad_out,
        out_ptr=out,
        delta_ptr=delta,
        n_rows=n_rows,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        num_warps=4,
        **_strides(g=grad_out, o=out),
    )


@dataclasses.dataclass(frozen=True)
class _Segments:
    """The segments of one call: device bounds, and what the host may know without reading them."""

    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None

    @property
    def count(self) -> int:
        return 1 if self.cu_q is None else self.cu_q.shape[0] - 1

    def blocks(self, n_rows: int, block: int) -> int:
        """Return the most blocks that rows in so many segments can take."""
        return max(_launch.cdiv(n_rows, block) + self.count - 1, 1)

    def mean_queries(self, q: torch.Tensor) -> int:
        return _launch.cdiv(q.shape[0], max(self.count, 1))

    def mean_keys(self, k: torch.Tensor) -> int:
        return _launch.cdiv(k.shape[0], max(self.count, 1))

    def storage(self) -> tuple[torch.Tensor, ...]:
        if self.cu_q is None or self.cu_k is None:
            return ()
        return (self.cu_q,) if self.cu_q is self.cu_k else (self.cu_q, self.cu_k)


class _Tile(NamedTuple):
    """Rows of queries and of keys that a program takes at a time, and how it is compiled.

    ``chunk``: features of a head that a product of rows reads at a time; 0 holds all of them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 0


def _common(
    q: torch.Tensor,
    k: torch.Tensor,
    segments: _Segments,
    causal: bool,
    window: int,
    softcap: float,
    tile: _Tile,
) -> dict[str, Any]:
    """Return the kernel arguments that all three products share."""
    several = segments.cu_q is not None
    return {
        "cu_q_ptr": segments.cu_q,
        "cu_k_ptr": segments.cu_k,
        "n_rows_q": q.shape[0],
        "n_rows_k": k.shape[0],
        "n_segments": segments.count,
        "group": q.shape[1] // k.shape[1],
        "window": window,
        "softcap_log2": float(softcap) * _LOG2E,
        "CAUSAL": causal,
        "WINDOWED": window > 0,
        "CAPPED": softcap > 0,
        "SEGMENTS": max(_launch.next_power_of_2(segments.count), 16) if several else 0,
        "HEAD_DIM": q.shape[2],
        "BLOCK_D": _block_d(q.shape[2]),
        "CHUNK_D": tile.chunk if tile.chunk < _block_d(q.shape[2]) else 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "UPCAST_DOT": _launch.interpreting(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _strides(**arrays: torch.Tensor) -> dict[str, int]:
    """Return ``stride_{name}t`` and ``stride_{name}h``, of rows and of heads."""
    rows = {f"stride_{name}t": array.stride(0) for name, array in arrays.items()}
    return rows | {f"stride_{name}h": array.stride(1) for name, array in arrays.items()}


def _passes_31_bits(*arrays: torch.Tensor) -> bool:
    """Whether a row of one segment may start past what 32 bits count."""
    return any(array.shape[0] * array.stride(0) >= 1 << 31 for array in arrays)


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    window: int,
    softcap: float,
) -> _Segments:
    _launch.check_storage(op, q=q, k=k, v=v)
    for name, array in (("q", q), ("k", k), ("v", v)):
        checks.check_ndim(op, name, array, 3)
    _launch.check_floating(op, q=q, k=k, v=v)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    heads, head_dim = q.shape[1:]
    checks.check_shape(op, "k", k, (-1, -1, head_dim), "q, k and v share one head dimension")
    checks.check_shape(op, "v", v, tuple(k.shape), "v has the shape of k")
    if not 0 < head_dim <= MAX_HEAD_DIM or k.shape[1] == 0 or heads % k.shape[1]:
        raise ShapeMismatchError(
            f"{op}: q has {heads} heads of {head_dim} and k has {k.shape[1]}, wanted a multiple "
            f"of the key/value heads, of 1 to {MAX_HEAD_DIM} features",
            "each key/value head serves a whole number of query heads",
        )
    if window < 0:
        raise ConfigError(f"{op}: window is {window}, wanted 0 (no window) or more", "")
    checks.check_softcap(op, softcap)
    _check_features(op, q=q, k=k, v=v)
    segments = _check_segments(op, cu_q, cu_k, q.shape[0], k.shape[0])
    _launch.prepare(op, q, k, v, *segments.storage())
    return segments


def _check_segments(
    op: str, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, n_queries: int, n_keys: int
) -> _Segments:
    if cu_q is None:
        if cu_k is not None:
            raise ShapeMismatchError(
                f"{op}: got cu_seqlens_k without cu_seqlens_q",
                "pass both, or neither for one segment",
            )
        return _Segments(None, None)
    _check_bounds(op, "cu_seqlens_q", cu_q, n_queries)
    shared = cu_q if cu_k is None else cu_k
    if shared is not cu_q or n_keys != n_queries:
        _check_bounds(op, "cu_seqlens_k", shared, n_keys)
    if cu_q.shape != shared.shape:
        raise ShapeMismatchError(
            f"{op}: cu_seqlens_q has {cu_q.shape[0]} entries and cu_seqlens_k {shared.shape[0]}, "
            "wanted as many of each",
            "a segment without keys has two equal entries",
        )
    return _Segments(cu_q, shared)


def _check_bounds(op: str, name: str, cu_seqlens: torch.Tensor, n_rows: int) -> None:
    _launch.check_storage(op, **{name: cu_seqlens})
    checks.check_ndim(op, name, cu_seqlens, 1)
    checks.check_dtype(op, name, cu_seqlens, "int32")
    _launch.require_contiguous(op, **{name: cu_seqlens})
    _check_bounds_on_cpu(op, name, cu_seqlens, n_rows)


def _check_bounds_on_cpu(op: str, name: str, cu_seqlens: torch.Tensor, n_rows: int) -> None:
    """Refuse bad bounds where the host can read them without waiting for a device."""
    on_cpu = cu_seqlens.device.type == "cpu"
    bounds = cu_seqlens.tolist() if on_cpu else [0, n_rows]
    empty = cu_seqlens.shape[0] == 0
    if empty or bounds[0] != 0 or bounds[-1] != n_rows or sorted(bounds) != bounds:
        raise DataError(
            f"{op}: {name} is {bounds[:8]}{' …' if len(bounds) > 8 else ''}, "
            f"wanted boundaries that rise from 0 to the {n_rows} rows",
            "each entry is where a segment starts, the last is the number of rows",
        )


def _check_saved(
    op: str, grad_out: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    _launch.check_storage(op, grad_out=grad_out, out=out, lse=lse)
    checks.check_shape(op, "grad_out", grad_out, tuple(q.shape), "it has the shape of q")
    checks.check_shape(op, "out", out, tuple(q.shape), "it has the shape of q")
    checks.check_shape(op, "lse", lse, (q.shape[1], q.shape[0]), "lse is [heads, tokens]")
    checks.check_same_dtype(op, grad_out=grad_out, q=q, out=out)
    checks.check_dtype(op, "lse", lse, "float32")
    _check_features(op, grad_out=grad_out, out=out)
    _launch.require_contiguous(op, lse=lse)
    _launch.prepare(op, grad_out, q, out, lse)


def _check_features(op: str, **arrays: torch.Tensor) -> None:
    for name, array in arrays.items():
        if array.numel() > 1 and array.shape[2] > 1 and array.stride(2) != 1:
            raise LayoutError(
                f"{op}: {name} has strides {tuple(array.stride())}, wanted contiguous features",
                f"pass {name}.contiguous()",
            )


def _block_d(head_dim: int) -> int:
    return max(_launch.next_power_of_2(head_dim), 16)


def _fit(block: int, rows: int) -> int:
    """Shrink a block of rows to segments that are shorter on average: 16 rows to decode."""
    return min(block, max(_launch.next_power_of_2(max(rows, 1)), 16))


# By padded head dimension. Chosen for no spill on sm_80, sm_90, gfx942 and at most 99 KB of shared
# memory, not yet by timing; 32-bit products run on the scalar units and want small tiles.
_FORWARD_16BIT = {
    64: _Tile(128, 64, 8, 3),
    128: _Tile(128, 64, 8, 2),
    256: _Tile(64, 32, 8, 2),
}
_FORWARD_32BIT = {64: _Tile(32, 32, 8, 1), 128: _Tile(32, 16, 8, 1), 256: _Tile(32, 16, 8, 1)}
_KEY_GRADIENT_16BIT = {
    64: _Tile(64, 64, 4, 2),
    128: _Tile(64, 64, 8, 2),
    256: _Tile(32, 32, 4, 1),
}
_KEY_GRADIENT_32BIT = {64: _Tile(32, 32, 8, 1), 128: _Tile(16, 32, 4, 1), 256: _Tile(16, 16, 8, 1)}
# With eight warps it spills there.
_KEY_GRADIENT_BLACKWELL = {128: _Tile(64, 64, 4, 2)}
_QUERY_GRADIENT_16BIT = {
    64: _Tile(128, 64, 8, 2),
    128: _Tile(64, 64, 8, 2),
    256: _Tile(32, 32, 4, 1),
}
_QUERY_GRADIENT_32BIT = {
    64: _Tile(32, 32, 4, 1),
    128: _Tile(16, 16, 8, 1),
    256: _Tile(16, 16, 8, 1),
}


# By item size and padded head dimension, where those above spill. In 99 KB of shared memory (sm_120: 8
# and 16 bytes in four warps):
_KEY_GRADIENT_SMALL = {(2, 64): _Tile(64, 64, 8, 2)}
_QUERY_GRADIENT_SMALL = {(4, 64): _Tile(32, 32, 8, 1), (2, 128): _Tile(64, 32, 8, 2)}
# On RDNA, whose wavefronts of 32 lanes hold both halves of a matrix operand twice, and whose scalar units
# multiply float32, wide heads are read a part of their features at a time (the last number).
_FORWARD_RDNA = {
    (2, 64): _Tile(128, 32, 8, 1), (2, 128): _Tile(32, 16, 8, 1), (2, 256): _Tile(32, 32, 8, 1, 128),
    (4, 64): _Tile(16, 16, 8, 1), (4, 128): _Tile(32, 32, 8, 1, 64), (4, 256): _Tile(16, 32, 8, 1, 32),
}  # fmt: skip
_KEY_GRADIENT_RDNA = {
    (2, 64): _Tile(32, 32, 8, 1), (2, 128): _Tile(32, 32, 8, 1, 32), (2, 256): _Tile(32, 32, 8, 1, 32),
    (4, 64): _Tile(16, 16, 8, 1), (4, 128): _Tile(16, 32, 16, 1, 64), (4, 256): _Tile(16, 32, 16, 1, 32),
}  # fmt: skip
_QUERY_GRADIENT_RDNA = {
    (2, 64): _Tile(32, 32, 8, 1, 32), (2, 128): _Tile(32, 32, 8, 1, 32), (2, 256): _Tile(32, 32, 8, 1, 32),
    (4, 64): _Tile(16, 16, 8, 1), (4, 128): _Tile(32, 32, 8, 1, 64), (4, 256): _Tile(32, 32, 16, 1, 32),
}  # fmt: skip
# With a soft cap, which holds a tile of scores longer.
_KEY_GRADIENT_CAPPED = {(2, 256): _Tile(32, 32, 8, 1)}
_QUERY_GRADIENT_CAPPED = {(4, 256): _Tile(32, 16, 16, 1)}
_SMALL_SHARED = 100 << 10
# On sm_75, where products of 16 bits run on the scalar units too.
_FORWARD_LEAST = {
    64: _Tile(16, 16, 8, 1, 32),
    128: _Tile(16, 16, 8, 1, 32),
    256: _Tile(32, 16, 8, 1, 32),
}
_KEY_GRADIENT_LEAST = dict.fromkeys((64, 128, 256), _Tile(16, 16, 8, 1, 16))
_QUERY_GRADIENT_LEAST = dict.fromkeys((64, 128, 256), _Tile(16, 32, 8, 1, 32))
_LEAST_SHARED = 64 << 10
# Elements of the output that a program of four warps multiplies by its gradient: 16 a thread.
_DELTA_ELEMENTS = 2048

_Exceptions = dict[tuple[int, int], _Tile]


def _choose(
    q: torch.Tensor,
    half: dict[int, _Tile],
    single: dict[int, _Tile],
    small: _Exceptions,
    rdna: _Exceptions,
    capped: _Exceptions,
    least: dict[int, _Tile],
) -> _Tile:
    width = max(_block_d(q.shape[2]), 64)
    tile = (single if q.dtype == torch.float32 else half)[width]
    tile = capped.get((q.element_size(), width), tile)
    if _launch.on_rdna():
        return rdna[q.element_size(), width]
    if _launch.on_amd():  # four wavefronts leave each the registers that eight would spill
        return tile._replace(num_warps=4, num_stages=1)
    shared = _launch.shared_bytes(q.device)
    if shared <= _LEAST_SHARED:
        return least[width]
    if shared < _SMALL_SHARED:
        return small.get((q.element_size(), width), tile)
    return tile


def _forward_tile(q: torch.Tensor, mean_queries: int) -> _Tile:
    tile = _choose(
        q, _FORWARD_16BIT, _FORWARD_32BIT, {}, _FORWARD_RDNA, {}, _FORWARD_LEAST
    )  # fmt: skip
    return tile._replace(block_m=_fit(tile.block_m, mean_queries))


def _key_gradient_tile(q: torch.Tensor, mean_keys: int, capped: bool) -> _Tile:
    blackwell = q.element_size() == 2 and architecture_of(q.device) == "sm_100"
    half = _KEY_GRADIENT_16BIT | _KEY_GRADIENT_BLACKWELL if blackwell else _KEY_GRADIENT_16BIT
    tile = _choose(
        q, half, _KEY_GRADIENT_32BIT, _KEY_GRADIENT_SMALL, _KEY_GRADIENT_RDNA,
        _KEY_GRADIENT_CAPPED if capped else {}, _KEY_GRADIENT_LEAST,
    )  # fmt: skip
    return tile._replace(block_n=_fit(tile.block_n, mean_keys))


def _query_gradient_tile(q: torch.Tensor, mean_queries: int, capped: bool) -> _Tile:
    tile = _choose(
        q, _QUERY_GRADIENT_16BIT, _QUERY_GRADIENT_32BIT, _QUERY_GRADIENT_SMALL,
        _QUERY_GRADIENT_RDNA, _QUERY_GRADIENT_CAPPED if capped else {}, _QUERY_GRADIENT_LEAST,
    )  # fmt: skip
    return tile._replace(block_m=_fit(tile.block_m, mean_queries))
