"""What bitsandbytes saved opens here to the bit, what we write is what it writes, damage is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from entrenar.errors import CheckpointError
from entrenar.optable import call
from entrenar.quant import from_bitsandbytes, is_bitsandbytes, quantize_weight, to_bitsandbytes

FILE = Path(__file__).resolve().parents[1] / "data" / "bitsandbytes_nf4.safetensors"
NAMES = ("plain.weight", "nested.weight", "half.weight")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return load_file(FILE)


@pytest.mark.parametrize("name", NAMES)
def test_their_weights_decode_as_they_do(name: str, tensors: dict[str, torch.Tensor]) -> None:
    assert is_bitsandbytes(name, tensors)
    assert not is_bitsandbytes(f"dense.{name}", tensors)
    weight = from_bitsandbytes(name, tensors)
    want = tensors[f"decoded.{name}"]
    assert (weight.shape, weight.dtype) == (tuple(want.shape), want.dtype)
    got = call("nf4_dequantize", weight)
    # the nested absmax and its offset are added in float32 by both; one rounding may differ
    rtol = 2e-7 if weight.double_quant else 0
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_trip_changes_no_bit(name: str, tensors: dict[str, torch.Tensor]) -> None:
    written = to_bitsandbytes(name, from_bitsandbytes(name, tensors))
    theirs = {k: v for k, v in tensors.items() if k == name or k.startswith(f"{name}.")}
    assert set(written) == set(theirs)
    for key, value in theirs.items():
        assert written[key].dtype == value.dtype
        assert written[key].shape == value.shape
        assert torch.equal(written[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_our_quantisation_writes_their_tensors(name: str, tensors: dict[str, torch.Tensor]) -> None:
    double = name.startswith("nested")
    written = to_bitsandbytes(name, quantize_weight(tensors[f"dense.{name}"], double_quant=double))
    for key, value in written.items():
        if key.endswith("nf4"):
            continue  # the offset is a mean, whose last bits depend on the order of the sum
        if "nested_absmax" in key:
            torch.testing.assert_close(value, tensors[key], rtol=1e-6, atol=0)
        else:
            assert torch.equal(value, tensors[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("plain.weight"), r"plain\.weight is missing"),
        (lambda t: t.pop("plain.weight.absmax"), r"plain\.weight\.absmax is missing"),
        (
            lambda t: t.update({"plain.weight.absmax": t["plain.weight.absmax"][:-1]}),
            r"plain\.weight\.absmax is torch\.float32 of 23 elements, wanted torch\.float32 of 24",
        ),
        (
            lambda t: t.update({"plain.weight": t["plain.weight"].float()}),
            r"plain\.weight is torch\.float32",
        ),
        (
            lambda t: t["plain.weight.quant_map"].__setitem__(9, 0.3379029),
            r"plain\.weight\.quant_map is not the table",
        ),
        (
            lambda t: t["plain.weight.quant_state.bitsandbytes__nf4"].__setitem__(0, 0),
            "quant_state.bitsandbytes__nf4 cannot be read",
        ),
        (
            lambda t: t.update(
                {
                    "plain.weight.quant_state.bitsandbytes__nf4": torch.from_numpy(
                        np.frombuffer(
                            b'{"quant_type": "fp4", "blocksize": 64, "dtype": "float32", "shape": [24, 64]}',
                            np.uint8,
                        ).copy()
                    )
                }
            ),
            "quant_type is 'fp4'",
        ),
    ],
)
def test_damage_is_named(change: Callable, message: str, tensors: dict[str, torch.Tensor]) -> None:
    """Another table too: https://github.com/artidoro/qlora/issues/299."""
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        from_bitsandbytes("plain.weight", tensors)
