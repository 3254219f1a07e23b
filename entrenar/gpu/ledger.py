"""A ledger of GPU memory that processes share: who reserved how much of which card.

One JSON file for the machine, ``~/.cache/entrenar/vram-ledger.json`` or the path in
``ENTRENAR_VRAM_LEDGER``, and beside it a lock that is never renamed: whoever reads to write holds it from
before the reading to after the writing, so that two processes cannot both find the last memory free.
The file is replaced whole, by rename. Entries of processes that died are dropped by whoever comes next;
where a process cannot be judged (another container, no ``/proc``) its entry lasts for its lease. A file
that is not a ledger is set aside, never emptied in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from entrenar.errors import VramError, VramFullError
from entrenar.gpu.card import Card
from entrenar.gpu.processes import Owner, is_alive, this_process

__all__ = ["Reservation", "VramLedger", "ledger_path"]

_VERSION = 1
_PERCENT, _UNIFIED_PERCENT = 85, 60
_LEASE_S = 24 * 3600.0
_ELSEWHERE = "name a file on a local disk in ENTRENAR_VRAM_LEDGER"


def ledger_path() -> Path:
    """Return where the machine's ledger lies."""
    named = os.environ.get("ENTRENAR_VRAM_LEDGER")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "entrenar" / "vram-ledger.json"


@dataclasses.dataclass(frozen=True)
class Reservation:
    """Memory of a card that one process holds.

    Attributes:
        id: Unique.
        card: UUID of the card.
        owner: The process.
        bytes: What was asked for.
        task: What it is for, as people read it.
        since: Seconds since the epoch when it was made.
        expires: When an owner who cannot be judged loses it.
        actual_bytes: What the owner measured since; counts in place of ``bytes``. None until then.
    """

    id: str
    card: str
    owner: Owner
    bytes: int
    task: str
    since: float
    expires: float
    actual_bytes: int | None = None

    @property
    def counted_bytes(self) -> int:
        """What it takes of the budget."""
        return self.bytes if self.actual_bytes is None else self.actual_bytes


