"""``metrics.jsonl``: one JSON object a line, written as the run goes and readable at any time.

A key that was not measured on a row is absent; nothing stands in for it, so a loss that is not
finite is left out and the row says ``"non_finite"`` instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar.errors import DataError
from entrenar.finetune.files import write_text

__all__ = ["METRIC_KEYS", "MetricsLog", "read_metrics"]

METRIC_KEYS = (
    "step",
    "epoch",
    "loss",
    "eval_loss",
    "perplexity",
    "learning_rate",
    "grad_norm",
    "tokens",
    "response_tokens",
    "tokens_per_s",
    "step_time_s",
    "peak_memory_bytes",
    "skipped",
    "non_finite",
)


class MetricsLog:
    """Appends rows to a run's ``metrics.jsonl``, each flushed at once.

    Args:
        path: The file.
        resume_step: Keep the rows up to this step, which a resumed run continues from; None
            starts an empty file.
        evaluated: Of the held-out losses keep those up to this step; a later one is measured again.
    """

    def __init__(
        self, path: Path, resume_step: int | None = None, evaluated: int | None = None
    ) -> None:
        self.path = path
        kept: list[dict[str, Any]] = []
        if resume_step is not None and path.exists():
            last = resume_step if evaluated is None else evaluated
            kept = [
                row
                for row in read_metrics(path)
                if row["step"] <= (last if "eval_loss" in row else resume_step)
            ]
        write_text(path, "".join(_line(row) for row in kept))

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row; None and values that are not finite are left out.

        Returns:
            The row as written, in the order of ``METRIC_KEYS``.
        """
        measured = {key: row[key] for key in METRIC_KEYS if _is_measured(row.get(key))}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(measured))
        return measured


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file; a last line cut short by a crash is passed over.

    Raises:
        DataError: The file is missing or another line of it is damaged.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "name a run folder") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError("not a row of metrics")
        except ValueError as error:
            if number == len(lines):
                break  # no newline follows: the writer was stopped in the middle
            raise DataError(f"{path}:{number} is damaged: {error}", "remove that line") from error
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _is_measured(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
