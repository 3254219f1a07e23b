"""A PTX interpreter for the PTX that Triton emits for sm_80-class targets, running on the CPU. Needs numpy and gcc; nothing else.

ptx_core.c.in is the interpreter's core (a warp of 32 lanes at a time); the cases for arithmetic are generated below and compiled once with gcc.
"""

from __future__ import annotations
import bisect, ctypes, dataclasses, functools, hashlib, mmap, os, pathlib, re, shutil, struct, subprocess, time
import numpy as np
from entrenar.errors import KernelError

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.environ.get("ENTRENAR_EMULATOR_CACHE") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "entrenar", "emulator"
)


class PTXError(RuntimeError):
    pass


NOP = 0xFFFFFFFF
SHWIN, LOCWIN = 1 << 60, 1 << 61

# ------------------------------------------------------------------ table of arithmetic operations: name -> (case body, dst class, operand classes)
OPS: dict[str, tuple[str, str, tuple[str, ...]]] = {}
CT = {
    "u16": "u16",
    "s16": "s16",
    "u32": "u32",
    "s32": "s32",
    "u64": "u64",
    "s64": "s64",
    "f32": "f32",
    "f64": "f64",
    "h": "u16",
    "bh": "u16",
}
W = {
    "u16": 16,
    "s16": 16,
    "u32": 32,
    "s32": 32,
    "u64": 64,
    "s64": 64,
    "f32": 32,
    "f64": 64,
    "h": 16,
    "bh": 16,
    "pred": 1,
}


def op(name, d, srcs, expr):
    body = f"{{ {CT[d]}*d=({CT[d]}*)(R+I->d); " + " ".join(
        f"const {CT[s]}*{n}=(const {CT[s]}*)(R+I->{n if i < 3 else 'x'});"
        for i, (n, s) in enumerate(zip("abce", srcs))
    )
    e = re.sub(r"\b([ABCE])\b", lambda m: f"{m[1].lower()}[l]", expr)
    OPS[name] = (body + f" LANES(d[l]={e}) }} break;", d, tuple(srcs))


