"""Which card is meant, whatever CUDA_VISIBLE_DEVICES renumbers; probes that fail."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from entrenar.errors import VramError
from entrenar.gpu import Card, card_in_use, cards_seen, read_cards

GIB = 1 << 30
BIG, SMALL = Card("GPU-aaaa-1", "big", 24 * GIB, 0), Card("GPU-bbbb-2", "small", 8 * GIB, 0)
CARDS = (BIG, SMALL)


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        (None, [BIG, SMALL]), ("1", [SMALL]), ("1,0", [SMALL, BIG]), ("GPU-aaaa", [BIG]),
        ("GPU-bbbb,GPU-aaaa", [SMALL, BIG]), ("", []), ("-1", []), ("0,-1,1", [BIG]), ("7", []),
        ("GPU-", []), ("0,0", [BIG]), (" 1 , 0 ", [SMALL, BIG]), ("GPU-cccc,0", []),
        ("MIG-1234", [Card("MIG-1234")]),
    ],
)  # fmt: skip
def test_cards_are_known_by_uuid(
    visible: str | None, wanted: list[Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/optimum-benchmark/issues/47"""
    assert list(cards_seen(CARDS, visible)) == wanted
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert card_in_use("cuda", CARDS) == (wanted[0] if wanted else None)
    assert card_in_use("cuda:1", CARDS) == (wanted[1] if len(wanted) > 1 else None)
    assert card_in_use("cpu", CARDS) is None


def answer(text: str, code: int = 0) -> Any:
    return lambda *args, **options: subprocess.CompletedProcess(args, code, text, "")


def test_what_the_driver_prints() -> None:
    text = "0, GPU-aaaa-1, NVIDIA H200, 143771, 512\n1, GPU-bbbb-2, Orin, [N/A], [N/A]\n"
    first, second = read_cards(answer(text))
    assert first == Card("GPU-aaaa-1", "NVIDIA H200", 143_771 << 20, 512 << 20)
    assert first.free_bytes == (143_771 - 512) << 20
    assert second == Card("GPU-bbbb-2", "Orin", None, None)
    assert second.is_unified
    assert not first.is_unified
    assert second.free_bytes is None


def test_a_size_of_zero_is_unknown() -> None:
    """https://github.com/jaylfc/taOS/issues/1766"""
    (card,) = read_cards(answer("0, GPU-a, X, 0, 0\n"))
    assert card.total_bytes is None


def test_no_driver_is_no_card() -> None:
    """https://github.com/jaylfc/taOS/issues/1766: the CPU has no ledger."""

    def missing(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError

    assert read_cards(missing) == ()


@pytest.mark.parametrize(
    "run",
    [
        answer("Failed to initialize NVML: Driver/library version mismatch", 18),
        answer("No devices were found\n"),
        pytest.param(None, id="timeout"),
    ],
)
def test_a_probe_that_fails_does_not_say_out_of_memory(run: Any) -> None:
    """https://github.com/jaylfc/taOS/issues/1766"""

    def late(*args: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    with pytest.raises(VramError, match=r"nvidia-smi failed.*not mean that memory is full"):
        read_cards(run or late)
