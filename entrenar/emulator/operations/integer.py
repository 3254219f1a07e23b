"""Integer arithmetic, logic, shifts and bit fields.

Results wrap; a shift by the width or more gives zero (the sign for an arithmetic right shift); division
by zero gives all ones and leaves the remainder as it was, as the hardware does.
"""

from __future__ import annotations

from entrenar.emulator.operations.operation import Operation, lanewise

__all__ = ["integer_operations"]


def integer_operations() -> dict[str, Operation]:
    """Return the operations by name, such as ``"add.u32"``."""
    return {
        **_of_every_width(),
        **_products(),
        **_quotients(),
        **_counts(),
        **_fields(),
        **_funnel_shifts(),
        **_sums_of_bytes(),
        **_pairs(),
    }


def _of_every_width() -> dict[str, Operation]:
    ops = {}
    for width in (16, 32, 64):
        u, s, last = f"u{width}", f"s{width}", width - 1
        for t in (u, s, f"b{width}"):
            ops[f"add.{t}"] = lanewise(u, (u, u), "A+B")
            ops[f"sub.{t}"] = lanewise(u, (u, u), "A-B")
            ops[f"mul.lo.{t}"] = lanewise(u, (u, u), f"({u})((u64)A*B)")
            ops[f"mad.lo.{t}"] = lanewise(u, (u, u, u), f"({u})((u64)A*B+C)")
            ops[f"shl.{t}"] = lanewise(u, (u, "u32"), f"B>{last}?0:({u})((u64)A<<B)")
            for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
                ops[f"{name}.{t}"] = lanewise(u, (u, u), f"A{sign}B")
            ops[f"not.{t}"] = lanewise(u, (u,), "~A")
            ops[f"mov.{t}"] = lanewise(u, (u,), "A")
            ops[f"cnot.{t}"] = lanewise(u, (u,), "A==0")
        for t in (u, f"b{width}"):
            ops[f"shr.{t}"] = lanewise(u, (u, "u32"), f"B>{last}?0:A>>B")
        ops[f"shr.{s}"] = lanewise(s, (s, "u32"), f"A>>(B>{last}?{last}:B)")
        for t in (u, s):
            ops[f"min.{t}"] = lanewise(t, (t, t), "A<B?A:B")
            ops[f"max.{t}"] = lanewise(t, (t, t), "A>B?A:B")
        ops[f"neg.{s}"] = lanewise(u, (u,), "0-A")
        ops[f"abs.{s}"] = lanewise(u, (s,), f"A<0?({u})0-({u})A:({u})A")
    for name, sign in (("min", "<"), ("max", ">")):
        expression = f"({{s32 v_=A{sign}B?A:B; v_<0?0:v_;}})"
        ops[f"{name}.relu.s32"] = lanewise("s32", ("s32", "s32"), expression)
    return ops


def _products() -> dict[str, Operation]:
    high = {
        "u16": ("u16", "(u16)(((u32)A*B)>>16)"),
        "s16": ("u16", "(u16)(((s32)A*B)>>16)"),
        "u32": ("u32", "(u32)(((u64)A*B)>>32)"),
        "s32": ("u32", "(u32)(((s64)A*B)>>32)"),
        "u64": ("u64", "(u64)(((unsigned __int128)A*B)>>64)"),
        "s64": ("u64", "(u64)(((__int128)A*B)>>64)"),
    }
    ops = {f"mul.hi.{t}": lanewise(d, (t, t), e) for t, (d, e) in high.items()}
    for t in ("u32", "s32"):
        ops[f"mad.hi.{t}"] = lanewise("u32", (t, t, "u32"), high[t][1] + "+C")
    for t, wide in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        product = f"({wide})A*({wide})B"
        ops[f"mul.wide.{t}"] = lanewise(wide, (t, t), product)
        ops[f"mad.wide.{t}"] = lanewise(wide, (t, t, wide), f"({wide})((u64)({product})+(u64)C)")
    ops["mul24.lo.s32"] = lanewise("u32", ("s32", "s32"), "(u32)((A<<8>>8)*(B<<8>>8))")
    ops["mul24.lo.u32"] = lanewise("u32", ("u32", "u32"), "(A&0xffffff)*(B&0xffffff)")
    return ops


