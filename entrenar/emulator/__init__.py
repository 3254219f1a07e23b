"""Compiled kernels (PTX) executed on the CPU, checked as a sanitizer would and counted as a profiler would.

``install_driver(target)`` makes ``kernel[grid](cpu_tensor, ...)`` compile for that target and run here;
``run_compiled`` runs one kernel; ``execute`` runs a parsed :class:`Program`. The way of a launch: ``driver``
(Triton's side) and ``binding`` (its specialisation), ``program`` (PTX text to instructions, with ``syntax``,
``declarations``, ``registers``, ``lowering`` and the tables in ``operations``), ``launch`` with
``parameters`` and ``memory``, then the interpreter in ``core``, which ``build`` compiles; ``monitor``,
``counters`` and ``reports`` say what was seen.

It has no clock, no caches and no scheduler: order of warps is chosen, not modelled. Not executed, and
refused by name: device functions, clusters and multicast, barriers of a part of a block, tcgen05, rounding
other than to nearest even in arithmetic, gather, scatter and reduction by TMA. Not checked: order between
the lanes of one warp, a missing proxy fence or wgmma.fence, registers of a wgmma read before its wait,
global memory between warps of one block.
"""

from __future__ import annotations

import os

# As for kernels: fused multiply-add stays on, and Triton does not warn that its default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from entrenar.emulator.binding import infer_type, is_array, storage
from entrenar.emulator.driver import (
    Driver,
    RunInfo,
    active_driver,
    install_driver,
    run_compiled,
    uninstall_driver,
)
from entrenar.emulator.errors import EmulatorError
from entrenar.emulator.launch import Execution, execute
from entrenar.emulator.program import Program
from entrenar.emulator.reports import KIND, Report

__all__ = [
    "KIND", "Driver", "EmulatorError", "Execution", "Program", "Report", "RunInfo", "active_driver",
    "execute", "infer_type", "install_driver", "is_array", "run_compiled", "storage", "uninstall_driver",
]  # fmt: skip
