"""Differentiable ops, one family a file as in ``entrenar.kernels``; all run through the op table.

Each computes with or without a tape; on an active one it is recorded where an input requires a
gradient.
"""

from __future__ import annotations

from entrenar.autograd.ops.attention import attention
from entrenar.autograd.ops.cross_entropy import (
    causal_cross_entropy,
    cross_entropy,
    linear_cross_entropy,
)
from entrenar.autograd.ops.elementwise import add, add_, bias_add, cast, multiply, scale
from entrenar.autograd.ops.embedding import embedding, take_rows
from entrenar.autograd.ops.gemm import linear, matmul
from entrenar.autograd.ops.layer_norm import layer_norm, layer_norm_residual
from entrenar.autograd.ops.lora import lora_linear
from entrenar.autograd.ops.nf4_gemm import nf4_linear
from entrenar.autograd.ops.rms_norm import rms_norm, rms_norm_residual
from entrenar.autograd.ops.rope import rope
from entrenar.autograd.ops.shape import concat, narrow, reshape, split, transpose
from entrenar.autograd.ops.softmax import softmax
from entrenar.autograd.ops.swiglu import gelu, relu, silu, swiglu

__all__ = [
    "add",
    "add_",
    "attention",
    "bias_add",
    "cast",
    "causal_cross_entropy",
    "concat",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "layer_norm_residual",
    "linear",
    "linear_cross_entropy",
    "lora_linear",
    "matmul",
    "multiply",
    "narrow",
    "nf4_linear",
    "relu",
    "reshape",
    "rms_norm",
    "rms_norm_residual",
    "rope",
    "scale",
    "silu",
    "softmax",
    "split",
    "swiglu",
    "take_rows",
    "transpose",
]
