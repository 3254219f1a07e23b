"""NF4 kernels, compiled and executed, against bitsandbytes' bits and reported faults."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("ENTRENAR_BACKEND") == "triton":
    pytest.skip("kernels of this process are interpreted", allow_module_level=True)
if not (shutil.which("gcc") or shutil.which("cc")):
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

import triton

from entrenar.errors import NumericsError, ShapeMismatchError
from entrenar.kernels import nf4, nf4_gemm
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.reference import nf4 as reference
from entrenar.testing import to_float64, to_storage

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_nf4_golden", DATA / "make_nf4_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _same_bits(got: torch.Tensor, wanted: np.ndarray) -> bool:
    return got.numpy().dtype == wanted.dtype and got.numpy().tobytes() == wanted.tobytes()


def _digest(maker: ModuleType, values: torch.Tensor) -> str:
    return maker.digest([values.contiguous().reshape(-1).view(torch.uint8).numpy()])


def test_bitsandbytes_bits(maker: ModuleType, counts: Callable[[int, int], int]) -> None:
    """Codes, absmax and decoded values; nested codes given the offset. All 100 by make prove."""
    with np.load(DATA / "nf4_golden.npz") as file:
        held = dict(file)
    code_at = scale_at = nested_at = 0
    for i, (x, dtype, block) in enumerate(maker.inputs()):
        n_codes, n_scales = -(-x.size // 2), -(-x.size // block)
        n_nested = -(-n_scales // 256)
        absmax = held["absmax"][scale_at : scale_at + n_scales]
        if i % 10 == 0 or i < counts(9, 100):
            w = nf4.nf4_quantize(torch.from_numpy(x.copy()).to(getattr(torch, dtype)), block)
            assert _same_bits(w.codes, held["codes"][code_at : code_at + n_codes]), i
            assert _same_bits(w.absmax, absmax), i
            assert _digest(maker, nf4.nf4_dequantize(w)) == held["decoded"][2 * i], i
            double = nf4.nf4_quantize(torch.from_numpy(x.copy()), block, double_quant=True)
            offset = double.offset.numpy()
            assert abs(offset - absmax.mean(dtype=np.float64)) <= np.spacing(offset), i
            codes, absmax2 = reference._quantize_absmax(absmax, offset)
            assert _same_bits(double.absmax_codes, codes), i
            assert _same_bits(double.absmax2, absmax2), i
            theirs = {
                "absmax_codes": held["absmax_codes"][scale_at : scale_at + n_scales],
                "absmax2": held["absmax2"][nested_at : nested_at + n_nested],
                "offset": held["offset"][i : i + 1],
            }
            nested = {name: torch.from_numpy(value.copy()) for name, value in theirs.items()}
            stored = NF4Weight(w.codes, None, (x.size,), w.dtype, block, **nested)
            assert _digest(maker, nf4.nf4_dequantize(stored)) == held["decoded"][2 * i + 1], i
        code_at, scale_at = code_at + n_codes, scale_at + n_scales
        nested_at += n_nested


def test_a_short_last_block_ignores_what_follows() -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1884."""
    memory = torch.full((200,), 1e30)
    memory[:100] = torch.from_numpy(np.arange(100) % 5 - 2.0).float()
    w = nf4.nf4_quantize(memory[:100])
    assert w.absmax.tolist() == [2.0, 2.0]
    assert nf4.nf4_dequantize(w).shape == (100,)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_a_short_last_block_where_integers_go_in_pairs(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From sm_90 on the compiler adds two 16-bit integers at once."""
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", target)
    x = np.random.default_rng(5).standard_normal(637).astype(np.float32)
    got, wanted = nf4.nf4_quantize(torch.from_numpy(x)), reference.nf4_quantize(x)
    assert _same_bits(got.codes, wanted.codes)
    assert _same_bits(got.absmax, wanted.absmax)


def test_strided_storage() -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1342."""
    x = torch.arange(72.0).reshape(3, 4, 6)[:, ::2, :]
    got, wanted = nf4.nf4_quantize(x), nf4.nf4_quantize(x.contiguous())
    assert _same_bits(got.codes, wanted.codes.numpy())
    assert got.shape == (3, 2, 6)


def test_non_finite_weights_are_counted_and_located() -> None:
    """https://github.com/huggingface/peft/issues/1009."""
    x = torch.ones(300, 64)
    x[200, 5] = float("nan")
    x[7, 63] = float("-inf")
    with pytest.raises(NumericsError, match=r"2 values .* \(7, 63\)"):
        nf4.nf4_quantize(x)


def test_sizes_past_31_bits() -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2071."""
    assert nf4.nf4_sizes((128, 4096, 4096), 64) == (2**31, 1073741824, 33554432)


def test_refuses_the_storage_of_another_weight() -> None:
    w = nf4.nf4_quantize(torch.ones(4, 64))
    with pytest.raises(ShapeMismatchError, match="codes"):
        nf4.nf4_dequantize(NF4Weight(w.codes, w.absmax, (8, 64), torch.float32))
    with pytest.raises(ShapeMismatchError, match="no absmax2 and no offset"):
        nf4.nf4_dequantize(
            NF4Weight(w.codes, None, (4, 64), torch.float32, absmax_codes=w.codes[:4])
        )


class TestProducts:
    @pytest.mark.parametrize("rows", [3, 65])
    def test_fused_and_decoded_first_agree(self, rows: int, monkeypatch: Any) -> None:
        rng = np.random.default_rng(0)
        plain = reference.nf4_quantize(rng.standard_normal((48, 128)))
        w = to_storage(plain)
        x, grad = (to_storage(rng.standard_normal((rows, n))) for n in (128, 48))
        dense = reference.nf4_dequantize(plain, "float64")
        for limit in (0, 1000):
            monkeypatch.setattr(nf4_gemm, "_FUSED_ROWS", limit)
            assert nf4_gemm.fused(w, rows) == (rows <= limit)
            got = to_float64(nf4_gemm.nf4_gemm_forward(x, w))
            np.testing.assert_allclose(got, to_float64(x) @ dense.T, rtol=1e-4, atol=1e-4)
            held = torch.ones(rows, 128)
            nf4_gemm.nf4_gemm_backward(grad, w, held, accumulate=True)
            wanted = 1 + to_float64(grad) @ dense
            np.testing.assert_allclose(to_float64(held), wanted, rtol=1e-4, atol=1e-4)

    def test_scratch_is_reused(self) -> None:
        first, second = (nf4.nf4_quantize(torch.full((8, 70), float(v))) for v in (1, 2))
        before = nf4_gemm.decode_to_scratch(first, torch.float32, None)
        after = nf4_gemm.decode_to_scratch(second, torch.float32, None)
        assert before.data_ptr() == after.data_ptr()
        assert (after.numpy() == 2).all()


@pytest.mark.parametrize("double", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_instructions_and_sectors_of_a_decoded_weight(
    dtype: str, double: bool, pytestconfig: pytest.Config
) -> None:
    """On sm_90, at most nine instructions of the disassembly and three sector bytes a weight.

    Triton 3.6 moves the values through shared memory in more steps: up to 11.5 there.
    """
    most = 9.0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 11.5
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    source = f"""
import json, os, re, subprocess, sys, tempfile
os.environ["ENTRENAR_BACKEND"], os.environ["ENTRENAR_PTX_TARGET"] = "ptx", "sm_90"
from entrenar.emulator import install_driver
from entrenar.kernels.nf4 import nf4_dequantize
from perf.calls import DTYPES, Maker
from perf.static_rows import nvidia_tool
driver = install_driver("sm_90", counters=True)
nf4_dequantize(Maker(DTYPES[{dtype!r}], 64, values=True).nf4(64, 2048, {double}))
done = driver.last
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(done.asm["cubin"])
    file.flush()
    command = [nvidia_tool("cuobjdump"), "-sass", file.name]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
code = re.findall(r"/\\*[0-9a-f]{{4}}\\*/ +(?:@!?U?P[0-9T]+ )?([A-Z0-9_]+)", sass)
weights = 64 * 2048 / done.workgroups / (32 * done.metadata.num_warps)
loads = done.counters["global_memory"]["load"]
bits = done.counters["access_bits"]
json.dump({{
    # whole programs run to the first EXIT, which ends the branch for programs without a tail
    "instructions": (code.index("EXIT") + 1) / weights,
    "sector_bytes": 32 * loads["sectors"] / (64 * 2048),
    "store_bits": sorted(bits["store"]),
    "load_bits": sorted(bits["load"]),
    "store_efficiency": done.counters["global_memory"]["store"]["efficiency"],
}}, sys.stdout)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["instructions"] <= most, found
    assert found["sector_bytes"] <= 3.0, found
    assert found["store_bits"] == [128]
    assert 128 in found["load_bits"]
    assert found["store_efficiency"] == 1.0
