"""The structures that Python and the C core share, field by field as in core/types.h and core/shadow.h."""

from __future__ import annotations

import ctypes

__all__ = [
    "LOCAL_WINDOW", "NO_REGISTER", "SHARED_WINDOW", "Argument", "Instruction", "Launch", "Monitor",
    "RawReport", "Warp",
]  # fmt: skip

NO_REGISTER = 0xFFFFFFFF
# Where shared and local memory lie in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61

_Fields = list[tuple[str, type]]


def _fields(kind: type, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class Instruction(ctypes.Structure):
    """``Ins``: one instruction."""

    _fields_ = [
        ("op", ctypes.c_uint16), ("pneg", ctypes.c_uint8), ("n", ctypes.c_uint8),
        *_fields(_U32, "pred d a b c x"), ("imm", ctypes.c_int64),
        *_fields(_U32, "k0 k1 k2 line"),
    ]  # fmt: skip


class Group(ctypes.Structure):
    """``Grp``: lanes that branched apart."""

    _fields_ = _fields(_U32, "pc mask blocked pad")


class Warp(ctypes.Structure):
    """``Warp``: registers, local memory, lanes and pending copies."""

    _fields_ = [
        *_fields(_U64, "R local"), *_fields(_U32, "pc mask alive state npend ncp ngrp cap"),
        ("pend", Group * 40), ("cp", _U64), ("grp_end", _U32 * 64),
    ]  # fmt: skip


class Launch(ctypes.Structure):
    """``Ctx``: one launch."""

    _fields_ = [
        *_fields(_U64, "prog extra warps smem smem_n local_n"),
        *_fields(_U32, "nprog nwarps nthreads gx gy gz o_tid"), ("o_ctaid", _U32 * 3),
        *_fields(_U32, "o_laneid o_warpid order late_async poison do_poison"),
        *_fields(_U64, "wg wg_end icount limit seed barriers fault"),
        ("err_pc", _U32), ("cur", ctypes.c_int32), *_fields(_U64, "smem_alloc mon"),
    ]  # fmt: skip


class Monitor(ctypes.Structure):
    """``Mon``: what is counted and checked, and where the results go."""

    _fields_ = [
        *_fields(_U32, "flags sgran ggran nreg"), *_fields(_U64, "im reg rep"),
        *_fields(_U32, "nrep maxrep"), ("blockbars", _U64),
    ]  # fmt: skip


class Argument(ctypes.Structure):
    """``MReg``: the memory of one argument."""

    _fields_ = _fields(_U64, "lo n ld st valid gr rld rst mlo mn bld bst gld gst pld pst")


class RawReport(ctypes.Structure):
    """``Rep``: what a check found."""

    _fields_ = [*_fields(_U32, "kind pc1 pc2 ag1 ag2 reg"), *_fields(_U64, "n addr block block2")]
