"""Model folders damaged at random: each is refused by one of our errors, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from entrenar import Transformer, runtime
from entrenar.errors import EntrenarError
from entrenar.quant import bitsandbytes_config, quantize_weight, to_bitsandbytes

Rng = np.random.Generator
SECONDS, MEGABYTES = 1.0, 200
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
REQUIRED = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "vocab_size",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_settings: dict[str, Any],
    make_weights: Callable[..., Any],
) -> list[Path]:
    """The same model in one file, in two shards, and in bitsandbytes' NF4."""
    from entrenar.transformer.config import TransformerConfig

    root = tmp_path_factory.mktemp("whole")
    config = TransformerConfig.from_hf(tiny_settings)
    tensors = {k: v.float() for k, v in make_weights(config).items()}
    made = []
    for name in ("single", "sharded", "nf4"):
        folder = root / name
        folder.mkdir()
        document = dict(tiny_settings)
        if name == "nf4":
            document["quantization_config"] = bitsandbytes_config(False, "float32")
            held: dict[str, torch.Tensor] = {}
            for key, tensor in tensors.items():
                quantised = "_proj" in key
                held |= (
                    to_bitsandbytes(key, quantize_weight(tensor)) if quantised else {key: tensor}
                )
            save_file(held, folder / SINGLE)
        elif name == "single":
            save_file(tensors, folder / SINGLE)
        else:
            shards = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
            for shard, keys in shards.items():
                save_file({key: tensors[key] for key in keys}, folder / shard)
            weight_map = {key: shard for shard, keys in shards.items() for key in keys}
            (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps(document))
        Transformer.from_pretrained(folder, device="cpu")  # whole, it is a model
        made.append(folder)
    return made


# ---- damage: each takes a folder and cannot leave a model ----


def shard(folder: Path, rng: Rng) -> Path:
    return sorted(folder.glob("*.safetensors"))[
        int(rng.integers(len(list(folder.glob("*.safetensors")))))
    ]


def header(path: Path) -> tuple[int, dict[str, Any]]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return length, json.loads(data[8 : 8 + length])


def with_header(path: Path, document: dict[str, Any]) -> None:
    length, _ = header(path)
    body = path.read_bytes()[8 + length :]
    text = json.dumps(document).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def cut_short(folder: Path, rng: Rng) -> None:
    path = shard(folder, rng)
    data = path.read_bytes()
    path.write_bytes(data[: int(rng.integers(len(data)))])


