"""Compiled kernels (PTX) executed on the CPU, checked as a sanitizer would and counted as a profiler would.

``install_driver(target)`` makes ``kernel[grid](cpu_tensor, ...)`` compile for that target and run
here; ``run_compiled`` runs one kernel and returns its counters and reports.
"""

from __future__ import annotations

import os

# As for kernels: fused multiply-add stays on, and Triton does not warn that its default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from entrenar.emulator.driver import (  # noqa: E402
    EmuError,
    RunInfo,
    active_driver,
    install_driver,
    run_compiled,
    uninstall_driver,
)

__all__ = [
    "EmuError",
    "RunInfo",
    "active_driver",
    "install_driver",
    "run_compiled",
    "uninstall_driver",
]
