"""`entrenar estimate`: what a run will need in memory, from the model's config alone, and what fits."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from entrenar import runtime
from entrenar.cli.config_flags import config_from
from entrenar.cli.console import Console, gibibytes
from entrenar.errors import ConfigError
from entrenar.finetune.config import InstructConfig, nearest

if TYPE_CHECKING:
    from entrenar.transformer.config import TransformerConfig

__all__ = ["CARDS", "card_bytes", "run"]

CARDS = {
    "t4": 15360,
    "v100": 32768,
    "l4": 23034,
    "a10g": 23028,
    "3090": 24576,
    "4090": 24564,
    "5090": 32607,
    "l40s": 46068,
    "a100-40": 40960,
    "a100": 81920,
    "h100": 81559,
    "h200": 143771,
}
"""MiB of cards by name, as ``nvidia-smi`` prints them for the whole card."""

_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "g": 2**30, "m": 2**20}


def card_bytes(text: str) -> int:
    """Return the memory of a card: a name of :data:`CARDS`, or a size such as ``24GB`` or ``80GiB``.

    Raises:
        ConfigError: It is neither.
    """
    name = re.sub(r"^(nvidia|geforce|rtx|tesla)[ -]*", "", text.strip().lower())
    name = re.sub(r"^(geforce|rtx|tesla)[ -]*", "", name)
    if name in CARDS:
        return CARDS[name] << 20
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b?)", name)
    if found is not None and found[2] in _UNITS and float(found[1]) > 0:
        return int(float(found[1]) * _UNITS[found[2]])
    raise ConfigError(
        f"--card is {text!r}, wanted a size such as 24GB or 80GiB, or the name of a card",
        nearest(name, CARDS),
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config, _ = config_from(arguments, arguments.config)
    model, config = _read(arguments.model, config)
    if arguments.card is None:
        device = runtime.resolve_device(config.device)
        capacity = runtime.available_memory_bytes(device)
        place = f"free on {device}"
    else:
        if config.device == "cpu":
            raise ConfigError("--card asks for a GPU, but device is cpu", "leave one of them out")
        device, capacity = "cuda:0", card_bytes(arguments.card)
        place = f"of the card {arguments.card}"
    found = _estimate(config, model, device, capacity)
    if arguments.json:
        print(json.dumps(found))
        return 0
    _show(found, config, place)
    return 0


def _read(path: str, config: InstructConfig) -> tuple[TransformerConfig, InstructConfig]:
    """Return a model's config, and the settings as its weights decide them; no weights need be there."""
    from entrenar.transformer.checkpoint import open_checkpoint
    from entrenar.transformer.hf_folder import read_model_config

    where = Path(path).expanduser()
    file = where / "config.json" if where.is_dir() else where
    if file.suffix != ".json" or not file.is_file():
        return open_checkpoint(where).config, config
    model, document = read_model_config(file)
    stored = document.get("quantization_config")
    if stored:
        # linears that bitsandbytes saved in 4 bits are held as they are, whatever the settings say
        double = bool(stored.get("bnb_4bit_use_double_quant"))
        config = config.replace(quantize_nf4=True, double_quant=double)
    return model, config


def _estimate(
    config: InstructConfig, model: TransformerConfig, device: str, capacity: int
) -> dict[str, object]:
    """Return bytes by component, their total, what there is, and the largest batch and length."""
    from entrenar.finetune.instruct_pipeline import memory

    targets = memory.adapted_shapes(config, model)

    def total(changed: InstructConfig) -> int:
        return sum(memory.estimate_memory(changed, model, targets, device, capacity).values())

    def with_recomputing(on: bool) -> int:
        return total(config.replace(checkpointing=on))

    parts = memory.estimate_memory(config, model, targets, device, capacity)
    context = model.context_length
    return {
        **parts,
        "total": sum(parts.values()),
        "free": capacity,
        "fits": sum(parts.values()) <= capacity,
        "total_with_checkpointing": with_recomputing(True),
        "total_without_checkpointing": with_recomputing(False),
        "largest_batch_size": memory.largest_batch(total, config, capacity),
        "largest_max_seq_len": memory.largest_length(total, config, capacity, context),
    }


_PARTS = (
    "weights",
    "adapters",
    "gradients",
    "moments",
    "process",
    "activations",
    "logits",
    "scratch",
)


def _show(found: dict[str, object], config: InstructConfig, place: str) -> None:
    console = Console()

    def size(name: str) -> str:
        value = found[name]
        assert isinstance(value, int)
        return gibibytes(value)

    console.facts({name: f"{size(name):>10}" for name in _PARTS if name in found})
    console.facts(
        {
            "total": f"{size('total')} of {size('free')} {place}: "
            + ("fits" if found["fits"] else "does not fit"),
            "checkpointing": f"{size('total_with_checkpointing')} with, "
            f"{size('total_without_checkpointing')} without",
            "largest that fit": f"--batch-size {found['largest_batch_size']} at "
            f"--max-seq-len {config.max_seq_len}, or --max-seq-len "
            f"{found['largest_max_seq_len']} at --batch-size {config.batch_size}",
        }
    )
    if not found["fits"]:
        console.notice(
            "this will not fit: try --quantize-nf4, --checkpointing true, a smaller --batch-size with "
            "more --grad-accum-steps, or a shorter --max-seq-len"
        )
    if config.graph is True:
        console.notice("what captured graphs keep is not counted")
