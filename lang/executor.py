"""The threads that programs share, whatever their number: one event loop for the work of all
states, one for `async def` programs called from plain code, and a bounded pool for plain functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_SHARED: weakref.WeakSet[LoopThread | ThreadPool | ThreadPools] = weakref.WeakSet()

# How many works of `ThreadPools` the calling code is within, on whatever thread or loop it runs.
_DEPTH = contextvars.ContextVar("depth", default=0)


class LoopThread:
    """An event loop on a thread of its own, started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # as in Run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        _SHARED.add(self)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call `function`; returns at once."""
        self._running().call_soon_threadsafe(function, *arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def is_current(self) -> bool:
        """Whether the calling code runs on this loop."""
        return self._loop is not None and asyncio._get_running_loop() is self._loop

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A forked process has the loop but not its thread.
            if self._loop is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_on, args=(self._loop,), name=self._name, daemon=True
                ).start()
            return self._loop


def _run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run `loop`, also when one of its tasks ends with a SystemExit: that is for who waits for the
    task, and the loop is for all programs.
    """
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            return


class ThreadPool:
    """At most `size` daemon threads, started as they are needed; more work waits its turn.

    The threads of concurrent.futures are joined when the interpreter ends, which would make a
    Ctrl-C wait for programs that are busy; these are not. Without `keeps_idle` a thread ends when
    there is no work for it.
    """

    def __init__(self, size: int, name: str, *, keeps_idle: bool = True) -> None:
        self._size = size
        self._name = name
        self._keeps_idle = keeps_idle
        self._lock = threading.RLock()  # as in Run
        self._start_empty()
        _SHARED.add(self)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on a thread of the pool, in the caller's context."""
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(function))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._pid != os.getpid():  # a forked process has none of the threads
                self._start_empty()
            self._work.put(work)
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_threads < self._size:
                self._num_threads += 1
                threading.Thread(
                    target=self._serve, name=f"{self._name}-{self._num_threads}", daemon=True
                ).start()
        return future

    def close(self) -> None:
        """Let the threads end when the work that was submitted is done."""
        with self._lock:
            for _ in range(self._num_threads):
                self._work.put(None)

    def _start_empty(self) -> None:
        self._pid = os.getpid()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_idle = 0

    def _serve(self) -> None:
        while True:
            work = self._work.get() if self._keeps_idle else self._get_or_leave()
            if work is None:
                return
            work()
            del work
            with self._lock:
                if self._keeps_idle and self._work.empty():
                    self._num_idle += 1

    def _get_or_leave(self) -> Callable[[], None] | None:
        """Work; None if there is none, and the thread is counted no more."""
        with self._lock:
            if not self._work.empty():
                return self._work.get()
            self._num_threads -= 1
            return None


class ThreadPools:
    """A `ThreadPool` for each depth of work that asks for work, and may wait for it: in one pool
    those that wait could hold all threads, and what they wait for would never begin.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.RLock()  # as in Run
        self._pools: list[ThreadPool] = []
        _SHARED.add(self)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on a thread, in the caller's context."""
        depth = _DEPTH.get()
        with self._lock:
            while len(self._pools) <= depth:
                number = len(self._pools)
                name = f"{self._name}-{number}" if number else self._name
                # Of those that begin the next one, a long row would leave a thread at each depth.
                self._pools.append(ThreadPool(self._size, name, keeps_idle=not number))
            pool = self._pools[depth]

        def work() -> T:
            _DEPTH.set(depth + 1)  # in the context that the pool runs it in
            return function()

        return pool.submit(work)

    async def call(self, function: Callable[[], T]) -> T:
        """As `submit`, waited for on the running event loop. Cancelling takes back what has not
        begun. A StopIteration, which no task can end with, is a RuntimeError, as in generators.
        """

        def work() -> T:
            try:
                return function()
            except StopIteration as error:
                raise RuntimeError("StopIteration was raised") from error

        return await asyncio.wrap_future(self.submit(work))


def _renew_locks() -> None:
    """In a forked process: a thread that is not there may have held them when it was made."""
    for shared in _SHARED:
        shared._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
