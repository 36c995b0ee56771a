"""Waiting for a change of state, from a thread or from any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

# A signal that arrives just before a thread blocks does not wake it. So nothing blocks for longer
# than this at a time, and a Ctrl-C is noticed after this long at the latest.
INTERRUPT_SECONDS = 0.5


class Signal:
    """Wakes whoever waits whenever `notify` is called, which must be with `lock` held.

    A check is called with the lock held; it returns None as long as there is nothing to return.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._wakers: list[Callable[[], object]] = []

    def notify(self) -> None:
        """Let everyone who waits check again."""
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def poll(self, check: Callable[[], T | None]) -> T | None:
        """What `check` returns now."""
        with self._lock:
            return check()

    def wait(self, check: Callable[[], T | None]) -> T:
        """Block this thread until `check` returns something; Ctrl-C interrupts it."""
        while True:
            with self._lock:
                found = check()
                if found is not None:
                    return found
                changed = threading.Event()
                self._wakers.append(changed.set)
            while not changed.wait(INTERRUPT_SECONDS):
                pass

    async def wait_async(self, check: Callable[[], T | None]) -> T:
        """As `wait`, but let the running event loop go on meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                found = check()
                if found is not None:
                    return found
                changed: asyncio.Future[None] = loop.create_future()
                self._wakers.append(lambda future=changed: _wake(loop, future))  # type: ignore[misc]
            await changed


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
