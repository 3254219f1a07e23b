"""The error of the emulator."""

from __future__ import annotations

from entrenar.errors import KernelError

__all__ = ["EmulatorError"]


class EmulatorError(KernelError):
    """A compiled kernel that the emulator cannot run, or that did what no kernel may do."""
