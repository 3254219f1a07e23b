"""Which process an entry of the ledger belongs to, and whether that process still lives.

A pid alone does not say: it is given out again, after a restart from the beginning, and each container
counts its own. So an owner is a pid with the time its process started, the boot of the machine and the
namespace its pid counts in, all as ``/proc`` has them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

__all__ = ["Owner", "is_alive", "this_process"]

_START_TIME = 19  # of the fields after the name in /proc/PID/stat (proc(5), field 22)


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process, told apart from every other that ever had its pid.

    Attributes:
        pid: Its number.
        started: When it started, in clock ticks since the boot; None where ``/proc`` is missing.
        boot: Identity of the boot; None where unknown.
        namespace: What its pid counts in, such as ``"pid:[4026531836]"``; None where unknown.
    """

    pid: int
    started: int | None = None
    boot: str | None = None
    namespace: str | None = None


def this_process(proc: Path = Path("/proc")) -> Owner:
    """Return the owner that this process is."""
    pid = os.getpid()
    return Owner(pid, _started(pid, proc), _boot(proc), _namespace(proc))


def is_alive(owner: Owner, proc: Path = Path("/proc")) -> bool | None:
    """Return whether a process lives; None where this machine or container cannot tell.

    Args:
        owner: The process.
        proc: Where the process table is.
    """
    boot = _boot(proc)
    if boot is None or owner.boot is None or owner.started is None:
        return None
    if owner.boot != boot:
        return False
    if owner.namespace != _namespace(proc):
        return None
    return _started(owner.pid, proc) == owner.started


def _started(pid: int, proc: Path) -> int | None:
    """Return when a process started; None where there is none, or a dead one not yet waited for."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    if len(fields) <= _START_TIME or fields[0] in ("Z", "X"):
        return None
    return int(fields[_START_TIME])


def _boot(proc: Path) -> str | None:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def _namespace(proc: Path) -> str | None:
    try:
        return os.readlink(proc / "self/ns/pid")
    except OSError:
        return None
