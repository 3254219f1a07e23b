"""After prewarming a training step compiles nothing; nothing of a large model's memory is touched."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import entrenar.kernels  # noqa: E402
from entrenar import InstructConfig, InstructPipeline  # noqa: E402
from entrenar.finetune.instruct_pipeline.prewarm import prewarm  # noqa: E402

needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("cc")), reason="the emulator needs a C compiler"
)


def compiled() -> dict[str, int]:
    """Return how many forms of each kernel this process holds compiled."""
    from triton.runtime.jit import JITFunction

    found = {}
    for module in pkgutil.iter_modules(entrenar.kernels.__path__):
        for value in vars(importlib.import_module(f"entrenar.kernels.{module.name}")).values():
            if isinstance(value, JITFunction):
                name = f"{value.fn.__module__}.{value.fn.__name__}"
                found[name] = sum(len(caches[0]) for caches in value.device_caches.values())
    return found


@needs_compiler
@pytest.mark.parametrize("quantize_nf4", [False, True])
def test_the_step_after_it_compiles_nothing(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, quantize_nf4: bool
) -> None:
    monkeypatch.setenv("ENTRENAR_BACKEND", "ptx")
    folder = make_model(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    config = InstructConfig(lora_rank=4, quantize_nf4=quantize_nf4, device="cpu")
    calls: list[tuple[int, int]] = []
    report = prewarm(folder, config, lengths=(12,), progress=lambda *call: calls.append(call))
    assert calls == [(n + 1, len(report.kernels)) for n in range(len(calls))]
    assert {"attention_backward", "adamw_step", "clip_factor", "lora_backward"} <= set(
        report.kernels
    )
    before = compiled()
    assert sum(before.values()) > 30
    pipeline = InstructPipeline.from_pretrained(folder, config)
    pipeline.train_batch([([5, 9, 17, 3, 5, 6], [8, 44, 2, 1, 2, 3])])
    after = compiled()
    assert {name: n for name, n in after.items() if n != before[name]} == {}
    # longer samples take other tiles, so that the count above can tell
    pipeline.train_batch([([5] * 20, [8] * 30)])
    assert compiled() != after


def test_where_numpy_computes_there_is_nothing_to_compile(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENTRENAR_BACKEND", raising=False)
    assert prewarm(tiny_model, InstructConfig(device="cpu")).kernels == ()
    pipeline = InstructPipeline.from_pretrained(
        tiny_model, InstructConfig(prewarm=True, device="cpu")
    )
    assert "0 kernels compiled before the model was loaded" in pipeline.notices[-1]


@needs_compiler
def test_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    """Sizes of Llama-3.1-8B: 16 GB of weights, of which none is touched."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"""
import json
from pathlib import Path
from entrenar import InstructConfig, runtime
from entrenar.finetune.instruct_pipeline import prewarm as module
from entrenar.transformer.config import TransformerConfig
model = TransformerConfig.from_hf(json.loads(Path({str(tmp_path / "config.json")!r}).read_text()))
before = runtime.peak_memory_bytes()
settings = InstructConfig(quantize_nf4=True, device="cpu", lora_rank=8)
forms = module._forms(model, settings, "bfloat16", True, (64,))
print(len(forms), runtime.peak_memory_bytes() - before)
"""
    environment = {"ENTRENAR_BACKEND": "ptx", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    forms, grown = map(int, done.stdout.split())
    assert forms > 30
    assert grown < 1 << 30
