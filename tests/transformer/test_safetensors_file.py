"""Damaged and hostile safetensors files: one error that names the file and the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from entrenar.errors import CheckpointError, UnsupportedModelError
from entrenar.transformer.safetensors_file import SafetensorsFile


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"1234567", "has 7 bytes, too few"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\n <html>", "web page"),
        (struct.pack("<Q", 2**40) + b"{}", "header of 1099511627776 bytes"),
        (struct.pack("<Q", 4) + b"oops", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 20_000) + b"[" * 20_000, "not JSON"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, reason: str) -> None:
    """https://github.com/lyogavin/airllm/issues/137"""
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_short(tmp_path: Path) -> None:
    """https://github.com/lyogavin/airllm/issues/137"""
    path = write(tmp_path / "m.safetensors", {"w": entry([16], 0, 64)}, bytes(40))
    with pytest.raises(CheckpointError, match="cut short: tensor w ends at byte"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"w": entry([1000, 1000], 0, 4)}, "tensor w of shape .* needs 4000000 bytes"),
        ({"w": entry([1], -4, 0)}, "tensor w has a malformed entry"),
        ({"w": entry([1], 4, 0)}, "tensor w has a malformed entry"),
        ({"w": entry([2**40], 0, 4)}, "tensor w of shape"),
        ({"w": entry([2**40, 2**40], 0, 4)}, "tensor w of shape"),
        ({"w": entry([-1], 0, 4)}, "tensor w has a malformed entry"),
        ({"w": entry([True], 0, 4)}, "tensor w has a malformed entry"),
        ({"v": entry([1], 0, 4), "w": entry([1], 2, 6)}, "tensor w overlaps"),
        ({"w": {"dtype": "F32"}}, "tensor w has a malformed entry"),
        ({"w": None}, "tensor w has a malformed entry"),
        ({"w": {**entry([1], 0, 4), "data_offsets": [0]}}, "tensor w has a malformed entry"),
    ],
)
def test_ranges_that_do_not_fit(tmp_path: Path, header: dict[str, Any], reason: str) -> None:
    """https://github.com/ml-explore/mlx/issues/3363"""
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFile(write(tmp_path / "m.safetensors", header, bytes(8)))


def test_bfloat16(tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/382"""
    data = bytes.fromhex("803FC03F00C00000")
    file = SafetensorsFile(write(tmp_path / "m", {"w": entry([4], 0, 8, "BF16")}, data))
    got = file.read("w")
    assert got.dtype == torch.bfloat16
    assert got.to(torch.float32).tolist() == [1.0, 1.5, -2.0, 0.0]
    assert got.view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool],
)
def test_every_plain_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """https://github.com/safetensors/safetensors/issues/382"""
    value = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    save_file({"w": value, "none": torch.zeros((0, 3))}, tmp_path / "m")
    file = SafetensorsFile(tmp_path / "m")
    assert torch.equal(file.read("w"), value)
    assert file.read("w").dtype == dtype
    assert file.read("none").shape == (0, 3)


def test_float8_is_unsupported_by_name(tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/382"""
    file = SafetensorsFile(write(tmp_path / "m", {"w": entry([4], 0, 4, "F8_E4M3")}, bytes(4)))
    with pytest.raises(UnsupportedModelError, match="tensor w is F8_E4M3"):
        file.read("w")


def test_a_tensor_survives_its_file_being_replaced(tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/164"""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(5.0)}, path)
    held = SafetensorsFile(path).read("w")
    path.write_bytes(b"")
    assert held.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_missing_file_and_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path / "none")
    save_file({"w": torch.arange(5.0)}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        SafetensorsFile(tmp_path / "m").read("v")


def test_random_bytes_never_do_more_than_raise(tmp_path: Path) -> None:
    save_file({"w": torch.arange(5.0), "v": torch.zeros(2, 3)}, tmp_path / "m")
    whole = np.frombuffer((tmp_path / "m").read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(200):
        broken = whole.copy()
        at = rng.integers(0, len(broken), 3)
        broken[at] = rng.integers(0, 256, 3)
        (tmp_path / "b").write_bytes(broken[: rng.integers(0, len(broken) + 1)].tobytes())
        try:
            file = SafetensorsFile(tmp_path / "b")
            for name in file.entries:
                file.read(name)
        except CheckpointError:
            continue
