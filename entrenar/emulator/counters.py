"""What a profiler would count of a launch.

``warp_instructions`` and ``by_class`` count executed warp instructions of the PTX, also those with no
active lane; the assembler merges, splits and removes some. ``global_memory`` counts requests to the first
cache, as 32-byte sectors, beside the fewest that the distinct bytes could take; no cache is modelled.
``distinct`` counts different bytes over the whole launch, the least that memory must move; of each buffer
also those within a program (``program_loaded``) and within a request (``requested_loaded``), added up.
``shared_memory`` counts wavefronts over 32 banks of 4 bytes beside the fewest possible; reads by wgmma and
bulk copies are not in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from entrenar.emulator.instruction_classes import (
    CLASSES,
    access_bits,
    access_kind,
    classify,
    matrix_work,
)
from entrenar.emulator.monitor import FIELDS, Watch
from entrenar.emulator.syntax import Opcode, opcode_of

__all__ = ["count"]

Counts = dict[str, Any]
_GLOBAL = ("requests", "bytes", "sectors", "ideal_sectors")
_SHARED = ("requests", "bytes", "wavefronts", "ideal_wavefronts")
_GLOBAL_KINDS = ("load", "store", "atomic", "cp_async", "tma_load", "tma_store")
_SHARED_KINDS = ("load", "store", "atomic", "ldmatrix", "stmatrix", "cp_async")


def count(watch: Watch, blocks: int) -> Counts:
    """Return the counters of a launch of ``blocks`` blocks, by the names in the module's docstring."""
    tally = _Tally()
    for text, counts in zip(watch.program.text, watch.per_instruction, strict=True):
        if counts[0]:
            tally.add(text, dict(zip(FIELDS, map(int, counts), strict=True)))
    for row in tally.global_memory.values():
        row["efficiency"] = row["ideal_sectors"] / row["sectors"] if row["sectors"] else None
    for row in tally.shared_memory.values():
        row["excess"] = row["wavefronts"] - row["ideal_wavefronts"]
    buffers = _buffers(watch)
    return {
        "warp_instructions": tally.instructions,
        "by_class": tally.by_class,
        "lanes_per_instruction": tally.lanes / max(tally.instructions, 1),
        "fp32_flops": tally.fp32_flops,
        "matrix": tally.matrix,
        "matrix_flops": sum(row["flops"] for row in tally.matrix.values()),
        "global_memory": tally.global_memory,
        "access_bits": tally.access_bits,
        "distinct": {
            "loaded": sum(row["loaded"] for row in buffers.values()),
            "stored": sum(row["stored"] for row in buffers.values()),
            "buffers": buffers,
        },
        "shared_memory": tally.shared_memory,
        "bank_conflict_excess": sum(row["excess"] for row in tally.shared_memory.values()),
        "cp_async_bytes": tally.global_memory["cp_async"]["bytes"],
        "block_barriers": int(watch.monitor.blockbars),
        "warp_barriers": tally.barriers,
        "blocks": blocks,
    }


class _Tally:
    """Sums over instructions."""

    def __init__(self) -> None:
        self.instructions = self.lanes = self.fp32_flops = self.barriers = 0
        self.by_class = dict.fromkeys(CLASSES, 0)
        self.global_memory: dict[str, Counts] = {
            k: dict.fromkeys(_GLOBAL, 0) for k in _GLOBAL_KINDS
        }
        self.shared_memory: dict[str, Counts] = {
            k: dict.fromkeys(_SHARED, 0) for k in _SHARED_KINDS
        }
        self.access_bits: dict[str, dict[int, int]] = {"load": {}, "store": {}, "cp_async": {}}
        self.matrix: dict[str, dict[str, int]] = {}

    def add(self, text: str, counts: dict[str, int]) -> None:
        opcode, kind = opcode_of(text), classify(text)
        executed = counts["executed"]
        self.by_class[kind] += executed
        self.instructions += executed
        self.lanes += counts["lanes"]
        if kind == "barrier" and opcode.base != "mbarrier" and "warp" not in opcode.text:
            self.barriers += executed
        elif kind == "fp32":
            self.fp32_flops += counts["lanes"] * _flops(opcode)
        elif kind == "matrix":
            shape, work = matrix_work(opcode)
            row = self.matrix.setdefault(shape, {"instructions": 0, "flops": 0})
            row["instructions"] += executed
            row["flops"] += work * executed
        elif kind == "global memory":
            self._add_global(text, access_kind(opcode), counts)
        elif kind == "shared memory":
            _add(self.shared_memory[access_kind(opcode)], counts, _SHARED)

    def _add_global(self, text: str, kind: str, counts: dict[str, int]) -> None:
        _add(self.global_memory[kind], counts, _GLOBAL)
        if kind in self.access_bits and counts["requests"]:
            bits = access_bits(text)
            widths = self.access_bits[kind]
            widths[bits] = widths.get(bits, 0) + counts["requests"]
        if kind == "cp_async":
            _add(self.shared_memory[kind], counts, _SHARED)


def _add(row: Counts, counts: dict[str, int], fields: tuple[str, ...]) -> None:
    for field in fields:
        row[field] += counts[field]


def _flops(opcode: Opcode) -> int:
    if opcode.base not in ("add", "sub", "mul", "fma", "mad"):
        return 0
    return (2 if opcode.base in ("fma", "mad") else 1) * (2 if opcode.type == "f32x2" else 1)


def _buffers(watch: Watch) -> dict[str, dict[str, int]]:
    return {
        name: {
            "size": region.nbytes,
            "loaded": int(np.bitwise_count(loaded).sum()),
            "stored": int(np.bitwise_count(stored).sum()),
            "requested_loaded": int(row.rld),
            "requested_stored": int(row.rst),
            "program_loaded": int(row.pld),
            "program_stored": int(row.pst),
            "loaded_sectors": int(np.count_nonzero(loaded)),
            "stored_sectors": int(np.count_nonzero(stored)),
        }
        for name, region, row, (loaded, stored) in zip(
            watch.arguments, watch.regions, watch.rows, watch.covered, strict=False
        )
    }
