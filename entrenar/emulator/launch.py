"""Run a program over a grid: memory, registers, the core, and what came of it."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from entrenar.emulator.build import core
from entrenar.emulator.counters import count
from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.layout import Instruction, Launch, Warp
from entrenar.emulator.memory import PAGE, anonymous
from entrenar.emulator.monitor import Checks, Watch
from entrenar.emulator.parameters import Arguments, Storage
from entrenar.emulator.program import Program
from entrenar.emulator.reports import Report

__all__ = ["Execution", "execute"]

# A quiet NaN as float32, and a number that is easily told as an integer: what nothing has written.
_POISON = 0x7FC0BAD1
_ORDERS = ("forward", "reverse", "random")
_FAULT, _LIMIT, _UNSUPPORTED, _SHARED_BOUNDS, _DIVERGENT = 1, 2, 3, 4, 5
_TRAP, _DEADLOCK, _MISALIGNED, _PARTIAL_BARRIER = 6, 7, 8, 9
_IN_GLOBAL_MEMORY = (_FAULT, _MISALIGNED)


@dataclasses.dataclass
class Execution:
    """What a launch did.

    Attributes:
        load_s, run_s: Seconds to set up and to execute.
        instructions: Warp instructions executed.
        barriers: Barriers, counted once a warp.
        workgroups: Blocks.
        warnings: A sentence for each finding.
        reports: Findings of the checks.
        counters: See ``entrenar.emulator.counters``; empty where they were off.
        per_instruction: A row for each executed instruction; empty where counters were off.
    """

    load_s: float
    run_s: float
    instructions: int
    barriers: int
    workgroups: int
    warnings: list[str]
    reports: list[Report]
    counters: dict[str, Any]
    per_instruction: list[dict[str, Any]]


def execute(
    program: Program,
    grid: Sequence[int],
    threads: int,
    shared: int,
    values: Sequence[Any],
    types: Sequence[str],
    storage: Storage,
    *,
    names: Sequence[str] | None = None,
    guard: bool = True,
    poison: bool = True,
    wave_order: str = "forward",
    late_async: bool = True,
    limit: int = 4_000_000_000,
    seed: int = 1,
    edges: int | None = None,
    counters: bool = False,
    racecheck: bool = False,
    initcheck: bool = False,
    gracecheck: bool = False,
    uninit: Sequence[Any] = (),
) -> Execution:
    """Execute a kernel.

    Args:
        program: The kernel.
        grid: Blocks along x, y, z; missing ones are 1.
        threads: Threads of a block.
        shared: Bytes of dynamic shared memory.
        values: Arguments in the order of the parameters: numbers, arrays, addresses, None.
        types: Triton's type of each, such as ``"*fp32"`` or ``"i32"``.
        storage: Returns (address of the storage, bytes, address of the array) of an array.
        names: Names of the arguments, for messages.
        guard: Place arguments between guard pages.
        poison: Fill registers and shared memory with a NaN before each run.
        wave_order: Order of warps between barriers: ``forward``, ``reverse`` or ``random``.
        late_async: Let asynchronous copies happen when they are waited for, and not at once.
        limit: Most warp instructions.
        seed: Of the random order.
        edges: Execute the first and the last so many blocks alone; all where None.
        counters: Count instructions, sectors, wavefronts, bytes.
        racecheck: Find races between warps in shared memory.
        initcheck: Find reads of shared memory that nothing wrote.
        gracecheck: Find races between blocks in global memory.
        uninit: Arrays whose bytes count as unset until they are stored.

    Returns:
        What happened; arrays hold the results.

    Raises:
        EmulatorError: The kernel left its memory, waits for ever, hits an instruction that is not
            known, or the like; the message names kernel, program id, instruction and argument.
    """
    started = time.perf_counter()
    x, y, z = (*grid, 1, 1, 1)[:3]
    unset = frozenset(storage(a)[0] for a in uninit)
    checks = Checks(counters, racecheck, initcheck, gracecheck, unset)
    arguments = Arguments(program, values, types, names, storage, guard)
    machine = _Machine(program, (x, y, z), threads, shared, poison)
    machine.launch.order, machine.launch.late_async = _ORDERS.index(wave_order), int(late_async)
    machine.launch.limit, machine.launch.seed = limit, seed
    blocks = int(machine.launch.wg_end)
    ranges = [(0, blocks)]
    if edges is not None and 2 * edges < blocks:
        ranges = [(0, edges), (blocks - edges, blocks)]
    return _run(program, machine, arguments, checks, ranges, started)


def _run(
    program: Program,
    machine: _Machine,
    arguments: Arguments,
    checks: Checks,
    ranges: list[tuple[int, int]],
    started: float,
) -> Execution:
    """Run the core, copy results back, and say what was seen; memory is let go in any case."""
    library, launch = core(), machine.launch
    blocks = sum(end - begin for begin, end in ranges)
    watch = None
    try:
        if unknown := checks.uninit - set(arguments.regions):
            raise EmulatorError(
                f"uninit: {len(unknown)} arrays are not arguments of {program.name}"
            )
        if checks:
            names = arguments.names
            watch = Watch(program, arguments.regions, names, checks, launch.nwarps)
            launch.mon = ctypes.addressof(watch.monitor)
        address = program.declared.parameter_address
        ctypes.memmove(address, arguments.data, len(arguments.data))
        ready = time.perf_counter()
        code = 0
        for launch.wg, launch.wg_end in ranges:
            code = code or library.run_grid(ctypes.byref(launch))
        done = time.perf_counter()
        if code:
            found = [f"; before that: {r}" for r in (watch.reports()[:3] if watch else [])]
            raise EmulatorError(_explain(code, program, machine, arguments) + "".join(found))
        warnings = arguments.copy_back()
    finally:
        arguments.close()
        for warp in machine.warps:
            library.free_cp(ctypes.byref(warp))
    reports = watch.reports() if watch else []
    counted = watch if checks.counters else None
    return Execution(
        load_s=ready - started,
        run_s=done - ready,
        instructions=launch.icount,
        barriers=launch.barriers,
        workgroups=blocks,
        warnings=[f"{program.name}: {w}" for w in warnings] + [str(r) for r in reports],
        reports=reports,
        counters=count(counted, blocks) if counted else {},
        per_instruction=counted.instructions() if counted else [],
    )


class _Machine:
    """Registers, shared memory and warps of one launch."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], threads: int, shared: int, poison: bool
    ) -> None:
        declared = program.declared
        self.shared_bytes = max(declared.dynamic_shared + shared, declared.static_shared)
        self.instructions = (Instruction * len(program.instructions))(*program.instructions)
        self._extra = (ctypes.c_uint32 * max(1, len(program.extra)))(*program.extra)
        count = -(-threads // 32)
        self.warps = (Warp * count)()
        self._keep: list[Any] = []
        special = program.registers.special
        self.launch = Launch(
            prog=ctypes.addressof(self.instructions), nprog=len(program.instructions),
            extra=ctypes.addressof(self._extra), warps=ctypes.addressof(self.warps),
            smem_n=self.shared_bytes, smem_alloc=-(-self.shared_bytes // PAGE) * PAGE + PAGE,
            local_n=-(-program.local_bytes // 16) * 16, nwarps=count, nthreads=threads,
            gx=grid[0], gy=grid[1], gz=grid[2], wg_end=grid[0] * grid[1] * grid[2],
            o_tid=special["tid.x"], o_laneid=special["laneid"], o_warpid=special["warpid"],
            poison=_POISON, do_poison=int(poison),
        )  # fmt: skip
        for axis in range(3):
            self.launch.o_ctaid[axis] = special[f"ctaid.{'xyz'[axis]}"]
        self.launch.smem = self._allocate(self.launch.smem_alloc)
        image = _registers(program, grid, threads, shared, poison)
        for warp in self.warps:
            warp.R = self._allocate(len(image))
            ctypes.memmove(warp.R, image.ctypes.data, len(image))
            warp.local = self._allocate(self.launch.local_n * 32) if self.launch.local_n else 0

    def _allocate(self, nbytes: int) -> int:
        memory, address = anonymous(nbytes)
        self._keep.append(memory)
        return address


def _registers(
    program: Program, grid: tuple[int, int, int], threads: int, shared: int, poison: bool
) -> np.ndarray:
    """Return a warp's register file as it begins: constants, dimensions, and poison elsewhere."""
    image = np.zeros(program.registers.size + 64, np.uint8)
    if poison:
        image.view(np.uint32)[: len(image) // 4] = _POISON
    for (value, width), offset in program.registers.constants.items():
        _fill(image, offset, value, width)
    dimensions = {
        "ntid.x": threads, "ntid.y": 1, "ntid.z": 1, "nctaid.x": grid[0], "nctaid.y": grid[1],
        "nctaid.z": grid[2], "nwarpid": -(-threads // 32), "dynamic_smem_size": shared,
        "total_smem_size": shared,
    }  # fmt: skip
    for name, offset in program.registers.dimensions.items():
        _fill(image, offset, dimensions[name], 32)
    lanes = np.arange(32, dtype=np.uint64)
    below = (np.uint64(1) << lanes) - np.uint64(1)
    masks = {
        "lt": below, "le": 2 * below + 1, "eq": below + 1, "gt": ~(2 * below + 1), "ge": ~below
    }  # fmt: skip
    for name, offset in program.registers.special.items():
        if name.startswith("lanemask_"):
            mask = masks[name.removeprefix("lanemask_")].astype(np.uint32)
            image[offset : offset + 128].view(np.uint32)[:] = mask
    return image


def _fill(image: np.ndarray, offset: int, value: int, width: int) -> None:
    if width == 1:
        image[offset : offset + 4].view(np.uint32)[:] = 0xFFFFFFFF if value else 0
    else:
        image[offset : offset + 4 * width].view(f"u{width // 8}")[:] = value


def _explain(code: int, program: Program, machine: _Machine, arguments: Arguments) -> str:
    """Say why a launch ended early: kernel, what, argument, program id, warp, instruction."""
    launch = machine.launch
    words = {
        _FAULT: f"access outside of memory, at {launch.fault:#x}",
        _LIMIT: f"more than {launch.limit} instructions",
        _UNSUPPORTED: "an instruction that is not known",
        _SHARED_BOUNDS: f"shared or local access at byte {launch.fault}, outside of "
        f"{machine.shared_bytes} and {launch.local_n} bytes",
        _DIVERGENT: "an instruction of the whole warp that lanes reach apart",
        _TRAP: "trap",
        _DEADLOCK: "every warp waits, for ever",
        _MISALIGNED: f"misaligned address {launch.fault:#x}",
        _PARTIAL_BARRIER: "a barrier that a part of the block does not reach",
    }
    near = arguments.locate(launch.fault) if code in _IN_GLOBAL_MEMORY else ""
    block = launch.wg
    place = (block % launch.gx, block // launch.gx % launch.gy, block // (launch.gx * launch.gy))
    known = launch.err_pc < len(program.text)
    instruction = program.describe(launch.err_pc) if known else "past the end"
    text = program.text[launch.err_pc] if known else ""
    unknown = f" ({text})" if code == _UNSUPPORTED else ""
    return (
        f"{program.name}: {words.get(code, f'error {code}')}{unknown}{f' ({near})' if near else ''}, "
        f"program {place}, warp {launch.cur}: {instruction}"
    )
