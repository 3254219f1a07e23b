"""Comparisons into predicates or values, selection, and logic on predicates.

A predicate is one word, a bit a lane. Ordered comparisons are false for NaN, ``ne`` too; those that end in
``u`` are true.
"""

from __future__ import annotations

from entrenar.emulator.operations.operation import Operation, lanewise

__all__ = ["comparison_operations"]

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_INTEGERS = tuple(f"{kind}{width}" for width in (16, 32, 64) for kind in "sub")
_STORE = "u32*d=(u32*)(R+I->d); *d=(*d&~m)|({}&m);"
_STORE_SECOND = "if(I->x!=NOP_){{ u32*q=(u32*)(R+I->x); *q=(*q&~m)|({}&m); }}"
# The result combined with a third predicate (and, or, xor), and the complement so combined in the second.
_COMBINE = (
    "if(I->k0){ u32 pc_=*(u32*)(R+I->c); if(I->k1) pc_=~pc_; u32 np_=~pres; switch(I->k0){ "
    "case 1: pres&=pc_; np_&=pc_; break; case 2: pres|=pc_; np_|=pc_; break; "
    "default: pres^=pc_; np_^=pc_; } "
    + _STORE_SECOND.format("np_")
    + " } else "
    + _STORE_SECOND.format("~pres")
    + " "
    + _STORE.format("pres")
)


def comparison_operations() -> dict[str, Operation]:
    """Return the operations by name, such as ``"setp.lt.s32"``."""
    return {**_predicates(), **_of_pairs(), **_values_of_pairs(), **_selection(), **_logic()}


def _setp(kind: str, test: str) -> Operation:
    operands = f"const {kind}*a=(const {kind}*)(R+I->a),*b=(const {kind}*)(R+I->b);"
    return Operation(f"{{ {operands} PSET({test}) {_COMBINE} }}", "pred", (kind, kind))


def _predicates() -> dict[str, Operation]:
    ops = {}
    for t in _INTEGERS:
        for name, sign in {**_SIGNS, **_UNSIGNED}.items():
            ops[f"setp.{name}.{t}"] = _setp(t.replace("b", "u"), f"a[l]{sign}b[l]")
    widened = {
        "f16": ("u16", "(f32)ash(a[l])", "(f32)ash(b[l])"),
        "bf16": ("u16", "bf(a[l])", "bf(b[l])"),
        "f32": ("f32", "a[l]", "b[l]"),
        "f64": ("f64", "a[l]", "b[l]"),
    }
    for t, (kind, x, y) in widened.items():
        for name, sign in _SIGNS.items():
            ops[f"setp.{name}.{t}"] = _setp(kind, _ordered(x, sign, y))
            ops[f"setp.{name}u.{t}"] = _setp(kind, _unordered(x, sign, y))
        ops[f"setp.num.{t}"] = _setp(kind, f"{x}=={x}&&{y}=={y}")
        ops[f"setp.nan.{t}"] = _setp(kind, f"{x}!={x}||{y}!={y}")
    return ops


def _ordered(x: str, sign: str, y: str) -> str:
    return f"({x}!={y}&&{x}=={x}&&{y}=={y})" if sign == "!=" else f"{x}{sign}{y}"


def _unordered(x: str, sign: str, y: str) -> str:
    return f"({x}{sign}{y})||{x}!={x}||{y}!={y}"


def _halves(t: str) -> list[tuple[str, str]]:
    value = "(f32)ash((u16)({}))" if t == "f16" else "bf((u16)({}))"
    return [(value.format(f"a[l]>>{n}"), value.format(f"b[l]>>{n}")) for n in (0, 16)]


def _of_pairs() -> dict[str, Operation]:
    """Packed comparisons: a predicate for each half."""
    ops = {}
    for t in ("f16", "bf16"):
        for name, sign in _SIGNS.items():
            for suffix, test in (("", _ordered), ("u", _unordered)):
                low, high = (test(x, sign, y) for x, y in _halves(t))
                body = (
                    "{ const u32*a=(const u32*)(R+I->a),*b=(const u32*)(R+I->b); u32 lo_=0,hi_=0; "
                    f"for(int l=0;l<32;l++){{ lo_|=(u32)({low})<<l; hi_|=(u32)({high})<<l; }} "
                    f"{_STORE.format('lo_')} {_STORE_SECOND.format('hi_')} }}"
                )
                ops[f"setp.{name}{suffix}.{t}x2"] = Operation(body, "pred", ("u32", "u32"))
    return ops


def _values_of_pairs() -> dict[str, Operation]:
    """``set``: 1.0 or 0 in each half."""
    ops = {}
    for t, one in (("f16", "0x3c00"), ("bf16", "0x3f80")):
        halves = [(x.replace("a[l]", "A"), y.replace("b[l]", "B")) for x, y in _halves(t)]
        tests = {
            name: [f"({x}{s}{y})&&{x}=={x}&&{y}=={y}" for x, y in halves]
            for name, s in _SIGNS.items()
        }
        tests |= {
            f"{name}u": [_unordered(x, s, y) for x, y in halves] for name, s in _SIGNS.items()
        }
        tests["nan"] = [f"{x}!={x}||{y}!={y}" for x, y in halves]
        tests["num"] = [f"{x}=={x}&&{y}=={y}" for x, y in halves]
        for name, (low, high) in tests.items():
            value = f"h2(({low})?{one}:0,({high})?{one}:0)"
            ops[f"set.{name}.{t}x2.{t}x2"] = lanewise("u32", ("u32", "u32"), value)
    return ops


def _selection() -> dict[str, Operation]:
    ops = {}
    for width in (16, 32, 64):
        u = f"u{width}"
        ops[f"selp.b{width}"] = Operation(
            f"{{ {u}*d=({u}*)(R+I->d); const {u}*a=(const {u}*)(R+I->a),*b=(const {u}*)(R+I->b); "
            "u32 p_=*(u32*)(R+I->c); LANES(d[l]=(p_>>l&1)?a[l]:b[l]) }",
            u,
            (u, u, "pred"),
        )
    return ops


def _logic() -> dict[str, Operation]:
    a, b = "*(u32*)(R+I->a)", "*(u32*)(R+I->b)"
    values = {"and": f"{a}&{b}", "or": f"{a}|{b}", "xor": f"{a}^{b}", "not": f"~{a}", "mov": a}
    return {
        f"{name}.pred": Operation(
            f"{{ u32 r_={value}; {_STORE.format('r_')} }}",
            "pred",
            ("pred",) * (1 if name in ("not", "mov") else 2),
        )
        for name, value in values.items()
    }
