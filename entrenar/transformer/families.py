"""The architectures that are implemented, and in what each differs from a plain Llama.

One row per ``model_type`` of a Hugging Face config. A row states defaults of keys that the config
may leave out, and which parts of the decoder block the architecture has. A model type without a row
is refused by name: weights of an unknown block would load and compute something else.
"""

from __future__ import annotations

import dataclasses

from entrenar.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture has that another has not.

    Attributes:
        model_type: The config's ``model_type``.
        gguf: ``general.architecture`` of the same model in a GGUF file; empty where there is none.
        gguf_permuted: Rows of q and k are permuted for interleaved rotation in GGUF files.
        qkv_bias: Whether q, k and v have biases: a fixed answer, or None for ``attention_bias``.
        output_bias: The same of the attention's output projection.
        mlp_bias: The same of the three MLP projections, None for ``mlp_bias``.
        qk_norm: RMSNorm over each head of q and k before rotation.
        window: How ``sliding_window`` applies: ``"none"`` ignored, ``"all"`` every layer, or
            ``"opt_in"`` only with ``use_sliding_window``, in layers from ``max_window_layers`` on.
        default_sliding_window: The window of a config that does not mention it.
        skips_rope: Some layers carry no rotation (``no_rope_layers``).
        default_head_dim: Head size of a config that does not state it; None for hidden / heads.
        default_kv_heads: Key/value heads of a config that does not state them; None for heads.
        default_rope_theta: Base of the rotation of a config that does not state it.
        default_tied: ``tie_word_embeddings`` of a config that does not state it.
        default_max_position: Context length of a config that does not state it.
    """

    model_type: str
    gguf: str = ""
    gguf_permuted: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    window: str = "none"
    default_sliding_window: int | None = None
    skips_rope: bool = False
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    default_rope_theta: float = 10000.0
    default_tied: bool = False
    default_max_position: int = 32768


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "llama", True, mlp_bias=None, default_max_position=2048),
        Family(
            "mistral",
            qkv_bias=False,
            output_bias=False,
            window="all",
            default_sliding_window=4096,
            default_kv_heads=8,
            default_max_position=131072,
        ),
        Family(
            "qwen2",
            "qwen2",
            qkv_bias=True,
            output_bias=False,
            window="opt_in",
            default_sliding_window=4096,
            default_kv_heads=32,
        ),
        Family(
            "qwen3",
            "qwen3",
            qk_norm=True,
            window="opt_in",
            default_sliding_window=4096,
            default_head_dim=128,
            default_kv_heads=32,
        ),
        Family(
            "smollm3",
            mlp_bias=None,
            window="opt_in",
            skips_rope=True,
            default_kv_heads=4,
            default_rope_theta=2000000.0,
            default_tied=True,
        ),
    )
}


def family_of(model_type: object) -> Family:
    """Return the row of a model type.

    Raises:
        UnsupportedModelError: There is none; the message lists those there are.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not implemented",
            f"use a model of one of these: {', '.join(sorted(FAMILIES))}",
        )
    return family
