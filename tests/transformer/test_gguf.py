"""GGUF files: written by the ``gguf`` package from a tiny model, read back as that model."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar.errors import CheckpointError, EntrenarError, UnsupportedModelError
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.gguf_file import GGUFFile
from entrenar.transformer.gguf_model import GGUFModel, hf_name, unpermute
from entrenar.transformer.model import Transformer

gguf = pytest.importorskip("gguf")

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture
def write(tmp_path: Path, make_weights: Callable[..., Any]) -> Callable[..., Path]:
    def make(
        settings: dict[str, Any],
        edit: Callable[[Any], object] | None = None,
        kind: str | None = None,
        rope_factors: np.ndarray | None = None,
    ) -> Path:
        config = TransformerConfig.from_hf(settings)
        arch = settings["model_type"]
        path = tmp_path / f"{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.head_dim)
        if edit is not None:
            edit(writer)
        for name, tensor in make_weights(config).items():
            value = tensor.numpy().astype(np.float32)
            if arch == "llama" and ".q_proj" in name:
                value = permute(value, config.num_attention_heads)
            if arch == "llama" and ".k_proj" in name:
                value = permute(value, config.num_key_value_heads)
            form = None
            if kind is not None and value.ndim == 2 and "embed" not in name:
                form = gguf.GGMLQuantizationType[kind]
                value = gguf.quants.quantize(value, form)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value), raw_dtype=form)
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def load(path: Path, **options: Any) -> Transformer:
    return Transformer.from_pretrained(path, device="cpu", **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True},
        {"model_type": "llama", "head_dim": 10, "num_key_value_heads": 4},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 12},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_the_same_logits_as_from_the_weights(
    write: Callable[..., Path],
    make_model: Callable[..., Transformer],
    tiny_settings: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    settings = {**tiny_settings, **changes}
    expected = make_model(settings, dtype="float32").logits(IDS)
    got = load(write(settings)).logits(IDS)
    np.testing.assert_array_equal(got, expected)


def test_factors_of_frequencies(
    write: Callable[..., Path],
    make_model: Callable[..., Transformer],
    tiny_settings: dict[str, Any],
) -> None:
    factors = np.array([1.0, 2.0, 8.0])
    model = load(write(tiny_settings, rope_factors=factors))
    assert model.config.rope_scaling.factors == (1.0, 2.0, 8.0)
    rule = {"rope_type": "factors", "factors": factors.tolist()}
    expected = make_model({**tiny_settings, "rope_scaling": rule}, dtype="float32").logits(IDS)
    np.testing.assert_array_equal(model.logits(IDS), expected)


def test_linear_scaling(write: Callable[..., Path], tiny_settings: dict[str, Any]) -> None:
    def edit(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    scaling = load(write(tiny_settings, edit)).config.rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_block_formats(
    write: Callable[..., Path],
    make_weights: Callable[..., Any],
    tiny_settings: dict[str, Any],
    kind: str,
) -> None:
    settings = {**tiny_settings, "hidden_size": 32, "intermediate_size": 64}
    path = write(settings, kind=kind)
    model = load(path)
    weights = make_weights(TransformerConfig.from_hf(settings))
    held = model.named_weights()
    for name, weight in weights.items():
        error = np.abs(held[name].numpy() - weight.numpy()).max()  # type: ignore[union-attr]
        assert error <= {"Q8_0": 0.01, "F16": 1e-3, "BF16": 1e-2}.get(kind, 0.12), name


def test_unpermute_undoes_the_converters_order() -> None:
    rows = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(unpermute(permute(rows, 3), 3), rows)
    assert permute(rows, 3)[1].tolist() == rows[2].tolist()


def test_names() -> None:
    assert hf_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert hf_name("blk.0.ffn_gate_inp.weight") == "blk.0.ffn_gate_inp.weight"


def test_experts_are_refused(write: Callable[..., Path], tiny_settings: dict[str, Any]) -> None:
    path = write(tiny_settings, lambda w: w.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="mixture of experts architecture 'llama'"):
        load(path)


def test_an_unknown_architecture(write: Callable[..., Path], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv6'"):
        load(tmp_path / "x.gguf")


def test_a_tensor_without_a_place(
    write: Callable[..., Path], tiny_settings: dict[str, Any]
) -> None:
    extra = np.zeros(8, np.float32)
    path = write(tiny_settings, lambda w: w.add_tensor("blk.0.post_norm.weight", extra))
    with pytest.raises(
        CheckpointError, match=r"no place in a llama model: blk\.0\.post_norm\.weight"
    ):
        load(path)


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GGUF", b"GGML" + bytes(64), b"<!DOCTYPE html>" + bytes(64)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(path)):
            load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(64))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        load(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64))
    with pytest.raises(UnsupportedModelError, match="little-endian"):
        load(path)


@pytest.mark.parametrize("counts", [(2**60, 0), (0, 2**60), (2**63, 2**63)])
def test_counts_beyond_the_file(tmp_path: Path, counts: tuple[int, int]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
    with pytest.raises(CheckpointError):
        GGUFFile(path)


def test_a_file_cut_short_anywhere(
    write: Callable[..., Path], tiny_settings: dict[str, Any]
) -> None:
    def edit(writer: Any) -> None:
        writer.add_token_list([f"token {i}" for i in range(40)])
        writer.add_array("numbers", list(range(50)))

    whole = write(tiny_settings, edit).read_bytes()
    path = write(tiny_settings, edit)
    for end in [*range(0, 3000, 61), *range(3000, len(whole), 5003), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            load(path)


def test_random_bytes_never_do_more_than_raise(
    write: Callable[..., Path], tiny_settings: dict[str, Any]
) -> None:
    path = write(tiny_settings, lambda w: w.add_token_list([f"t{i}" for i in range(40)]))
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    header = 3500
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = whole.copy()
        at = rng.integers(0, header, 2)
        broken[at] = rng.integers(0, 256, 2)
        path.write_bytes(broken.tobytes())
        try:
            file = GGUFFile(path)
            for name in file.tensors:
                file.read(name)
        except EntrenarError:
            continue


def test_read_of_a_tensor_that_is_not_there(
    write: Callable[..., Path], tiny_settings: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        GGUFFile(write(tiny_settings)).read("x")


JUNK = [None, True, 0, -1, 1, 3, 0.5, "", "x", [], [1], ["x"], [None], float("inf"), 2**40]


def test_junk_in_any_metadata_is_an_error_of_ours_or_is_read(
    write: Callable[..., Path], tiny_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
        writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3, 1, 1, 1])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template("x")

    path = write(tiny_settings, edit)
    whole = GGUFFile(path)
    assert GGUFModel(path).tokenizer() is not None
    keys = [key for key in whole.metadata if key.split(".")[0] in ("llama", "tokenizer")]
    assert len(keys) > 20
    for kind in ("llama", "gpt2"):
        for key in keys:
            for value in JUNK:
                broken = GGUFFile(path)
                broken.metadata["tokenizer.ggml.model"] = kind
                broken.metadata[key] = value
                monkeypatch.setattr(
                    "entrenar.transformer.gguf_model.GGUFFile", lambda _, b=broken: b
                )
                try:
                    GGUFModel(path).tokenizer()
                except EntrenarError:
                    continue