def flipped_length(folder: Path, rng: Rng) -> None:
    path = shard(folder, rng)
    data = bytearray(path.read_bytes())
    data[int(rng.integers(8))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def flipped_header(folder: Path, rng: Rng) -> None:
    path = shard(folder, rng)
    length, _ = header(path)
    data = bytearray(path.read_bytes())
    text = data[8 : 8 + length].rstrip(b" ")
    data[8 + int(rng.integers(len(text)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def lied_about(folder: Path, rng: Rng) -> None:
    path = shard(folder, rng)
    _, document = header(path)
    entry = document[sorted(document)[int(rng.integers(len(document)))]]
    begin, end = entry["data_offsets"]
    changes: list[dict[str, Any]] = [
        {"shape": [*entry["shape"], 2**40]}, {"data_offsets": [begin, end + 4]},
        {"data_offsets": [begin - 10**9, end]}, {"data_offsets": [end, begin]},
        {"data_offsets": [begin + 10**12, end + 10**12]}, {"shape": [-1]}, {"shape": "many"},
        {"dtype": "F8_E4M3"}, {"dtype": 7}, {"shape": None}, {"data_offsets": [0.5, 1.5]},
    ]  # fmt: skip
    entry |= changes[int(rng.integers(len(changes)))]
    with_header(path, document)


def other_tensors(folder: Path, rng: Rng) -> None:
    path = shard(folder, rng)
    tensors = load_file(path)
    key = sorted(tensors)[int(rng.integers(len(tensors)))]
    value = tensors.pop(key)
    kind = int(rng.integers(4))
    if kind == 1:
        tensors[key.replace("model", "modle").replace("head", "haed")] = value
    elif kind == 2:
        tensors[key] = torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    elif kind == 3:
        tensors |= {key: value, "model.layers.0.mlp.surprise.weight": torch.ones(3)}
        index = folder / INDEX
        if index.exists():
            document = json.loads(index.read_text())
            document["weight_map"]["model.layers.0.mlp.surprise.weight"] = path.name
            index.write_text(json.dumps(document))
    save_file(tensors, path)


def not_weights(folder: Path, rng: Rng) -> None:
    texts = (b"", b"version https://git-lfs.github.com/spec/v1\noid", b"<!DOCTYPE html>", b"\x80\x04N.",
             b"0" * 7, struct.pack("<Q", 2**40) + b"{}", b"\xff" * 100)  # fmt: skip
    shard(folder, rng).write_bytes(texts[int(rng.integers(len(texts)))])


def gone(folder: Path, rng: Rng) -> None:
    names = sorted(p.name for p in folder.iterdir())
    (folder / names[int(rng.integers(len(names)))]).unlink()


def broken_json(folder: Path, rng: Rng) -> None:
    names = sorted(p.name for p in folder.glob("*.json"))
    path = folder / names[int(rng.integers(len(names)))]
    text = path.read_bytes()
    forms = (text[: int(rng.integers(len(text)))], b"[" * 100_000, b"[]", b"null", b"\xff\xfe" + text,
             text.replace(b":", b"=", 1))  # fmt: skip
    path.write_bytes(forms[int(rng.integers(len(forms)))])


def absurd_config(folder: Path, rng: Rng) -> None:
    document = json.loads((folder / "config.json").read_text())
    key = REQUIRED[int(rng.integers(len(REQUIRED)))]
    values = (None, -1, 0, 10**30, 0.5, "many", [], {}, True, float("nan"))
    if rng.integers(4) == 0:
        document[f"{key}s"] = document.pop(key)
    else:
        document[key] = values[int(rng.integers(len(values)))]
    (folder / "config.json").write_text(json.dumps(document))


def misled(folder: Path, rng: Rng) -> None:
    index = folder / INDEX
    names = {p.name for p in folder.glob("*.safetensors")}
    document = {"weight_map": {}}
    if index.exists():
        document = json.loads(index.read_text())
    else:
        path = folder / SINGLE
        document["weight_map"] = dict.fromkeys(load_file(path), "a.safetensors")
        path.rename(folder / "a.safetensors")
        names = {"a.safetensors"}
    places = ("../outside.safetensors", "/etc/hostname", "a/../../b.safetensors", "", ".", 7, None,
              "missing.safetensors", {"a": 1}, "config.json")  # fmt: skip
    key = sorted(document["weight_map"])[int(rng.integers(len(document["weight_map"])))]
    document["weight_map"][key] = places[int(rng.integers(len(places)))]
    assert names
    index.write_text(json.dumps(document))


DAMAGE = (
    cut_short, flipped_length, flipped_header, lied_about, other_tensors, not_weights, gone, broken_json,
    absurd_config, misled,
)  # fmt: skip


def peak_megabytes(reset: bool = False) -> float:
    """Return the most memory used since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return runtime.peak_memory_bytes() / 2**20


def outcome_of(folder: Path) -> Any:
    """Return the model in a folder, or what reading it raised."""
    try:
        return Transformer.from_pretrained(folder, device="cpu")
    except Exception as error:
        return error


def test_every_kind_of_damage_is_refused(
    folders: list[Path], tmp_path: Path, counts: Callable[[int, int], int]
) -> None:
    kinds: dict[str, int] = {}
    for number in range(counts(60, 500)):
        rng = np.random.default_rng(number)
        damage = DAMAGE[number % len(DAMAGE)]
        source = folders[int(rng.integers(len(folders)))]
        folder = tmp_path / "damaged"
        shutil.copytree(source, folder)
        damage(folder, rng)
        what = f"{number}: {damage.__name__} of {source.name}"
        before, start = peak_megabytes(reset=True), time.perf_counter()
        found = outcome_of(folder)
        assert isinstance(found, EntrenarError), f"{what}: {type(found).__name__} {found}"
        kinds[type(found).__name__] = kinds.get(type(found).__name__, 0) + 1
        assert time.perf_counter() - start < SECONDS, what
        assert peak_megabytes() - before < MEGABYTES, what
        shutil.rmtree(folder)
    assert len(kinds) > 1
