"""Floating-point arithmetic: float32, float64, and 16-bit floats alone and in pairs.

Rounding is to nearest even. ``fma`` rounds once. ``.ftz`` flushes subnormal operands and results to zero.
float16 is computed in float32 and bfloat16 in float64, ``fma`` of either in float64 rounded to odd: the
result is rounded once. Functions that hardware approximates (``ex2``, ``lg2``, ``sin``, ``cos``, ``tanh``,
``rsqrt``, ``rcp.approx``, ``div.full``) are those of the C library, within 1 ulp; hardware is within 2 ulp
for ``ex2``, ``rcp``, ``rsqrt`` and ``div.full``, 2^-22 for ``lg2`` away from 1, 2^-11 for ``tanh`` (PTX ISA,
sections on each). A tolerance that holds for both needs those terms, and ours come from longer sums.
"""

from __future__ import annotations

import re

from entrenar.emulator.operations.operation import Operation, lanewise

__all__ = ["floating_operations"]

_FLOAT32 = {
    "add": "x+y", "sub": "x-y", "mul": "x*y", "div": "x/y", "fma": "__builtin_fmaf(x,y,z)",
    "min": "fmin_(x,y)", "max": "fmax_(x,y)", "min.NaN": "fminN(x,y)", "max.NaN": "fmaxN(x,y)",
    "neg": "asf(asu(x)^0x80000000u)", "abs": "asf(asu(x)&0x7fffffffu)", "rcp": "1.0f/x",
    "sqrt": "__builtin_sqrtf(x)", "rsqrt": "(f32)(1.0/sqrt((f64)x))", "ex2": "exp2f(x)",
    "lg2": "log2f(x)", "sin": "sinf(x)", "cos": "cosf(x)", "tanh": "tanhf(x)",
    "copysign": "copysignf(y,x)",
}  # fmt: skip
_FLOAT64 = {
    "add": "A+B", "sub": "A-B", "mul": "A*B", "div": "A/B", "fma": "__builtin_fma(A,B,C)",
    "min": "dmin_(A,B)", "max": "dmax_(A,B)", "neg": "-A", "abs": "__builtin_fabs(A)",
    "rcp": "1.0/A", "sqrt": "__builtin_sqrt(A)", "rsqrt": "1.0/sqrt(A)",
    "copysign": "copysign(B,A)", "mov": "A",
}  # fmt: skip
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_EXTREMES = {"min": "fmin_", "max": "fmax_", "min.NaN": "fminN", "max.NaN": "fmaxN"}


def floating_operations() -> dict[str, Operation]:
    """Return the operations by name, such as ``"fma.ftz.f32"``."""
    return {**_float32(), **_float64(), **_halves(), **_pairs(), **_packing(), **_extremes()}


def _float32() -> dict[str, Operation]:
    ops = {"mov.f32": lanewise("f32", ("f32",), "A")}
    for name, expression in _FLOAT32.items():
        names = [v for v in "xyz" if re.search(rf"\b{v}\b", expression)]
        kinds = ("f32",) * len(names)
        for flush in (False, True):
            value = expression
            for variable, operand in zip(names, "ABC", strict=False):
                given = f"fz({operand})" if flush else operand
                value = re.sub(rf"\b{variable}\b", given, value)
            ftz = ".ftz" if flush else ""
            result = f"fz({value})" if flush else value
            ops[f"{name}{ftz}.f32"] = lanewise("f32", kinds, result)
            if name in (*_SIGNS, "fma"):
                clamped = f"({{f32 r_={value}; r_!=r_?0.0f:r_<0?0.0f:r_>1?1.0f:r_;}})"
                ops[f"{name}.sat{ftz}.f32"] = lanewise("f32", kinds, clamped)
    return ops


def _float64() -> dict[str, Operation]:
    return {
        f"{name}.f64": lanewise("f64", ("f64",) * len(re.findall(r"\b[ABC]\b", e)), e)
        for name, e in _FLOAT64.items()
    }


