"""Measure what training steps take: a program that a test starts in a process of its own.

Reads one JSON object from standard input: ``model`` (fields of a config.json), ``settings`` (those of
InstructConfig), ``steps``; trains that many steps of ``batch_size`` samples of ``max_seq_len`` tokens, of
which all but the first carry loss. Prints one JSON object in bytes: ``base``, resident before the model
was made, and ``anonymous``, what of it no file holds; ``resident``, the highest resident size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import torch

from entrenar import runtime
from entrenar.finetune import InstructConfig, InstructPipeline
from entrenar.optable import call
from entrenar.transformer.config import TransformerConfig
from entrenar.transformer.model import Transformer
from entrenar.transformer.weights import tensor_shapes


def weights(config: TransformerConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights one at a time, as a checkpoint's reader does."""
    rng = np.random.default_rng(0)
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(0.02)
        yield name, torch.from_numpy(values)


def anonymous() -> int:
    """Return the resident bytes that are not pages of files, such as the libraries' code."""
    with open("/proc/self/status", encoding="ascii") as lines:
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    asked = json.load(sys.stdin)
    config = TransformerConfig.from_hf(asked["model"])
    settings = InstructConfig(device="cpu", **asked["settings"])
    # what the libraries take on their first use is the process's own, not the model's
    call("matmul", torch.ones(256, 256), torch.ones(256, 256))
    base, held = runtime.peak_memory_bytes(), anonymous()
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    quantize = "nf4" if settings.quantize_nf4 else None
    model = Transformer(
        config, weights(config), quantize=quantize, dtype=dtype, device="cpu",
        double_quant=settings.double_quant,
    )  # fmt: skip
    pipeline = InstructPipeline(model, settings)
    rng = np.random.default_rng(1)
    shape = settings.batch_size, settings.max_seq_len
    ids = rng.integers(0, config.vocab_size, shape).tolist()
    for _ in range(asked["steps"]):
        pipeline.train_batch([(row[:1], row[1:]) for row in ids])
    found = {"base": base, "anonymous": held, "resident": runtime.peak_memory_bytes()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
