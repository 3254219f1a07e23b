"""`entrenar vram`: the cards of the machine, their memory, and who reserved it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time

from entrenar.cli.console import Console, duration, gibibytes
from entrenar.gpu import Card, Reservation, VramLedger, cards_seen, ledger_path, read_cards

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; entries of processes that are gone are dropped by the reading."""
    cards = cards_seen(read_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    held = {card: _ledger(card) for card in cards}
    if arguments.json:
        found = [_as_json(card, ledger) for card, ledger in held.items()]
        print(json.dumps({"ledger": str(ledger_path()), "cards": found}, indent=2))
        return 0
    console = Console()
    if not cards:
        console.line(
            "no GPU is listed by nvidia-smi, or CUDA_VISIBLE_DEVICES hides them all: nothing is reserved "
            "on this machine"
        )
    for number, (card, ledger) in enumerate(held.items()):
        console.heading(f"cuda:{number}  {card.name}  {card.uuid}".rstrip())
        _show(console, card, ledger)
    return 0


def _ledger(card: Card) -> VramLedger | None:
    return VramLedger(card) if card.total_bytes else None


def _show(console: Console, card: Card, ledger: VramLedger | None) -> None:
    if ledger is None:
        console.line("  its memory could not be read: none of it can be reserved")
        return
    entries = ledger.reservations()
    reserved = sum(entry.counted_bytes for entry in entries)
    used = "unknown" if card.used_bytes is None else gibibytes(card.used_bytes)
    console.facts(
        {
            "memory": f"{gibibytes(card.total_bytes or 0)}, {used} in use",
            "budget": f"{gibibytes(ledger.budget_bytes)}, {gibibytes(reserved)} reserved, "
            f"{gibibytes(max(ledger.budget_bytes - reserved, 0))} left",
        }
    )
    for entry in entries:
        console.line("    " + _line(entry))


def _line(entry: Reservation) -> str:
    measured = (
        ""
        if entry.actual_bytes is None
        else f", measured after asking for {gibibytes(entry.bytes)}"
    )
    age = duration(max(time.time() - entry.since, 0))
    return f"{gibibytes(entry.counted_bytes):>10}  pid {entry.owner.pid}  {entry.task}  for {age}{measured}"


def _as_json(card: Card, ledger: VramLedger | None) -> dict[str, object]:
    found = dataclasses.asdict(card)
    if ledger is not None:
        entries = ledger.reservations()
        found["budget_bytes"] = ledger.budget_bytes
        found["reserved_bytes"] = sum(entry.counted_bytes for entry in entries)
        found["reservations"] = [dataclasses.asdict(entry) for entry in entries]
    return found
