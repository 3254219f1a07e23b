"""`entrenar plot`: draw a run again, or compare several."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from entrenar.errors import ConfigError, DataError
from entrenar.finetune.metrics import read_metrics
from entrenar.finetune.plot import compare_runs, plot_loss
from entrenar.finetune.profile_plot import plot_profile
from entrenar.finetune.run_folder import RunFolder

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    folders = [RunFolder(path) for path in arguments.runs]
    for folder in folders:
        if not folder.metrics.is_file():
            raise ConfigError(
                f"{folder.path} is not a run's folder: it has no metrics.jsonl",
                "name a run's folder",
            )
    if len(folders) == 1:
        return _one(folders[0], arguments.output)
    if not arguments.output:
        raise ConfigError("--output is missing", "say where the comparison of runs is to be drawn")
    compare_runs(_named(folders), arguments.output)
    print(arguments.output)
    return 0


def _one(folder: RunFolder, output: str | None) -> int:
    target = output or folder.plot
    plot_loss(read_metrics(folder.metrics), target, folder.path.name)
    print(target)
    if folder.trace.is_file() and not output:
        plot_profile(_trace(folder.trace), folder.profile_plot, folder.path.name)
        print(folder.profile_plot)
    return 0


def _trace(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is no trace of a step: {error}", "profile a step again") from error


def _named(folders: list[RunFolder]) -> dict[str, Any]:
    """Return each run's rows by a name of its own: its folder's, or its path where two share one."""
    names = [folder.path.name for folder in folders]
    paths = [str(folder.path) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError("a run is named twice", "name each run once")
    shown = names if len(set(names)) == len(names) else paths
    return {n: read_metrics(f.metrics) for n, f in zip(shown, folders, strict=True)}
