"""Memory and flags of the counters and checks of one launch, which the core fills."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar.emulator.instruction_classes import access_bits, classify
from entrenar.emulator.layout import Argument, Monitor, RawReport
from entrenar.emulator.memory import Region
from entrenar.emulator.program import Program
from entrenar.emulator.reports import Report, report
from entrenar.emulator.syntax import TYPE_BITS, opcode_of

__all__ = ["Checks", "Watch"]

_MOST_REPORTS = 256
_COUNT, _RACES, _UNINITIALISED, _GLOBAL_RACES = 1, 2, 4, 8
FIELDS = (
    "executed", "lanes", "requests", "bytes", "sectors", "ideal_sectors", "wavefronts",
    "ideal_wavefronts",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Checks:
    """Which counters and checks are on.

    Attributes:
        counters: Count instructions, sectors, wavefronts, bytes.
        racecheck: Races between warps in shared memory.
        initcheck: Shared memory read before it was written.
        gracecheck: Races between blocks in global memory.
        uninit: Addresses of storages whose bytes count as unset until they are stored.
    """

    counters: bool = False
    racecheck: bool = False
    initcheck: bool = False
    gracecheck: bool = False
    uninit: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return (
            self.counters
            or self.racecheck
            or self.initcheck
            or self.gracecheck
            or bool(self.uninit)
        )

    @property
    def flags(self) -> int:
        """The bits of the core's MF_* constants."""
        return (
            _COUNT * self.counters
            | _RACES * self.racecheck
            | _UNINITIALISED * (self.initcheck or bool(self.uninit))
            | _GLOBAL_RACES * self.gracecheck
        )


class Watch:
    """Counters and checks of one launch.

    Args:
        program: What runs.
        regions: Memory of the arguments, by address of their storage.
        names: Names of the arguments of each region.
        checks: What is on.
        warps: Warps of a block.

    Attributes:
        monitor: The core's structure.
        arguments: Names by region.
        covered: Per region with counters on, bits of the bytes loaded and stored, a word a sector.
    """

    def __init__(
        self,
        program: Program,
        regions: Mapping[int, Region],
        names: Mapping[int, Sequence[str]],
        checks: Checks,
        warps: int,
    ) -> None:
        self.program, self.checks, self.warps = program, checks, warps
        self.regions = list(regions.values())
        self.arguments = ["/".join(dict.fromkeys(names[root])) for root in regions]
        self.per_instruction = np.zeros((len(program.instructions), len(FIELDS)), np.uint64)
        self.covered: list[tuple[np.ndarray, np.ndarray]] = []
        self._reports = (RawReport * _MOST_REPORTS)()
        self.rows = (Argument * max(1, len(regions)))()
        self._keep: list[np.ndarray] = []
        shared, global_ = _narrowest(program)
        for row, (root, region) in zip(self.rows, regions.items(), strict=False):
            self._watch(row, region, root in checks.uninit, global_)
        self.monitor = Monitor(
            flags=checks.flags, sgran=shared, ggran=global_, nreg=len(regions),
            im=self.per_instruction.ctypes.data, reg=ctypes.addressof(self.rows),
            rep=ctypes.addressof(self._reports), maxrep=_MOST_REPORTS,
        )  # fmt: skip

    def _zeros(self, words: int) -> np.ndarray:
        made = np.zeros(words, np.uint32)
        self._keep.append(made)
        return made

    def _watch(self, row: Argument, region: Region, unset: bool, granule: int) -> None:
        row.lo, row.n = region.start, region.nbytes
        row.mlo, row.mn = region.mapping
        sectors = region.nbytes // 32 + 2
        if self.checks.counters:
            loaded, stored = self._zeros(sectors), self._zeros(sectors)
            row.ld, row.st = loaded.ctypes.data, stored.ctypes.data
            self.covered.append((loaded, stored))
            for name in ("bld", "bst", "gld", "gst"):
                setattr(row, name, self._zeros(sectors).ctypes.data)
        if unset:
            row.valid = self._zeros(sectors).ctypes.data
        if self.checks.gracecheck:
            row.gr = self._zeros((region.nbytes // granule + 40) * 6).ctypes.data

    def reports(self) -> list[Report]:
        """Return what the checks found."""
        found = self._reports[: self.monitor.nrep]
        return [report(raw, self.program, self.arguments, self.warps) for raw in found]

    def instructions(self) -> list[dict[str, Any]]:
        """Return a row for each instruction that was executed: line, source, text, and its counts."""
        return [
            {
                "line": self.program.instructions[k].line,
                "source": self.program.where(k),
                "text": text,
                **{name: int(v) for name, v in zip(FIELDS, self.per_instruction[k], strict=True)},
            }
            for k, text in enumerate(self.program.text)
            if self.per_instruction[k, 0]
        ]


def _narrowest(program: Program) -> tuple[int, int]:
    """Return the bytes of the narrowest shared and global access, at most 4: the units of the checks."""
    shared = global_ = 4
    for text in program.text:
        opcode = opcode_of(text)
        if opcode.text.startswith("cp.async.bulk"):
            global_ = 1
        if opcode.base not in ("ld", "ldu", "st", "atom", "red") or opcode.type not in TYPE_BITS:
            continue
        kind, size = classify(text), access_bits(text) // 8
        if kind == "shared memory" or (kind == "global memory" and not opcode.has("global")):
            shared = min(shared, size)
        if kind == "global memory":
            global_ = min(global_, size)
    return shared, global_
