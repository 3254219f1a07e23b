"""What the compute capabilities differ in."""

from __future__ import annotations

__all__ = ["shared_memory_bytes"]

# KiB of shared memory a block may use where it is not that of sm_90 and newer (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
_SHARED_KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99}


def shared_memory_bytes(target: str) -> int:
    """Return the shared memory a block may use on a target, such as ``"sm_80"``."""
    return _SHARED_KIB.get(target, 227) << 10
