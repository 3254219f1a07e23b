"""Small random configs of every family, over the fields that change what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["draw"]

FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT, ORIGINAL = 64, 16
Settings = dict[str, Any]


def _pick(rng: np.random.Generator, *options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _base(rng: np.random.Generator, own_head_dim: bool) -> Settings:
    heads, kv_heads = _pick(rng, (2, 1), (3, 1), (2, 2), (4, 2), (6, 2), (3, 3))
    # rows of 16 and more: on shorter ones the norms multiply the rounding of the angles too far
    size = 2 * int(rng.integers(4, 9))
    settings = {
        "vocab_size": int(rng.integers(40, 160)),
        "hidden_size": heads * size,
        "intermediate_size": int(rng.integers(12, 80)),
        "num_hidden_layers": int(rng.integers(2, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": _pick(rng, 1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": bool(rng.integers(2)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if own_head_dim:
        settings["head_dim"] = size + 2 * int(rng.integers(0, 3))
    return settings


def _rope(rng: np.random.Generator, pairs: int, *kinds: str) -> Settings:
    """A rope object of one of these kinds; ``pairs`` is the number of rotated pairs of a head."""
    kind = _pick(rng, *kinds)
    made: Settings = {"rope_type": kind, "rope_theta": _pick(rng, 100.0, 10000.0, 500000.0)}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        made["factor"] = float(_pick(rng, 2.0, 2.5, 4.0))
    if kind in ("llama3", "yarn", "longrope"):
        made["original_max_position_embeddings"] = ORIGINAL
    if kind == "llama3":
        made |= {"low_freq_factor": 1.0, "high_freq_factor": _pick(rng, 2.0, 4.0)}
    if kind == "yarn":
        made |= _pick(
            rng,
            {},
            {"beta_fast": 8.0, "beta_slow": 2.0},
            {"mscale": 1.0, "mscale_all_dim": 0.7},
            {"attention_factor": 1.2, "truncate": False},
        )
    if kind == "longrope":
        made["short_factor"] = (1 + rng.random(pairs) / 4).round(3).tolist()
        made["long_factor"] = (1 + 6 * rng.random(pairs)).round(3).tolist()
        made |= _pick(rng, {}, {"factor": 3.0}, {"attention_factor": 1.1})
    return made


_ANY_ROPE = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def _size(settings: Settings) -> int:
    return settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]


def _types(rng: np.random.Generator, layers: int) -> list[str]:
    return [_pick(rng, FULL, SLIDING) for _ in range(layers)]


def _llama(rng: np.random.Generator) -> Settings:
    settings = _base(rng, bool(rng.integers(2)))
    settings |= {
        "attention_bias": bool(rng.integers(2)),
        "mlp_bias": bool(rng.integers(2)),
        "hidden_act": _pick(rng, "silu", "gelu", "gelu_pytorch_tanh", "relu"),
    }
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, *_ANY_ROPE)}


def _mistral(rng: np.random.Generator) -> Settings:
    settings = _base(rng, bool(rng.integers(2)))
    settings["sliding_window"] = _pick(rng, None, 4, 9, 1000)
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, *_ANY_ROPE)}


def _qwen2(rng: np.random.Generator, own_head_dim: bool = False) -> Settings:
    settings = _base(rng, own_head_dim)
    layers = settings["num_hidden_layers"]
    settings |= _pick(
        rng,
        {"use_sliding_window": False, "sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": layers - 1},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": _types(rng, layers)},
    )
    kinds = ("default", "default", "yarn", "dynamic")
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, *kinds)}


def _qwen3(rng: np.random.Generator) -> Settings:
    return {**_qwen2(rng, True), "attention_bias": bool(rng.integers(2))}


def _smollm3(rng: np.random.Generator) -> Settings:
    settings = _base(rng, False)
    layers = settings["num_hidden_layers"]
    settings |= _pick(
        rng,
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": rng.integers(0, 2, layers).tolist()},
        {"use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2},
    )
    settings |= {"attention_bias": bool(rng.integers(2)), "mlp_bias": bool(rng.integers(2))}
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, "default", "yarn")}


def _phi3(rng: np.random.Generator) -> Settings:
    settings = _base(rng, False)
    settings["sliding_window"] = _pick(rng, None, 5, 1000)
    share = _pick(rng, 1.0, 1.0, 0.75, 0.5)
    if int(_size(settings) * share) % 2:
        share = 1.0
    rope = _rope(rng, int(_size(settings) * share) // 2, "default", "longrope")
    if rope["rope_type"] == "longrope":
        settings["original_max_position_embeddings"] = ORIGINAL
    return settings | {"rope_parameters": {**rope, "partial_rotary_factor": share}}


def _gemma(rng: np.random.Generator) -> Settings:
    settings = _base(rng, True)
    settings |= {
        "attention_bias": bool(rng.integers(2)),
        "hidden_act": _pick(rng, "gelu_pytorch_tanh", "gelu"),
    }
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, "default", "linear")}


def _gemma2(rng: np.random.Generator) -> Settings:
    settings = _base(rng, True)
    settings |= {
        "attention_bias": bool(rng.integers(2)),
        "hidden_activation": _pick(rng, "gelu_pytorch_tanh", "silu"),
        "query_pre_attn_scalar": int(rng.integers(4, 40)),
        "sliding_window": int(rng.integers(3, 9)),
        "attn_logit_softcapping": _pick(rng, None, 50.0, 2.0),
        "final_logit_softcapping": _pick(rng, None, 30.0, 3.0),
        "layer_types": _pick(rng, None, _types(rng, settings["num_hidden_layers"])),
    }
    return settings | {"rope_parameters": _rope(rng, _size(settings) // 2, "default")}


def _gemma3(rng: np.random.Generator) -> Settings:
    settings = {**_gemma2(rng), "num_hidden_layers": 7, "attn_logit_softcapping": None}
    settings["layer_types"] = _pick(rng, None, _types(rng, 7))
    pairs = _size(settings) // 2
    settings["rope_parameters"] = {
        FULL: _rope(rng, pairs, "default", "linear", "yarn"),
        SLIDING: _rope(rng, pairs, "default"),
    }
    return settings


_DRAWN: dict[str, Callable[[np.random.Generator], Settings]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def draw(family: str, number: int) -> tuple[Settings, np.random.Generator]:
    """Return a family's config number ``number``, and the generator it was drawn from."""
    rng = np.random.default_rng([number, sorted(_DRAWN).index(family)])
    return {"model_type": family, **_DRAWN[family](rng)}, rng
