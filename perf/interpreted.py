"""Bytes that programs load and store, counted in Triton's interpreter.

The interpreter runs a kernel's source, not what the compiler made of it, so that its count is an
independent one: distinct bytes of each program, added up over the programs of a launch, must be the
emulator's within two per cent.

    TRITON_INTERPRET=1 python -m perf.interpreted --only rms_norm --tokens 16
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["Counter", "counting", "main", "measure"]

Row = dict[str, Any]


class Counter:
    """Stands in for the interpreter's memory functions and counts what goes through.

    Attributes:
        loaded, stored: Bytes, distinct within each program, added up.
        programs: Programs that touched memory.
    """

    def __init__(self, memory: Any, builder: Any) -> None:
        self._memory, self._builder = memory, builder
        self.loaded = self.stored = self.programs = 0
        self._program: Any = None
        self._reads: list[tuple[np.ndarray, int]] = []
        self._writes: list[tuple[np.ndarray, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _note(self, to: list[tuple[np.ndarray, int]], pointers: Any, mask: Any, size: int) -> None:
        if self._builder.grid_idx is not self._program:
            self.flush()
            self._program = self._builder.grid_idx
        addresses = np.asarray(pointers).astype(np.uint64).ravel()
        if mask is not None:
            addresses = addresses[
                np.broadcast_to(np.asarray(mask, bool), np.shape(pointers)).ravel()
            ]
        to.append((np.unique(addresses), size))

    def flush(self) -> None:
        """Add up the program at hand; call it after the last one too."""
        for name, seen in (("loaded", self._reads), ("stored", self._writes)):
            if seen:
                setattr(self, name, getattr(self, name) + _distinct(seen))
        self.programs += bool(self._reads or self._writes)
        self._reads.clear()
        self._writes.clear()
        self._program = None

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Load, and note what."""
        self._note(self._reads, pointers, mask, np.dtype(dtype).itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        """Store, and note where."""
        self._note(self._writes, pointers, mask, np.asarray(values).dtype.itemsize)
        return self._memory.store(pointers, values, mask)

    def _both(self, pointers: Any, mask: Any, size: int) -> None:
        self._note(self._reads, pointers, mask, size)
        self._note(self._writes, pointers, mask, size)

    def atomic_rmw(self, kind: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        """Read, modify and write, and note both."""
        self._both(pointers, mask, np.asarray(values).dtype.itemsize)
        return self._memory.atomic_rmw(kind, pointers, values, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, values: Any, order: Any) -> Any:
        """Compare and swap, and note both."""
        self._both(pointers, None, np.asarray(values).dtype.itemsize)
        return self._memory.atomic_cas(pointers, compared, values, order)


def _distinct(seen: list[tuple[np.ndarray, int]]) -> int:
    """Return how many bytes accesses of these addresses and sizes touch."""
    sizes = {size for _, size in seen}
    if len(sizes) == 1:  # of one size, and aligned to it: they overlap wholly or not at all
        return np.unique(np.concatenate([a for a, _ in seen])).size * sizes.pop()
    bytes_ = [(a[:, None] + np.arange(size, dtype=np.uint64)).ravel() for a, size in seen]
    return np.unique(np.concatenate(bytes_)).size


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Count all that is loaded and stored by kernels interpreted inside the block."""
    from triton.runtime import interpreter

    counter = Counter(interpreter._interpreter, interpreter.interpreter_builder)
    interpreter._interpreter = counter
    try:
        yield counter
    finally:
        counter.flush()
        interpreter._interpreter = counter._memory


def measure(only: str, dtypes: tuple[str, ...], tokens: int) -> list[Row]:
    """Interpret every call that ``perf traffic`` counts; return a row each."""
    os.environ["ENTRENAR_BACKEND"], os.environ["TRITON_INTERPRET"] = "triton", "1"
    from perf.calls import DTYPES, Maker
    from perf.traffic import chosen, complete

    rows = []
    for call, dtype in chosen(only, dtypes):
        launcher = getattr(
            importlib.import_module(f"entrenar.kernels.{call.family}"), call.function
        )
        given = complete(launcher, call.make(Maker(DTYPES[dtype], tokens, values=True)))
        with counting() as counter:
            launcher(**given)
        rows.append(
            {
                "op": call.function,
                "dtype": dtype,
                "shape": f"{call.shape}, T={tokens}",
                "interpreted_loaded_bytes": counter.loaded,
                "interpreted_stored_bytes": counter.stored,
                "programs": counter.programs,
            }
        )
        print(f"interpreted {call.function} {call.shape} {dtype}", file=sys.stderr)
    return rows


def main(arguments: list[str]) -> int:
    """Print rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m perf.interpreted", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.only, tuple(options.dtypes.split(",")), options.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
