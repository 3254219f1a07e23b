"""The memory of a launch's arguments: a copy of each between pages that no access may touch.

Storage past a GiB is used where it lies instead: it may be a sparse file's, larger than memory.

An argument ends where its last guard page begins, rounded up to 16 bytes, so that an access past the end
faults at once, or is found by the fill pattern (stores) and by the checks (loads).
"""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["PAGE", "InPlace", "Region", "anonymous"]

PAGE = 4096
_FILL = 0xA5
_NO_ACCESS, _READ_WRITE = 0, 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory that nothing else lies beside, and its address."""
    memory = mmap.mmap(-1, max(PAGE, nbytes))
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Region:
    """A guarded copy of one storage.

    Args:
        host: Address of the storage.
        nbytes: Its size.
        guard: Whether to place guard pages.

    Attributes:
        host, nbytes: As given.
        start: Address of the copy; as far from a multiple of 16 as the storage's own.
        mapping: Address and size of all of it, guard pages and all.
    """

    def __init__(self, host: int, nbytes: int, guard: bool) -> None:
        self.host, self.nbytes, self._guard = host, nbytes, guard
        padded = (nbytes + 15) & ~15
        misalignment = host % 16
        body = -(-max(padded, 16) // PAGE) * PAGE + (PAGE if misalignment else 0)
        self._memory, first = anonymous(body + 3 * PAGE)
        self.mapping = (first, body + 3 * PAGE)
        self._low, self._high = first + PAGE, first + PAGE + body
        if guard:
            self.start = self._high - padded - (16 - misalignment if misalignment else 0)
        else:
            self.start = self._low + misalignment
        ctypes.memset(self._low, _FILL, body)
        ctypes.memmove(self.start, host, nbytes)
        self._protect(_NO_ACCESS)

    def _protect(self, access: int) -> None:
        if self._guard:
            _libc.mprotect(self.mapping[0], PAGE, access)
            _libc.mprotect(self._high, 2 * PAGE, access)

    def copy_back(self) -> list[str]:
        """Copy to the storage; return where beside it something was written."""
        ctypes.memmove(self.host, self.start, self.nbytes)
        if not self._guard:
            return []
        end = self.start + self.nbytes
        beside = {
            "before the start": ctypes.string_at(self._low, self.start - self._low),
            "past the end": ctypes.string_at(end, self._high - end),
        }
        return [where for where, found in beside.items() if found.strip(bytes([_FILL]))]

    def holds(self, address: int) -> bool:
        """Whether the address lies in the copy or in its guard pages."""
        return self.mapping[0] <= address < self.mapping[0] + self.mapping[1]

    def close(self) -> None:
        """Let the guard pages be freed."""
        self._protect(_READ_WRITE)


class InPlace(Region):
    """A storage used where it lies: no copy, no guard pages.

    Args:
        host: Address of the storage.
        nbytes: Its size.
    """

    def __init__(self, host: int, nbytes: int) -> None:
        self.host, self.nbytes, self._guard = host, nbytes, False
        self.start, self.mapping = host, (host, nbytes)

    def copy_back(self) -> list[str]:
        """Return that nothing beside it was written, which is not known."""
        return []
