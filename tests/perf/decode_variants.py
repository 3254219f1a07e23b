"""Decode 4-bit codes by table and by selects, in the emulator, and print what the model says of each."""

from __future__ import annotations

import json
import sys

import numpy as np
import triton
import triton.language as tl

from entrenar.emulator import RunInfo, run_compiled
from perf.devices import DEVICES
from perf.model import launch_model, registers_of
from perf.tally import tally_launch

N = 1 << 16


@triton.jit
def table_kernel(codes_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + at)
    tl.store(out_ptr + at, tl.load(table_ptr + code.to(tl.int32)))


@triton.jit
def tree_kernel(codes_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + at)
    value = tl.zeros([BLOCK], tl.float32)
    for level in tl.static_range(16):
        value = tl.where(code == level, (level * level - 60) * 0.013, value)
    tl.store(out_ptr + at, value)


def main() -> int:
    codes = np.random.default_rng(0).integers(0, 16, N).astype(np.uint8)
    table = np.array([(i * i - 60) * 0.013 for i in range(16)], np.float32)
    device, found = DEVICES["a100"], []
    for kernel in (table_kernel, tree_kernel):
        out = np.zeros(N, np.float32)
        info: RunInfo = run_compiled(
            kernel, None, {"BLOCK": 1024}, (N // 1024,), [codes, table, out], counters=True
        )
        np.testing.assert_allclose(out, table[codes], rtol=1e-6)
        counted = {**tally_launch(info), "matrix": info.counters["matrix"]}
        found.append(launch_model(device, counted, registers_of(info.asm["cubin"])))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
