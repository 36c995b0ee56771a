"""Many runs of one program, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from palmette.errors import BatchInterrupted, ProgramCancelled
from palmette.lang.call import Call
from palmette.lang.executor import ThreadPool
from palmette.lang.signals import INTERRUPT_SECONDS

_STOPPED = "the batch was stopped"


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


def run_plan(plan: Plan, *, in_order: bool = False) -> Generator[tuple[int, Any], None, None]:
    """Index and state (or exception) of each run as it ends, or in order.

    Closing the iterator, Ctrl-C, and an error that is raised cancel what still runs; the last of
    these waits until nothing of it is left in the backend.
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
    except Exception:  # a collector that closes it must not wait, nor must a second Ctrl-C
        _wind_up(running.values())
        raise
    finally:
        for call in running.values():
            call.cancel(_STOPPED)
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


def run_all(plan: Plan) -> list[Any]:
    """The results in the order of the items.

    Ctrl-C stops the batch: with `returns_errors` a ProgramCancelled stands in the place of each run
    that was not done, otherwise BatchInterrupted is raised with the same results.
    """
    found: dict[int, Any] = {}
    calls: dict[int, Call] = {}  # an interrupt between two lines must not lose what was done
    try:
        with contextlib.closing(run_plan(_keeping(plan, calls))) as results:
            for index, result in results:
                found[index] = result
                calls.pop(index, None)
    except KeyboardInterrupt as interrupt:
        _wind_up(calls.values())
        for index in range(len(plan.makers)):
            if index not in found:
                call = calls.get(index)
                found[index] = ProgramCancelled(_STOPPED) if call is None else call.outcome()
        every = [found[index] for index in range(len(plan.makers))]
        if not plan.returns_errors:
            raise BatchInterrupted(every) from interrupt
        return every
    return [found[index] for index in range(len(plan.makers))]


def _keeping(plan: Plan, calls: dict[int, Call]) -> Plan:
    """The plan, with each call in `calls` from when it is made."""

    def keep(index: int, make: Callable[[], Call]) -> Call:
        calls[index] = made = make()
        return made

    makers = [functools.partial(keep, index, make) for index, make in enumerate(plan.makers)]
    return replace(plan, makers=makers)


def _wind_up(calls: Iterable[Call]) -> None:
    """Cancel them all and wait until the backend has nothing of them."""
    calls = list(calls)
    for call in calls:
        call.cancel(_STOPPED)
    for call in calls:
        call.wait_idle()


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
    if not plan.shows_progress or not plan.makers:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """Runs a second; of late while it goes on, in the end of all of them."""

        def render(self, task: Task) -> Text:
            if task.finished_time:
                speed: float | None = task.completed / task.finished_time
            else:
                speed = task.speed
            return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("runs", total=len(plan.makers))
        yield lambda: bar.advance(task)