def build_ops():
    for w in (16, 32, 64):
        u, s = f"u{w}", f"s{w}"
        for t in (u, s, f"b{w}"):
            op(f"add.{t}", u, (u, u), "A+B")
            op(f"sub.{t}", u, (u, u), "A-B")
            op(f"mul.lo.{t}", u, (u, u), f"({u})((u64)A*B)")
            op(f"mad.lo.{t}", u, (u, u, u), f"({u})((u64)A*B+C)")
            op(f"shl.{t}", u, (u, "u32"), f"B>{w - 1}?0:({u})((u64)A<<B)")
            for n, e in (("and", "A&B"), ("or", "A|B"), ("xor", "A^B")):
                op(f"{n}.{t}", u, (u, u), e)
            op(f"not.{t}", u, (u,), "~A")
            op(f"mov.{t}", u, (u,), "A")
            op(f"cnot.{t}", u, (u,), "A==0")
        op(f"shr.{u}", u, (u, "u32"), f"B>{w - 1}?0:A>>B")
        op(f"shr.b{w}", u, (u, "u32"), f"B>{w - 1}?0:A>>B")
        op(f"shr.{s}", s, (s, "u32"), f"A>>(B>{w - 1}?{w - 1}:B)")
        for t in (u, s):
            op(f"min.{t}", t, (t, t), "A<B?A:B")
            op(f"max.{t}", t, (t, t), "A>B?A:B")
        op(f"neg.{s}", u, (u,), "0-A")
        op(f"abs.{s}", u, (s,), f"A<0?({u})0-({u})A:({u})A")
    op("mul.hi.u32", "u32", ("u32",) * 2, "(u32)(((u64)A*B)>>32)")
    op("mul.hi.s32", "u32", ("s32",) * 2, "(u32)(((s64)A*B)>>32)")
    op("mul.hi.u64", "u64", ("u64",) * 2, "(u64)(((unsigned __int128)A*B)>>64)")
    op("mul.hi.s64", "u64", ("s64",) * 2, "(u64)(((__int128)A*B)>>64)")
    op("mul.hi.u16", "u16", ("u16",) * 2, "(u16)(((u32)A*B)>>16)")
    op("mul.hi.s16", "u16", ("s16",) * 2, "(u16)(((s32)A*B)>>16)")
    op("mad.hi.u32", "u32", ("u32",) * 3, "(u32)(((u64)A*B)>>32)+C")
    op("mad.hi.s32", "u32", ("s32", "s32", "u32"), "(u32)(((s64)A*B)>>32)+C")
    for s, d in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        op(f"mul.wide.{s}", d, (s, s), f"({d})A*({d})B")
        op(f"mad.wide.{s}", d, (s, s, d), f"({d})((u64)(({d})A*({d})B)+(u64)C)")
    for n in ("mul24.lo",):
        op(f"{n}.s32", "u32", ("s32",) * 2, "(u32)((A<<8>>8)*(B<<8>>8))")
        op(f"{n}.u32", "u32", ("u32",) * 2, "(A&0xffffff)*(B&0xffffff)")
    op("div.s32", "s32", ("s32",) * 2, "sdiv32(A,B)")
    op("rem.s32", "s32", ("s32",) * 2, "srem32(A,B)")
    for n, o in (("min", "<"), ("max", ">")):
        op(f"{n}.relu.s32", "s32", ("s32",) * 2, f"({{s32 v_=A{o}B?A:B; v_<0?0:v_;}})")
    op("div.u32", "u32", ("u32",) * 2, "B?A/B:~0u")
    op("rem.u32", "u32", ("u32",) * 2, "B?A%B:A")
    op("div.s64", "s64", ("s64",) * 2, "sdiv64(A,B)")
    op("rem.s64", "s64", ("s64",) * 2, "srem64(A,B)")
    op("div.u64", "u64", ("u64",) * 2, "B?A/B:~0ull")
    op("rem.u64", "u64", ("u64",) * 2, "B?A%B:A")
    op("div.s16", "s16", ("s16",) * 2, "(s16)sdiv32(A,B)")
    op("rem.s16", "s16", ("s16",) * 2, "(s16)srem32(A,B)")
    op("div.u16", "u16", ("u16",) * 2, "B?A/B:0xffff")
    op("rem.u16", "u16", ("u16",) * 2, "B?A%B:A")
    op("popc.b32", "u32", ("u32",), "__builtin_popcount(A)")
    op("popc.b64", "u32", ("u64",), "__builtin_popcountll(A)")
    op("clz.b32", "u32", ("u32",), "A?__builtin_clz(A):32")
    op("clz.b64", "u32", ("u64",), "A?__builtin_clzll(A):64")
    op(
        "brev.b32",
        "u32",
        ("u32",),
        "({u32 v_=A,r_=0; for(int i=0;i<32;i++) r_|=((v_>>i)&1)<<(31-i); r_;})",
    )
    op(
        "brev.b64",
        "u64",
        ("u64",),
        "({u64 v_=A,r_=0; for(int i=0;i<64;i++) r_|=((v_>>i)&1)<<(63-i); r_;})",
    )
    op("bfind.u32", "u32", ("u32",), "A?31-__builtin_clz(A):~0u")
    op("bfind.s32", "u32", ("s32",), "({s32 v_=A; if(v_<0) v_=~v_; v_?31-__builtin_clz(v_):~0u;})")
    op("bfind.u64", "u32", ("u64",), "A?63-__builtin_clzll(A):~0u")
    for w in (32, 64):
        for t in ("u", "s"):
            op(
                f"bfe.{t}{w}",
                f"u{w}",
                (f"u{w}", "u32", "u32"),
                f"(u{w})bfe_(A,B,C,{w},{int(t == 's')})",
            )
        op(f"bfi.b{w}", f"u{w}", (f"u{w}", f"u{w}", "u32", "u32"), f"(u{w})bfi_(A,B,C,E,{w})")
    op("prmt.b32", "u32", ("u32",) * 3, "prmt(A,B,C)")
    op("lop3.b32", "u32", ("u32",) * 3, "lop3(A,B,C,I->k0)")
    op("shf.l.wrap.b32", "u32", ("u32",) * 3, "(u32)(((((u64)B<<32)|A)<<(C&31))>>32)")
    op("shf.r.wrap.b32", "u32", ("u32",) * 3, "(u32)((((u64)B<<32)|A)>>(C&31))")
    op("shf.l.clamp.b32", "u32", ("u32",) * 3, "C>=32?A:(u32)(((((u64)B<<32)|A)<<C)>>32)")
    op("shf.r.clamp.b32", "u32", ("u32",) * 3, "C>=32?B:(u32)((((u64)B<<32)|A)>>C)")
    op("sad.s32", "u32", ("s32", "s32", "u32"), "(u32)(A<B?(s64)B-A:(s64)A-B)+C")
    op("sad.u32", "u32", ("u32",) * 3, "(A<B?B-A:A-B)+C")
    op(
        "dp4a.s32.s32",
        "u32",
        ("u32",) * 3,
        "({u32 s_=C; for(int i=0;i<4;i++) s_+=(s32)(s8)(A>>(8*i))*(s32)(s8)(B>>(8*i)); s_;})",
    )
    op(
        "dp4a.u32.u32",
        "u32",
        ("u32",) * 3,
        "({u32 s_=C; for(int i=0;i<4;i++) s_+=(u32)(u8)(A>>(8*i))*(u32)(u8)(B>>(8*i)); s_;})",
    )
    # floating point
    F = {
        "add": (2, "x+y"),
        "sub": (2, "x-y"),
        "mul": (2, "x*y"),
        "div": (2, "x/y"),
        "fma": (3, "__builtin_fmaf(x,y,z)"),
        "min": (2, "fmin_(x,y)"),
        "max": (2, "fmax_(x,y)"),
        "min.NaN": (2, "fminN(x,y)"),
        "max.NaN": (2, "fmaxN(x,y)"),
        "neg": (1, "asf(asu(x)^0x80000000u)"),
        "abs": (1, "asf(asu(x)&0x7fffffffu)"),
        "rcp": (1, "1.0f/x"),
        "sqrt": (1, "__builtin_sqrtf(x)"),
        "rsqrt": (1, "(f32)(1.0/sqrt((f64)x))"),
        "ex2": (1, "exp2f(x)"),
        "lg2": (1, "log2f(x)"),
        "sin": (1, "sinf(x)"),
        "cos": (1, "cosf(x)"),
        "tanh": (1, "tanhf(x)"),
        "copysign": (2, "copysignf(y,x)"),
    }
    for n, (k, e) in F.items():
        for ftz in (0, 1):
            ee = e
            for v, r in zip("xyz"[:k], "ABC"):
                ee = re.sub(rf"\b{v}\b", f"fz({r})" if ftz else r, ee)
            nm = n + (".ftz" if ftz else "") + ".f32"
            op(nm, "f32", ("f32",) * k, f"fz({ee})" if ftz else ee)
            if n in ("add", "sub", "mul", "fma"):
                op(
                    n + ".sat" + (".ftz" if ftz else "") + ".f32",
                    "f32",
                    ("f32",) * k,
                    f"({{f32 r_={ee}; r_!=r_?0.0f:r_<0?0.0f:r_>1?1.0f:r_;}})",
                )
    D = {
        "add": (2, "A+B"),
        "sub": (2, "A-B"),
        "mul": (2, "A*B"),
        "div": (2, "A/B"),
        "fma": (3, "__builtin_fma(A,B,C)"),
        "min": (2, "dmin_(A,B)"),
        "max": (2, "dmax_(A,B)"),
        "neg": (1, "-A"),
        "abs": (1, "__builtin_fabs(A)"),
        "rcp": (1, "1.0/A"),
        "sqrt": (1, "__builtin_sqrt(A)"),
        "rsqrt": (1, "1.0/sqrt(A)"),
        "copysign": (2, "copysign(B,A)"),
    }
    for n, (k, e) in D.items():
        op(n + ".f64", "f64", ("f64",) * k, e)
    op("mov.f32", "f32", ("f32",), "A")
    op("mov.f64", "f64", ("f64",), "A")
    H = {
        "add": (2, "x+y"),
        "sub": (2, "x-y"),
        "mul": (2, "x*y"),
        "fma": (3, None),
        "min": (2, "fmin_(x,y)"),
        "max": (2, "fmax_(x,y)"),
        "min.NaN": (2, "fminN(x,y)"),
        "max.NaN": (2, "fmaxN(x,y)"),
    }
    for n, (k, e) in H.items():
        if k == 2:
            op(
                n + ".f16",
                "h",
                ("h", "h"),
                "ashu((f16)("
                + e.replace("x", "@")
                .replace("y", "(f32)ash(B)")
                .replace("@", "(f32)ash(A)")
                .replace("fma(f32)ash(A)", "fmax")
                .replace("fmi", "fmi")
                + "))"
                if not n.startswith("max")
                else "ashu((f16)"
                + ("fmaxN" if "NaN" in n else "fmax_")
                + "((f32)ash(A),(f32)ash(B)))",
            )
            ee = e if not n.startswith("max") else e.replace("fmax", "FM@X")
            be = (
                ee.replace("x", "@").replace("y", "bf(B)").replace("@", "bf(A)")
                if not n.startswith("max")
                else ("fmaxN" if "NaN" in n else "fmax_") + "(bf(A),bf(B))"
            )
            op(
                n + ".bf16",
                "bh",
                ("bh", "bh"),
                f"tobf_d((f64)({be}))"
                if n not in ("mul", "add", "sub")
                else f"tobf_d((f64)bf(A){'*' if n == 'mul' else '+' if n == 'add' else '-'}(f64)bf(B))",
            )
            s = {"add": "(f32)x+(f32)y", "sub": "(f32)x-(f32)y", "mul": "(f32)x*(f32)y"}.get(n) or e
            op(n + ".f16x2", "u32", ("u32", "u32"), f"HX2(A,B,{s})")
            op(
                n + ".bf16x2",
                "u32",
                ("u32", "u32"),
                f"BX2(A,B,{ {'add': '(f64)x+y', 'sub': '(f64)x-y', 'mul': '(f64)x*y'}.get(n) or e })",
            )
    for t, d, widen in (("f16", "h", "ash"), ("bf16", "bh", "bf")):
        for n, o in (("add", "+"), ("sub", "-")):
            op(f"{n}.f32.{t}", "f32", (d, "f32"), f"(f32){widen}(A){o}B")
    op("fma.f16", "h", ("h",) * 3, "ashu((f16)fma_odd(ash(A),ash(B),ash(C)))")
    op("fma.bf16", "bh", ("bh",) * 3, "tobf_d(fma_odd(bf(A),bf(B),bf(C)))")
    op(
        "fma.f16x2",
        "u32",
        ("u32",) * 3,
        "h2(ashu((f16)fma_odd(ash((u16)A),ash((u16)B),ash((u16)C))),ashu((f16)fma_odd(ash((u16)(A>>16)),ash((u16)(B>>16)),ash((u16)(C>>16)))))",
    )
    op(
        "fma.bf16x2",
        "u32",
        ("u32",) * 3,
        "h2(tobf_d(fma_odd(bf((u16)A),bf((u16)B),bf((u16)C))),tobf_d(fma_odd(bf((u16)(A>>16)),bf((u16)(B>>16)),bf((u16)(C>>16)))))",
    )
    for t, d in (("f16", "h"), ("bf16", "bh")):
        op(f"neg.{t}", d, (d,), "A^0x8000")
        op(f"abs.{t}", d, (d,), "A&0x7fff")
        op(f"neg.{t}x2", "u32", ("u32",), "A^0x80008000u")
        op(f"abs.{t}x2", "u32", ("u32",), "A&0x7fff7fffu")
    op("ex2.f16", "h", ("h",), "ashu((f16)exp2f((f32)ash(A)))")
    op("tanh.f16", "h", ("h",), "ashu((f16)tanhf((f32)ash(A)))")
    # two-operand packing conversions (d, hi, lo)
    op("cvt.f16x2.f32", "u32", ("f32", "f32"), "h2(ashu((f16)B),ashu((f16)A))")
    op("cvt.bf16x2.f32", "u32", ("f32", "f32"), "h2(tobf(B),tobf(A))")
    op("cvt.rz.f16x2.f32", "u32", ("f32", "f32"), "h2(f16rz(B),f16rz(A))")
    op("cvt.rz.bf16x2.f32", "u32", ("f32", "f32"), "h2((u16)(asu(B)>>16),(u16)(asu(A)>>16))")
    for t, e5 in (("e4m3", 0), ("e5m2", 1)):
        op(f"cvt.{t}x2.f32", "u16", ("f32", "f32"), f"(u16)(tofp8(B,{e5})|(tofp8(A,{e5})<<8))")
        op(
            f"cvt.f16x2.{t}x2",
            "u32",
            ("u16",),
            f"h2(ashu((f16){t}((u8)A)),ashu((f16){t}((u8)(A>>8))))",
        )
        op(
            f"cvt.{t}x2.f16x2",
            "u16",
            ("u32",),
            f"(u16)(tofp8((f32)ash((u16)A),{e5})|(tofp8((f32)ash((u16)(A>>16)),{e5})<<8))",
        )
    for n in ("min", "max"):
        for nan in ("", ".NaN"):
            fn = f"f{n}N" if nan else f"f{n}_"
            op(f"{n}{nan}.f323", "f32", ("f32",) * 3, f"{fn}({fn}(A,B),C)")
    op("min.xorsign.abs.f32", "f32", ("f32", "f32"), "xsign(fmin_(fabsf(A),fabsf(B)),A,B)")
    op("max.xorsign.abs.f32", "f32", ("f32", "f32"), "xsign(fmax_(fabsf(A),fabsf(B)),A,B)")
    for n, o in (("add", "+"), ("sub", "-"), ("mul", "*")):
        op(f"{n}.f32x2", "u64", ("u64", "u64"), f"pk2(lo2(A){o}lo2(B),hi2(A){o}hi2(B))")
    op(
        "fma.f32x2",
        "u64",
        ("u64",) * 3,
        "pk2(__builtin_fmaf(lo2(A),lo2(B),lo2(C)),__builtin_fmaf(hi2(A),hi2(B),hi2(C)))",
    )
    # set: packed/16-bit/32-bit comparisons that give a value
    for st, ct in (("f16x2", "u32"), ("bf16x2", "u32")):
        f = "(f32)ash((u16)(X))" if st == "f16x2" else "bf((u16)(X))"
        for cmp, o in {
            "eq": "==",
            "ne": "!=",
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
            "nan": None,
            "num": None,
            "equ": "==",
            "neu": "!=",
            "ltu": "<",
            "leu": "<=",
            "gtu": ">",
            "geu": ">=",
        }.items():

            def half(sh):
                x, y = f.replace("X", f"A>>{sh}"), f.replace("X", f"B>>{sh}")
                if cmp == "nan":
                    return f"({x}!={x}||{y}!={y})"
                if cmp == "num":
                    return f"({x}=={x}&&{y}=={y})"
                if cmp[-1] == "u" and len(cmp) == 3:
                    return f"(({x}{o}{y})||{x}!={x}||{y}!={y})"
                return f"(({x}{o}{y})&&{x}=={x}&&{y}=={y})"

            op(
                f"set.{cmp}.{st}.{st}",
                "u32",
                ("u32", "u32"),
                f"h2({half(0)}?{'0x3c00' if st == 'f16x2' else '0x3f80'}:0,{half(16)}?{'0x3c00' if st == 'f16x2' else '0x3f80'}:0)",
            )
            for dt in ("u32", "s32"):
                pass
    # selects
    for w in (16, 32, 64):
        u = f"u{w}"
        OPS[f"selp.b{w}"] = (
            f"{{ {u}*d=({u}*)(R+I->d); const {u}*a=(const {u}*)(R+I->a),*b=(const {u}*)(R+I->b); u32 p_=*(u32*)(R+I->c); LANES(d[l]=(p_>>l&1)?a[l]:b[l]) }} break;",
            u,
            (u, u, "pred"),
        )
    for n, e in (("and", "A&B"), ("or", "A|B"), ("xor", "A^B"), ("not", "~A"), ("mov", "A")):
        ee = e.replace("A", "*(u32*)(R+I->a)").replace("B", "*(u32*)(R+I->b)")
        OPS[f"{n}.pred"] = (
            f"{{ u32*d=(u32*)(R+I->d); u32 r_={ee}; *d=(*d&~m)|(r_&m); }} break;",
            "pred",
            ("pred",) * (1 if n in ("not", "mov") else 2),
        )
    # comparisons
    tail = "if(I->k0){ u32 pc_=*(u32*)(R+I->c); if(I->k1) pc_=~pc_; u32 np_=~pres; switch(I->k0){ case 1: pres&=pc_; np_&=pc_; break; case 2: pres|=pc_; np_|=pc_; break; default: pres^=pc_; np_^=pc_; } if(I->x!=NOP_){ u32*q=(u32*)(R+I->x); *q=(*q&~m)|(np_&m);} } else if(I->x!=NOP_){ u32*q=(u32*)(R+I->x); *q=(*q&~m)|(~pres&m);} u32*d=(u32*)(R+I->d); *d=(*d&~m)|(pres&m); } break;"
    for t in (
        "s16",
        "u16",
        "b16",
        "s32",
        "u32",
        "b32",
        "s64",
        "u64",
        "b64",
        "f16",
        "bf16",
        "f32",
        "f64",
    ):
        isf = t[0] == "f" or t == "bf16"
        ct = {"f16": "u16", "bf16": "u16"}.get(t, t.replace("b", "u") if not isf else t)
        A, B = {"f16": ("(f32)ash(a[l])", "(f32)ash(b[l])"), "bf16": ("bf(a[l])", "bf(b[l])")}.get(
            t, ("a[l]", "b[l]")
        )
        C = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
        if not isf:
            C |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
        for cmp, o in C.items():
            e = f"{A}{o}{B}"
            if isf and cmp == "ne":
                e = f"({A}!={B}&&{A}=={A}&&{B}=={B})"
            OPS[f"setp.{cmp}.{t}"] = (
                f"{{ const {ct}*a=(const {ct}*)(R+I->a),*b=(const {ct}*)(R+I->b); PSET({e}) "
                + tail,
                "pred",
                (ct, ct),
            )
            if isf:
                OPS[f"setp.{cmp}u.{t}"] = (
                    f"{{ const {ct}*a=(const {ct}*)(R+I->a),*b=(const {ct}*)(R+I->b); PSET(({A}{o}{B})||{A}!={A}||{B}!={B}) "
                    + tail,
                    "pred",
                    (ct, ct),
                )
        if isf:
            OPS[f"setp.num.{t}"] = (
                f"{{ const {ct}*a=(const {ct}*)(R+I->a),*b=(const {ct}*)(R+I->b); PSET({A}=={A}&&{B}=={B}) "
                + tail,
                "pred",
                (ct, ct),
            )
            OPS[f"setp.nan.{t}"] = (
                f"{{ const {ct}*a=(const {ct}*)(R+I->a),*b=(const {ct}*)(R+I->b); PSET({A}!={A}||{B}!={B}) "
                + tail,
                "pred",
                (ct, ct),
            )
    # packed comparisons: a predicate for each half
    for t, value in (("f16", "(f32)ash((u16)({}))"), ("bf16", "bf((u16)({}))")):
        halves = [(value.format(f"a[l]>>{n}"), value.format(f"b[l]>>{n}")) for n in (0, 16)]
        for cmp, o in {
            "eq": "==",
            "ne": "!=",
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
        }.items():
            for unordered in ("", "u"):
                tests = []
                for x, y in halves:
                    nan = f"({x}!={x}||{y}!={y})"
                    tests.append(f"({x}{o}{y})||{nan}" if unordered else f"({x}{o}{y})&&!{nan}")
                code = (
                    "{ const u32*a=(const u32*)(R+I->a),*b=(const u32*)(R+I->b); u32 lo_=0,hi_=0; "
                    f"for(int l=0;l<32;l++){{ lo_|=(u32)({tests[0]})<<l; hi_|=(u32)({tests[1]})<<l; }} "
                    "u32*d=(u32*)(R+I->d); *d=(*d&~m)|(lo_&m); "
                    "if(I->x!=NOP_){ u32*q=(u32*)(R+I->x); *q=(*q&~m)|(hi_&m); } } break;"
                )
                OPS[f"setp.{cmp}{unordered}.{t}x2"] = (code, "pred", ("u32", "u32"))
    op("cvta.w", "u64", ("u64",), "A+(u64)I->imm")
    op("testp.finite.f32", "f32", ("f32",), "A")
    del OPS["testp.finite.f32"]


