"""`entrenar merge`: base model and adapter become one Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from entrenar.cli.console import Console, gibibytes
from entrenar.errors import ConfigError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from entrenar.finetune.adapted import base_of, read_adapters
    from entrenar.finetune.merge import merge_adapter
    from entrenar.transformer.checkpoint import open_checkpoint
    from entrenar.transformer.weights import linear_shapes

    console = Console()
    adapter = arguments.adapter
    if adapter is None and arguments.model is None:
        raise ConfigError(
            "neither a model nor an adapter was given", "say --adapter, --model or both"
        )
    model = arguments.model or base_of(adapter)
    shapes = linear_shapes(open_checkpoint(model).config)
    adapters = read_adapters(adapter, shapes, "cpu") if adapter else None
    report = merge_adapter(
        model, adapters, arguments.output, arguments.dtype, arguments.double_quant
    )
    size = sum(path.stat().st_size for path in Path(arguments.output).iterdir())
    merged = f"{report.changed} weights of {model} with {adapter}" if adapter else "no adapter"
    console.facts(
        {"merged": merged, "written": f"{arguments.output} ({arguments.dtype}, {gibibytes(size)})"}
    )
    for notice in report.notices():
        console.notice(notice)
    return 0
