"""Many runs of one program, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from palmette.lang.call import Call
from palmette.lang.executor import ThreadPool
from palmette.lang.signals import INTERRUPT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: makers of calls, so that a call exists only from its start to its delivery."""

    makers: Sequence[Callable[[], Call]]
    max_running: int
    returns_errors: bool
    shows_progress: bool
    # Runs an async program from plain code, or a call of either kind from an event loop.
    spawn: Callable[[Call], Future[None]] | None
    awaited: Callable[[Call], Any]


def run_plan(plan: Plan, *, in_order: bool = False) -> Iterator[tuple[int, Any]]:
    """Index and state (or exception) of each run as it ends, or in order.

    Closing the iterator, an error that is raised, and Ctrl-C cancel what still runs.
    """
    pool = ThreadPool(min(plan.max_running, len(plan.makers)), "palmette-batch")
    ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
    running: dict[int, Call] = {}
    ready: dict[int, Any] = {}
    num_started = num_yielded = 0
    try:
        with _progress(plan) as advance:
            while num_yielded < len(plan.makers):
                while (
                    num_started < len(plan.makers) and len(running) + len(ready) < plan.max_running
                ):
                    call = running[num_started] = plan.makers[num_started]()
                    future = pool.submit(call.run) if plan.spawn is None else plan.spawn(call)
                    future.add_done_callback(_reporter(ended, num_started))
                    num_started += 1
                    del call, future
                index, error = _next(ended)
                advance()
                ready[index] = _result(running.pop(index), error, plan)
                while ready if not in_order else num_yielded in ready:
                    index = num_yielded if in_order else next(iter(ready))
                    num_yielded += 1
                    yield index, ready.pop(index)
    finally:
        for call in running.values():
            call.cancel()
        pool.close()


async def run_plan_async(plan: Plan) -> AsyncIterator[tuple[int, Any]]:
    """As `run_plan`, without blocking the event loop."""
    running: dict[asyncio.Task[None], tuple[int, Call]] = {}
    num_started = 0
    try:
        with _progress(plan) as advance:
            while running or num_started < len(plan.makers):
                while num_started < len(plan.makers) and len(running) < plan.max_running:
                    call = plan.makers[num_started]()
                    task = asyncio.ensure_future(plan.awaited(call))
                    running[task] = (num_started, call)
                    num_started += 1
                    del call, task
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                first = min(ended, key=lambda task: running[task][0])
                advance()
                index, call = running.pop(first)
                result = _result(call, first.exception(), plan)
                del call, first, ended
                yield index, result
                del result
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def collect(results: Iterator[tuple[int, Any]], count: int) -> list[Any]:
    """The results in the order of their indices."""
    found: list[Any] = [None] * count
    for index, result in results:
        found[index] = result
    return found


def without_index(results: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """The results alone."""
    for _, result in results:
        yield result


def _result(call: Call, error: BaseException | None, plan: Plan) -> Any:
    if error is None:
        return call.state
    if plan.returns_errors and isinstance(error, Exception):
        return error
    raise error


def _next(ended: queue.SimpleQueue[tuple[int, BaseException | None]]) -> Any:
    while True:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=INTERRUPT_SECONDS)


def _reporter(
    ended: queue.SimpleQueue[tuple[int, BaseException | None]], index: int
) -> Callable[[Future[None]], None]:
    return lambda future: ended.put((index, future.exception()))


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[], None]]:
    """A function to call for each run that ends; it moves a bar on standard error, if wanted."""
    if not plan.shows_progress:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("runs", total=len(plan.makers))
        yield lambda: bar.advance(task)