def _quotients() -> dict[str, Operation]:
    ops = {}
    for t, cast, size in (("s16", "(s16)", 32), ("s32", "", 32), ("s64", "", 64)):
        ops[f"div.{t}"] = lanewise(t, (t, t), f"{cast}sdiv{size}(A,B)")
        ops[f"rem.{t}"] = lanewise(t, (t, t), f"{cast}srem{size}(A,B)")
    for t, ones in (("u16", "0xffff"), ("u32", "~0u"), ("u64", "~0ull")):
        ops[f"div.{t}"] = lanewise(t, (t, t), f"B?A/B:{ones}")
        ops[f"rem.{t}"] = lanewise(t, (t, t), "B?A%B:A")
    return ops


def _counts() -> dict[str, Operation]:
    ops = {}
    for width, suffix in ((32, ""), (64, "ll")):
        u = f"u{width}"
        ops[f"popc.b{width}"] = lanewise("u32", (u,), f"__builtin_popcount{suffix}(A)")
        ops[f"clz.b{width}"] = lanewise("u32", (u,), f"A?__builtin_clz{suffix}(A):{width}")
        reverse = f"for(int i=0;i<{width};i++) r_|=((v_>>i)&1)<<({width - 1}-i);"
        ops[f"brev.b{width}"] = lanewise(u, (u,), f"({{{u} v_=A,r_=0; {reverse} r_;}})")
        ops[f"bfind.{u}"] = lanewise("u32", (u,), f"A?{width - 1}-__builtin_clz{suffix}(A):~0u")
    signed = "({s32 v_=A; if(v_<0) v_=~v_; v_?31-__builtin_clz(v_):~0u;})"
    ops["bfind.s32"] = lanewise("u32", ("s32",), signed)
    return ops


def _fields() -> dict[str, Operation]:
    ops = {}
    for width in (32, 64):
        u = f"u{width}"
        for sign in "us":
            field = f"({u})bfe_(A,B,C,{width},{int(sign == 's')})"
            ops[f"bfe.{sign}{width}"] = lanewise(u, (u, "u32", "u32"), field)
        ops[f"bfi.b{width}"] = lanewise(u, (u, u, "u32", "u32"), f"({u})bfi_(A,B,C,E,{width})")
    ops["prmt.b32"] = lanewise("u32", ("u32",) * 3, "prmt(A,B,C)")
    ops["lop3.b32"] = lanewise("u32", ("u32",) * 3, "lop3(A,B,C,I->k0)")
    return ops


def _funnel_shifts() -> dict[str, Operation]:
    pair = "(((u64)B<<32)|A)"
    expressions = {
        "shf.l.wrap.b32": f"(u32)(({pair}<<(C&31))>>32)",
        "shf.r.wrap.b32": f"(u32)({pair}>>(C&31))",
        "shf.l.clamp.b32": f"C>=32?A:(u32)(({pair}<<C)>>32)",
        "shf.r.clamp.b32": f"C>=32?B:(u32)({pair}>>C)",
    }
    return {name: lanewise("u32", ("u32",) * 3, e) for name, e in expressions.items()}


def _sums_of_bytes() -> dict[str, Operation]:
    ops = {
        "sad.s32": lanewise("u32", ("s32", "s32", "u32"), "(u32)(A<B?(s64)B-A:(s64)A-B)+C"),
        "sad.u32": lanewise("u32", ("u32",) * 3, "(A<B?B-A:A-B)+C"),
        # an address of a space of its own as a generic one, and back
        "cvta.w": lanewise("u64", ("u64",), "A+(u64)I->imm"),
    }
    for t, byte, wide in (("s32", "s8", "s32"), ("u32", "u8", "u32")):
        term = f"({wide})({byte})(A>>(8*i))*({wide})({byte})(B>>(8*i))"
        expression = f"({{u32 s_=C; for(int i=0;i<4;i++) s_+={term}; s_;}})"
        ops[f"dp4a.{t}.{t}"] = lanewise("u32", ("u32",) * 3, expression)
    return ops


def _pairs() -> dict[str, Operation]:
    """Two 16-bit integers to a register, each half by itself (sm_90 and later)."""
    ops = {}
    for t in ("u16", "s16"):
        for name, each in (("add", "x_+y_"), ("min", "x_<y_?x_:y_"), ("max", "x_>y_?x_:y_")):
            half = f"({{{t} x_=({t})(A>>s_), y_=({t})(B>>s_); (u16)({each});}})"
            expression = f"({{u32 r_=0; for(int s_=0;s_<32;s_+=16) r_|=(u32){half}<<s_; r_;}})"
            ops[f"{name}.{t}x2"] = lanewise("u32", ("u32", "u32"), expression)
    return ops
