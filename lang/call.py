"""One call of a program: its body together with the run that does its work."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from palmette.lang.run import Run
from palmette.lang.state import State

_background: set[asyncio.Task[None]] = set()  # an event loop itself keeps only weak references


class Call:
    """`func` with its arguments, ready to run. `state` shows the run from outside."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Run,
    ) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._run = run
        self.state = State(run.root, is_outside=True)
        run.record.of_call(
            getattr(func, "__name__", "program"), {**dict(_named(func, args)), **kwargs}
        )

    def run(self) -> None:
        """Call the function on this thread and wait for all it has started. Raises its error."""
        run = self._run
        run.start()
        try:
            result = self._func(State(run.root), *self._args, **self._kwargs)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(f"{self._func!r} returned a coroutine: declare it with async def")
            run.return_value = result
            run.close_all()
            run.wait_idle()
        except BaseException as error:
            run.cancel()
            try:
                if isinstance(error, Exception):
                    run.wait_idle()
            finally:  # the waiting may be interrupted in its turn
                run.finish(error)
            raise
        run.finish()
        if run.error is not None:
            raise run.error

    async def run_async(self) -> None:
        """Await the function on this event loop and wait for all it has started."""
        run = self._run
        run.start()
        try:
            run.return_value = await self._func(State(run.root), *self._args, **self._kwargs)
            run.close_all()
            await run.wait_idle_async()
        except BaseException as error:
            run.cancel()
            try:
                if isinstance(error, Exception):
                    await run.wait_idle_async()
            finally:  # the waiting may be interrupted in its turn
                run.finish(error)
            raise
        run.finish()
        if run.error is not None:
            raise run.error

    def run_quietly(self) -> None:
        """As `run`; an error is left for those who read the state."""
        try:
            self.run()
        except Exception:
            return  # it is the run's `error`

    async def run_quietly_async(self) -> None:
        """As `run_async`; an error is left for those who read the state."""
        try:
            await self.run_async()
        except Exception:
            return  # it is the run's `error`

    def start_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `loop`, which runs on this thread, await the function."""
        task = loop.create_task(self.run_quietly_async())
        _background.add(task)
        task.add_done_callback(_background.discard)

    def cancel(self, why: str = "the run was cancelled") -> None:
        """Abort what runs."""
        self._run.cancel(why)

    def wait_idle(self) -> None:
        """Block until the backend does nothing for it."""
        self._run.wait_idle()

    def outcome(self) -> State | BaseException:
        """Of a call that was cancelled: its state if it had ended well by then, or its error."""
        if not self._run.is_finished:
            return self._run.interruption()
        return self.state if self._run.error is None else self._run.error


def _named(func: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each positional argument with the name of its parameter, or its place where it has none."""
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[1 : code.co_argcount]
    for place, value in enumerate(args):
        yield (names[place] if place < len(names) else f"[{place}]"), value
