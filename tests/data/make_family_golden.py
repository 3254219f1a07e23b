"""Write what transformers makes of tiny random models of each architecture: their logits.

    pip install torch transformers
    python tests/data/make_family_golden.py

It writes family_golden.json beside itself: for each case the config, the logits, and ten greedy tokens
after a prompt, computed in float64 from weights that ``make_weight`` gives for a name and a shape, so
that the file need not hold them. The first case of a rope scaling rule is long enough that the rule
matters.
"""

from __future__ import annotations

import json
import pathlib
import zlib

import numpy as np

HERE = pathlib.Path(__file__).parent
BASE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8.0, "truncate": False}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 5.0],
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def rope(theta, **rule):
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **rule}}


CASES = {
    "llama": {"model_type": "llama"},
    "llama_tied_multi_head": {
        "model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4,
    },
    "llama_bias_head_dim": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 10,
    },
    "llama_gelu": {"model_type": "llama", "hidden_act": "gelu"},
    "llama_gelu_tanh": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "llama_relu": {"model_type": "llama", "hidden_act": "relu"},
    "llama_linear": {"model_type": "llama", **rope(10000.0, rope_type="linear", factor=2.5)},
    "llama_llama3": {"model_type": "llama", "head_dim": 16, **rope(500000.0, **LLAMA3)},
    "llama_yarn": {"model_type": "llama", "head_dim": 16, **rope(10000.0, **YARN)},
    "llama_yarn_mscale": {"model_type": "llama", "head_dim": 16, **rope(10000.0, **MSCALE)},
    "llama_dynamic": {
        "model_type": "llama", "max_position_embeddings": 16,
        **rope(10000.0, rope_type="dynamic", factor=4.0),
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "mistral_window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **rope(1000000.0)},
    "qwen2_window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 1, "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12, **rope(1000000.0)},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, **rope(2000000.0)},
    "phi3": {"model_type": "phi3", "sliding_window": 7},
    "phi3_partial": {
        "model_type": "phi3", "hidden_size": 32, **rope(10000.0, partial_rotary_factor=0.75),
    },
    "phi3_longrope": {
        "model_type": "phi3", "original_max_position_embeddings": 16, **rope(10000.0, **LONGROPE),
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "head_dim": 12, "sliding_window": 5,
        "query_pre_attn_scalar": 20, "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    },
}  # fmt: skip
LENGTH = 24
PROMPT = 11  # ten tokens more are past the context that scaling starts from


def make_weight(name, shape):
    """A tensor that depends on its name and shape alone; norms are near one."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    value = rng.standard_normal(shape)
    return 1.0 + 0.1 * value if "norm" in name else 0.3 * value


def make_ids():
    return np.random.default_rng(5).integers(0, BASE["vocab_size"], (2, LENGTH))


def main():
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    out = {"made_with": f"transformers {transformers.__version__}", "cases": {}}
    for case, changes in CASES.items():
        settings = {**BASE, **changes}
        config = AutoConfig.for_model(**settings)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(make_weight(name, tuple(parameter.shape))))
            logits = model(torch.from_numpy(make_ids())).logits
            model.generation_config.eos_token_id = None
            prompt = torch.from_numpy(make_ids()[:1, :PROMPT])
            tokens = model.generate(prompt, max_new_tokens=10, do_sample=False)
        out["cases"][case] = {
            "config": settings,
            "names": [name for name, _ in model.named_parameters()],
            "tokens": tokens[0, PROMPT:].tolist(),
            "logits": [
                [[round(v, 5) for v in row] for row in part[::5]] for part in logits.tolist()
            ],
        }
        print(case, tuple(logits.shape), float(logits.abs().max()))
    (HERE / "family_golden.json").write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
