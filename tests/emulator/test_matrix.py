"""Matrix instructions, emulated through Triton's ``tl.dot``, against products in NumPy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

import triton
import triton.language as tl

from entrenar.emulator import run_compiled

OPCODES = Path(__file__).resolve().parents[1] / "data" / "ptx_arithmetic.txt"


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision=PRECISION)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


MATRIX = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("sm_80", torch.bfloat16, 32),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": ("sm_80", torch.float16, 32),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": ("sm_80", torch.float32, 32),
    "wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16": ("sm_90", torch.bfloat16, 64),
    "wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16": ("sm_90", torch.float16, 64),
}


@pytest.mark.parametrize("opcode", MATRIX)
def test_matrix_instruction_against_numpy(opcode: str, counts: Callable[[int, int], int]) -> None:
    """Products of small integers are exact in any order; of others within the bound of k fp32 sums."""
    target, dtype, rows = MATRIX[opcode]
    k, rng = 64, np.random.default_rng(3)
    for columns in ((64,), (16, 32, 64, 128, 256))[counts(0, 1)]:
        whole = rng.integers(-8, 9, (rows, k)), rng.integers(-8, 9, (k, columns))
        real = rng.standard_normal((rows, k)), rng.standard_normal((k, columns))
        for left, right in (whole, real):
            a, b = (torch.from_numpy(x.astype(np.float32)).to(dtype) for x in (left, right))
            c = torch.zeros(rows, columns)
            constants = {"M": rows, "N": columns, "K": k, "PRECISION": "tf32"}
            done = run_compiled(_product_kernel, None, constants, (1,), [a, b, c], target=target)
            assert opcode.replace("nN", f"n{columns}") in done.asm["ptx"]
            wide_a, wide_b = a.double().numpy(), b.double().numpy()
            # tf32 keeps 10 bits of each operand; whether a GPU rounds or truncates there is not stated
            operands = 2.0**-9 if dtype == torch.float32 and left is real[0] else 0.0
            sums = 0.0 if left is whole[0] else k * 2.0**-24
            bound = (operands + sums) * (np.abs(wide_a) @ np.abs(wide_b))
            assert (np.abs(c.numpy() - wide_a @ wide_b) <= bound).all()


def test_the_recorded_matrix_opcodes_are_all_tested() -> None:
    recorded = {x for x in OPCODES.read_text().splitlines() if x.startswith(("mma.", "wgmma."))}
    assert len(recorded) >= 4
    assert recorded <= MATRIX.keys(), recorded - MATRIX.keys()
