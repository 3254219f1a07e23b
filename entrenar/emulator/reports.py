"""What the checks find, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from entrenar.emulator.layout import RawReport

if TYPE_CHECKING:
    from entrenar.emulator.program import Program

__all__ = ["KIND", "Report", "report"]

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
    12: "access outside of an argument",
}
_SHARED_RACES, _SHARED, _ONE_INSTRUCTION = (1, 2, 3), (4, 5), (6, 10, 12)
_SEVERAL = 0xFFFFFFFE


@dataclasses.dataclass(frozen=True)
class Report:
    """One finding; equal pairs of instructions are reported once, with a count.

    Attributes:
        kind: A value of ``KIND``.
        message: A sentence naming kernel, block, instructions, source lines, and argument.
        kernel: Name of the kernel.
        line1, line2: Lines of the PTX; of the earlier and of the later access.
        source1, source2: ``file:line`` of the source, where the PTX tells.
        text1, text2: The instructions.
        block: Number of the block; the second one of a pair.
        count: How often it happened.
        address: Byte within shared memory or within the argument.
    """

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

    def __str__(self) -> str:
        return self.message


def _signed(address: int) -> int:
    return address - (1 << 64) if address >> 63 else address


def _agent(number: int, warps: int) -> str:
    """Name whose access it was; agents are numbered as core/shadow.h says."""
    kinds = ("warp", "cp.async of warp", "wgmma of warp", "bulk store of warp")
    if number < 4 * warps:
        return f"{kinds[number // warps]} {number % warps}"
    return f"bulk load (mbarrier {number - 4 * warps})"


def _message(raw: RawReport, program: Program, arguments: Sequence[str], warps: int) -> str:
    kind, first, second = KIND[raw.kind], program.describe(raw.pc1), program.describe(raw.pc2)
    if raw.kind in _SHARED_RACES:
        return (
            f"{kind} in {program.name}, block {raw.block}, shared byte {raw.addr}: "
            f"{_agent(raw.ag1, warps)}: {first}; then, not ordered after it, "
            f"{_agent(raw.ag2, warps)}: {second}"
        )
    if raw.kind in _SHARED:
        where = f"block {raw.block}, warp {raw.ag1}, shared byte {raw.addr}"
        return f"{kind}: {program.name}, {where}: {first}"
    where = f"byte {_signed(raw.addr)} of {arguments[raw.reg]}"
    if raw.kind in _ONE_INSTRUCTION:
        return f"{kind}: {program.name}, {where}, block {raw.block}: {second}"
    other = f"block {raw.block2}" if raw.block2 < _SEVERAL else "several blocks"
    return f"{kind}: {program.name}, {where}: {other}: {first}; block {raw.block}: {second}"


def report(raw: RawReport, program: Program, arguments: Sequence[str], warps: int) -> Report:
    """Put a finding of the core into words.

    Args:
        raw: The finding.
        program: What ran.
        arguments: Names of the arguments, by region.
        warps: Warps of a block.
    """
    times = f" [{raw.n} times]" if raw.n > 1 else ""
    return Report(
        kind=KIND[raw.kind],
        message=_message(raw, program, arguments, warps) + times,
        kernel=program.name,
        line1=program.instructions[raw.pc1].line,
        line2=program.instructions[raw.pc2].line,
        source1=program.where(raw.pc1),
        source2=program.where(raw.pc2),
        text1=program.text[raw.pc1],
        text2=program.text[raw.pc2],
        block=raw.block,
        count=raw.n,
        address=_signed(raw.addr),
    )
