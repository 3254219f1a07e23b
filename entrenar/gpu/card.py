"""Which card a process computes on, by an identity that no renumbering changes, and its memory.

``CUDA_VISIBLE_DEVICES`` renumbers cards for one process and not for the driver, so an index means
different cards to different readers. The ledger's key is the card's UUID.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Sequence

from entrenar.errors import VramError

__all__ = ["Card", "card_in_use", "cards_seen", "read_cards"]

_QUERY = "index,uuid,name,memory.total,memory.used"
_MIB = 1 << 20
_UNIFIED = re.compile(r"jetson|orin|tegra|xavier|thor|gb10", re.IGNORECASE)
_TIMEOUT_S = 20


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU as the driver knows it.

    Attributes:
        uuid: Such as ``"GPU-5a0f…"``, or ``"MIG-…"`` for a part of a card.
        name: Its model.
        total_bytes: All of its memory; None where it could not be read.
        used_bytes: Memory in use by anyone when it was read; None where unknown.
    """

    uuid: str
    name: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None

    @property
    def free_bytes(self) -> int | None:
        """Memory that nobody uses; None where unknown."""
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(self.total_bytes - self.used_bytes, 0)

    @property
    def is_unified(self) -> bool:
        """Whether the card shares its memory with the processor."""
        return bool(_UNIFIED.search(self.name))


def read_cards(
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> tuple[Card, ...]:
    """Return the cards of the machine in the driver's order; none where ``nvidia-smi`` is absent.

    Args:
        run: Runs a command, as ``subprocess.run``.

    Raises:
        VramError: ``nvidia-smi`` is there and fails: nobody can say what is free.
    """
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _probe_failed(str(error)) from error
    if done.returncode:
        raise _probe_failed((done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]
    if any(len(row) != 5 for row in rows):
        raise _probe_failed(f"it printed {done.stdout.strip()!r}")
    return tuple(Card(row[1], row[2], _bytes(row[3]), _bytes(row[4])) for row in rows)


def _probe_failed(why: str) -> VramError:
    return VramError(
        f"the GPU's memory could not be read: nvidia-smi failed: {why}",
        "see that nvidia-smi runs; this does not mean that memory is full",
    )


def _bytes(mebibytes: str) -> int | None:
    """Return bytes; None for ``[N/A]``, which nvidia-smi prints where it does not know."""
    return int(mebibytes) * _MIB if mebibytes.isdigit() and int(mebibytes) else None


def cards_seen(cards: Sequence[Card], visible: str | None) -> tuple[Card, ...]:
    """Return the cards that a process sees, in the order it numbers them.

    Args:
        cards: All of the machine's, in the driver's order.
        visible: The value of ``CUDA_VISIBLE_DEVICES``; None where it is not set. Indices and UUIDs,
            whole or their beginning; the list ends at the first entry that names no card, as CUDA
            reads it. A part of a card (``MIG-…``) that is not listed keeps its name and has no size.
    """
    if visible is None:
        return tuple(cards)
    seen: list[Card] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            found = [c for c in cards if c.uuid == name] or [Card(name)]
        elif name.startswith("GPU-"):
            found = [c for c in cards if c.uuid.startswith(name)]
        else:
            found = [cards[int(name)]] if name.isdigit() and int(name) < len(cards) else []
        if len(found) != 1 or found[0] in seen:
            break
        seen.append(found[0])
    return tuple(seen)


def card_in_use(device: str, cards: Sequence[Card] | None = None) -> Card | None:
    """Return the card behind a device of this process; None for the CPU or where none is listed.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        cards: All of the machine's; read from the driver where None.

    Raises:
        VramError: The driver's tool fails.
    """
    if not device.startswith("cuda"):
        return None
    seen = cards_seen(
        read_cards() if cards is None else cards, os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    index = int(device.partition(":")[2] or 0)
    return seen[index] if index < len(seen) else None
