"""One arithmetic instruction: the C that computes it for the lanes of a warp."""

from __future__ import annotations

import dataclasses
import re

__all__ = ["WIDTH", "Operation", "lanewise"]

# Bits of an operand class: "h" and "bh" are float16 and bfloat16 as bits.
WIDTH = {
    "u16": 16, "s16": 16, "h": 16, "bh": 16, "u32": 32, "s32": 32, "f32": 32, "u64": 64, "s64": 64,
    "f64": 64, "pred": 1,
}  # fmt: skip
_C_TYPE = {"h": "u16", "bh": "u16"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What an instruction does to registers.

    Attributes:
        body: C statements over ``I`` (the instruction), ``R`` (the register file) and ``m`` (the lanes).
        result: Class of the result, a key of ``WIDTH``.
        operands: Classes of the operands.
    """

    body: str
    result: str
    operands: tuple[str, ...]


def lanewise(result: str, operands: tuple[str, ...], expression: str) -> Operation:
    """Return the operation that sets each lane to a C expression of A, B, C and E, its operands."""
    pointers = " ".join(
        f"const {_C_TYPE.get(kind, kind)}*{name}=(const {_C_TYPE.get(kind, kind)}*)(R+I->{field});"
        for name, field, kind in zip("abce", "abcx", operands, strict=False)
    )
    value = re.sub(r"\b([ABCE])\b", lambda m: f"{m[1].lower()}[l]", expression)
    kind = _C_TYPE.get(result, result)
    return Operation(
        f"{{ {kind}*d=({kind}*)(R+I->d); {pointers} LANES(d[l]={value}) }}", result, operands
    )
