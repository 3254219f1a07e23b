"""`entrenar plot`: draw a run's losses again."""

from __future__ import annotations

import argparse

from entrenar.errors import ConfigError
from entrenar.finetune.metrics import read_metrics
from entrenar.finetune.plot import plot_loss
from entrenar.finetune.run_folder import RunFolder

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    folder = RunFolder(arguments.run)
    if not folder.metrics.is_file():
        raise ConfigError(
            f"{folder.path} is not a run's folder: it has no metrics.jsonl", "name a run's folder"
        )
    output = arguments.output or folder.plot
    plot_loss(read_metrics(folder.metrics), output, folder.path.name)
    print(output)
    return 0
