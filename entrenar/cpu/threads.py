"""Spread the work of one op over the cores: parts on threads of our own, BLAS on one thread in each.

BLAS threads of one product wait for each other by spinning: on a machine that has other work too, a
product takes many times its time, and what lies between products stays on one core. So products are
split here, by rows or columns that need no word from each other, like everything else.

As many threads as BLAS was told to use (``OPENBLAS_NUM_THREADS``, else one a core). Where BLAS is
one whose threads cannot be limited from here, it keeps them and nothing is spread.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import functools
import importlib
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["count", "one_blas_thread", "parts", "product", "run", "scratch", "spread"]

LEAST_FLOPS = 1 << 22
"""Least work of a part of a product: 50 microseconds, where waking a thread takes 10 to 20."""

LEAST_VALUES = 1 << 15
"""Least values of a part of an element-wise pass, for the same reason."""

_READ_FLOPS = 8
_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "", "_64")


class _Blas:
    """The thread count of the BLAS that NumPy is linked to; 0 threads where it cannot be set."""

    def __init__(self) -> None:
        self.threads = 0
        self._set: Callable[[int], Any] | None = None
        self._depth = 0
        self._lock = threading.Lock()
        module = importlib.import_module("numpy._core._multiarray_umath")
        with contextlib.suppress(OSError, TypeError):
            # a symbol is looked up in what the module is linked to as well
            self._find(ctypes.CDLL(module.__file__))

    def _find(self, library: ctypes.CDLL) -> None:
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                get = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                put = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    self.threads, self._set = int(get()), put
                    return

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Compute each product on its caller's thread inside the block; blocks nest and overlap."""
        if self._set is None or self.threads < 2:
            yield
            return
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._set(1)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._set(self.threads)


@functools.cache
def _blas() -> _Blas:
    return _Blas()


def one_blas_thread() -> contextlib.AbstractContextManager[None]:
    """Keep BLAS to its caller's thread inside the block: a few microseconds a block.

    BLAS threads that were used spin for a while after it, on a core that :func:`run` has use for.
    """
    return _blas().limited()


def count() -> int:
    """Return how many threads work is spread over, this one included."""
    return max(_blas().threads, 1)


class _Pool:
    """Threads that wait for work; they end with the process."""

    def __init__(self, threads: int) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._serve, daemon=True, name="entrenar-cpu").start()

    def _serve(self) -> None:
        while True:
            self.tasks.get()()


_thread = threading.local()


@functools.cache
def _pool() -> _Pool:
    return _Pool(count() - 1)


if hasattr(os, "register_at_fork"):
    # a forked child has no threads but the one that forked
    os.register_at_fork(after_in_child=_pool.cache_clear)


class _Share:
    """Pieces of work that several threads take one after another."""

    def __init__(self, works: Iterable[Callable[[], Any]]) -> None:
        self.left = collections.deque(works)
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def help(self) -> None:
        """Take pieces until none is left; tell of each, and of what it raised."""
        _thread.inside = True
        while self.left:
            try:
                work = self.left.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                work()
            except BaseException as error:
                self.ended.put(error)
            else:
                self.ended.put(None)
            del work  # keeps no array alive while the thread waits for more

    def finish(self) -> None:
        """Take part, then wait for pieces that others took; a thread that comes late finds none."""
        wanted = len(self.left)
        for _ in range(count() - 1):
            _pool().tasks.put(functools.partial(contextvars.copy_context().run, self.help))
        try:
            self.help()
        finally:
            _thread.inside = False
            wanted -= len(self.left)  # not zero where the keyboard interrupted
            self.left.clear()
            errors = [self.ended.get() for _ in range(wanted)]
        for error in errors:
            if error is not None:
                raise error


def run(works: Sequence[Callable[[], Any]]) -> None:
    """Run pieces of work, several at a time, and return when all are done.

    Args:
        works: They write to places of their own; the order in which they run is not defined.
            NumPy's settings of the calling thread (``np.errstate``) apply to each.

    Raises:
        BaseException: One that a piece raised, once all have ended.
    """
    if len(works) < 2 or count() < 2 or getattr(_thread, "inside", False):
        for work in works:
            work()
        return
    with one_blas_thread():
        _Share(works).finish()


def parts(size: int, least: int, step: int = 1) -> list[slice]:
    """Cut ``range(size)`` into one part a thread, or fewer.

    Args:
        size: How many there are.
        least: A part holds at least so many, unless there is only one.
        step: A part begins at a multiple of it.
    """
    number = max(min(count(), size // max(least, 1)), 1)
    length = -(-size // number)
    length = -(-length // step) * step
    return [slice(start, min(start + length, size)) for start in range(0, size, max(length, 1))]


def spread(work: Callable[[slice], Any], size: int, least: int, step: int = 1) -> None:
    """Call ``work`` with each of :func:`parts`, on as many threads."""
    pieces = parts(size, least, step)
    run([functools.partial(work, piece) for piece in pieces])


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the product of two matrices to ``out`` and return it.

    Cut by rows or columns, so that the operand each thread packs for itself is the smaller one.
    """
    (m, k), n = a.shape, b.shape[1]

    def rows(part: slice) -> None:
        np.matmul(a[part], b, out=out[part])

    def columns(part: slice) -> None:
        np.matmul(a, b[:, part], out=out[:, part])

    work, size, other = (rows, m, n) if m >= n else (columns, n, m)
    # reading a weight for few rows takes as long as some sixteen multiplications with each value
    flops = 2 * k * (other + (_READ_FLOPS if other < _READ_FLOPS else 0))
    spread(work, size, -(-LEAST_FLOPS // max(flops, 1)), 16)
    return out


_memory = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return uninitialised memory of this thread that the next call with the same name reuses.

    Numerics:
        A fresh array of megabytes costs page faults that exceed what is computed in it.
    """
    held = _memory.__dict__.setdefault("arrays", {})
    key, size = (name, np.dtype(dtype)), math.prod(shape)
    if key not in held or held[key].size < size:
        held[key] = np.empty(max(size, 1), dtype)
    return held[key][:size].reshape(shape)
