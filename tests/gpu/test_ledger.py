"""The ledger: exact boundaries, dead and unjudged owners, damaged files, disks that refuse."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock
import pytest

from entrenar.errors import VramError, VramFullError
from entrenar.gpu import Card, VramLedger
from entrenar.gpu.processes import Owner, is_alive, this_process

MIB = 1 << 20
CARD = Card("GPU-aaaa", "NVIDIA H200", 24_000 * MIB, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "vram-ledger.json"


def ledger(path: Path, **options: Any) -> VramLedger:
    return VramLedger(CARD, path, **options)


def entries(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["reservations"]


def elsewhere(path: Path, **changes: Any) -> None:
    """Give the first entry of the file to another owner."""
    document = json.loads(path.read_text())
    document["reservations"][0]["owner"].update(changes)
    path.write_text(json.dumps(document))


def test_the_budget_is_kept_to_the_byte(path: Path) -> None:
    """https://github.com/paiml/entrenar/issues/148"""
    alive = {"first": True}
    mine = this_process()
    book = ledger(path, alive=lambda owner: alive["first"])
    assert book.budget_bytes == 20_400 * MIB
    book.reserve(15_000 * MIB, "first")
    with pytest.raises(
        VramFullError, match=r"6 000 MiB .* 5 400 MiB are left .* 20 400 MiB"
    ) as found:
        book.reserve(6_000 * MIB, "second")
    assert f"first (pid {mine.pid}) 15 000 MiB" in str(found.value)
    assert [e["bytes"] for e in entries(path)] == [15_000 * MIB]
    book.reserve(5_400 * MIB, "third")
    with pytest.raises(VramFullError, match="0 MiB are left"):
        book.reserve(1, "fourth")
    alive["first"] = False
    book.reserve(6_000 * MIB, "fifth")
    assert [e["task"] for e in entries(path)] == ["fifth"]


def test_memory_shared_with_the_processor_leaves_more_to_it(path: Path) -> None:
    unified = dataclasses.replace(CARD, name="NVIDIA GB10")
    assert VramLedger(unified, path).budget_bytes == 14_400 * MIB


def test_cards_do_not_share_a_budget(path: Path) -> None:
    ledger(path).reserve(20_400 * MIB, "one")
    other = VramLedger(dataclasses.replace(CARD, uuid="GPU-bbbb"), path)
    other.reserve(20_400 * MIB, "two")
    assert [r.task for r in other.reservations()] == ["two"]


def test_a_card_of_unknown_size_is_not_a_full_one(path: Path) -> None:
    """https://github.com/jaylfc/taOS/issues/1766"""
    with pytest.raises(
        VramError, match=r"could not be read.*does not mean that memory is full"
    ) as e:
        VramLedger(Card("GPU-aaaa"), path)
    assert not isinstance(e.value, VramFullError)


def test_a_pid_that_was_given_out_again(path: Path) -> None:
    """https://github.com/nightlyone/lockfile/issues/39"""
    book = ledger(path)
    book.reserve(15_000 * MIB, "before")
    started = this_process().started
    assert started is not None
    elsewhere(path, started=started - 360_000)  # an hour earlier, by 100 ticks a second
    assert book.reservations() == ()
    book.reserve(15_000 * MIB, "after")
    elsewhere(path, boot="another boot")
    assert book.reservations() == ()


@pytest.mark.parametrize("change", [{"started": None}, {"namespace": "pid:[1]"}, {"boot": None}])
def test_an_owner_that_cannot_be_judged_keeps_its_lease(path: Path, change: dict[str, Any]) -> None:
    """https://github.com/nightlyone/lockfile/issues/39: no /proc, or another container's pids."""
    now = [1e9]
    book = ledger(path, clock=lambda: now[0])
    book.reserve(15_000 * MIB, "far")
    elsewhere(path, pid=2**22, **change)
    now[0] += 24 * 3600 - 1
    assert [r.task for r in book.reservations()] == ["far"]
    now[0] += 2
    assert book.reservations() == ()


def test_a_live_owner_outlives_its_lease(path: Path) -> None:
    now = [1e9]
    book = ledger(path, clock=lambda: now[0])
    book.reserve(MIB, "long")
    now[0] += 30 * 24 * 3600
    assert [r.task for r in book.reservations()] == ["long"]


def test_what_was_measured_counts(path: Path) -> None:
    book = ledger(path)
    held = book.reserve(15_000 * MIB, "first")
    held = book.update(held, 10_000 * MIB)
    assert held.counted_bytes == 10_000 * MIB
    book.reserve(10_400 * MIB, "second")
    book.update(held, 11_000 * MIB)  # more than is left: it is the truth all the same
    with pytest.raises(VramFullError, match="0 MiB are left"):
        book.reserve(MIB, "third")


def test_memory_used_by_strangers_is_not_free(path: Path) -> None:
    """https://github.com/HilbertraumAI/HilbertRaum/issues/473"""
    free = [4_000 * MIB]
    book = ledger(path, free_bytes=lambda: free[0])
    with pytest.raises(
        VramFullError, match=r"4 000 MiB are free: the ledger would allow 20 400 MiB"
    ):
        book.reserve(6_000 * MIB, "late")
    free[0] = 20_000 * MIB
    early = book.reserve(15_000 * MIB, "early")  # has not taken it yet: 20 000 are still to be seen
    with pytest.raises(VramFullError, match="5 000 MiB are free"):
        book.reserve(5_200 * MIB, "late")
    book.update(early, 15_000 * MIB)
    free[0] = 5_300 * MIB
    book.reserve(5_200 * MIB, "late")


