"""Which tiles products may take on each architecture, and where each comes from.

Fixed: nothing is tuned at run time. A tile measured on a GPU replaces one taken from what others
publish. Sources:

* ``t03``: Triton's tutorial 03 (its lists for CUDA and for HIP), https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html
* ``t09``: Triton's tutorial 09, persistent products, https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html
* ``gluon``: Triton's Gluon tutorials 05 and 07, of one Hopper GPU: 128x256x64, 8 warps is the fastest there
* ``inductor``: the list PyTorch's inductor tunes over (torch/_inductor, ``mm_configs``)
* ``static``: ours; the largest of its shape that neither spills nor passes the shared memory there, by
  offline compilation (``python -m perf static``)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "PROCESSORS", "SHARED_BYTES", "TABLES", "Tile"]


class Tile(NamedTuple):
    """A tile of the result, the step over k, and how it is run.

    Attributes:
        m, n: Rows and columns.
        k: Step over the inner size.
        warps: Of a program.
        stages: Of the loop over k.
        source: Where it comes from.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    source: str


# Rows that do not start at multiples of 16 elements are read element by element, through registers,
# which wide tiles have not enough of.
KINDS = ("16-bit", "16-bit unaligned", "fp32", "fp32 unaligned", "tf32")
# What work is spread over: of one device each (T4, A100, RTX 3090, RTX 4090, H100 SXM, B200, RTX 5090,
# MI250X's half, MI300X, RX 7900 XTX), whatever the device at hand has, so that its count changes no sum.
PROCESSORS = {
    "sm_75": 40, "sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "gfx90a": 110, "gfx942": 304, "gfx1100": 96,
}  # fmt: skip
# Shared memory of a program (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
SHARED_BYTES = {
    "sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx1100": 64 << 10,
}  # fmt: skip

_Table = dict[str, tuple[Tile, ...]]