build_ops()
BASE = [
    "BRA",
    "RET",
    "BAR",
    "SYNCWARP",
    "SHFL",
    "REDUX",
    "MMA",
    "LDMATRIX",
    "STMATRIX",
    "WGMMA",
    "VOTE",
    "ELECT",
    "LD",
    "ST",
    "ATOM",
    "CPASYNC",
    "CPCOMMIT",
    "CPWAIT",
    "CPWAITALL",
    "CVT",
    "NOP",
    "TRAP",
    "UNSUP",
    "PACK",
    "UNPACK",
    "ACTIVEMASK",
    "MBAR",
    "TRYWAIT",
    "TMALD",
    "TMAST",
    "TMREP",
    "TMCP",
]
OPID = {n: i for i, n in enumerate(BASE)}
for n in OPS:
    OPID[n] = len(OPID)


class _Ins(ctypes.Structure):
    _fields_ = (
        [("op", ctypes.c_uint16), ("pneg", ctypes.c_uint8), ("n", ctypes.c_uint8)]
        + [(k, ctypes.c_uint32) for k in ("pred", "d", "a", "b", "c", "x")]
        + [("imm", ctypes.c_int64)]
        + [(k, ctypes.c_uint32) for k in ("k0", "k1", "k2", "line")]
        + [("count", ctypes.c_uint64)]
    )


class _Grp(ctypes.Structure):
    _fields_ = [(k, ctypes.c_uint32) for k in ("pc", "mask", "blocked", "pad")]


class _Warp(ctypes.Structure):
    _fields_ = (
        [("R", ctypes.c_uint64), ("local", ctypes.c_uint64)]
        + [
            (k, ctypes.c_uint32)
            for k in ("pc", "mask", "alive", "state", "npend", "ncp", "ngrp", "cap")
        ]
        + [("pend", _Grp * 40), ("cp", ctypes.c_uint64), ("grp_end", ctypes.c_uint32 * 64)]
    )


class _Ctx(ctypes.Structure):
    _fields_ = (
        [(k, ctypes.c_uint64) for k in ("prog", "extra", "warps", "smem", "smem_n", "local_n")]
        + [(k, ctypes.c_uint32) for k in ("nprog", "nwarps", "nthreads", "gx", "gy", "gz", "o_tid")]
        + [("o_ctaid", ctypes.c_uint32 * 3)]
        + [
            (k, ctypes.c_uint32)
            for k in ("o_laneid", "o_warpid", "order", "late_async", "poison", "do_poison")
        ]
        + [
            (k, ctypes.c_uint64)
            for k in ("wg", "wg_end", "icount", "limit", "seed", "barriers", "fault")
        ]
        + [(k, ctypes.c_uint32) for k in ("err", "err_pc", "started")]
        + [("cur", ctypes.c_int32)]
        + [(k, ctypes.c_uint32) for k in ("regbytes", "regpoison_lo", "regpoison_hi", "pad")]
        + [("smem_alloc", ctypes.c_uint64), ("mon", ctypes.c_uint64)]
    )


class _Mon(ctypes.Structure):
    _fields_ = (
        [(k, ctypes.c_uint32) for k in ("flags", "sgran", "ggran", "nreg")]
        + [(k, ctypes.c_uint64) for k in ("im", "reg", "rep")]
        + [(k, ctypes.c_uint32) for k in ("nrep", "maxrep")]
        + [("blockbars", ctypes.c_uint64)]
    )


class _MReg(ctypes.Structure):
    _fields_ = [(k, ctypes.c_uint64) for k in ("lo", "n", "ld", "st", "valid", "gr", "rld", "rst")]


class _Rep(ctypes.Structure):
    _fields_ = [(k, ctypes.c_uint32) for k in ("kind", "pc1", "pc2", "ag1", "ag2", "reg")] + [
        (k, ctypes.c_uint64) for k in ("n", "addr", "block", "block2")
    ]


@functools.cache
def _lib():
    os.makedirs(CACHE, exist_ok=True)
    src = pathlib.Path(HERE, "ptx_core.c.in").read_text()
    enum = ", ".join(f"OP_{n}={i}" for n, i in OPID.items() if n in BASE)
    cases = "\n".join(
        f"static void f_{OPID[n]}(Ins*I,u8*R,u32 m){{ u32 pres; (void)pres; {b[0].removesuffix(' break;')} }}"
        for n, b in OPS.items()
    )
    cases += f"\ntypedef void (*opf)(Ins*,u8*,u32);\nenum {{ NBASE={len(BASE)} }};\nstatic const opf OPF[]={{{','.join(f'f_{OPID[n]}' for n in OPS)}}};"
    src = (
        src.replace("@ENUM@", enum)
        .replace("@CASES@", cases)
        .replace("@MON@", pathlib.Path(HERE, "ptx_mon.c.in").read_text())
    )
    flags = [
        "-O3",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fwrapv",
        "-fno-strict-aliasing",
    ]
    so = os.path.join(
        CACHE,
        "core_"
        + hashlib.sha256(
            (
                src
                + " ".join(flags)
                + pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].split("flags")[-1]
            ).encode()
        ).hexdigest()[:16]
        + ".so",
    )
    if not os.path.exists(so):
        c = so[:-3] + f".{os.getpid()}.c"
        pathlib.Path(c).write_text(src)
        compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")
        if compiler is None:
            raise KernelError(
                "the PTX emulator needs a C compiler and found neither gcc nor cc",
                "install gcc, or name a compiler in CC",
            )
        subprocess.check_call(
            [compiler, *flags, "-shared", "-fPIC", c, "-o", so + f".{os.getpid()}", "-lm"]
        )
        os.replace(so + f".{os.getpid()}", so)
        os.remove(c)
    lib = ctypes.CDLL(so)
    assert (lib.sz_ctx(), lib.sz_ins(), lib.sz_warp()) == (
        ctypes.sizeof(_Ctx),
        ctypes.sizeof(_Ins),
        ctypes.sizeof(_Warp),
    ), (
        lib.sz_ctx(),
        lib.sz_ins(),
        lib.sz_warp(),
        ctypes.sizeof(_Ctx),
        ctypes.sizeof(_Ins),
        ctypes.sizeof(_Warp),
    )
    lib.free_cp.argtypes = [ctypes.c_void_p]
    return lib


# ------------------------------------------------------------------ PTX text -> program
TW = {
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "f32x2": 64,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "pred": 1,
    "b128": 128,
}
CVT = {
    "u8": 0,
    "s8": 1,
    "u16": 2,
    "s16": 3,
    "u32": 4,
    "s32": 5,
    "u64": 6,
    "s64": 7,
    "f16": 8,
    "bf16": 9,
    "f32": 10,
    "f64": 11,
}
RND = {"rn": 1, "rz": 2, "rm": 3, "rp": 4, "rni": 5, "rzi": 6, "rmi": 7, "rpi": 8, "rna": 9}


def split_ops(s):
    out, depth, cur = [], 0, ""
    for ch in s:
        if ch in "{[(":
            depth += 1
        if ch in "}])":
            depth -= 1
        if ch == "," and depth == 0:
            out.append(cur.strip())
            cur = ""
        else:
            cur += ch
    if cur.strip():
        out.append(cur.strip())
    return out