DAMAGED = [
    "",
    '{"reservations": [',
    "[]",
    "null",
    '{"version": 99, "reservations": []}',
    "\x00\x01",
]
DAMAGED += ['{"version": 1}', '{"version": 1, "reservations": [{"id": 3}]}', "{" * 100_000]
DAMAGED += ['{"version": 1, "reservations": [[]]}', '{"version": 1, "reservations": 7}']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_set_aside(path: Path, text: str) -> None:
    """https://github.com/tox-dev/filelock/issues/534"""
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"kept as vram-ledger.corrupt-"):
        ledger(path).reserve(MIB, "after")
    (kept,) = path.parent.glob("vram-ledger.corrupt-*.json")
    assert kept.read_text() == text
    assert [e["task"] for e in entries(path)] == ["after"]


def test_a_file_that_is_no_text_is_set_aside(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="was no ledger"):
        assert ledger(path).reservations() == ()


def test_waiting_for_the_lock_ends_and_says_who_has_it(path: Path) -> None:
    """https://github.com/tox-dev/filelock/issues/534"""
    ledger(path).reserve(MIB, "the one before")
    with (
        filelock.FileLock(path.with_suffix(".lock")),
        pytest.raises(
            VramError, match=r"held by others for 0.1 s; last by pid \d+, the one before"
        ),
    ):
        ledger(path, lock_timeout_s=0.1).reserve(MIB, "late")


def test_a_folder_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/OytunOnal/JobRadar/issues/1: said reserved with nothing on disk."""

    def refuse(self: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(VramError, match=r"Permission denied.*ENTRENAR_VRAM_LEDGER"):
        ledger(path).reserve(MIB, "never")
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_reserves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """https://github.com/OytunOnal/JobRadar/issues/1"""
    book = ledger(path)
    book.reserve(MIB, "there")
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(VramError, match="nothing was reserved"):
            book.reserve(MIB, "never")
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["vram-ledger.json", "vram-ledger.lock"]


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems are; a lock of another kind would outlive a killed process."""
    import fcntl

    def missing(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(VramError, match=r"cannot lock .*local disk in ENTRENAR_VRAM_LEDGER"):
        ledger(path).reserve(MIB, "never")


def test_a_stranger_releases_nothing(path: Path) -> None:
    """https://github.com/OytunOnal/JobRadar/issues/1: a release by another erased the entry."""
    book = ledger(path)
    held = book.reserve(MIB, "mine")
    code = f"""
import sys
from pathlib import Path
from entrenar.errors import VramError
from entrenar.gpu import Card, VramLedger
book = VramLedger(Card("GPU-aaaa", "", {24_000 * MIB}), Path({str(path)!r}))
(held,) = book.reservations()
for act in (lambda: book.release(held), lambda: book.update(held, 1)):
    try:
        act()
    except VramError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count(f"belongs to pid {os.getpid()}") == 2
    assert [r.counted_bytes for r in book.reservations()] == [MIB]
    book.release(held)
    book.release(held)  # once more is no error
    assert book.reservations() == ()
    with pytest.raises(VramError, match="no longer in"):
        book.update(held, MIB)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_reserved(path: Path, nbytes: int) -> None:
    with pytest.raises(VramError, match="wanted at least 1"):
        ledger(path).reserve(nbytes, "nothing")


# processes


def process_table(folder: Path, pid: int, stat: str) -> Path:
    (folder / str(pid)).mkdir(parents=True)
    (folder / str(pid) / "stat").write_text(stat)
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text("b-1\n")
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to("pid:[7]")
    return folder


def stat_line(pid: int, name: str, state: str, started: int) -> str:
    return f"{pid} ({name}) {state} " + " ".join(["0"] * 18) + f" {started} 0 0\n"


@pytest.mark.parametrize("name", ["python", "a b) R 1 (c", ")))"])
def test_a_process_is_known_by_when_it_started(tmp_path: Path, name: str) -> None:
    proc = process_table(tmp_path, 41, stat_line(41, name, "S", 777))
    owner = Owner(41, 777, "b-1", "pid:[7]")
    assert is_alive(owner, proc) is True
    assert is_alive(dataclasses.replace(owner, started=778), proc) is False
    assert is_alive(dataclasses.replace(owner, boot="b-0"), proc) is False
    assert is_alive(dataclasses.replace(owner, pid=42), proc) is False
    assert is_alive(dataclasses.replace(owner, namespace="pid:[8]"), proc) is None


def test_one_that_only_waits_to_be_collected_is_dead(tmp_path: Path) -> None:
    proc = process_table(tmp_path, 41, stat_line(41, "python", "Z", 777))
    assert is_alive(Owner(41, 777, "b-1", "pid:[7]"), proc) is False


def test_without_a_process_table_nothing_is_known(tmp_path: Path) -> None:
    assert is_alive(Owner(41, 777, "b-1"), tmp_path / "none") is None
    assert this_process(tmp_path / "none") == Owner(os.getpid())


def test_this_process_lives() -> None:
    assert is_alive(this_process()) is True
