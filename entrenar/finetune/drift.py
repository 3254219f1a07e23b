"""What differs between the run a checkpoint is of and the one that wants to continue it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from entrenar.finetune.chat import Example

__all__ = ["changes", "fingerprint", "model_fingerprint"]

_MAY_DIFFER = ("device", "checkpointing", "profile_interval", "graph", "prewarm")
_ABSENT = object()


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each thing in which two runs' states differ.

    Args:
        now: ``config``, ``data``, ``samples``, ``model``, ``ranks`` and ``total`` of the run that continues.
        then: The same of the checkpoint; a key that an older version did not write is not compared.
    """
    found = []
    for name, value in now["config"].items():
        before = then["config"].get(name, _ABSENT)
        if before is not _ABSENT and before != value and name not in _MAY_DIFFER:
            found.append(f"{name} was {before!r}, now {value!r}")
    for name, what in (("ranks", "the number of ranks"), ("total", "the number of steps")):
        if then.get(name, now[name]) != now[name]:
            found.append(f"{what} was {then[name]}, now {now[name]}")
    if then.get("data", now["data"]) != now["data"]:
        before = then.get("samples", "an unknown number of")
        found.append(f"it is of other data: {before} samples then, {now['samples']} now")
    if then.get("model", now["model"]) != now["model"]:
        found.append("the base model has another config")
    return found


def fingerprint(samples: Sequence[Example]) -> str:
    """Return a digest of all samples in order: their tokens, and which of them are learned."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(sample.ids.tobytes())
        digest.update(sample.is_response.tobytes())
    return digest.hexdigest()


def model_fingerprint(config: Any) -> str:
    """Return a digest of a base model's config."""
    values = sorted(dataclasses.asdict(config).items(), key=lambda item: item[0])
    return hashlib.sha256(repr(values).encode()).hexdigest()
