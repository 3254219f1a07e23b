"""Run our training step and that of transformers and peft in turns, and set them side by side.

The peers live in an environment of their own, which is made once, and run :mod:`perf.peer_step`. Each
measurement is a process of its own; a round runs every one of them, so that what else the machine does
meets all alike, and ratios are taken of medians over the rounds. Where other work takes turns on the same
cores, compare processor seconds with one thread each (``OMP_NUM_THREADS=1``): they do not count waiting,
while threads that wait for each other spin.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrenar.errors import DataError
from perf.timing import environment

__all__ = ["beside", "make_environment", "summary", "table"]

Row = dict[str, Any]
_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "numpy", "transformers", "peft", "bitsandbytes", "gguf", "sentencepiece")
# Name of a variant, whether it is ours, and its options.
VARIANTS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("entrenar nf4", True, ()),
    ("transformers + peft, dense", False, ("--dense",)),
    ("transformers + peft + bitsandbytes nf4", False, ()),
)


def make_environment(folder: Path) -> Path:
    """Return the Python of the peers' environment, which is made where there is none.

    Raises:
        DataError: A package could not be installed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
        asked = [*_PACKAGES, "--extra-index-url", index]
        _output([str(python), "-m", "pip", "install", "-q", *asked])
    return python


def _output(command: Sequence[str]) -> str:
    inherited = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        command, cwd=_ROOT, env=inherited, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DataError(
            f"{' '.join(command[:4])} … ended with code {done.returncode}: {done.stderr[-400:]}", ""
        )
    return done.stdout


def beside(
    model: Path, folder: Path, arguments: Sequence[str], rounds: int, log: Path | None
) -> list[Row]:
    """Measure every variant ``rounds`` times, in turns.

    Args:
        model: A GGUF file or a Hugging Face folder.
        folder: The peers' environment; a GGUF file is kept there as a folder they read.
        arguments: What ours and theirs both take, such as ``--tokens 512``.
        rounds: How often each runs.
        log: JSON lines are appended here, each with machine and date.

    Raises:
        DataError: A run failed.
    """
    python = str(make_environment(folder))
    program = str(Path(__file__).with_name("peer_step.py"))
    theirs = model
    if model.is_file():
        theirs = folder / f"{model.stem}.hf"
        if not (theirs / "tokenizer.json").exists():  # the last file to be written
            _output([python, program, "--convert", str(model), str(theirs)])
    rows: list[Row] = []
    for _ in range(rounds):
        for name, ours, options in VARIANTS:
            start = [sys.executable, "-m", "perf", "step"] if ours else [python, program]
            path = str(model if ours else theirs)
            text = _output([*start, "--model", path, *arguments, *options])
            row = {
                "who": name,
                **json.loads(text.strip().splitlines()[-1]),
                "options": [*arguments],
            }
            row = {**environment("cpu"), **row, "who": name}
            rows.append(row)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each variant: medians over its runs, and ours as a ratio to it."""
    found = []
    for name, _, _ in VARIANTS:
        mine = [row for row in rows if row["who"] == name]
        if mine:
            found.append(
                {
                    "who": name,
                    "runs": len(mine),
                    "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
                    "peak_rss_bytes": statistics.median(row["peak_rss_bytes"] for row in mine),
                }
            )
            if all("cpu_s" in row for row in mine):
                found[-1]["cpu_s"] = statistics.median(row["cpu_s"] for row in mine)
    first = found[0]
    for row in found:
        if "cpu_s" in first and "cpu_s" in row:
            row["cpu_ratio"] = row["cpu_s"] / first["cpu_s"]
        row["speed_ratio"] = first["tokens_per_s"] / row["tokens_per_s"]
        row["memory_ratio"] = first["peak_rss_bytes"] / row["peak_rss_bytes"]
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a summary as Markdown."""
    lines = [
        "| | tokens/s | CPU s a step | peak memory | our speed ÷ its | its CPU s ÷ ours | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary(rows):
        speed, memory = f"{row['speed_ratio']:.2f}", f"{row['memory_ratio']:.2f}"
        cpu = (f"{row[name]:.2f}" if name in row else "" for name in ("cpu_s", "cpu_ratio"))
        seconds, share = cpu
        lines.append(
            f"| {row['who']} | {row['tokens_per_s']:.1f} | {seconds} "
            f"| {row['peak_rss_bytes'] / 1e9:.2f} GB | {speed} | {share} | {memory} |"
        )
    return "\n".join(lines)
