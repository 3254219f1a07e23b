"""A reservation for as long as a block of code runs, waiting for its turn where asked to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import TracebackType

from entrenar.errors import ConfigError, VramError, VramFullError
from entrenar.gpu.ledger import Reservation, VramLedger

__all__ = ["VramGuard"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0


class VramGuard:
    """Holds memory of a card inside a ``with`` block.

    A process that ends without leaving the block, killed or not, loses the reservation to whoever looks
    into the ledger next.

    Args:
        ledger: The card's ledger.
        nbytes: How much to hold.
        task: What for.
        wait_s: How long to wait for others to give memory back; 0 tries once.
        on_wait: Called with a sentence before each wait.
        sleep: Waits that many seconds.
        clock: Seconds of a clock that never goes back.

    Raises:
        ConfigError: ``wait_s`` is negative.
    """

    def __init__(
        self,
        ledger: VramLedger,
        nbytes: int,
        task: str,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not wait_s >= 0:
            raise ConfigError(f"wait_s is {wait_s}, wanted 0 or more seconds", "")
        self.ledger = ledger
        self.nbytes = nbytes
        self.task = task
        self._wait_s = wait_s
        self._on_wait = on_wait
        self._sleep = sleep
        self._clock = clock
        self._held: Reservation | None = None

    @property
    def reservation(self) -> Reservation | None:
        """What is held; None outside the block."""
        return self._held

    def __enter__(self) -> VramGuard:
        """Take the memory.

        Raises:
            VramFullError: It did not fit, at once or until the wait was over.
            VramError: The ledger cannot be read or written, or the guard was entered already.
        """
        if self._held is not None:
            raise VramError("this guard holds memory already", "make another guard for more")
        deadline = self._clock() + self._wait_s
        pause = _FIRST_WAIT_S
        while True:
            try:
                self._held = self.ledger.reserve(self.nbytes, self.task)
                return self
            except VramFullError as error:
                left = deadline - self._clock()
                if left <= 0 or self.nbytes > self.ledger.budget_bytes:
                    raise
                # A random part, so that processes that wait together do not ask together.
                wait = min(pause * random.uniform(0.5, 1.0), left)
                self._on_wait(f"waiting {wait:.0f} s for GPU memory: {error}")
                self._sleep(wait)
                pause = min(2 * pause, _LONGEST_WAIT_S)

    def update(self, actual_bytes: int) -> bool:
        """Replace what was asked for by what was measured; return whether it is more than that."""
        if self._held is None:
            raise VramError("no memory is held", "update the guard inside its with block")
        self._held = self.ledger.update(self._held, actual_bytes)
        return actual_bytes > self.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the memory back."""
        if self._held is not None:
            held, self._held = self._held, None
            self.ledger.release(held)
