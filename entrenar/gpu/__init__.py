"""GPU memory shared between processes: a ledger of who holds how much of which card, and its guard."""

from __future__ import annotations

from entrenar.gpu.card import Card, card_in_use, cards_seen, read_cards
from entrenar.gpu.guard import VramGuard
from entrenar.gpu.ledger import Reservation, VramLedger, ledger_path

__all__ = [
    "Card",
    "Reservation",
    "VramGuard",
    "VramLedger",
    "card_in_use",
    "cards_seen",
    "ledger_path",
    "read_cards",
]