class VramLedger:
    """The reservations of one card, shared by the processes of a machine.

    Args:
        card: The card; one without a known size has no ledger.
        path: The file; :func:`ledger_path` where None.
        free_bytes: Returns the card's free memory now, or None where unknown; what programs use that
            are not in the ledger is seen through it.
        lock_timeout_s: How long to wait for other processes to finish with the file.
        clock: Seconds since the epoch.
        alive: Whether an owner lives, as :func:`entrenar.gpu.processes.is_alive`.

    Attributes:
        budget_bytes: What may be reserved in all: 85 % of the card, 60 % of memory shared with the
            processor.

    Raises:
        VramError: The card's size is unknown.
    """

    def __init__(
        self,
        card: Card,
        path: Path | None = None,
        *,
        free_bytes: Callable[[], int | None] = lambda: None,
        lock_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.time,
        alive: Callable[[Owner], bool | None] = is_alive,
    ) -> None:
        if not card.total_bytes:
            raise VramError(
                f"the memory of {card.uuid} could not be read, so none of it can be reserved",
                "see that nvidia-smi lists it; this does not mean that memory is full",
            )
        self.card = card
        self.path = path or ledger_path()
        percent = _UNIFIED_PERCENT if card.is_unified else _PERCENT
        self.budget_bytes = card.total_bytes * percent // 100
        self._free_bytes = free_bytes
        self._lock_timeout_s = lock_timeout_s
        self._clock = clock
        self._alive = alive

    def reserve(self, nbytes: int, task: str) -> Reservation:
        """Take memory, or refuse before anything is allocated.

        Args:
            nbytes: How much; exactly what is left is accepted.
            task: What for.

        Raises:
            VramFullError: It does not fit; the message has what is asked, left, and held by whom.
            VramError: The ledger cannot be read or written; nothing is reserved.
        """
        if nbytes < 1:
            raise VramError(f"{nbytes} bytes were asked for, wanted at least 1", "")
        with self._locked(task) as entries:
            self._check_fits(nbytes, [e for e in entries if e.card == self.card.uuid])
            now = self._clock()
            made = Reservation(
                uuid.uuid4().hex, self.card.uuid, this_process(), nbytes, task, now, now + _LEASE_S
            )
            entries.append(made)
        return made

    def update(self, reservation: Reservation, actual_bytes: int) -> Reservation:
        """Replace what was asked for by what was measured, and renew the lease.

        Raises:
            VramError: The reservation is another process's, or is gone.
        """
        with self._locked(reservation.task) as entries:
            at = self._find(reservation, entries)
            renewed = self._clock() + _LEASE_S
            entries[at] = dataclasses.replace(
                entries[at], actual_bytes=actual_bytes, expires=renewed
            )
            return entries[at]

    def release(self, reservation: Reservation) -> None:
        """Give memory back; a reservation that is gone is no error.

        Raises:
            VramError: It is another process's.
        """
        with self._locked(reservation.task) as entries:
            if any(entry.id == reservation.id for entry in entries):
                del entries[self._find(reservation, entries)]

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the card's live reservations, oldest first."""
        with self._locked("reading") as entries:
            return tuple(entry for entry in entries if entry.card == self.card.uuid)

    def _check_fits(self, nbytes: int, held: list[Reservation]) -> None:
        reserved = sum(entry.counted_bytes for entry in held)
        left = self.budget_bytes - reserved
        holders = "; ".join(f"{e.task} (pid {e.owner.pid}) {_mib(e.counted_bytes)}" for e in held)
        if nbytes > left:
            raise VramFullError(
                f"{_mib(nbytes)} of {self.card.uuid} were asked for, {_mib(max(left, 0))} are left of the "
                f"budget of {_mib(self.budget_bytes)}; {_mib(reserved)} are reserved"
                + (f" by {holders}" if holders else ""),
                "wait for them, or ask for less",
            )
        free = self._free_bytes()
        if free is None:
            return
        # Those who have not measured yet have not taken what they reserved: it is free only to see.
        pending = sum(entry.bytes for entry in held if entry.actual_bytes is None)
        if nbytes > free - pending:
            raise VramFullError(
                f"{_mib(nbytes)} of {self.card.uuid} were asked for, {_mib(max(free - pending, 0))} are "
                f"free: the ledger would allow {_mib(left)}, but programs outside it use the card",
                "see nvidia-smi for who they are",
            )

    def _find(self, reservation: Reservation, entries: list[Reservation]) -> int:
        for at, entry in enumerate(entries):
            if entry.id == reservation.id:
                if entry.owner != this_process():
                    raise VramError(
                        f"the reservation {entry.id} belongs to pid {entry.owner.pid}, this is pid "
                        f"{os.getpid()}",
                        "only its owner may change it; it ends with that process",
                    )
                return at
        raise VramError(
            f"the reservation {reservation.id} is no longer in {self.path}",
            "it was set aside with a damaged ledger, or its lease ran out; reserve again",
        )

    # the file

    @contextlib.contextmanager
    def _locked(self, task: str) -> Iterator[list[Reservation]]:
        """Give all cards' live entries under the lock; what was changed of them is written at the end."""
        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # a marker file, which filelock falls back to, would outlive a killed process
                held.enter_context(
                    filelock.FileLock(lock, timeout=self._lock_timeout_s, fallback_to_soft=False)
                )
            except filelock.Timeout as error:
                raise VramError(
                    f"{lock} was held by others for {self._lock_timeout_s:g} s{_holder(lock)}",
                    "see whether that process hangs; the lock ends with it",
                ) from error
            except (OSError, NotImplementedError) as error:
                raise VramError(f"cannot lock {lock}: {error}", _ELSEWHERE) from error
            self._sign(lock, task)
            read = self._read()
            live = [entry for entry in read if self._is_live(entry)]
            yield live
            if live != read:
                self._write(live)

    def _sign(self, lock: Path, task: str) -> None:
        """Write who holds the lock into it, for those who wait in vain."""
        try:
            lock.write_text(f"pid {os.getpid()}, {task}", encoding="utf-8")
        except OSError as error:
            raise VramError(f"cannot write {lock}: {error}", _ELSEWHERE) from error

    def _is_live(self, entry: Reservation) -> bool:
        alive = self._alive(entry.owner)
        return self._clock() < entry.expires if alive is None else alive

    def _read(self) -> list[Reservation]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError):
                raise VramError(f"cannot read {self.path}: {error}", _ELSEWHERE) from error
            text = ""
        try:
            return _parse(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._set_aside(error)
            return []

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_name(
            f"{self.path.stem}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}.json"
        )
        try:
            os.rename(self.path, aside)
        except OSError as problem:
            raise VramError(f"cannot set {self.path} aside: {problem}", _ELSEWHERE) from error
        warnings.warn(
            f"{self.path} was no ledger of version {_VERSION} ({error}); it was kept as {aside.name} and a "
            "new one begun: memory reserved before is not counted",
            RuntimeWarning,
            stacklevel=2,
        )

    def _write(self, entries: list[Reservation]) -> None:
        document = {"version": _VERSION, "reservations": [dataclasses.asdict(e) for e in entries]}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise VramError(
                f"cannot write {self.path}: {error}; nothing was reserved or released", _ELSEWHERE
            ) from error


def _parse(text: str) -> list[Reservation]:
    """Read a ledger; any other text raises one of the errors of reading it so."""
    document: Any = json.loads(text)
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError("another version or shape")
    found = []
    for entry in document["reservations"]:
        owner = Owner(**entry["owner"])
        made = Reservation(**{**entry, "owner": owner})
        numbers = (owner.pid, made.bytes, made.counted_bytes, made.since, made.expires)
        if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
            raise ValueError("a reservation without numbers")
        if not all(isinstance(word, str) for word in (made.id, made.card, made.task)):
            raise ValueError("a reservation without names")
        found.append(made)
    return found


def _holder(lock: Path) -> str:
    try:
        text = lock.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return f"; last by {text[:200]}" if text else ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB".replace(",", " ")