def _halves() -> dict[str, Operation]:
    ops = {}
    half, brain = ("(f32)ash(A)", "(f32)ash(B)"), ("(f64)bf(A)", "(f64)bf(B)")
    for name, sign in _SIGNS.items():
        ops[f"{name}.f16"] = lanewise("h", ("h", "h"), f"ashu((f16)({half[0]}{sign}{half[1]}))")
        ops[f"{name}.bf16"] = lanewise("bh", ("bh", "bh"), f"tobf_d({brain[0]}{sign}{brain[1]})")
    for name, function in _EXTREMES.items():
        value = f"ashu((f16){function}({half[0]},{half[1]}))"
        ops[f"{name}.f16"] = lanewise("h", ("h", "h"), value)
        value = f"tobf_d((f64){function}(bf(A),bf(B)))"
        ops[f"{name}.bf16"] = lanewise("bh", ("bh", "bh"), value)
    value = "ashu((f16)fma_odd(ash(A),ash(B),ash(C)))"
    ops["fma.f16"] = lanewise("h", ("h",) * 3, value)
    ops["fma.bf16"] = lanewise("bh", ("bh",) * 3, "tobf_d(fma_odd(bf(A),bf(B),bf(C)))")
    for t, kind, widen in (
        ("f16", "h", "ash"),
        ("bf16", "bh", "bf"),
    ):  # into float32: sm_100 and later
        for name, sign in (("add", "+"), ("sub", "-")):
            ops[f"{name}.f32.{t}"] = lanewise("f32", (kind, "f32"), f"(f32){widen}(A){sign}B")
        value = f"__builtin_fmaf((f32){widen}(A),(f32){widen}(B),C)"
        ops[f"fma.f32.{t}"] = lanewise("f32", (kind, kind, "f32"), value)
    for t, kind in (("f16", "h"), ("bf16", "bh")):
        ops[f"neg.{t}"] = lanewise(kind, (kind,), "A^0x8000")
        ops[f"abs.{t}"] = lanewise(kind, (kind,), "A&0x7fff")
    ops["ex2.f16"] = lanewise("h", ("h",), "ashu((f16)exp2f((f32)ash(A)))")
    ops["tanh.f16"] = lanewise("h", ("h",), "ashu((f16)tanhf((f32)ash(A)))")
    return ops


def _pairs() -> dict[str, Operation]:
    ops = {}
    two = ("u32", "u32")
    for name, sign in _SIGNS.items():
        ops[f"{name}.f16x2"] = lanewise("u32", two, f"HX2(A,B,(f32)x{sign}(f32)y)")
        ops[f"{name}.bf16x2"] = lanewise("u32", two, f"BX2(A,B,(f64)x{sign}y)")
        value = f"pk2(lo2(A){sign}lo2(B),hi2(A){sign}hi2(B))"
        ops[f"{name}.f32x2"] = lanewise("u64", ("u64", "u64"), value)
    for name, function in _EXTREMES.items():
        ops[f"{name}.f16x2"] = lanewise("u32", two, f"HX2(A,B,{function}(x,y))")
        ops[f"{name}.bf16x2"] = lanewise("u32", two, f"BX2(A,B,{function}(x,y))")

    for t, narrow, widen in (
        ("f16x2", "ashu((f16)fma_odd({}))", "ash"),
        ("bf16x2", "tobf_d(fma_odd({}))", "bf"),
    ):
        low, high = (
            narrow.format(",".join(f"{widen}((u16)({v}{shift}))" for v in "ABC"))
            for shift in ("", ">>16")
        )
        ops[f"fma.{t}"] = lanewise("u32", ("u32",) * 3, f"h2({low},{high})")
    low, high = (f"__builtin_fmaf({f}(A),{f}(B),{f}(C))" for f in ("lo2", "hi2"))
    ops["fma.f32x2"] = lanewise("u64", ("u64",) * 3, f"pk2({low},{high})")
    for t in ("f16x2", "bf16x2"):
        ops[f"neg.{t}"] = lanewise("u32", ("u32",), "A^0x80008000u")
        ops[f"abs.{t}"] = lanewise("u32", ("u32",), "A&0x7fff7fffu")
    return ops


def _packing() -> dict[str, Operation]:
    """Conversions of two values into one register; the first operand is the upper half."""
    two = ("f32", "f32")
    ops = {
        "cvt.f16x2.f32": lanewise("u32", two, "h2(ashu((f16)B),ashu((f16)A))"),
        "cvt.bf16x2.f32": lanewise("u32", two, "h2(tobf(B),tobf(A))"),
        "cvt.rz.f16x2.f32": lanewise("u32", two, "h2(f16rz(B),f16rz(A))"),
        "cvt.rz.bf16x2.f32": lanewise("u32", two, "h2((u16)(asu(B)>>16),(u16)(asu(A)>>16))"),
    }
    for t, e5 in (("e4m3", 0), ("e5m2", 1)):
        value = f"(u16)(tofp8(B,{e5})|(tofp8(A,{e5})<<8))"
        ops[f"cvt.{t}x2.f32"] = lanewise("u16", two, value)
        value = f"h2(ashu((f16){t}((u8)A)),ashu((f16){t}((u8)(A>>8))))"
        ops[f"cvt.f16x2.{t}x2"] = lanewise("u32", ("u16",), value)
        low, high = "(f32)ash((u16)A)", "(f32)ash((u16)(A>>16))"
        value = f"(u16)(tofp8({low},{e5})|(tofp8({high},{e5})<<8))"
        ops[f"cvt.{t}x2.f16x2"] = lanewise("u16", ("u32",), value)
    return ops


def _extremes() -> dict[str, Operation]:
    """Minimum and maximum of three (sm_100 and later), and by magnitude with the signs' product."""
    ops = {}
    for name, function in _EXTREMES.items():
        value = f"{function}({function}(A,B),C)"
        ops[f"{name}.f323"] = lanewise("f32", ("f32",) * 3, value)
    for name in ("min", "max"):
        value = f"xsign(f{name}_(fabsf(A),fabsf(B)),A,B)"
        ops[f"{name}.xorsign.abs.f32"] = lanewise("f32", ("f32", "f32"), value)
    return ops
