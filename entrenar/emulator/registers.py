"""The register file of a warp: where each register, constant and special register lies.

A register is an offset in bytes; its 32 lanes follow one another. Constants take registers of their own,
filled before the run.
"""

from __future__ import annotations

from entrenar.emulator.errors import EmulatorError

__all__ = ["Register", "RegisterFile"]

Register = tuple[int, int]  # offset, bits
_PER_BLOCK = ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z", "laneid", "warpid")
_PER_LAUNCH = (
    "ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z", "nwarpid", "dynamic_smem_size",
    "total_smem_size",
)  # fmt: skip
_ZERO = (
    "tid.y", "tid.z", "clusterid.x", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z",
    "cluster_ctarank", "smid", "clock", "clock_hi", "globaltimer_lo",
)  # fmt: skip
_ONE = ("cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z", "cluster_nctarank")


class RegisterFile:
    """Allocates registers and remembers names by scope.

    Attributes:
        size: Bytes so far.
        constants: Offset of each (value, bits).
        special: Offset of each special register that the core or the launcher fills per block or lane.
        dimensions: Offset of each that is one number a launch.
        scopes: Registers by name, innermost scope last.
    """

    def __init__(self) -> None:
        self.size = 0
        self.constants: dict[Register, int] = {}
        self.scopes: list[dict[str, Register]] = [{}]
        self.special = {name: self.allocate(32) for name in _PER_BLOCK}
        self.dimensions: dict[str, int] = {}
        self._sinks: dict[int, int] = {}

    def allocate(self, width: int) -> int:
        """Return a new register of ``width`` bits; a predicate takes one word."""
        if width != 1:
            self.size = (self.size + 31) // 32 * 32
        offset = self.size
        self.size += 4 if width == 1 else 32 * width // 8
        return offset

    def declare(self, name: str, width: int) -> None:
        """Add a register to the innermost scope."""
        self.scopes[-1][name] = (self.allocate(width), width)

    def lookup(self, name: str) -> Register | None:
        """Return a declared register, or None."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def constant(self, value: int, width: int) -> int:
        """Return a register that holds ``value`` in every lane."""
        key = (value & ((1 << width) - 1), width)
        if key not in self.constants:
            self.constants[key] = self.allocate(width)
        return self.constants[key]

    def sink(self, width: int) -> int:
        """Return a register for results nobody wants."""
        if width not in self._sinks:
            self._sinks[width] = self.allocate(width)
        return self._sinks[width]

    def of_special(self, name: str) -> int:
        """Return the register of a special register, such as ``"tid.x"``.

        Raises:
            EmulatorError: It is none that is known.
        """
        if name in self.special:
            return self.special[name]
        if name in _ZERO:
            return self.constant(0, 32)
        if name in ("clock64", "globaltimer"):
            return self.constant(0, 64)
        if name in _ONE:
            return self.constant(1, 32)
        if name.startswith("lanemask_"):
            self.special[name] = self.allocate(32)
            return self.special[name]
        if name in _PER_LAUNCH:
            if name not in self.dimensions:
                self.dimensions[name] = self.allocate(32)
            return self.dimensions[name]
        raise EmulatorError(f"special register %{name} is not known")
