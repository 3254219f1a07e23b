"""The guard: one try, waiting with back-off, giving back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrenar.errors import ConfigError, VramError, VramFullError
from entrenar.gpu import Card, VramGuard, VramLedger

CARD = Card("GPU-aaaa", "", 1000, 0)  # of which 850 may be reserved


@pytest.fixture
def ledger(tmp_path: Path) -> VramLedger:
    return VramLedger(CARD, tmp_path / "ledger.json")


class Time:
    """A clock that sleeping moves on."""

    def __init__(self, ledger: VramLedger | None = None, frees_at: float = 0.0) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self._ledger, self._frees_at = ledger, frees_at

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        if self._ledger is not None and self.now >= self._frees_at:
            for held in self._ledger.reservations():
                self._ledger.release(held)

    def options(self) -> dict[str, Any]:
        return {"sleep": self.sleep, "clock": lambda: self.now}


def test_a_block_holds_and_gives_back(ledger: VramLedger) -> None:
    with VramGuard(ledger, 850, "run") as guard:
        (held,) = ledger.reservations()
        assert held == guard.reservation
        assert guard.update(800) is False
        assert guard.update(900) is True
    assert ledger.reservations() == ()
    assert guard.reservation is None
    with pytest.raises(VramError, match="no memory is held"):
        guard.update(1)


def test_an_error_inside_gives_back(ledger: VramLedger) -> None:
    with pytest.raises(KeyError), VramGuard(ledger, 1, "run"):
        raise KeyError
    assert ledger.reservations() == ()


def test_a_guard_is_entered_once_at_a_time(ledger: VramLedger) -> None:
    guard = VramGuard(ledger, 100, "run")
    with guard:
        with pytest.raises(VramError, match="holds memory already"):
            guard.__enter__()
        assert [held.bytes for held in ledger.reservations()] == [100]
    with guard:
        assert [held.bytes for held in ledger.reservations()] == [100]


def test_no_wait_is_one_try(ledger: VramLedger) -> None:
    ledger.reserve(600, "other")
    time = Time()
    with pytest.raises(VramFullError), VramGuard(ledger, 300, "run", **time.options()):
        pass
    assert time.naps == []


def test_it_waits_longer_each_time_until_memory_is_back(ledger: VramLedger) -> None:
    ledger.reserve(600, "other")
    time, said = Time(ledger, frees_at=100.0), []
    guard = VramGuard(ledger, 300, "run", wait_s=1000, on_wait=said.append, **time.options())
    with guard:
        assert [held.task for held in ledger.reservations()] == ["run"]
    assert 100 <= time.now < 170
    assert len(said) == len(time.naps)
    assert all("other" in text for text in said)
    for number, nap in enumerate(time.naps):
        longest = min(0.5 * 2**number, 60)
        assert longest / 2 <= nap <= longest


def test_the_wait_ends(ledger: VramLedger) -> None:
    ledger.reserve(600, "other")
    time = Time()
    with (
        pytest.raises(VramFullError, match="other"),
        VramGuard(ledger, 300, "run", wait_s=7.5, **time.options()),
    ):
        pass
    assert time.now == pytest.approx(7.5)


def test_what_never_fits_is_not_waited_for(ledger: VramLedger) -> None:
    time = Time()
    with (
        pytest.raises(VramFullError),
        VramGuard(ledger, 851, "run", wait_s=1e6, **time.options()),
    ):
        pass
    assert time.naps == []


def test_a_ledger_that_cannot_be_written_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    time = Time()
    broken = VramLedger(CARD, tmp_path / "file" / "ledger.json")
    with (
        pytest.raises(VramError, match="cannot lock"),
        VramGuard(broken, 1, "run", wait_s=1e6, **time.options()),
    ):
        pass
    assert time.naps == []


def test_a_negative_wait_is_refused(ledger: VramLedger) -> None:
    with pytest.raises(ConfigError, match="wait_s is -1"):
        VramGuard(ledger, 1, "run", wait_s=-1)
