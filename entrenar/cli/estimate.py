"""`entrenar estimate`: what a run will need in memory, from the model's config alone."""

from __future__ import annotations

import argparse
import json

from entrenar import runtime
from entrenar.cli.config_flags import config_from
from entrenar.cli.console import Console, gibibytes

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from entrenar.finetune.instruct_pipeline.memory import estimate_memory
    from entrenar.lora import match_targets
    from entrenar.transformer.checkpoint import open_checkpoint
    from entrenar.transformer.weights import linear_shapes

    config, _ = config_from(arguments, arguments.config)
    device = runtime.resolve_device(config.device)
    found = open_checkpoint(arguments.model)
    shapes = linear_shapes(found.config)
    targets = {name: shapes[name] for name in match_targets(shapes, config.target_modules)}
    parts = estimate_memory(config, found.config, targets, device)
    needed, free = sum(parts.values()), runtime.available_memory_bytes(device)
    if arguments.json:
        print(json.dumps({**parts, "total": needed, "free": free, "fits": needed <= free}))
        return 0
    console = Console()
    console.facts({name: f"{gibibytes(size):>10}" for name, size in parts.items()})
    console.facts({"total": f"{gibibytes(needed)} of {gibibytes(free)} free on {device}"})
    if needed > free:
        console.notice(
            "this will not fit: try --quantize-nf4, --checkpointing true, a smaller --batch-size with "
            "more --grad-accum-steps, or a shorter --max-seq-len"
        )
    return 0
