"""The rows of NF4 quantisation.

A weight in a sample is a reference ``NF4Weight`` that decodes to float64. A suite hands a backend
its twin in torch storage, decoding to the dtype under test, where ``Op.floats`` names it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from entrenar.errors import ConfigError, DTypeError, NumericsError, ShapeMismatchError
from entrenar.optable.row import Arguments, ErrorCase, Function, Op, Sample
from entrenar.reference.nf4 import NF4Weight, nf4_quantize

__all__ = ["FUNCTIONS", "OPS", "baseline_dense", "weight"]

FUNCTIONS = (
    Function("nf4_quantize", "nf4"),
    Function("nf4_dequantize", "nf4", results=("w",), mutates=("out",), override="dtype"),
)


def weight(
    rng: np.random.Generator, shape: tuple[int, ...], block_size: int = 64, double: bool = False
) -> NF4Weight:
    """Return a random NF4 weight of a checkpoint's usual size, about 0.05 a value."""
    return nf4_quantize(np.asarray(rng.standard_normal(shape) * 0.05), block_size, double)


def baseline_dense(w: Any, dtype: Any = None) -> Any:
    """Decode a torch NF4 weight in plain torch, as a baseline."""
    import torch

    from entrenar.reference.nf4 import DYNAMIC_CODE, NF4_CODE

    levels = torch.from_numpy(NF4_CODE.copy()).to(w.device)
    codes = torch.stack([w.codes >> 4, w.codes & 15], dim=1).reshape(-1).long()
    absmax = w.absmax
    if absmax is None:
        nested = torch.from_numpy(DYNAMIC_CODE.copy()).to(w.device)
        scales = w.absmax2.repeat_interleave(256)[: w.absmax_codes.numel()]
        absmax = nested[w.absmax_codes.long()] * scales + w.offset
    count = math.prod(w.shape)
    wanted = w.dtype if dtype is None else dtype
    levels = levels.to(torch.float64 if wanted == torch.float64 else torch.float32)
    values = levels[codes[:count]] * absmax.repeat_interleave(w.block_size)[:count]
    return values.reshape(w.shape).to(wanted)


def _baseline_dequantize(w: Any, dtype: Any = None, out: Any = None) -> Any:
    dense = baseline_dense(w, dtype)
    return dense if out is None else out.copy_(dense)


def _quantize_sample(
    name: str, shape: tuple[int, ...], block_size: int = 64, double: bool = False, kind: str = ""
) -> Sample:
    def make(rng: np.random.Generator) -> Arguments:
        w = np.asarray(rng.standard_normal(shape) * 0.05)
        if kind == "zero_blocks":
            w.reshape(-1)[block_size : 2 * block_size] = 0
        if kind == "outliers":
            w.reshape(-1)[:: 3 * block_size + 1] = 1e4
        if kind == "transposed":
            w = np.ascontiguousarray(w.T).T
        return {"w": w, "block_size": block_size, "double_quant": double}

    return Sample(name, make)


def _dequantize_sample(
    name: str, shape: tuple[int, ...], block_size: int = 64, double: bool = False
) -> Sample:
    return Sample(name, lambda rng: {"w": weight(rng, shape, block_size, double)})


def _with(value: float) -> Any:
    def make(rng: np.random.Generator) -> Arguments:
        w = rng.standard_normal((2, 64))
        w[1, 6] = value
        return {"w": w}

    return make


def _count(a: Arguments) -> int:
    return math.prod(a["w"].shape)


def _stored_bytes(a: Arguments) -> int:
    """Bytes that quantisation writes: codes, and one absmax or its code a block."""
    count = _count(a)
    blocks = -(-count // a["block_size"])
    scales = blocks + 4 * (-(-blocks // 256) + 1) if a["double_quant"] else 4 * blocks
    return -(-count // 2) + scales


_QUANTIZE_ERRORS = (
    ErrorCase(
        "block_size",
        "nf4_quantize",
        lambda rng: {"w": rng.standard_normal((2, 64)), "block_size": 48},
        ConfigError,
        "block_size is 48",
    ),
    ErrorCase(
        "integers",
        "nf4_quantize",
        lambda rng: {"w": np.arange(64, dtype=np.int64)},
        DTypeError,
        "w is int64",
    ),
    ErrorCase("nan", "nf4_quantize", _with(np.nan), NumericsError, r"\(1, 6\)"),
    ErrorCase("inf", "nf4_quantize", _with(np.inf), NumericsError, r"\(1, 6\)"),
)


def _wrong_out(rng: np.random.Generator) -> Arguments:
    return {"w": weight(rng, (3, 64)), "out": np.zeros((64, 3))}


OPS = (
    Op(
        name="nf4_quantize",
        family="nf4",
        forward=FUNCTIONS[0],
        samples=(
            _quantize_sample("n7", (7,)),
            _quantize_sample("0d", ()),
            _quantize_sample("empty", (0, 5)),
            _quantize_sample("3x37", (3, 37)),
            _quantize_sample("2x3x5_double", (2, 3, 5), double=True),
            _quantize_sample("5x130_zero_blocks", (5, 130), kind="zero_blocks"),
            _quantize_sample("9x64_outliers", (9, 64), kind="outliers"),
            _quantize_sample("33x40_transposed", (33, 40), kind="transposed"),
            _quantize_sample("5x1000_block4096", (5, 1000), block_size=4096),
            _quantize_sample("11x32_block32", (11, 32), block_size=32),
            _quantize_sample("75x257_double", (75, 257), double=True),
        ),
        errors=_QUANTIZE_ERRORS,
        floats=("w",),
        reduction=lambda a: 1,
        bytes_moved=lambda a, itemsize: _count(a) * itemsize + _stored_bytes(a),
        flops=lambda a: 3 * _count(a),
        traffic_bound=1.1,
        traffic_reason="one pass; double quantisation writes the absmax once and reads them twice",
        tolerance_reason="codes and absmax are equal to the bit, the offset within 2 ulp",
        source="Dettmers et al., QLoRA, section 3; bitsandbytes 0.50 backends/default/ops.py",
    ),
    Op(
        name="nf4_dequantize",
        family="nf4",
        forward=FUNCTIONS[1],
        samples=(
            _dequantize_sample("n7", (7,)),
            _dequantize_sample("0d", ()),
            _dequantize_sample("empty", (0, 5)),
            _dequantize_sample("3x37", (3, 37)),
            _dequantize_sample("2x3x5_double", (2, 3, 5), double=True),
            _dequantize_sample("5x1000_block4096", (5, 1000), block_size=4096),
            _dequantize_sample("11x32_block32", (11, 32), block_size=32),
            _dequantize_sample("75x257_double", (75, 257), double=True),
            _dequantize_sample("64x192", (64, 192)),
        ),
        errors=(ErrorCase("out_shape", "nf4_dequantize", _wrong_out, ShapeMismatchError, "out"),),
        floats=("w",),
        reduction=lambda a: 1,
        a=1.01,
        b=1.0,
        bytes_moved=lambda a, itemsize: a["w"].nbytes + _count(a) * itemsize,
        flops=lambda a: _count(a),
        traffic_bound=1.1,
        traffic_reason="one pass; neighbouring programs may share a scale's sector",
        tolerance_reason="one float32 product, then one rounding to the storage dtype",
        torch_baseline=_baseline_dequantize,
        source="Dettmers et al., QLoRA, equation 6; bitsandbytes 0.50 csrc/cpu_ops.cpp",
    ),
)
