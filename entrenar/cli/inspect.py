"""`entrenar inspect`: what a model, an adapter, a run or a data file holds; no weight is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from entrenar import runtime
from entrenar.cli.console import Console, count, gibibytes
from entrenar.finetune.config import InstructConfig
from entrenar.finetune.corpus import read_corpus
from entrenar.finetune.metrics import read_metrics
from entrenar.finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from entrenar.transformer.checkpoint import Checkpoint

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    path, console = Path(arguments.path), Console()
    if RunFolder(path).is_run:
        facts = _run_facts(RunFolder(path))
    elif (path / "adapter_config.json").is_file():
        facts = _adapter_facts(path)
    elif path.suffix in (".jsonl", ".json") and path.is_file():
        facts = _corpus_facts(path)
    else:
        facts = _model_facts(path)
    if arguments.json:
        print(
            json.dumps({key.replace(" ", "_"): value for key, value in facts.items()}, default=str)
        )
        return 0
    console.facts({key: _shown(key, value) for key, value in facts.items()})
    return 0


def _shown(key: str, value: object) -> str:
    """Return a fact as people read it; JSON has the plain value."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(key, part)}" for name, part in value.items())
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return gibibytes(value) if key.startswith(("memory", "size")) else count(value)


def _run_facts(folder: RunFolder) -> dict[str, object]:
    config = InstructConfig.from_toml(folder.config)
    default = InstructConfig()
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    facts: dict[str, object] = {"kind": "run"}
    facts |= {key: folder.run_settings().get(key, "") for key in ("command", "model", "data")}
    facts["settings"] = ", ".join(changed) or "all default"
    losses = [row["loss"] for row in rows if "loss" in row]
    held = [row["eval_loss"] for row in rows if "eval_loss" in row]
    facts["steps"] = max((row["step"] for row in rows), default=0)
    if losses:
        facts["loss"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
    if held:
        facts["held-out loss"] = f"{held[0]:.4f} → {held[-1]:.4f}"
    facts["adapter"] = "complete" if folder.adapter.is_dir() else "not yet: continue with --resume"
    return facts


def _adapter_facts(path: Path) -> dict[str, object]:
    from entrenar.lora import load_adapter
    from entrenar.lora.peft_files import read_config

    config, state = load_adapter(path)
    targets = config.target_modules
    return {
        "kind": "LoRA adapter",
        "base": read_config(path).get("base_model_name_or_path") or "not named",
        "rank": config.r,
        "alpha": f"{config.lora_alpha:g} (scale {config.scaling:g})",
        "targets": targets if isinstance(targets, str) else ", ".join(targets),
        "modules": count(len(state) // 2),
        "parameters": count(sum(array.size for array in state.values())),
    }


def _corpus_facts(path: Path) -> dict[str, object]:
    corpus = read_corpus(path)
    answers = [
        len(turn["content"])
        for conversation in corpus.conversations
        for turn in conversation.messages
        if turn["role"] in ("assistant", "text")
    ]
    return {
        "kind": "data",
        "format": corpus.format,
        "samples": f"{count(len(corpus))} ({count(len(corpus.empty_lines))} empty ones skipped)",
        "texts"
        if corpus.format == "text"
        else "answers": f"{count(len(answers))}, {sum(answers) / len(answers):.0f} characters on average, "
        f"{count(max(answers))} at most",
        "keys not used": ", ".join(corpus.ignored_keys) or "none",
    }


def _model_facts(path: Path) -> dict[str, object]:
    from entrenar.transformer.checkpoint import open_checkpoint
    from entrenar.transformer.weights import tensor_shapes

    found = open_checkpoint(path)
    config = found.config
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    facts: dict[str, object] = {
        "kind": "GGUF model" if path.is_file() else "Hugging Face model",
        "architecture": config.model_type,
        "parameters": parameters,
        "stored as": found.stored_types(),
        "size on disk": sum(file.stat().st_size for file in files),
        "layers": config.num_hidden_layers,
        "hidden size": f"{config.hidden_size}, MLP {config.intermediate_size}",
        "heads": f"{config.num_attention_heads} of {config.head_dim}, "
        f"{config.num_key_value_heads} for keys and values",
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "tensors": len(found.names()),
    }
    return facts | _training_facts(found)


def _training_facts(found: Checkpoint) -> dict[str, object]:
    """Return what training with the default settings takes here, and whether it fits."""
    from entrenar.finetune.instruct_pipeline.memory import adapted_shapes, estimate_memory

    device = runtime.resolve_device("auto")
    free = runtime.available_memory_bytes(device)
    needed = {}
    for name, nf4 in (("dense", False), ("NF4", True)):
        config = InstructConfig(quantize_nf4=nf4)
        targets = adapted_shapes(config, found.config)
        needed[name] = sum(estimate_memory(config, found.config, targets, device).values())
    fitting = [name for name, size in needed.items() if size <= free]
    return {
        "memory to train": needed,
        "memory free here": free,
        "trains here": f"yes, {' or '.join(fitting)}, on {device}"
        if fitting
        else f"no, not on {device}",
    }
