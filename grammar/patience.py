"""How long an operation on a grammar may hold up others, and whether anyone waits for it still.

The limits of a grammar bound what it may cost in all. Patience is the caller's, for one operation
on one thread, and says nothing about the grammar: what ends for lack of it may be tried again, and
goes on from what was found out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfPatience(Exception):
    """The operation was given up and changed nothing; it may be tried again."""


class Patience:
    """For one operation: so many seconds of processor time, rests in between, and an end.

    With `rests`, a thread that works for long sleeps now and then, for twice as long as it worked,
    so that another one that does short work is not kept waiting for the interpreter each time.
    `cancel` may be called from any thread.
    """

    def __init__(self, seconds: float | None = None, *, rests: bool = False) -> None:
        self.seconds = seconds
        self._rests = rests
        self._is_cancelled = False
        self.start()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._is_cancelled = True

    def start(self) -> None:
        """The operation begins, on this thread."""
        self._started_at = self._rested_at = time.thread_time()

    @property
    def seconds_spent(self) -> float:
        """Processor time since the operation began, asked on its thread."""
        return time.thread_time() - self._started_at

    def look(self) -> None:
        """To be called now and then by what takes long. Raises OutOfPatience."""
        if self._is_cancelled:
            raise OutOfPatience("nobody waits for it any more")
        now = time.thread_time()
        if self.seconds is not None and now - self._started_at > self.seconds:
            raise OutOfPatience(f"it takes more than {self.seconds} s of processor time")
        if self._rests and now - self._rested_at > _STRETCH_SECONDS:
            time.sleep(2 * (now - self._rested_at))
            self._rested_at = time.thread_time()

    def acquire(self, lock: threading.Lock) -> None:
        """Hold the lock. Raises OutOfPatience instead of waiting longer than it lasts."""
        if not lock.acquire(timeout=-1 if self.seconds is None else self.seconds):
            raise OutOfPatience("another operation on the grammar takes long")


# Of work without a rest.
_STRETCH_SECONDS = 0.001

_here = threading.local()


def current_patience() -> Patience | None:
    """That of the operation which this thread carries out, if it has one."""
    patience: Patience | None = getattr(_here, "patience", None)
    return patience


@contextmanager
def patient(patience: Patience) -> Iterator[None]:
    """What this thread does within is one operation with `patience`."""
    before = current_patience()
    _here.patience = patience
    patience.start()
    try:
        yield
    finally:
        _here.patience = before