_UNALIGNED = (
    Tile(128, 64, 32, 8, 2, "static"),
    Tile(64, 64, 32, 4, 2, "static"),
    Tile(64, 32, 32, 4, 2, "static"),
    Tile(32, 64, 64, 4, 2, "static"),
    Tile(16, 64, 64, 4, 2, "static"),
)
_FP32_UNALIGNED = (
    Tile(64, 64, 16, 8, 3, "static"),
    Tile(32, 64, 16, 4, 3, "static"),
    Tile(16, 64, 32, 4, 3, "static"),
)
# Bound by reading b: two and more of these run on a processor at a time.
_FEW_ROWS = (Tile(32, 64, 128, 4, 3, "static"), Tile(16, 64, 128, 4, 4, "static"))
_AMPERE: _Table = {
    "16-bit": (
        Tile(128, 256, 64, 8, 3, "t03"),
        Tile(128, 128, 64, 8, 4, "inductor"),
        Tile(128, 64, 64, 4, 4, "t03"),
        Tile(64, 128, 64, 4, 4, "t03"),
        Tile(64, 64, 64, 4, 4, "inductor"),
        Tile(64, 32, 64, 4, 4, "t03"),
        Tile(64, 16, 64, 4, 4, "static"),
        *_FEW_ROWS,
    ),
    "16-bit unaligned": _UNALIGNED,
    "fp32": (
        Tile(128, 128, 16, 8, 3, "static"),
        Tile(128, 64, 16, 8, 3, "static"),
        Tile(64, 64, 16, 4, 2, "static"),
        Tile(32, 64, 32, 4, 3, "static"),
        Tile(16, 64, 32, 4, 3, "static"),
    ),
    "fp32 unaligned": _FP32_UNALIGNED,
    "tf32": (
        Tile(128, 128, 32, 8, 3, "inductor"),
        Tile(64, 64, 32, 4, 4, "inductor"),
        Tile(16, 64, 64, 4, 4, "static"),
    ),
}
# 99 KiB: the widest tile steps over half as much
_ADA: _Table = {
    **_AMPERE,
    "16-bit": (
        Tile(128, 256, 32, 8, 3, "inductor"),
        Tile(128, 128, 64, 8, 3, "inductor"),
        Tile(128, 64, 64, 4, 4, "t03"),
        Tile(64, 128, 64, 4, 4, "t03"),
        Tile(64, 64, 64, 4, 4, "inductor"),
        Tile(64, 32, 64, 4, 4, "t03"),
        Tile(64, 16, 64, 4, 4, "static"),
        Tile(32, 64, 128, 4, 4, "static"),
        Tile(16, 64, 128, 4, 4, "static"),
    ),
}
# Triton multiplies in registers there, float32 at a time: short steps, or operands spill.
_IN_REGISTERS = (
    Tile(128, 64, 16, 8, 2, "static"),
    Tile(64, 64, 16, 4, 2, "static"),
    Tile(64, 32, 16, 4, 2, "static"),
    Tile(32, 64, 16, 4, 2, "static"),
    Tile(16, 64, 16, 4, 2, "static"),
)
_TURING: _Table = {
    "16-bit": _IN_REGISTERS,
    "16-bit unaligned": _IN_REGISTERS,
    "fp32": (*_AMPERE["fp32"][:3], *_FP32_UNALIGNED[1:]),
    "fp32 unaligned": _FP32_UNALIGNED,
    "tf32": _FP32_UNALIGNED,  # there is none: float32 as it is
}
# Stages are those of descriptors, which with them take up to 225 KiB; parts of the result lie there too.
_HOPPER: _Table = {
    **_AMPERE,
    "16-bit": (
        Tile(128, 256, 64, 8, 4, "gluon"),
        Tile(256, 128, 64, 8, 4, "t09"),
        Tile(128, 128, 64, 8, 4, "t09"),
        Tile(64, 256, 64, 4, 4, "t03"),
        Tile(128, 64, 64, 4, 4, "t03"),
        Tile(64, 128, 64, 4, 4, "t03"),
        Tile(64, 64, 64, 4, 4, "inductor"),
        Tile(64, 32, 64, 4, 4, "t03"),
        Tile(64, 16, 64, 4, 4, "static"),
        *_FEW_ROWS,
    ),
}
# With four warps the tiles of 64 columns or rows spill a few registers here.
_BLACKWELL: _Table = {
    **_AMPERE,
    "16-bit": (
        Tile(128, 256, 64, 8, 4, "t09"),
        Tile(256, 128, 64, 8, 4, "t09"),
        Tile(128, 128, 64, 8, 4, "t09"),
        Tile(128, 64, 64, 8, 4, "static"),
        Tile(64, 128, 64, 8, 4, "static"),
        Tile(64, 64, 64, 4, 4, "inductor"),
        Tile(64, 32, 64, 4, 4, "t03"),
        Tile(64, 16, 64, 4, 4, "static"),
        *_FEW_ROWS,
    ),
    "fp32": (*_AMPERE["fp32"][:2], Tile(64, 64, 16, 8, 3, "static"), *_AMPERE["fp32"][3:]),
}
# Triton's tutorial 03 lists these for HIP, all with 8 warps and 2 stages
_CDNA: _Table = {
    "16-bit": (
        Tile(128, 128, 64, 8, 2, "t03"),
        Tile(128, 64, 64, 8, 2, "t03"),
        Tile(64, 128, 64, 8, 2, "static"),
        Tile(64, 64, 64, 8, 2, "t03"),
        Tile(64, 32, 64, 8, 2, "t03"),
        Tile(32, 64, 64, 8, 2, "t03"),
        Tile(16, 64, 128, 4, 2, "static"),
    ),
    "16-bit unaligned": _UNALIGNED,
    "fp32": _AMPERE["fp32"],
    "fp32 unaligned": _FP32_UNALIGNED,
    "tf32": _FP32_UNALIGNED,  # there is none: float32 as it is
}
# Half as many lanes hold a tile: of 128 columns and rows it spills unless the step is short.
_RDNA: _Table = {
    **_CDNA,
    "16-bit": (Tile(128, 128, 32, 8, 2, "static"), *_CDNA["16-bit"][1:]),
    "fp32": (_AMPERE["fp32"][1], Tile(64, 64, 16, 8, 3, "static"), *_AMPERE["fp32"][3:]),
}
TABLES: dict[str, _Table] = {
    "sm_75": _TURING, "sm_80": _AMPERE, "sm_86": _ADA, "sm_89": _ADA, "sm_90": _HOPPER,
    "sm_100": _BLACKWELL, "sm_120": _ADA, "gfx90a": _CDNA, "gfx942": _CDNA, "gfx1100": _RDNA,
}  # fmt: skip
