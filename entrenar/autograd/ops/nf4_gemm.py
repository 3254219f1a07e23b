"""Differentiable products with a frozen 4-bit weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from entrenar.autograd.node import Gradient, Node
from entrenar.autograd.ops.gemm import bias_gradient
from entrenar.autograd.ops.shape import reshape
from entrenar.autograd.prefetch import DecodeAhead
from entrenar.autograd.stream import current_stream
from entrenar.autograd.tape import record, run
from entrenar.autograd.tensor import Tensor
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import call

__all__ = ["DecodedWeights", "decoded", "nf4_linear"]


class DecodedWeights:
    """4-bit weights that are decoded once and kept, for products that follow one another.

    Decoding a weight takes several times as long as reading it decoded. It takes the memory of that.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], tuple[NF4Weight, torch.Tensor]] = {}

    def of(self, weight: NF4Weight, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight decoded to ``dtype``."""
        key = (id(weight), dtype)
        if key not in self._held:
            stream = current_stream(weight.device)
            made = call("nf4_dequantize", weight, dtype, stream=stream)
            self._held[key] = (weight, made)  # the weight too: another would get its id
        return self._held[key][1]

    def fill(self, weights: Iterable[Any], dtype: torch.dtype) -> None:
        """Decode those of the weights that are 4-bit ones now."""
        for weight in weights:
            if isinstance(weight, NF4Weight):
                self.of(weight, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of what is held decoded."""
        return sum(made.numel() * made.element_size() for _, made in self._held.values())

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let the products of this context read them inside the block."""
        token = _KEPT.set(self)
        try:
            yield
        finally:
            _KEPT.reset(token)


_KEPT: ContextVar[DecodedWeights | None] = ContextVar("entrenar_decoded_weights", default=None)


def nf4_linear(
    x: Tensor, weight: NF4Weight, bias: Tensor | None = None, ahead: DecodeAhead | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` with a 4-bit weight, which has no gradient.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
        ahead: Decodes the weight for many rows, forward and backward, ahead of its use; None lets each
            product do it.

    Returns:
        [..., out].
    """
    if x.ndim != 2:
        flat = nf4_linear(reshape(x, (-1, x.shape[-1])), weight, bias, ahead)
        return reshape(flat, (*x.shape[:-1], weight.shape[0]))
    with decoded(ahead, weight, x.data) as w:
        if w is weight:
            y = run("nf4_gemm_forward", x, w, bias=bias)
        else:
            y = run("matmul", x, w, trans_b=True, bias=bias)
    record("nf4_linear", (x, bias), y, _backward, weight=weight, ahead=ahead)
    return y


def _backward(node: Node, grad: torch.Tensor) -> tuple[Gradient, ...]:
    grad = grad.contiguous()
    grad_x = None
    if node.needs[0]:
        weight = node.settings["weight"]
        with decoded(node.settings["ahead"], weight, grad) as w:
            function = "nf4_gemm_backward" if w is weight else "matmul"
            grad_x = node.call(function, grad, w)
    return grad_x, bias_gradient(node, 1, grad)


def decoded(ahead: DecodeAhead | None, weight: Any, x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return what a product of ``x`` with ``weight`` reads: the weight, or its values decoded ahead."""
    if not isinstance(weight, NF4Weight):
        return contextlib.nullcontext(weight)
    kept = _KEPT.get()
    if kept is not None:
        return contextlib.nullcontext(kept.of(weight, x.dtype))
    if ahead is None:
        return contextlib.nullcontext(weight)
    return ahead.decoded(weight, x)
