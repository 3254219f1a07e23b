"""What the emulator counted of a call, added up over its launches and divided by its elements.

An instruction per element is a warp instruction times 32 lanes over the number of elements: what one
lane executes for each. Instructions are PTX; the assembler merges, splits and removes some, above all
those of the class "other" (moves and parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["hottest", "per_element", "ratio", "tally", "tally_launch"]

Row = dict[str, Any]
LOADS = ("load", "cp_async", "tma_load")
STORES = ("store", "tma_store")
WARP = 32
SECTOR = 32


def ratio(part: float, whole: float) -> float | None:
    """Return a share rounded to four digits; None of nothing."""
    return round(part / whole, 4) if whole else None


def _memory(counters: Sequence[Row], kinds: tuple[str, ...]) -> Row:
    """Add up requests to global memory of some kinds."""
    found = [c["global_memory"][kind] for c in counters for kind in kinds]
    total = {
        field: sum(int(kind[field]) for kind in found)
        for field in ("requests", "bytes", "sectors", "ideal_sectors")
    }
    return {**total, "coalescing": ratio(total["ideal_sectors"], total["sectors"])}


def _shared(counters: Sequence[Row]) -> Row:
    """Add up wavefronts of shared memory; conflicts are the share that banks in conflict cost."""
    kinds = [kind for c in counters for kind in c["shared_memory"].values()]
    waves = sum(kind["wavefronts"] for kind in kinds)
    excess = sum(c["bank_conflict_excess"] for c in counters)
    return {"wavefronts": waves, "excess": excess, "conflicts": ratio(excess, waves)}


def _sum(counters: Sequence[Row]) -> Row:
    classes: dict[str, int] = {}
    for counted in counters:
        for name, n in counted["by_class"].items():
            if n:
                classes[name] = classes.get(name, 0) + n
    instructions = sum(c["warp_instructions"] for c in counters)
    lanes = sum(c["lanes_per_instruction"] * c["warp_instructions"] for c in counters)
    loads, stores = _memory(counters, LOADS), _memory(counters, STORES)
    shared = _shared(counters)
    return {
        "blocks": sum(c["blocks"] for c in counters),
        "warp_instructions": instructions,
        "by_class": classes,
        "lanes_per_instruction": ratio(lanes, instructions),
        "matrix_flops": sum(c["matrix_flops"] for c in counters),
        "loads": loads,
        "stores": stores,
        "atomics": _memory(counters, ("atomic",)),
        "distinct_loaded_bytes": sum(c["distinct"]["loaded"] for c in counters),
        "distinct_stored_bytes": sum(c["distinct"]["stored"] for c in counters),
        "shared": shared,
        "block_barriers": sum(c["block_barriers"] for c in counters),
        "load_efficiency": loads["coalescing"],
        "store_efficiency": stores["coalescing"],
        "bank_conflicts": shared["conflicts"],
    }


def per_element(total: Row, elements: int) -> Row:
    """Divide a tally by elements: instructions of a lane, bytes, bytes of sectors, wavefront lanes."""

    def each(n: float) -> float:
        return round(n / elements, 4)

    return {
        "instructions": each(WARP * total["warp_instructions"]),
        "by_class": {name: each(WARP * n) for name, n in total["by_class"].items()},
        "loaded_bytes": each(total["loads"]["bytes"]),
        "stored_bytes": each(total["stores"]["bytes"]),
        "loaded_sector_bytes": each(SECTOR * total["loads"]["sectors"]),
        "stored_sector_bytes": each(SECTOR * total["stores"]["sectors"]),
        "distinct_loaded_bytes": each(total["distinct_loaded_bytes"]),
        "distinct_stored_bytes": each(total["distinct_stored_bytes"]),
        "shared_wavefronts": each(WARP * total["shared"]["wavefronts"]),
        "bank_conflict_excess": each(WARP * total["shared"]["excess"]),
        "block_barriers": each(total["block_barriers"]),
        "matrix_flops": each(total["matrix_flops"]),
    }


def tally_launch(launch: Any) -> Row:
    """Return what was counted of one launch, with its kernel's name, warps and shared memory."""
    metadata = launch.metadata
    return {
        "kernel": str(metadata.name),
        "warps": int(metadata.num_warps),
        "shared_bytes": int(metadata.shared),
        **_sum([launch.counters]),
    }


def tally(history: Sequence[Any], elements: int) -> Row:
    """Return what was counted of a call: in all, per element, and of each launch.

    Args:
        history: What the emulator returned of each launch, counters on.
        elements: What to divide by.
    """
    total = _sum([launch.counters for launch in history])
    return {
        "launches": len(history),
        "elements": elements,
        **total,
        "per_element": per_element(total, elements),
        "kernels": [tally_launch(launch) for launch in history],
        "reports": [str(report) for launch in history for report in launch.reports],
    }


def hottest(history: Sequence[Any], lines: int) -> list[Row]:
    """Return the instructions executed most: kernel, source line, PTX, and what each asked of memory."""
    found = [
        {"kernel": str(launch.metadata.name), **counted}
        for launch in history
        for counted in launch.per_instruction
    ]
    return sorted(found, key=lambda row: -row["executed"])[:lines]
