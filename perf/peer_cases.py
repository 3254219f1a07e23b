"""Operations that Liger or bitsandbytes also has Triton kernels for: the same values for both sides.

A peer's kernels are launched by its own host functions, with the settings those choose. Sizes are those
of Llama-3.2-1B with fewer rows where a program's work does not depend on how many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Comparison", "comparisons"]

Run = Callable[[], Any]
LIGER, BITSANDBYTES = "liger-kernel", "bitsandbytes"
ROWS, HIDDEN, FORWARD, VOCAB = 32, 2048, 8192, 128_256


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One operation on one set of values, ours and a peer's.

    Attributes:
        op: What is computed.
        dtype: ``"bf16"`` or ``"fp32"``.
        shape: Sizes, readable.
        elements: What counts are divided by.
        ours: Runs our launchers and returns arrays.
        peer: The package the other side comes from; None where neither has such a Triton kernel.
        theirs: Runs the peer's and returns the same arrays, or None.
        note: What a reader must know to compare.
    """

    op: str
    dtype: str
    shape: str
    elements: int
    ours: Run
    peer: str | None = None
    theirs: Run | None = None
    note: str = ""


def _normal(*shape: int, dtype: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _nf4(dtype: str, kind: Any) -> Iterator[Comparison]:
    import torch

    from entrenar.kernels.nf4 import nf4_dequantize
    from entrenar.kernels.nf4_weight import NF4Weight

    n = 64 * HIDDEN
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (n // 2,), generator=generator, dtype=torch.uint8)
    absmax = torch.rand(n // 64, generator=generator) + 0.5
    weight = NF4Weight(codes, absmax, (64, HIDDEN), kind)

    def theirs() -> tuple[Any, ...]:
        from bitsandbytes.backends.triton.kernels_4bit import dequantize_4bit_impl

        out = torch.empty(64, HIDDEN, dtype=kind)
        dequantize_4bit_impl(codes, absmax, 64, "nf4", kind, out)
        return (out,)

    yield Comparison(
        "nf4_dequantize", dtype, f"64x{HIDDEN}", n,
        lambda: (nf4_dequantize(weight),), BITSANDBYTES, theirs,
    )  # fmt: skip


def _rms_norm(dtype: str, kind: Any) -> Iterator[Comparison]:
    from entrenar.kernels.rms_norm import rms_norm_forward

    x, residual = (_normal(ROWS, HIDDEN, dtype=kind, seed=s) for s in (2, 4))
    weight = _normal(HIDDEN, dtype=kind, seed=5)

    def forward() -> tuple[Any, ...]:
        from liger_kernel.ops.rms_norm import rms_norm_forward as liger

        return (liger(x, weight, 1e-6, 0.0, "llama", True)[0],)

    def fused() -> tuple[Any, ...]:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward as liger

        return tuple(liger(x, residual, weight, 1e-6, 0.0, "llama")[:2])

    def ours_fused() -> tuple[Any, ...]:
        found = rms_norm_forward(x, weight, 1e-6, residual)
        return tuple(t for t in found if t.shape == x.shape)

    where = {"dtype": dtype, "shape": f"{ROWS}x{HIDDEN}", "elements": x.numel(), "peer": LIGER}
    yield Comparison(
        "rms_norm_forward", **where,
        ours=lambda: (rms_norm_forward(x, weight, 1e-6)[0],), theirs=forward,
    )  # fmt: skip
    yield Comparison("rms_norm_forward with residual", **where, ours=ours_fused, theirs=fused)


def _rms_norm_backward(dtype: str, kind: Any) -> Iterator[Comparison]:
    """All 4096 rows: how many of them a program sums decides what the weight's gradient costs."""
    import torch

    from entrenar.kernels.rms_norm import rms_norm_backward

    x, grad = (_normal(4096, HIDDEN, dtype=kind, seed=s) for s in (2, 3))
    weight = _normal(HIDDEN, dtype=kind, seed=5)
    rstd = (x.float().square().mean(1) + 1e-6).rsqrt()

    def theirs(need_weight: bool) -> Run:
        def run() -> tuple[Any, ...]:
            from liger_kernel.ops.rms_norm import rms_norm_backward as liger
            from liger_kernel.ops.utils import calculate_settings

            settings = calculate_settings(HIDDEN)
            parts = [
                liger(grad[r : r + ROWS].clone(), x[r : r + ROWS], weight, rstd[r : r + ROWS],
                      0.0, 0, *settings, True, True, need_weight)
                for r in range(0, 4096, ROWS)
            ]  # fmt: skip
            grad_x = torch.cat([part[0] for part in parts])
            if not need_weight:
                return (grad_x,)
            return grad_x, torch.stack([part[1].float() for part in parts]).sum(0)

        return run

    def ours(need_weight: bool) -> Run:
        def run() -> tuple[Any, ...]:
            found = rms_norm_backward(grad, x, weight, rstd, None, need_weight)
            return found if need_weight else found[:1]

        return run

    where = {"dtype": dtype, "shape": f"4096x{HIDDEN}", "elements": x.numel(), "peer": LIGER}
    note = f"Liger: {ROWS} rows a program, as its grid of one a multiprocessor gives on 128 of them"
    yield Comparison(
        "rms_norm_backward", **where, ours=ours(True), theirs=theirs(True),
        note=f"{note}; it sums their partial gradients of the weight in torch, uncounted",
    )  # fmt: skip
    yield Comparison(
        "rms_norm_backward, weight frozen", **where,
        ours=ours(False), theirs=theirs(False), note=note,
    )  # fmt: skip


def _cross_entropy(dtype: str, kind: Any) -> Iterator[Comparison]:
    import torch

    from entrenar.kernels import cross_entropy

    rows = 4
    logits = _normal(rows, VOCAB, dtype=kind, seed=6)
    targets = torch.tensor([5, VOCAB - 1, 70_000, 31], dtype=torch.int64)

    def ours() -> tuple[Any, ...]:
        cross_entropy.cross_entropy_forward(logits, targets)
        return (cross_entropy.cross_entropy_backward(logits, targets),)

    def theirs() -> tuple[Any, ...]:
        from liger_kernel.ops.cross_entropy import cross_entropy_forward as liger

        given = logits.clone().requires_grad_()
        return (liger(given, targets, None, -100, 0.0, 0.0, "sum", None, False)[4].detach(),)

    yield Comparison(
        "cross_entropy loss and gradient", dtype, f"{rows}x{VOCAB}", rows * VOCAB,
        ours, LIGER, theirs, "ours: a launch for the loss and one for the gradient",
    )  # fmt: skip
    yield Comparison(
        "cross_entropy gradient alone", dtype, f"{rows}x{VOCAB}", rows * VOCAB,
        lambda: (cross_entropy.cross_entropy_backward(logits, targets),), LIGER, theirs,
        "Liger has no launch without the loss",
    )  # fmt: skip


def _rows(dtype: str, kind: Any) -> Iterator[Comparison]:
    from entrenar.kernels import softmax, swiglu

    gate, up, grad = (_normal(8, FORWARD, dtype=kind, seed=s) for s in (7, 8, 9))
    x, dy = (_normal(ROWS, 4096, dtype=kind, seed=s) for s in (10, 11))
    y = x.float().softmax(-1).to(kind)

    def forward() -> tuple[Any, ...]:
        from liger_kernel.ops.swiglu import swiglu_forward as liger

        return (liger(gate, up)[2],)

    def backward() -> tuple[Any, ...]:
        from liger_kernel.ops.swiglu import swiglu_backward as liger

        return tuple(liger(gate.clone(), up.clone(), grad))

    def softmax_forward() -> tuple[Any, ...]:
        from liger_kernel.ops.softmax import _softmax_forward as liger

        return (liger(x)[0],)

    def softmax_backward() -> tuple[Any, ...]:
        from liger_kernel.ops.softmax import _softmax_backward as liger
        from liger_kernel.ops.utils import calculate_settings

        return (liger(dy, y, *calculate_settings(4096), False),)

    wide, n = f"8x{FORWARD}", 8 * FORWARD
    yield Comparison(
        "swiglu_forward", dtype, wide, n,
        lambda: (swiglu.swiglu_forward(gate, up),), LIGER, forward,
    )  # fmt: skip
    yield Comparison(
        "swiglu_backward in place", dtype, wide, n,
        lambda: swiglu.swiglu_backward(grad, gate.clone(), up.clone(), True), LIGER, backward,
    )  # fmt: skip
    tall, n = f"{ROWS}x4096", ROWS * 4096
    yield Comparison(
        "softmax_forward", dtype, tall, n,
        lambda: (softmax.softmax_forward(x),), LIGER, softmax_forward,
    )  # fmt: skip
    yield Comparison(
        "softmax_backward", dtype, tall, n,
        lambda: (softmax.softmax_backward(dy, y),), LIGER, softmax_backward,
    )  # fmt: skip


def _rope(dtype: str, kind: Any) -> Iterator[Comparison]:
    import torch

    from entrenar.kernels.rope import rope_forward

    q, k = _normal(64, 32, 64, dtype=kind, seed=12), _normal(64, 8, 64, dtype=kind, seed=13)
    angles = torch.arange(64)[:, None] / 10_000 ** (torch.arange(32) / 32)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    positions = torch.arange(64)

    def theirs() -> tuple[Any, ...]:
        from liger_kernel.ops.rope import rope_forward as liger

        heads = [t.clone()[None].transpose(1, 2) for t in (q, k)]
        both = [torch.cat((t, t), 1) for t in (cos, sin)]
        return tuple(t[0].transpose(0, 1) for t in liger(*heads, *both)[:2])

    yield Comparison(
        "rope_forward", dtype, "64 tokens, 32/8 heads of 64", q.numel() + k.numel(),
        lambda: rope_forward(q.clone(), k.clone(), cos, sin, positions), LIGER, theirs,
    )  # fmt: skip


def _adamw(dtype: str, kind: Any) -> Iterator[Comparison]:
    import torch

    from entrenar.kernels.adamw import adamw_step

    n = 1 << 17
    if kind != torch.float32:
        return  # parameters and moments are float32, whatever the activations are
    params, grads, m = (_normal(n, dtype=kind, seed=s) for s in (14, 15, 16))
    m, v = 0.1 * m, 0.01 * _normal(n, dtype=kind, seed=17).square()

    def ours() -> tuple[Any, ...]:
        state = [t.clone() for t in (params, m, v)]
        step, lr = torch.tensor([3], dtype=torch.int64), torch.tensor([1e-3])
        adamw_step(state[0], grads, state[1], state[2], step, lr)
        return tuple(state)

    def theirs() -> tuple[Any, ...]:
        from bitsandbytes.backends.triton.kernels_optim import optimizer_update_32bit_impl

        state = [t.clone() for t in (params, m, v)]
        optimizer_update_32bit_impl(
            "adam", grads, state[0], state[1], state[2], None, 0.0, 0.0,
            0.9, 0.999, 0.0, 0.0, 1e-8, 0.01, 4, 1e-3,
        )  # fmt: skip
        return tuple(state)

    yield Comparison("adamw_step", dtype, str(n), n, ours, BITSANDBYTES, theirs)


def _products(dtype: str, kind: Any) -> Iterator[Comparison]:
    import torch

    from entrenar.kernels.attention import attention_backward, attention_forward
    from entrenar.kernels.gemm import gemm_forward

    a, b = _normal(256, 1024, dtype=kind, seed=18), _normal(1024, 512, dtype=kind, seed=19)
    q = _normal(256, 8, 64, dtype=kind, seed=20)
    k, v = (_normal(256, 2, 64, dtype=kind, seed=s) for s in (21, 22))
    none = "neither package has such a Triton kernel"

    out, lse = q.clone(), torch.zeros(8, 256)  # counts do not depend on their values

    def backward() -> tuple[Any, ...]:
        return tuple(attention_backward(grad_out=q, q=q, k=k, v=v, out=out, lse=lse))

    yield Comparison(
        "gemm_forward", dtype, "256x1024 @ 1024x512", 256 * 512,
        lambda: (gemm_forward(a, b),), note=none,
    )  # fmt: skip
    heads = "256 tokens, 8/2 heads of 64, causal"
    yield Comparison(
        "attention_forward", dtype, heads, q.numel(),
        lambda: attention_forward(q, k, v), note=none,
    )  # fmt: skip
    yield Comparison("attention_backward", dtype, heads, q.numel(), backward, note=none)


def comparisons(dtypes: tuple[str, ...] = ("bf16", "fp32"), only: str = "") -> Iterator[Comparison]:
    """Yield what is compared, for each dtype, where the op's name contains ``only``."""
    from perf.calls import DTYPES

    for dtype in dtypes:
        for family in (
            _nf4,
            _rms_norm,
            _rms_norm_backward,
            _cross_entropy,
            _rows,
            _rope,
            _adamw,
            _products,
        ):
            for found in family(dtype, DTYPES[dtype]):
                if only in found.op:
                    yield found
