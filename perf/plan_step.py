"""The launches of a training step of a published model, from the pipeline itself, on memory never touched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CONFIGS", "Launch", "recorded", "step"]

# From the models' config.json.
_QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": _QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
# Products of a launch: 2 operations a multiplication, by how many products of [queries, keys, features].
_ATTENTION = {
    "_attention_forward_kernel": 2,
    "_attention_query_gradient_kernel": 3,
    "_attention_key_gradient_kernel": 4,
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a step.

    Attributes:
        phase: Of the profiler: forward, backward, clip, optimiser.
        layer: What its weight belongs to, or the last weight read before.
        op: The launcher.
        kernel: What it launched.
        shape: Sizes of its products, readable; empty where it has none.
        bytes: Inputs read once and outputs written once.
        flops: Operations of its products.
        matrix: ``"16-bit"`` or ``"fp32"``: which units multiply.
        wide_bytes: Size of its largest 16-bit output, for what is modelled on it.
    """

    phase: str
    layer: str
    op: str
    kernel: str
    shape: str
    bytes: int
    flops: int
    matrix: str = "16-bit"
    wide_bytes: int = 0

    def as_row(self) -> dict[str, Any]:
        """Return its fields by name."""
        return dataclasses.asdict(self)


def _storage_bytes(tensors: Any) -> int:
    """Return the bytes of distinct storages, each once."""
    seen = {(t.data_ptr(), t.numel() * t.element_size()) for t in tensors if t is not None}
    return sum(size for _, size in seen)


def _bytes(record: Any) -> int:
    if record.op == "embedding_forward":  # reads the rows it gathers, not the table
        ids = min(record.reads, key=lambda t: t.numel() * t.element_size())
        return _storage_bytes([ids]) + 2 * _storage_bytes(record.writes)
    return _storage_bytes(record.reads) + _storage_bytes(record.writes)


def _products(kernel: str, given: dict[str, Any]) -> tuple[int, str, str]:
    """Return operations, shape and units of a launch's products."""
    tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
    bases = [v.base for v in given.values() if hasattr(v, "block_shape")]
    widest = max((t.element_size() for t in (*tensors, *bases) if t.is_floating_point()), default=2)
    floats = [t.dtype for t in (*tensors, *bases) if t.is_floating_point()]
    matrix = (
        "fp32" if floats and all(d == torch.float32 for d in floats) and widest == 4 else "16-bit"
    )
    if kernel in _ATTENTION:
        q, k = given["q_ptr"], given["k_ptr"]
        pairs = q.shape[0] * (k.shape[0] + 1) / 2 if given["CAUSAL"] else q.shape[0] * k.shape[0]
        flops = int(2 * _ATTENTION[kernel] * pairs * q.shape[1] * q.shape[2])
        return flops, f"{q.shape[1]}x{q.shape[0]}x{q.shape[2]}", matrix
    sizes = [given.get(name) for name in ("M", "N", "K")]
    rank = given.get("rank", 0)
    if "matmul" in kernel or "described" in kernel:
        m, n, k = (int(n or 0) for n in sizes)
        batch = int(given.get("batch", 1) or 1)
        return 2 * batch * m * n * k, f"{m}x{n}x{k}", matrix
    m, n, k = (int(n) if isinstance(n, int) else 0 for n in sizes)
    if not isinstance(rank, int) or not m:
        return 0, "", matrix
    if n and k:  # a base product, with the adapter's in the same accumulators
        return 2 * m * n * (k + rank), f"{m}x{n}x({k}+{rank})", matrix
    if rank and (n or k):  # grad_s and grad_b read one gradient; each other has one product
        twice = 2 if "grad_s_b" in kernel else 1
        return 2 * twice * m * (n or k) * rank, f"{m}x{n or k}x{rank}", matrix
    return 0, "", matrix


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, list[tuple[str, dict[str, Any]]]]]]:
    """Collect launch records, each with the kernels it launched; nothing is run, results are untouched."""
    from entrenar import runtime
    from entrenar.kernels import _launch
    from entrenar.kernels.warm import untouched

    found: list[tuple[Any, list[tuple[str, dict[str, Any]]]]] = []

    def keep(op: str, kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        found[-1][1].append((kernel.__name__, given))

    with (
        runtime.listening(lambda record: found.append((record, []))),
        _launch.launching(keep),
        _launch.allocating(lambda shape, dtype, device: untouched(shape, dtype)),
    ):
        yield found


def step(
    config: dict[str, Any],
    tokens: int,
    target: str,
    learn_all: bool = False,
    dtype: str = "bfloat16",
    **options: Any,
) -> tuple[list[Launch], dict[str, int]]:
    """Return the launches of one step, and the memory it takes by component.

    Args:
        config: Of the model, as in config.json.
        tokens: Of the one sequence.
        target: Whose tiles are chosen, such as ``"sm_90"``.
        learn_all: Every token carries loss instead of the second half.
        dtype: Of activations.
        **options: Settings of :class:`entrenar.InstructConfig`.
    """
    from entrenar import InstructConfig
    from entrenar.finetune.instruct_pipeline.memory import adapted_shapes, estimate_memory
    from entrenar.finetune.instruct_pipeline.prewarm import standing_in_for
    from entrenar.transformer.config import TransformerConfig

    model = TransformerConfig.from_hf(config)
    settings: dict[str, Any] = {
        "quantize_nf4": True, "max_seq_len": tokens, "dtype": dtype, "device": "cpu",
        "profile_interval": 1,
    }  # fmt: skip
    asked = InstructConfig(**(settings | options))
    memory = estimate_memory(asked, model, adapted_shapes(asked, model), "cuda:0", free=1 << 60)
    with standing_in_for(target):
        return _launches(model, asked, tokens, learn_all), memory


def _launches(model: Any, config: Any, tokens: int, learn_all: bool) -> list[Launch]:
    from entrenar.finetune.chat import Example
    from entrenar.finetune.instruct_pipeline.prewarm import untouched_pipeline

    with recorded() as found:
        pipeline = untouched_pipeline(model, config, decode_ahead=True)
        prompt = 1 if learn_all else tokens - tokens // 2
        sample = Example.from_pair([0] * prompt, [0] * (tokens - prompt))
        before = len(found)
        pipeline.train_examples([[sample]])
    profiler = pipeline.profiler
    assert profiler is not None
    seen = profiler.steps[-1].ops  # in the order of the records
    records = found[before:]
    assert [span.name for span in seen] == [record.op for record, _ in records]
    made = []
    for span, (record, kernels) in zip(seen, records, strict=True):
        for kernel, given in kernels or [("", {})]:
            flops, shape, matrix = _products(kernel, given)
            halves = [t.numel() * t.element_size() for t in record.writes if t.element_size() == 2]
            made.append(
                Launch(
                    phase=span.phase,
                    layer=span.layer,
                    op=span.name,
                    kernel=kernel.strip("_"),
                    shape=shape,
                    bytes=_bytes(record),
                    flops=flops,
                    matrix=matrix,
                    wide_bytes=max(halves, default=0),
                )
            )
    return made
