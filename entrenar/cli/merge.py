"""`entrenar merge`: base model and adapter become one Hugging Face folder."""

from __future__ import annotations

import argparse

from entrenar.cli.console import Console, gibibytes

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    from entrenar.finetune.adapted import base_of, read_adapters
    from entrenar.finetune.merge import merge_adapter
    from entrenar.transformer.checkpoint import open_checkpoint
    from entrenar.transformer.weights import linear_shapes

    console = Console()
    model = arguments.model or base_of(arguments.adapter)
    shapes = linear_shapes(open_checkpoint(model).config)
    adapters = read_adapters(arguments.adapter, shapes, "cpu")
    changed = merge_adapter(model, adapters, arguments.output, arguments.dtype)
    size = sum(path.stat().st_size for path in Path(arguments.output).iterdir())
    console.facts(
        {
            "merged": f"{changed} weights of {model} with {arguments.adapter}",
            "written": f"{arguments.output} ({arguments.dtype}, {gibibytes(size)})",
        }
    )
    return 0