class Program:
    def __init__(self, ptx: str, name: str):
        self.name, self.ptx = name, ptx
        self.ins: list[_Ins] = []
        self.extra: list[int] = []
        self.labels: dict = {}
        self.fix: list = []
        self.consts: dict = {}
        self.off = 0
        self.text: list[str] = []
        self.params: list = []
        self.param_off: dict = {}
        self.local: dict = {}
        self.local_n = 0
        self.globals: dict = {}
        self.keep: list = []
        self.shared: dict = {}
        self.static_shared = 0
        self.spec = {
            k: self.alloc(32)
            for k in ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z", "laneid", "warpid")
        }
        self.dimspec = {}  # launch-time constants
        self.nt_exact = None
        self.parse()

    # registers are byte offsets into a warp's register file
    def alloc(self, width):
        n = 4 if width == 1 else 32 * width // 8
        if width != 1:
            self.off = (self.off + 31) // 32 * 32
        o = self.off
        self.off += n
        return o

    def const(self, v, width):
        v &= (1 << width) - 1 if width > 1 else 1
        if (v, width) not in self.consts:
            self.consts[(v, width)] = self.alloc(width)
        return self.consts[(v, width)]

    def special(self, nm):
        m = {
            "tid.x": "tid.x",
            "laneid": "laneid",
            "warpid": "warpid",
            "ctaid.x": "ctaid.x",
            "ctaid.y": "ctaid.y",
            "ctaid.z": "ctaid.z",
        }
        if nm in m:
            return self.spec[m[nm]]
        if nm in (
            "tid.y",
            "tid.z",
            "clusterid.x",
            "cluster_ctaid.x",
            "cluster_ctaid.y",
            "cluster_ctaid.z",
            "cluster_ctarank",
            "smid",
            "clock",
            "clock_hi",
            "globaltimer_lo",
        ):
            return self.const(0, 32)
        if nm in ("clock64", "globaltimer"):
            return self.const(0, 64)
        if nm in ("cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z", "cluster_nctarank"):
            return self.const(1, 32)
        if nm.startswith("lanemask_"):
            if nm not in self.spec:
                self.spec[nm] = self.alloc(32)
            return self.spec[nm]
        if nm in (
            "ntid.x",
            "ntid.y",
            "ntid.z",
            "nctaid.x",
            "nctaid.y",
            "nctaid.z",
            "nwarpid",
            "dynamic_smem_size",
            "total_smem_size",
        ):
            if nm not in self.dimspec:
                self.dimspec[nm] = self.alloc(32)
            return self.dimspec[nm]
        raise PTXError(f"special register %{nm}")

    def lookup(self, t):
        for sc in reversed(self.scopes):
            if t in sc:
                return sc[t]
        return None

    def imm(self, t, width):
        if t.startswith("0f") or t.startswith("0F"):
            v = int(t[2:], 16)
            return (
                v
                if width == 32
                else struct.unpack(
                    "<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", v))[0])
                )[0]
            )
        if t.startswith("0d") or t.startswith("0D"):
            return int(t[2:], 16)
        t = t.rstrip("U")
        try:
            return int(t, 0)
        except ValueError:
            if re.fullmatch(r"-?0[0-7]+", t):
                return int(t, 8)
            return None

    def src(self, t, width):
        """operand -> register offset"""
        r = self.lookup(t)
        if r is not None:
            if r[1] != width:
                raise PTXError(f"operand {t} is {r[1]} bits, {width} wanted: {self.cur}")
            return r[0]
        if t.startswith("%"):
            return self.special(t[1:])
        if t == "WARP_SZ":
            return self.const(32, width)
        if t in self.shared:
            return self.const(self.shared[t], width)
        if t in self.local:
            return self.const(self.local[t], width)
        if t in self.globals:
            return self.const(self.globals[t], width)
        if t in self.param_off:
            return self.const(self.param_off[t], width)  # made an address by cvta.param
        if width == 1 and t in ("true", "false"):
            return self.const(int(t == "true"), 1)
        v = self.imm(t, width)
        if v is None:
            raise PTXError(f"operand {t!r}: {self.cur}")
        return self.const(v, width)

    def reg(self, t):
        r = self.lookup(t)
        if r is None:
            raise PTXError(f"not a register: {t!r}: {self.cur}")
        return r

    def dst(self, t, width):
        if t == "_":
            return self.sink(width)
        o, w = self.reg(t)
        if w != width:
            raise PTXError(f"destination {t} is {w} bits, {width} wanted: {self.cur}")
        return o

    def sink(self, width):
        if ("sink", width) not in self.spec:
            self.spec[("sink", width)] = self.alloc(width)
        return self.spec[("sink", width)]

    def addr(self, t, space):
        """[reg+off] -> (reg offset, is64, imm)"""
        t = t.strip()[1:-1].strip()
        m = re.fullmatch(r"([^+\s]+)\s*(?:\+\s*(-?\w+))?", t) or re.fullmatch(
            r"([^+\s-]+)(-\d+)", t
        )
        if not m:
            raise PTXError(f"address [{t}]")
        base, off = m[1], int(m[2], 0) if m[2] else 0
        r = self.lookup(base)
        if r:
            return r[0], r[1] == 64, off
        if space == "param" or base in self.param_off:
            return self.const(self.param_addr + self.param_off[base] + off, 64), True, 0
        for d in (self.shared, self.local, self.globals):
            if base in d:
                return self.const(d[base] + off, 64), True, 0
        v = self.imm(base, 64)
        if v is None:
            raise PTXError(f"address [{t}]: {self.cur}")
        return self.const(v + off, 64), True, 0

    def emit(self, opn, **k):
        i = _Ins()
        i.op = OPID[opn]
        i.pred, i.pneg = self.pred
        i.d = i.a = i.b = i.c = i.x = NOP
        for kk, v in k.items():
            setattr(
                i, kk, v & 0xFFFFFFFF if kk in ("k0", "k1", "k2", "d", "a", "b", "c", "x") else v
            )
        i.line = self.line
        self.ins.append(i)
        self.text.append(self.cur)
        self.locs.append(self.loc)

    def ex(self, *v):
        o = len(self.extra)
        self.extra += [x & 0xFFFFFFFF for x in v]
        return o

    def parse(self):
        blank = lambda m: "\n" * m[0].count("\n")
        t = re.sub(r"/\*.*?\*/", blank, self.ptx, flags=re.S)
        t = re.sub(r"//[^\n]*", "", t)
        self.files = {int(m[1]): m[2] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', t)}
        self.line, self.loc, self.locs = 0, None, []
        k = re.search(r"\n\s*\.section\b", t)
        if k:
            t = t[: k.start()]
        if re.search(r"\.func\b", re.sub(r"\.extern\s+\.func.*?;", "", t, flags=re.S)):
            raise PTXError("device functions (.func) are not supported")
        t = re.sub(r"\.extern\s+\.func.*?;", blank, t, flags=re.S)
        m = re.search(r"\.entry\s+(\S+?)\s*\((.*?)\)(.*?)\{", t, flags=re.S)
        if not m:
            raise PTXError("no .entry")
        head, body = t[: m.start()], t[m.end() :]
        starts = [i.start() for i in re.finditer("\n", t)]
        base = m.end()
        # module-level data
        for st in head.split(";"):
            st = " ".join(st.split())
            if g := re.search(
                r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d*)\])?$", st
            ):
                if ".extern" in st:
                    self.shared[g[3]] = ("dyn",)
                else:
                    al = int(g[1] or 1)
                    self.static_shared = (self.static_shared + al - 1) // al * al
                    self.shared[g[3]] = self.static_shared
                    self.static_shared += int(g[4] or 1) * TW[g[2]] // 8
            elif g := re.search(
                r"\.(?:global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{?([^}]*)\}?)?$",
                st,
            ):
                w = TW[g[2]] // 8
                vals = [self.imm(x.strip(), w * 8) for x in g[5].split(",")] if g[5] else []
                n = int(g[4]) if g[4] else max(1, len(vals))
                buf = (ctypes.c_uint8 * (n * w + 16))()
                self.keep.append(buf)
                for i, v in enumerate(vals):
                    struct.pack_into(
                        {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[w], buf, i * w, v & ((1 << 8 * w) - 1)
                    )
                self.globals[g[3]] = ctypes.addressof(buf)
        dynbase = (self.static_shared + 1023) // 1024 * 1024 if self.static_shared else 0
        self.dynbase = dynbase
        for kk, v in self.shared.items():
            if v == ("dyn",):
                self.shared[kk] = dynbase
        # parameters
        off = 0
        for prm in [p for p in m[2].split(",") if p.strip()]:
            toks = prm.split()
            ty = next(x[1:] for x in toks if x[1:] in TW)
            al = TW[ty] // 8
            n = 1
            nm = toks[-1]
            if a := re.fullmatch(r"(\S+?)\[(\d+)\]", nm):
                nm, n = a[1], int(a[2])
            if ".align" in toks and ".ptr" not in toks:
                al = int(toks[toks.index(".align") + 1])
            off = (off + al - 1) // al * al
            self.param_off[nm] = off
            self.params.append((nm, off, TW[ty] // 8 * n))
            off += TW[ty] // 8 * n
        self.param_buf = (ctypes.c_uint8 * (off + 128))()
        self.param_addr = (ctypes.addressof(self.param_buf) + 63) // 64 * 64
        self.param_n = off
        self.maxntid = (
            int(x[1]) if (x := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", m[3])) else None
        )
        # statements
        self.scopes = [{}]
        self.scope_ids = [0]
        self.nscope = 0
        self.poison_lo = None
        pos, n = 0, len(body)
        depth = 1
        while pos < n:
            mm = re.compile(r"\s*").match(body, pos)
            pos = mm.end()
            if pos >= n:
                break
            if body[pos] == "{":
                self.scopes.append({})
                self.nscope += 1
                self.scope_ids.append(self.nscope)
                depth += 1
                pos += 1
                continue
            if body[pos] == "}":
                depth -= 1
                pos += 1
                if depth == 0:
                    break
                self.scopes.pop()
                self.scope_ids.pop()
                continue
            if lm := re.compile(r"([\w$]+)\s*:(?!:)").match(body, pos):
                self.labels[(self.scope_ids[-1], lm[1])] = len(self.ins)
                pos = lm.end()
                continue
            if re.compile(r"\.(loc|file)\s").match(body, pos):
                e = body.find("\n", pos)
                if l := re.match(r"\.loc\s+(\d+)\s+(\d+)", body[pos:e]):
                    self.loc = (int(l[1]), int(l[2])) if int(l[2]) else self.loc
                pos = n if e < 0 else e
                continue
            e = body.find(";", pos)
            if e < 0:
                break
            self.line = bisect.bisect_left(starts, base + pos) + 1
            st = " ".join(body[pos:e].split())
            pos = e + 1
            if st:
                self.statement(st)
        for i, lab, chain in self.fix:
            k = next(((s, lab) for s in reversed(chain) if (s, lab) in self.labels), None)
            if k is None:
                raise PTXError(f"label {lab}")
            self.ins[i].k0 = self.labels[k]
        self.cur = "ret"
        self.pred = (NOP, 0)
        self.emit("RET")

    def statement(self, st):
        self.cur = st
        if st.startswith(".reg"):
            m = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", st)
            w = TW[m[1]]
            for v in m[2].split(","):
                v = v.strip()
                if a := re.fullmatch(r"(\S+?)<(\d+)>", v):
                    for i in range(int(a[2])):
                        self.scopes[-1][f"{a[1]}{i}"] = (self.alloc(w), w)
                else:
                    self.scopes[-1][v] = (self.alloc(w), w)
            return
        if st.startswith(".local"):
            m = re.fullmatch(r"\.local\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\S+?)(?:\[(\d+)\])?", st)
            al = int(m[1] or 1)
            self.local_n = (self.local_n + al - 1) // al * al
            self.local[m[3]] = self.local_n
            self.local_n += int(m[4] or 1) * TW[m[2]] // 8
            return
        if st.startswith(".shared"):
            m = re.fullmatch(
                r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\S+?)(?:\[(\d+)\])?", st
            )
            raise PTXError("shared array inside the kernel: " + st)
        if st.startswith(".pragma") or st.startswith("."):
            return
        self.pred = (NOP, 0)
        if m := re.match(r"@(!?)(%?[\w$]+)\s+", st):
            self.pred = (self.src(m[2], 1), int(bool(m[1])))
            st = st[m.end() :]
        m = re.match(r"(\S+)\s*(.*)", st)
        try:
            self.instr(m[1], split_ops(m[2]))
        except (PTXError, KeyError, IndexError, StopIteration, ValueError) as e:
            if not isinstance(e, PTXError):
                e = f"form not understood ({type(e).__name__}: {e})"
            self.emit("UNSUP")
            self.text[-1] = f"{self.cur}   <- {e}"

    def regs(self, t):
        return [x.strip() for x in t.strip()[1:-1].split(",")] if t.startswith("{") else [t]

    def instr(self, opc, a):
        p = opc.split(".")
        b = p[0]
        ty = p[-1]
        S = set(p[1:])
        if b == "bra":
            self.fix.append((len(self.ins), a[0], list(self.scope_ids)))
            self.emit("BRA")
            return
        if b in ("ret", "exit"):
            self.emit("RET")
            return
        if b in ("trap", "brkpt"):
            self.emit("TRAP")
            return
        if b in ("bar", "barrier"):
            if "warp" in S:
                self.emit("SYNCWARP")
                return
            if "cluster" in S:
                raise PTXError("cluster barrier")
            if ("sync" in S) and (len(a) < 2 or self.imm(a[1], 32) == self.maxntid):
                self.emit("BAR")
                return
            raise PTXError("barrier form")
        if b in (
            "membar",
            "fence",
            "prefetch",
            "prefetchu",
            "griddepcontrol",
            "setmaxnreg",
            "nanosleep",
            "discard",
            "applypriority",
            "pmevent",
        ):
            self.emit("NOP")
            return
        if b == "createpolicy":
            self.emit("mov.u64", d=self.dst(a[0], 64), a=self.const(0, 64))
            return
        if b == "call":
            if any("vprintf" in x for x in a):
                self.emit("NOP")
                return  # device_print: nothing is printed
            if any("__assertfail" in x for x in a):
                self.emit("TRAP")
                return
            raise PTXError("call")
        if (
            b in ("st", "ld")
            and "param" in S
            and (aa := re.match(r"\[([\w$]+)", a[1 if b == "ld" else 0]))
            and aa[1] not in self.param_off
            and self.lookup(aa[1]) is None
        ):
            self.emit("NOP")
            return  # arguments of a call
        if b in ("ld", "ldu") or (b == "st"):
            sp = next(
                (
                    x
                    for x in p[1:]
                    if x.split("::")[0] in ("global", "shared", "local", "param", "const")
                ),
                "generic",
            ).split("::")[0]
            n = 8 if "v8" in S else 4 if "v4" in S else 2 if "v2" in S else 1
            w = TW[ty]
            sx = int(ty[0] == "s")
            da, aa = (a[0], a[1]) if b != "st" else (a[1], a[0])
            if w == 128:
                raise PTXError("b128 access")
            ra, is64, off = self.addr(aa, sp)
            x = []
            for r in self.regs(da):
                if r == "_":
                    x += [NOP, 0]
                elif b == "st" and self.lookup(r) is None:
                    wr = max(w, 16)
                    x += [self.src(r, wr), wr]
                else:
                    x += list(self.reg(r))
            spn = {"generic": 0, "global": 1, "param": 1, "const": 1, "shared": 2, "local": 3}[sp]
            self.emit(
                "ST" if b == "st" else "LD",
                a=ra,
                imm=off,
                n=n,
                k0=spn | (w // 8) << 8 | sx << 16 | int(sp in ("param", "const")) << 24,
                k2=int(is64),
                x=self.ex(*x),
            )
            return
        if b in ("atom", "red"):
            sp = next(
                (x for x in p[1:] if x.split("::")[0] in ("global", "shared")), "generic"
            ).split("::")[0]
            if any(x in S for x in ("v2", "v4", "v8")):
                raise PTXError("vector atomic")
            opn = next(
                x
                for x in p[1:]
                if x in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
            )
            w = TW[ty]
            k = {"f32": 2, "f64": 3, "f16": 4, "bf16": 5, "f16x2": 6, "bf16x2": 7}.get(
                ty, 1 if ty[0] == "s" else 0
            )
            if b == "atom":
                d, rest = self.dst(a[0], w), a[1:]
            else:
                d, rest = NOP, a
            ra, is64, off = self.addr(rest[0], sp)
            x = []
            for r in rest[1:3]:
                if self.lookup(r) or self.imm(r, w) is not None:
                    x += [self.src(r, w), w]
            self.emit(
                "ATOM",
                d=d,
                a=ra,
                imm=off,
                n=len(x) // 2,
                k0={"generic": 0, "global": 1, "shared": 2}[sp] | (w // 8) << 8 | k << 16,
                k1=["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"].index(opn)
                | w << 8,
                k2=int(is64),
                x=self.ex(*x),
            )
            return
        if b == "cp" and "async" in S:
            if "bulk" in S and S & {"commit_group", "wait_group"}:
                self.emit(
                    "NOP",
                    k0=3 if "commit_group" in S else 4,
                    k1=0 if "commit_group" in S else int(a[0], 0),
                )
                return  # bulk stores are done at once
            if "bulk" in S and "tensor" in S:
                if "reduce" in S or S & {
                    "multicast::cluster",
                    "im2col",
                    "tile::gather4",
                    "tile::scatter4",
                    "cta_group::2",
                }:
                    raise PTXError("bulk copy form")
                load = "mbarrier::complete_tx::bytes" in S
                sm, mp = (a[0], a[1]) if load else (a[1], a[0])
                parts = split_ops(mp.strip()[1:-1])
                rm, m64, moff = self.addr("[" + parts[0] + "]", "global")
                if not m64 or moff:
                    raise PTXError("tensor map address")
                co = [self.src(x, 32) for x in self.regs(parts[1])]
                ra, is64, off = self.addr(sm, "shared")
                kw = {}
                if load:
                    rb, b64, boff = self.addr(a[2], "shared")
                    if boff or (b64 and self.lookup(a[2].strip()[1:-1].strip())):
                        raise PTXError("mbarrier address")
                    kw = dict(c=rb)
                self.emit(
                    "TMALD" if load else "TMAST",
                    a=ra,
                    imm=off,
                    k2=int(is64),
                    b=rm,
                    n=len(co),
                    x=self.ex(*co),
                    **kw,
                )
                return
            if "commit_group" in S:
                self.emit("CPCOMMIT")
                return
            if "wait_group" in S:
                self.emit("CPWAIT", k0=int(a[0], 0))
                return
            if "wait_all" in S:
                self.emit("CPWAITALL")
                return
            if "bulk" in S or "mbarrier" in S:
                raise PTXError("bulk copy")
            ra, is64, off = self.addr(a[0], "shared")
            rb, b64, offb = self.addr(a[1], "global")
            if not b64:
                raise PTXError("cp.async source")
            c = NOP
            rest = a[3:]
            if rest and (
                self.imm(rest[0], 32) is not None or (self.lookup(rest[0]) or (0, 0))[1] == 32
            ):
                c = self.src(rest[0], 32)
            self.emit("CPASYNC", a=ra, imm=off, k2=int(is64), b=rb, k1=offb, k0=int(a[2], 0), c=c)
            return
        if b == "ldmatrix":
            n = 4 if "x4" in S else 2 if "x2" in S else 1
            if ty != "b16" or "m8n8" not in S:
                raise PTXError("ldmatrix form")
            ra, is64, off = self.addr(a[1], "shared")
            x = []
            for r in self.regs(a[0]):
                x += list(self.reg(r))
            self.emit(
                "LDMATRIX", a=ra, imm=off, k2=int(is64), n=n, k0=int("trans" in S), x=self.ex(*x)
            )
            return
        if b == "mbarrier":
            k = p[1]
            if k in ("try_wait", "test_wait"):
                if "parity" not in S:
                    raise PTXError("mbarrier form")
                ra, is64, off = self.addr(a[1], "shared")
                self.emit(
                    "TRYWAIT",
                    d=self.dst(a[0], 1),
                    a=ra,
                    imm=off,
                    k2=int(is64),
                    b=self.src(a[2], 32),
                )
                return
            if "shared::cluster" in S or "noComplete" in S:
                raise PTXError("mbarrier form")
            if k == "arrive":
                if a[0] != "_":
                    raise PTXError("mbarrier form")
                a = a[1:]
            ra, is64, off = self.addr(a[0], "shared")
            sub = {"init": 0, "arrive": 2 if "expect_tx" in S else 1, "expect_tx": 3, "inval": 4}
            if k not in sub:
                raise PTXError("mbarrier form")
            self.emit(
                "MBAR",
                a=ra,
                imm=off,
                k2=int(is64),
                k0=sub[k],
                b=self.src(a[1], 32) if len(a) > 1 else NOP,
            )
            return
        if b == "tensormap":
            if "replace" in S:
                F = [
                    "global_address",
                    "rank",
                    "box_dim",
                    "global_dim",
                    "global_stride",
                    "element_stride",
                    "elemtype",
                    "interleave_layout",
                    "swizzle_mode",
                    "fill_mode",
                ]
                f = next(i for i, x in enumerate(F) if x in S)
                sp = 2 if any(x.startswith("shared") for x in S) else 1
                ra, is64, off = self.addr(a[0], "shared")
                o, v = (int(a[1], 0), a[2]) if f in (2, 3, 4, 5) else (0, a[1])
                w = TW[ty]
                self.emit(
                    "TMREP",
                    a=ra,
                    imm=off,
                    k2=int(is64) | sp << 1,
                    k0=f,
                    n=o,
                    k1=w,
                    b=self.src(v, w),
                )
                return
            if "cp_fenceproxy" in S:
                ra, is64, off = self.addr(a[1], "shared")
                rb, b64, boff = self.addr(a[0], "global")
                if boff or not b64:
                    raise PTXError("tensormap address")
                self.emit("TMCP", a=ra, imm=off, k2=int(is64), b=rb)
                return
        if b == "stmatrix":
            n = 4 if "x4" in S else 2 if "x2" in S else 1
            if ty != "b16" or "m8n8" not in S:
                raise PTXError("stmatrix form")
            ra, is64, off = self.addr(a[0], "shared")
            x = []
            for r in self.regs(a[1]):
                x += [self.src(r, 32), 32]
            self.emit(
                "STMATRIX", a=ra, imm=off, k2=int(is64), n=n, k0=int("trans" in S), x=self.ex(*x)
            )
            return
        if b == "wgmma":
            if p[1] in ("fence", "commit_group", "wait_group"):
                self.emit(
                    "NOP",
                    k0={"fence": 0, "commit_group": 1, "wait_group": 2}[p[1]],
                    k1=int(a[0], 0) if p[1] == "wait_group" else 0,
                )
                return
            shp = next(x for x in p if re.fullmatch(r"m64n\d+k\d+", x))
            N = int(re.findall(r"n(\d+)", shp)[0])
            T = ["f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2"]
            ts = [x for x in p if x in T + ["f32", "s32"]]
            D = [self.dst(r, 32) for r in self.regs(a[0])]
            inreg = a[1].startswith("{")
            A = [self.src(r, 32) for r in self.regs(a[1])] if inreg else [self.src(a[1], 64)]
            im = [int(x, 0) for x in a[4:]]
            neg = im[:2]
            tr = im[2:]
            if any(x not in (1, -1) for x in neg):
                raise PTXError("wgmma form")
            if inreg:
                tr = [0] + tr
            tr = (tr + [0, 0])[:2]
            c = (
                NOP
                if self.lookup(a[3]) is None and self.imm(a[3], 1) not in (0, None)
                else self.src(a[3], 1)
            )
            self.emit(
                "WGMMA",
                n=len(D),
                c=c,
                k0=T.index(ts[1]) | T.index(ts[2]) << 4,
                k1=N | int(ts[0] == "f16") << 16 | int(inreg) << 17 | int("satfinite" in S) << 18,
                k2=tr[0]
                | tr[1] << 1
                | (4 if neg[:1] == [-1] else 0)
                | (8 if neg[1:] == [-1] else 0),
                x=self.ex(*D, *A, self.src(a[2], 64)),
            )
            return
        if b == "mma":
            ts = [
                x
                for x in p
                if x in ("f16", "bf16", "tf32", "s8", "u8", "f64", "f32", "s32", "e4m3", "e5m2")
            ]
            shp = next(x for x in p if re.fullmatch(r"m\d+n\d+k\d+", x))
            at, bt = ts[1], ts[2]
            kinds = {
                ("m16n8k16", "f16", "f16"): 0,
                ("m16n8k16", "bf16", "bf16"): 1,
                ("m16n8k8", "tf32", "tf32"): 2,
                ("m16n8k8", "f16", "f16"): 3,
                ("m16n8k8", "bf16", "bf16"): 4,
                ("m16n8k32", "s8", "s8"): 5,
                ("m16n8k16", "s8", "s8"): 6,
                ("m16n8k32", "u8", "u8"): 7,
                ("m8n8k4", "f64", "f64"): 8,
                ("m16n8k4", "tf32", "tf32"): 9,
                ("m16n8k32", "e4m3", "e4m3"): 10,
                ("m16n8k32", "e5m2", "e5m2"): 11,
                ("m16n8k32", "e4m3", "e5m2"): 12,
                ("m16n8k32", "e5m2", "e4m3"): 13,
            }
            if (shp, at, bt) not in kinds:
                raise PTXError("mma form")
            w = 64 if at == "f64" else 32
            D, A, B, C = (
                [self.dst(r, w) for r in self.regs(a[0])],
                *[[self.src(r, w) for r in self.regs(x)] for x in a[1:4]],
            )
            self.emit(
                "MMA",
                n=len(D),
                k0=kinds[(shp, at, bt)],
                k1=int(ts[0] == "f16"),
                k2=int("satfinite" in S),
                x=self.ex(*D, *A, *B, *C),
            )
            return
        if b == "shfl":
            mode = next(i for i, x in enumerate(("up", "down", "bfly", "idx")) if x in S)
            d = a[0].split("|")
            self.emit(
                "SHFL",
                d=self.dst(d[0].strip(), 32),
                x=self.dst(d[1].strip(), 1) if len(d) > 1 else NOP,
                a=self.src(a[1], 32),
                b=self.src(a[2], 32),
                c=self.src(a[3], 32),
                k0=mode,
            )
            return
        if b == "redux":
            o = next(x for x in ("add", "min", "max", "and", "or", "xor") if x in S)
            k0 = ["add", "min", "max", "and", "or", "xor"].index(o)
            if ty == "f32":
                k0 = 6 if o == "min" else 7
            self.emit(
                "REDUX", d=self.dst(a[0], 32), a=self.src(a[1], 32), k0=k0, k1=int(ty == "s32")
            )
            return
        if b == "vote":
            k = 0 if "all" in S else 1 if "any" in S else 2 if "ballot" in S else None
            if k is None:
                raise PTXError("vote form")
            neg = a[1].startswith("!")
            self.emit(
                "VOTE",
                d=self.dst(a[0], 32 if k == 2 else 1),
                a=self.src(a[1].lstrip("!"), 1),
                k0=k,
                k1=int(neg),
            )
            return
        if b == "elect":
            d = a[0].split("|")
            self.emit(
                "ELECT",
                d=NOP if d[0].strip() == "_" else self.dst(d[0].strip(), 32),
                x=self.dst(d[1].strip(), 1),
            )
            return
        if b == "activemask":
            self.emit("ACTIVEMASK", d=self.dst(a[0], 32))
            return
        if b == "cvta":
            sp = p[2] if "to" in S else p[1]
            win = {"shared": SHWIN, "local": LOCWIN, "param": self.param_addr}.get(
                sp.split("::")[0], 0
            )
            self.emit(
                "cvta.w", d=self.dst(a[0], 64), a=self.src(a[1], 64), imm=-win if "to" in S else win
            )
            return
        if b == "mov":
            if a[0].startswith("{"):
                rs = self.regs(a[0])
                w = TW[ty]
                x = []
                for r in rs:
                    x += [NOP, 0] if r == "_" else list(self.reg(r))
                self.emit(
                    "UNPACK", a=self.src(a[1], w), k0=w // len(rs), k1=w, n=len(rs), x=self.ex(*x)
                )
                return
            if a[1].startswith("{"):
                rs = self.regs(a[1])
                w = TW[ty]
                x = []
                for r in rs:
                    x += [self.src(r, w // len(rs)), w // len(rs)]
                self.emit(
                    "PACK", d=self.dst(a[0], w), k0=w // len(rs), k1=w, n=len(rs), x=self.ex(*x)
                )
                return
            w = TW[ty]
            n = {1: "mov.pred", 16: "mov.u16", 32: "mov.u32", 64: "mov.u64"}[w]
            self.emit(n, d=self.dst(a[0], w), a=self.src(a[1], w))
            return
        if b == "cvt":
            if p[-1].endswith("x2") or p[-2] in ("e4m3x2", "e5m2x2"):
                nm = f"cvt.{p[-2]}.{p[-1]}"
                if nm not in OPS or "relu" in S:
                    raise PTXError("cvt form")
                _, d, ss = OPS[nm]
                self.emit(
                    nm,
                    d=self.dst(a[0], W[d]),
                    **{k: self.src(t, W[x]) for k, t, x in zip("abc", a[1:], ss)},
                )
                return
            if len(a) == 3:
                if not S & {"rn", "rz"} or "relu" in S or "satfinite" in S:
                    raise PTXError("cvt form")
                self.emit(
                    f"cvt.{'rz.' if 'rz' in S else ''}{p[-2]}.f32",
                    d=self.dst(a[0], 32),
                    a=self.src(a[1], 32),
                    b=self.src(a[2], 32),
                )
                return
            if ty == "f32" and "tf32" in S:
                dt, at, rn = "f32", "f32", 9
            else:
                tt = [x for x in p[1:] if x in CVT]
                if len(tt) != 2 or "relu" in S:
                    raise PTXError("cvt form")
                dt, at = tt
                rn = next((RND[x] for x in p[1:] if x in RND), 0)
            if rn in (3, 4) and dt in ("f16", "bf16"):
                raise PTXError("cvt rounding")
            od, dw = self.reg(a[0])
            r = self.lookup(a[1])
            oa, aw = r if r else (self.src(a[1], max(16, TW[at])), max(16, TW[at]))
            self.emit(
                "CVT",
                d=od,
                a=oa,
                k0=CVT[dt],
                k1=CVT[at],
                k2=rn | int("ftz" in S) << 4 | int("sat" in S) << 5 | dw << 8 | aw << 16,
            )
            return
        if b == "setp":
            cmp = p[1]
            bop = next((x for x in p[2:-1] if x in ("and", "or", "xor")), None)
            d = a[0].split("|")
            nm = f"setp.{cmp}.{ty}"
            if nm not in OPS or "ftz" in S or (ty.endswith("x2") and bop):
                raise PTXError("setp form")
            w = TW[ty]
            kw = {}
            if bop:
                kw = dict(
                    k0=["", "and", "or", "xor"].index(bop),
                    c=self.src(a[3].lstrip("!"), 1),
                    k1=int(a[3].startswith("!")),
                )
            self.emit(
                nm,
                d=self.dst(d[0].strip(), 1),
                x=self.dst(d[1].strip(), 1) if len(d) > 1 else NOP,
                a=self.src(a[1], w),
                b=self.src(a[2], w),
                **kw,
            )
            return
        if b == "selp":
            w = TW[ty]
            self.emit(
                f"selp.b{w}",
                d=self.dst(a[0], w),
                a=self.src(a[1], w),
                b=self.src(a[2], w),
                c=self.src(a[3], 1),
            )
            return
        if b == "lop3":
            if opc != "lop3.b32":
                raise PTXError("lop3 form")
            self.emit(
                "lop3.b32",
                d=self.dst(a[0], 32),
                a=self.src(a[1], 32),
                b=self.src(a[2], 32),
                c=self.src(a[3], 32),
                k0=int(a[4], 0),
            )
            return
        if b == "bfi":
            w = TW[ty]
            self.emit(
                f"bfi.b{w}",
                d=self.dst(a[0], w),
                a=self.src(a[1], w),
                b=self.src(a[2], w),
                c=self.src(a[3], 32),
                x=self.src(a[4], 32),
            )
            return
        if b in ("shf", "dp4a", "prmt", "set"):
            if b == "prmt" and len(p) != 2:
                raise PTXError("prmt mode")
            nm = opc
        else:
            isf = ty in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
            if isf:
                if S & {"rz", "rm", "rp"}:
                    raise PTXError("rounding mode")
                mixed = ty in ("f16", "bf16") and p[1:-1] == ["rn", "f32"]
                if S - {"rn", "approx", "full", "ftz", "sat", "NaN", "xorsign", "abs", ty} and not mixed:
                    raise PTXError("modifier")
                if "xorsign" in S:
                    b += ".xorsign.abs"
                nm = (
                    b
                    + (".NaN" if "NaN" in S else "")
                    + (".sat" if "sat" in S else "")
                    + (".ftz" if "ftz" in S and ty == "f32" else "")
                    + "."
                    + ty
                )
                if b == "mad":
                    nm = nm.replace("mad", "fma")
                if mixed:
                    nm = f"{b}.f32.{ty}"
            else:
                nm = (
                    b
                    + "".join("." + x for x in p[1:-1] if x in ("lo", "hi", "wide", "relu"))
                    + "."
                    + ty
                )
                if S - {"lo", "hi", "wide", "relu", ty}:
                    raise PTXError("modifier")
        if len(a) == 4 and b in ("min", "max") and nm + "3" in OPS:
            nm += "3"  # three-input forms of sm_100 and later
        if nm not in OPS:
            raise PTXError(f"instruction {opc}")
        _, d, ss = OPS[nm]
        kw = {k: self.src(t, W[s]) for k, t, s in zip("abc", a[1:], ss)}
        if len(a) - 1 != len(ss):
            raise PTXError("operand count")
        self.emit(nm, d=self.dst(a[0], W[d]), **kw)


# ------------------------------------------------------------------ memory regions with guard pages
PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    FILL = 0xA5

    def __init__(self, ptr, nbytes, guard):
        self.host, self.n, self.guard = ptr, nbytes, guard
        self.pad = (nbytes + 15) & ~15
        mis = ptr % 16
        body = (max(self.pad, 16) + PAGE - 1) // PAGE * PAGE + (PAGE if mis else 0)
        self.m = mmap.mmap(-1, body + 3 * PAGE)
        self.m0 = ctypes.addressof(ctypes.c_char.from_buffer(self.m))
        self.lo, self.hi = self.m0 + PAGE, self.m0 + PAGE + body
        self.dev = (self.hi - self.pad - (16 - mis if mis else 0)) if guard else self.lo + mis
        ctypes.memset(self.lo, self.FILL, body)
        ctypes.memmove(self.dev, ptr, nbytes)
        if guard:
            _libc.mprotect(self.m0, PAGE, 0)
            _libc.mprotect(self.hi, 2 * PAGE, 0)

    def back(self):
        ctypes.memmove(self.host, self.dev, self.n)
        bad = []
        if self.guard:
            h = ctypes.string_at(self.lo, self.dev - self.lo)
            t = ctypes.string_at(self.dev + self.n, self.hi - self.dev - self.n)
            if h.count(bytes([self.FILL])) != len(h):
                bad.append("before the start")
            if t.count(bytes([self.FILL])) != len(t):
                bad.append("past the end")
        return bad

    def close(self):
        if self.guard:
            _libc.mprotect(self.m0, PAGE, 3)
            _libc.mprotect(self.hi, 2 * PAGE, 3)


# ------------------------------------------------------------------ counters and checks (C side: ptx_mon.c.in)
CLASSES = (
    "integer",
    "fp32",
    "fp64",
    "fp16/bf16",
    "conversion",
    "special function",
    "matrix",
    "shared memory",
    "global memory",
    "local memory",
    "control",
    "shuffle",
    "barrier",
    "other",
)


def classify(text):
    """class of a PTX instruction, from its text"""
    t = re.sub(r"^@!?%?[\w$]+\s+", "", text)
    opc = t.split()[0].rstrip(";")
    p = opc.split(".")
    b, S, ty = p[0], set(p[1:]), p[-1]
    space = next(
        (
            x.split("::")[0]
            for x in p[1:]
            if x.split("::")[0] in ("global", "shared", "local", "param", "const")
        ),
        "generic",
    )
    if b in ("ld", "ldu", "st", "atom", "red"):
        return {
            "shared": "shared memory",
            "local": "local memory",
            "param": "other",
            "const": "other",
        }.get(space, "global memory")
    if b in ("ldmatrix", "stmatrix"):
        return "shared memory"
    if b in ("mma", "wgmma"):
        return "matrix" if "mma" in opc and (b == "mma" or "mma_async" in S) else "other"
    if b == "cp":
        return "other" if S & {"commit_group", "wait_group", "wait_all"} else "global memory"
    if b in ("bar", "barrier", "mbarrier"):
        return "barrier"
    if b in ("bra", "ret", "exit", "trap", "brkpt", "call"):
        return "control"
    if b in ("shfl", "redux", "vote", "match", "activemask", "elect"):
        return "shuffle"
    if b == "cvt":
        return "conversion"
    if b in (
        "mov",
        "cvta",
        "membar",
        "fence",
        "prefetch",
        "prefetchu",
        "createpolicy",
        "tensormap",
        "griddepcontrol",
        "setmaxnreg",
        "nanosleep",
        "discard",
        "applypriority",
        "pmevent",
    ):
        return "other"
    if b in ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "rsqrt") or (
        b == "div" and ty[0] == "f"
    ):
        return "special function"
    if b == "set":
        ty = p[-1]
    if ty in ("f32", "f32x2"):
        return "fp32"
    if ty == "f64":
        return "fp64"
    if ty in ("f16", "bf16", "f16x2", "bf16x2"):
        return "fp16/bf16"
    return "integer"


def _opcode(text):
    return re.sub(r"^@!?%?[\w$]+\s+", "", text).split()[0].rstrip(";")


def _mma_shape(opc):
    """(label, FLOPs of one warp's instruction)"""
    m = re.search(r"m(\d+)n(\d+)k(\d+)", opc)
    M, N, K = map(int, m.groups())
    ts = [
        x
        for x in opc.split(".")
        if x in ("f16", "bf16", "tf32", "s8", "u8", "f64", "f32", "s32", "e4m3", "e5m2")
    ]
    return f"{opc.split('.')[0]} {m[0]} {ts[1]}", 2 * M * N * K // (
        4 if opc.startswith("wgmma") else 1
    )


@dataclasses.dataclass
class Report:
    kind: str
    message: str
    kernel: str
    line1: int
    line2: int
    source1: str
    source2: str
    text1: str
    text2: str
    block: int
    count: int
    address: int

    def __str__(self):
        return self.message


KIND = {
    1: "shared write-write race",
    2: "shared read-after-write race",
    3: "shared write-after-read race",
    4: "lanes of one instruction store different values to one shared address",
    5: "read of shared memory never written",
    6: "read of an uninitialised byte",
    7: "two blocks write the same byte",
    8: "one block writes, another reads the same byte",
    9: "one block reads, another writes the same byte",
    10: "lanes of one instruction store different values to one global address",
    11: "one block writes, another does an atomic on the same byte",
}
_IMF = (
    "executed",
    "lanes",
    "requests",
    "bytes",
    "sectors",
    "ideal_sectors",
    "wavefronts",
    "ideal_wavefronts",
)


class Monitor:
    def __init__(
        self, prog, regions, rnames, uninit, storage, counters, racecheck, initcheck, gracecheck
    ):
        self.p, self.rn = prog, ["/".join(dict.fromkeys(rnames[r])) for r in regions]
        self.regions = list(regions.values())
        self.on = counters
        un = {storage(a)[0] for a in uninit}
        unk = un - set(regions)
        if unk:
            raise PTXError("uninit: an array that is not an argument")
        self.im = np.zeros((len(prog.ins), 8), np.uint64)
        self.reps = (_Rep * 256)()
        self.regs = (_MReg * max(1, len(regions)))()
        self.keep = []
        self.cov = []
        sg, gg = 4, 4  # granules: the narrowest access of the program
        for t in prog.text:
            o = _opcode(t)
            if o.split(".")[0] in ("ld", "ldu", "st", "atom", "red") and (
                w := TW.get(o.split(".")[-1])
            ):
                n = w // 8 * (8 if ".v8" in o else 4 if ".v4" in o else 2 if ".v2" in o else 1)
                k = classify(t)
                if k == "shared memory" or (k == "global memory" and ".global" not in o):
                    sg = min(sg, n)
                if k == "global memory":
                    gg = min(gg, n)
            if o.startswith("cp.async.bulk"):
                gg = 1
        for i, (root, r) in enumerate(regions.items()):
            q = self.regs[i]
            q.lo, q.n = r.dev, r.n
            ns = r.n // 32 + 2

            def z(n, fill=None):
                a = np.zeros(n, np.uint32) if fill is None else np.full(n, fill, np.uint32)
                self.keep.append(a)
                return a, a.ctypes.data

            if counters:
                (l, q.ld), (s_, q.st) = z(ns), z(ns)
                self.cov.append((l, s_))
            if root in un:
                _, q.valid = z(ns)
            if gracecheck:
                _, q.gr = z((r.n // gg + 40) * 6)
        self.c = _Mon()
        self.c.flags = (
            int(bool(counters))
            | bool(racecheck) << 1
            | (bool(initcheck) or len(un) > 0) << 2
            | bool(gracecheck) << 3
        )
        self.c.sgran, self.c.ggran, self.c.nreg = sg, gg, len(regions)
        self.c.im, self.c.reg, self.c.rep, self.c.maxrep = (
            self.im.ctypes.data,
            ctypes.addressof(self.regs),
            ctypes.addressof(self.reps),
            256,
        )

    def src(self, pc):
        l = self.p.locs[pc]
        return f"{os.path.basename(self.p.files.get(l[0], '?'))}:{l[1]}" if l else ""

    def reports(self):
        out = []
        for r in self.reps[: self.c.nrep]:
            k = KIND[r.kind]
            i1, i2 = self.p.ins[r.pc1], self.p.ins[r.pc2]
            d = lambda pc: (
                f"PTX line {self.p.ins[pc].line} ({self.src(pc)}) `{self.p.text[pc][:90]}`"
            )
            if r.kind in (1, 2, 3):
                m = f"{k} in {self.p.name}, block {r.block}, shared byte {r.addr}: {self.agent(r.ag1)}: {d(r.pc1)}; then, not ordered after it, {self.agent(r.ag2)}: {d(r.pc2)}"
            elif r.kind == 4:
                m = f"{k}: {self.p.name}, block {r.block}, warp {r.ag1}, shared byte {r.addr}: {d(r.pc1)}"
            elif r.kind == 5:
                m = f"{k}: {self.p.name}, block {r.block}, warp {r.ag1}, shared byte {r.addr}: {d(r.pc1)}"
            else:
                where = f"byte {r.addr} of {self.rn[r.reg]}"
                m = (
                    f"{k}: {self.p.name}, {where}, block {r.block}: {d(r.pc2)}"
                    if r.kind in (6, 10)
                    else f"{k}: {self.p.name}, {where}: {f'block {r.block2}' if r.block2 < 0xFFFFFFFE else 'several blocks'}: {d(r.pc1)}; block {r.block}: {d(r.pc2)}"
                )
            out.append(
                Report(
                    k,
                    m + (f" [{r.n} times]" if r.n > 1 else ""),
                    self.p.name,
                    i1.line,
                    i2.line,
                    self.src(r.pc1),
                    self.src(r.pc2),
                    self.p.text[r.pc1],
                    self.p.text[r.pc2],
                    r.block,
                    r.n,
                    r.addr,
                )
            )
        return out

    nw = 1

    def agent(self, a):
        nw = self.nw
        return (
            f"warp {a}"
            if a < nw
            else f"cp.async of warp {a - nw}"
            if a < 2 * nw
            else f"wgmma of warp {a - 2 * nw}"
            if a < 3 * nw
            else f"bulk store of warp {a - 3 * nw}"
            if a < 4 * nw
            else f"bulk load (mbarrier {a - 4 * nw})"
        )

    def per_instruction(self):
        return [
            dict(
                line=i.line,
                source=self.src(k),
                text=t,
                **{n: int(v) for n, v in zip(_IMF, self.im[k])},
            )
            for k, (i, t) in enumerate(zip(self.p.ins, self.p.text))
            if self.im[k, 0]
        ]

    def counters(self, blocks):
        C = {k: 0 for k in CLASSES}
        tot = lanes = 0
        z = lambda: dict(requests=0, bytes=0, sectors=0, ideal_sectors=0)
        g = {k: z() for k in ("load", "store", "atomic", "cp_async", "tma_load", "tma_store")}
        sh = {
            k: dict(requests=0, bytes=0, wavefronts=0, ideal_wavefronts=0)
            for k in ("load", "store", "atomic", "ldmatrix", "stmatrix", "cp_async")
        }
        width = {"load": {}, "store": {}, "cp_async": {}}
        mat = {}
        fl = 0
        for k, t in enumerate(self.p.text):
            n, ln, rq, by, se, idl, wv, wi = (int(x) for x in self.im[k])
            if not n:
                continue
            cl = classify(t)
            C[cl] += n
            tot += n
            lanes += ln
            o = _opcode(t)
            b = o.split(".")[0]
            if cl == "fp32" and b in ("add", "sub", "mul", "fma", "mad"):
                fl += ln * (2 if b in ("fma", "mad") else 1) * (2 if o.endswith("f32x2") else 1)
            if cl == "matrix":
                s_, f = _mma_shape(o)
                e = mat.setdefault(s_, dict(instructions=0, flops=0))
                e["instructions"] += n
                e["flops"] += f * n
            if cl == "global memory":
                kind = (
                    ("tma_load" if "mbarrier" in o else "tma_store")
                    if "bulk" in o
                    else "cp_async"
                    if b == "cp"
                    else "atomic"
                    if b in ("atom", "red")
                    else "store"
                    if b == "st"
                    else "load"
                )
                for f, v in zip(
                    ("requests", "bytes", "sectors", "ideal_sectors"), (rq, by, se, idl)
                ):
                    g[kind][f] += v
                if kind in width and rq:
                    w = (
                        int(split_ops(t[t.index("[") :])[2].rstrip(";"), 0) * 8
                        if kind == "cp_async"
                        else TW[o.split(".")[-1]]
                        * (8 if ".v8" in o else 4 if ".v4" in o else 2 if ".v2" in o else 1)
                    )
                    width[kind][w] = width[kind].get(w, 0) + rq
                if kind == "cp_async":
                    for f, v in zip(
                        ("requests", "bytes", "wavefronts", "ideal_wavefronts"), (rq, by, wv, wi)
                    ):
                        sh[kind][f] += v
            if cl == "shared memory":
                kind = (
                    b
                    if b in sh
                    else "atomic"
                    if b in ("atom", "red")
                    else "store"
                    if b == "st"
                    else "load"
                )
                for f, v in zip(
                    ("requests", "bytes", "wavefronts", "ideal_wavefronts"), (rq, by, wv, wi)
                ):
                    sh[kind][f] += v
        for v in g.values():
            v["efficiency"] = v["ideal_sectors"] / v["sectors"] if v["sectors"] else None
        for v in sh.values():
            v["excess"] = v["wavefronts"] - v["ideal_wavefronts"]
        pop = lambda a: (
            int(np.bitwise_count(a).sum())
            if hasattr(np, "bitwise_count")
            else int(np.unpackbits(a.view(np.uint8)).sum())
        )
        bufs = {}
        for nm, r, q, (l, s_) in zip(self.rn, self.regions, self.regs, self.cov):
            bufs[nm] = dict(
                size=r.n,
                loaded=pop(l),
                stored=pop(s_),
                requested_loaded=int(q.rld),
                requested_stored=int(q.rst),
                loaded_sectors=int(np.count_nonzero(l)),
                stored_sectors=int(np.count_nonzero(s_)),
            )
        return dict(
            warp_instructions=tot,
            by_class=C,
            lanes_per_instruction=lanes / max(tot, 1),
            fp32_flops=fl,
            matrix=mat,
            matrix_flops=sum(v["flops"] for v in mat.values()),
            global_memory=g,
            access_bits=width,
            distinct=dict(
                loaded=sum(v["loaded"] for v in bufs.values()),
                stored=sum(v["stored"] for v in bufs.values()),
                buffers=bufs,
            ),
            shared_memory=sh,
            bank_conflict_excess=sum(v["excess"] for v in sh.values()),
            cp_async_bytes=g["cp_async"]["bytes"],
            block_barriers=int(self.c.blockbars),
            warp_barriers=sum(
                int(self.im[k, 0])
                for k, t in enumerate(self.p.text)
                if _opcode(t).split(".")[0] in ("bar", "barrier") and "warp" not in _opcode(t)
            ),
            blocks=blocks,
        )


PACK = {
    "i1": "b",
    "u1": "B",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
    "f64": "d",
    "fp16": "e",
}


def execute(
    prog: Program,
    grid,
    num_threads,
    shared,
    values,
    types,
    storage,
    *,
    guard=True,
    poison=True,
    wave_order="forward",
    limit=4_000_000_000,
    seed=1,
    late_async=True,
    counters=False,
    racecheck=False,
    initcheck=False,
    gracecheck=False,
    uninit=(),
    names=None,
):
    """values/types: parameters in order; storage(array) -> (root pointer, root bytes, pointer)"""
    lib = _lib()
    t0 = time.perf_counter()
    gx, gy, gz = (tuple(grid) + (1, 1, 1))[:3]
    regions, rnames = {}, {}
    pb = bytearray(prog.param_n)
    for i, (v, ty) in enumerate(zip(values, types)):
        if ty.startswith("*"):
            if v is None:
                word = bytes(8)
            elif isinstance(v, int):
                word = struct.pack("<Q", v)
            else:
                root, nb, p = storage(v)
                if root not in regions:
                    regions[root] = Region(root, nb, guard)
                rnames.setdefault(root, []).append(names[i] if names else f"parameter {i}")
                word = struct.pack("<Q", regions[root].dev + p - root)
        elif ty == "nvTmaDesc":
            t = v.base
            root, nb, q = storage(t)
            if root not in regions:
                regions[root] = Region(root, nb, guard)
            rnames.setdefault(root, []).append(names[i] if names else f"parameter {i}")
            m = v.meta
            sh, st = list(v.shape)[::-1], list(v.strides)[::-1]
            n = len(sh)
            bx = list(m["block_size"])[::-1]
            word = struct.pack(
                "<Q5I5I4Q5I5I2I",
                regions[root].dev + q - root,
                *(sh + [1] * (5 - n)),
                *(bx + [1] * (5 - n)),
                *([x * m["elem_size"] for x in st[1:]] + [0] * (5 - n))[:4],
                n - 1,
                m["swizzle"],
                m["elem_size"],
                int(v.nan),
                0,
                1,
                1,
                1,
                1,
                1,
                0,
                0,
            )
        elif ty == "bf16":
            word = struct.pack("<H", (int(np.float32(v).view(np.uint32)) + 0x8000 >> 16) & 0xFFFF)
        else:
            word = struct.pack("<" + PACK[ty], v)
        nm, o, n = prog.params[i]
        if len(word) != n and ty in ("i1", "u1", "i8", "u8"):
            word = word.ljust(n, b"\0")
        if len(word) != n:
            raise PTXError(f"parameter {i}: {ty} is {len(word)} bytes, PTX has {n}")
        pb[o : o + n] = word
    ctypes.memmove(prog.param_addr, bytes(pb), len(pb))
    nw = (num_threads + 31) // 32
    insarr = (_Ins * len(prog.ins))(*prog.ins)
    extra = (ctypes.c_uint32 * max(1, len(prog.extra)))(*prog.extra)
    c = _Ctx()
    c.prog, c.extra, c.nprog = ctypes.addressof(insarr), ctypes.addressof(extra), len(prog.ins)
    smem_n = max(prog.dynbase + shared, prog.static_shared)
    c.smem_n = smem_n
    c.smem_alloc = (smem_n + 4095) // 4096 * 4096 + 4096
    keep = []

    def alloc(n):
        b = mmap.mmap(-1, max(4096, n))
        keep.append(b)
        return ctypes.addressof(ctypes.c_char.from_buffer(b))

    c.smem = alloc(c.smem_alloc)
    c.local_n = (prog.local_n + 15) // 16 * 16
    warps = (_Warp * nw)()
    c.warps = ctypes.addressof(warps)
    c.nwarps, c.nthreads = nw, num_threads
    c.gx, c.gy, c.gz = gx, gy, gz
    c.o_tid, c.o_laneid, c.o_warpid = prog.spec["tid.x"], prog.spec["laneid"], prog.spec["warpid"]
    for i, k in enumerate(("ctaid.x", "ctaid.y", "ctaid.z")):
        c.o_ctaid[i] = prog.spec[k]
    image = np.zeros(prog.off + 64, np.uint8)
    if poison:
        image.view(np.uint32)[: len(image) // 4] = 0x7FC0BAD1

    def fill(o, v, w):
        if w == 1:
            image[o : o + 4].view(np.uint32)[:] = 0xFFFFFFFF if v else 0
        else:
            image[o : o + 4 * w].view(f"u{w // 8}")[:] = v

    for (v, w), o in prog.consts.items():
        fill(o, v, w)
    dims = {
        "ntid.x": num_threads,
        "ntid.y": 1,
        "ntid.z": 1,
        "nctaid.x": gx,
        "nctaid.y": gy,
        "nctaid.z": gz,
        "nwarpid": nw,
        "dynamic_smem_size": shared,
        "total_smem_size": shared,
    }
    for k, o in prog.dimspec.items():
        fill(o, dims[k], 32)
    for k, o in prog.spec.items():
        if isinstance(k, str) and k.startswith("lanemask_"):
            for l in range(32):
                image[o + 4 * l : o + 4 * l + 4].view(np.uint32)[:] = {
                    "lt": (1 << l) - 1,
                    "le": (2 << l) - 1,
                    "eq": 1 << l,
                    "gt": 0xFFFFFFFF & ~((2 << l) - 1),
                    "ge": 0xFFFFFFFF & ~((1 << l) - 1),
                }[k[9:]] & 0xFFFFFFFF
    for w in warps:
        w.R = alloc(len(image))
        ctypes.memmove(w.R, image.ctypes.data, len(image))
        w.local = alloc(c.local_n * 32) if c.local_n else 0
    c.order = {"forward": 0, "reverse": 1, "random": 2}[wave_order]
    c.late_async, c.poison, c.do_poison = int(late_async), 0x7FC0BAD1, int(poison)
    c.regpoison_lo = c.regpoison_hi = 0  # registers: filled once with the poison pattern at load
    c.wg_end, c.limit, c.seed = gx * gy * gz, limit, seed
    mon = (
        Monitor(prog, regions, rnames, uninit, storage, counters, racecheck, initcheck, gracecheck)
        if counters or racecheck or initcheck or gracecheck or len(uninit)
        else None
    )
    if mon:
        c.mon = ctypes.addressof(mon.c)
        mon.nw = nw
    t1 = time.perf_counter()
    warnings = []
    try:
        rc = lib.run_grid(ctypes.byref(c))
        t2 = time.perf_counter()
        if rc:
            where = f"block {c.wg} warp {c.cur} instruction {c.err_pc}: {prog.text[c.err_pc] if c.err_pc < len(prog.text) else '?'}"
            msg = {
                1: f"memory fault at {c.fault:#x}",
                2: f"instruction limit {limit} reached",
                3: "unsupported instruction",
                4: f"shared/local access at byte {c.fault}, outside {smem_n}/{c.local_n}",
                5: "warp-wide instruction with a divergent warp",
                6: "trap",
                8: f"misaligned address {c.fault:#x}",
            }.get(rc, f"error {rc}")
            if rc in (1, 8):
                for r in regions.values():
                    if r.m0 <= c.fault < r.m0 + len(r.m):
                        msg += f" ({c.fault - r.dev:+d} bytes from the start of a {r.n}-byte array)"
            raise PTXError(
                msg
                + ": "
                + where
                + "".join(f"; before that: {r}" for r in (mon.reports()[:3] if mon else []))
            )
        for r in regions.values():
            for b in r.back():
                warnings.append(f"array of {r.n} bytes: written {b}")
    finally:
        for r in regions.values():
            r.close()
        for w in warps:
            lib.free_cp(ctypes.byref(w))
    prog.last_counts = [i.count for i in insarr]
    reports = mon.reports() if mon else []
    warnings += [str(x) for x in reports]
    return dict(
        run_s=t2 - t1,
        load_s=t1 - t0,
        instructions=c.icount,
        barriers=c.barriers,
        workgroups=gx * gy * gz,
        warnings=warnings,
        reports=reports,
        counters=mon.counters(gx * gy * gz) if mon and counters else None,
        per_instruction=mon.per_instruction() if mon and counters else None,
    )
