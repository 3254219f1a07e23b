"""Faults planted in the source of kernels turn the op suite's check red.

Each fault is one substitution in a copy of a kernel's module. The copy's kernels take the place of the
originals, and one sample of the op runs compiled in the emulator, as in the op suite.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from entrenar.errors import NumericsError
from entrenar.optable import FAMILIES, OPS
from perf.oracle import check, reporting_unset

PROVE = os.environ.get("ENTRENAR_PROVE", "") not in ("", "0")
CHECKS = {"racecheck": True, "initcheck": True, "gracecheck": True}


class Fault(NamedTuple):
    """A substitution in ``entrenar/kernels/<module>.py``; every occurrence is replaced."""

    id: str
    module: str
    old: str
    new: str
    op: str
    sample: str
    reduced: bool = True


FAULTS = [
    Fault("eps_dropped", "rms_norm", "/ n_cols + eps)", "/ n_cols)", "rms_norm", "T3_D96_eps_dominates"),
    Fault("mask_off_by_one", "rms_norm", "(cols < n_cols)[None", "(cols <= n_cols)[None", "rms_norm",
          "T7_D123"),
    Fault("scale_dropped", "softmax", "* (scale * _LOG2E)", "* _LOG2E", "softmax",
          "7x129_scaled"),
    Fault("mask_off_by_one", "softmax", "(cols < n_cols)[None", "(cols < n_cols - 1)[None", "softmax",
          "5x37"),
    Fault("target_off_by_one", "_cross_entropy_kernels", "start + cols == column",
          "start + cols == column + 1", "cross_entropy", "R5_V10"),
    Fault("halves_swapped", "rope", "first * cos - second * sin", "second * cos - first * sin", "rope",
          "T5_H3_1_D32"),
    Fault("sign_of_the_rotation", "rope", "second * cos + first * sin", "second * cos - first * sin",
          "rope", "T5_H3_1_D32"),
    Fault("operands_swapped", "swiglu", "gate * _sigmoid(gate) * up", "up * _sigmoid(up) * gate",
          "swiglu", "T7_F123"),
    Fault("decay_dropped", "adamw", " + weight_decay * params", "", "adamw", "n100_step_10"),
    Fault("eps_dropped", "adamw", "tl.sqrt_rn(v_hat) + eps", "tl.sqrt_rn(v_hat)", "adamw", "n45_eps_dominates"),
    Fault("lane_unset", "embedding", "mask=found, other=", "mask=found & (cols > 0), other=", "embedding",
          "T7_V11_H37"),
    Fault("scale_dropped", "_gemm_kernels", "acc = acc * scale", "acc = acc", "matmul", "nt_7x9x11_scaled"),
    Fault("operand_unmasked", "_gemm_kernels", "mask=in_rows & in_k[None, :]", "mask=in_rows", "gemm",
          "17x19x23",
          False),
    Fault("bias_dropped", "_gemm_kernels", "bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)",
          "bias = tl.zeros_like(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))", "linear",
          "T7_13_to_11", False),
    Fault("scale_of_the_scores_dropped", "_attention_kernels", "scores *= scale_log2", "pass", "attention",
          "S7_H1_D8"),
    Fault("nibbles_swapped", "nf4", "tl.join(high * absmax[:, None], low * absmax[:, None])",
          "tl.join(low * absmax[:, None], high * absmax[:, None])", "nf4_dequantize", "3x37"),
    Fault("mask_of_the_last_block", "nf4", "mask=values_at < left)", "mask=values_at <= left)",
          "nf4_dequantize", "3x37"),
    Fault("kept_scale_dropped", "_lora_kernels", "x * keep_scale", "x", "lora",
          "T21_in64_out48_r16_drop0.25", False),
    Fault("scale_of_the_adapter_dropped", "_lora_kernels", "UPCAST_DOT) * scale", "UPCAST_DOT)", "lora",
          "T5_in12_out7_r2", False),
    Fault("bias_of_nf4_product_masked", "nf4_gemm", "bias_ptr + cols, mask=in_cols",
          "bias_ptr + cols, mask=in_cols & (cols > 0)", "nf4_gemm",
          "T17_in96_out40_block32_bias", False),
    Fault("factor_dropped", "clip", "x * factor", "x", "clip_grad_norm", "n37"),
    Fault("second_summand_dropped", "elementwise",
          "b = tl.load(b_ptr + offsets, mask=inside, other=0.0)",
          "b = tl.zeros_like(tl.load(b_ptr + offsets, mask=inside, other=0.0))", "add", "3x37"),
    Fault("store_past_the_end", "elementwise", "y.to(out_ptr.dtype.element_ty), mask=inside)",
          "y.to(out_ptr.dtype.element_ty))", "scale", "3x37"),
]  # fmt: skip


@contextlib.contextmanager
def planted(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the kernels of a faulty copy of a module wherever the originals are."""
    for family in FAMILIES:  # one imported later would keep the copy
        importlib.import_module(f"entrenar.kernels.{family}")
    original = importlib.import_module(f"entrenar.kernels.{fault.module}")
    source = Path(original.__file__ or "").read_text()
    assert fault.old in source, f"entrenar/kernels/{fault.module}.py has changed"
    path = folder / f"faulty_{fault.module}.py"
    path.write_text(source.replace(fault.old, fault.new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("entrenar.kernels.")]
    replaced = 0
    for (name, value), module in itertools.product(vars(copy).items(), modules):
        if hasattr(value, "cache_key") and value.fn.__module__ == path.stem:
            theirs = getattr(module, name, None)
            if theirs is not None and theirs.fn.__module__ == original.__name__:
                monkeypatch.setattr(module, name, value)
                replaced += 1
    assert replaced
    yield


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.module}-{f.id}")
def test_a_fault_in_the_source_is_noticed(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    chosen = request.config.getoption("--backend")
    if chosen and "ptx" not in chosen:
        pytest.skip("runs where kernels are emulated")
    pytest.importorskip("triton")
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the emulator needs a C compiler")
    if not (PROVE or fault.reduced):
        pytest.skip("run by make prove")
    from entrenar.emulator import EmulatorError, install_driver

    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    monkeypatch.setenv("ENTRENAR_PTX_TARGET", "sm_80")
    op = OPS[fault.op]
    sample = next(s for s in op.samples if s.id == fault.sample)
    driver = install_driver("sm_80", **CHECKS)
    try:
        faulty = planted(fault, tmp_path, monkeypatch)
        red = pytest.raises((AssertionError, NumericsError, EmulatorError))
        with reporting_unset(driver), faulty, red as caught:
            check(op, sample, "float32")
    finally:
        install_driver("sm_80")
    assert re.search(
        r"elements off|wrote outside|\.global|uninitialised|same byte", str(caught.value)
    )
