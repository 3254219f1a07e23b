"""Published rates of devices, for the time model.

Sources: [A] NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020) and data sheet; [H] NVIDIA H100 Tensor
Core GPU Architecture whitepaper (2022) and data sheet; [H200] its data sheet; [Ada] NVIDIA Ada GPU
Architecture whitepaper (2022); [G] CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions" and "Technical Specifications per Compute Capability". Matrix rates are dense. A rate that is
not published is None and bounds nothing.
"""

from __future__ import annotations

import dataclasses

__all__ = ["DEVICES", "Device"]


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU as its maker describes it.

    Attributes:
        name: As people say it.
        target: What kernels are compiled for.
        multiprocessors: How many.
        clock_hz: Boost clock.
        dram_bytes_per_s: Bandwidth of memory.
        l2_bytes_per_clock: Bandwidth of the second cache, all of it together.
        fp32_lanes: Lanes a multiprocessor executes in a clock, of float32 arithmetic.
        matrix_flops_per_s: Dense, by operand type; float32 accumulation.
        shared_bytes: Shared memory of a multiprocessor.
        most_warps: Warps a multiprocessor holds.
        most_blocks: Blocks it holds.
        integer_lanes, special_lanes, shuffle_lanes: As ``fp32_lanes``.
        conversion_lanes: Of conversions between 32-bit types and narrower ones.
        issue: Warp instructions a multiprocessor issues in a clock: one for each of four schedulers.
        registers: Registers of a multiprocessor.
    """

    name: str
    target: str
    multiprocessors: int
    clock_hz: float
    dram_bytes_per_s: float
    l2_bytes_per_clock: float | None
    fp32_lanes: int
    matrix_flops_per_s: dict[str, float]
    shared_bytes: int
    most_warps: int
    most_blocks: int
    integer_lanes: int = 64
    special_lanes: int = 16
    shuffle_lanes: int = 32
    conversion_lanes: int = 64
    issue: int = 4
    registers: int = 65536


_A100 = {"f16": 312e12, "bf16": 312e12, "tf32": 156e12, "f64": 19.5e12, "s8": 624e12}
_H100 = {"f16": 989.4e12, "bf16": 989.4e12, "tf32": 494.7e12, "f64": 66.9e12, "s8": 1978.9e12,
         "e4m3": 1978.9e12, "e5m2": 1978.9e12}  # fmt: skip
_ADA = {"f16": 165.2e12, "bf16": 165.2e12, "tf32": 82.6e12, "s8": 660.6e12, "e4m3": 330.3e12,
        "e5m2": 330.3e12}  # fmt: skip
DEVICES = {
    # [A]: 108 multiprocessors, 1.41 GHz, 2039 GB/s with 80 GB, 5120 bytes a clock from the second cache
    "a100": Device(
        "A100 SXM 80GB", "sm_80", 108, 1.41e9, 2.039e12, 5120, 64, _A100, 164 << 10, 64, 32
    ),
    # [H]: 132 multiprocessors, 1.83 GHz at the stated matrix rates, 3.35 TB/s
    "h100": Device("H100 SXM", "sm_90", 132, 1.83e9, 3.35e12, None, 128, _H100, 228 << 10, 64, 32),
    # [H200]: as the H100 with 4.8 TB/s
    "h200": Device("H200 SXM", "sm_90", 132, 1.83e9, 4.8e12, None, 128, _H100, 228 << 10, 64, 32),
    # [Ada]: 128 multiprocessors, 2.52 GHz, 1008 GB/s
    "rtx4090": Device(
        "RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, None, 128, _ADA, 100 << 10, 48, 24
    ),
}
