"""One run of a program: its backend, its defaults, and all its branches."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from palmette.errors import PalmetteError, ProgramError
from palmette.lang.backend import explains_prompts
from palmette.lang.branch import Branch
from palmette.lang.executor import LoopThread
from palmette.lang.limits import Budget, Limits, Stop
from palmette.lang.outlook import Ahead, Forecast
from palmette.lang.signals import Signal
from palmette.lang.tracing.recording import RunRecord
from palmette.lang.variables import Failure
from palmette.protocol import ProgramListener, TokenBackend, Usage

_WORK = LoopThread("palmette-lang")


class Run:
    """What the branches of one call of a program share.

    `is_async` says that the program is an `async def`, which must not block its event loop,
    `explains` that it is to be said of every prompt why it was cached or not, `traces` that
    `record` is to have that and log-probabilities where the backend can tell, `limits` what the run
    may take from `start` on.
    """

    def __init__(
        self,
        backend: TokenBackend,
        defaults: Mapping[str, Any],
        *,
        is_async: bool = False,
        explains: bool = False,
        traces: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.run_id = uuid.uuid4().hex
        self.forecast = Forecast(self.run_id)
        self._listener = backend if isinstance(backend, ProgramListener) else None
        # Whatever max_tokens says, there will be no more; of no use where nobody listens.
        self.max_context = 0 if self._listener is None else backend.max_context
        self.backend = backend
        self.defaults = defaults
        self.is_async = is_async
        self.explains = explains
        self.traces = traces and explains_prompts(backend)
        self.record = RunRecord(is_detailed=traces)
        # Reentrant, because a batch that is garbage-collected cancels its runs wherever the
        # collector happens to run.
        self.lock = threading.RLock()
        self.work = _WORK
        self.changed = Signal(self.lock)
        # Told of each branch that has come to have nothing left to do, with the lock held. Who
        # waits for many must not be woken by each: it would fight with the loop over the lock.
        self.watchers: set[Callable[[Branch], object]] = set()
        self.is_finished = False
        self._is_told_over = False
        self.error: BaseException | None = None  # what the program itself ended with
        self.return_value: Any = None
        self.open_paths: set[tuple[int, ...]] = set()  # of branches that are not over, but the root
        self._num_requests = 0
        self._live: set[Branch] = set()
        self._num_settled = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._failures: list[Failure] = []
        self._limits = limits or Limits()
        tokens = self._limits.max_total_tokens
        budget = None if tokens is None else Budget(tokens, "the run")
        self.root = Branch(self, budget=budget)

    @property
    def usage(self) -> Usage:
        """What all branches have used so far."""
        return self.root.usage

    def start(self) -> None:
        """The program begins now."""
        self.record.begin()
        if self._limits.timeout is not None:
            self.stop_after(self._limits.timeout, "the run", [self.root])

    def stop_after(self, seconds: float, of: str, branches: Iterable[Branch]) -> None:
        """Stop `branches` when so much time has passed from now on, unless the run has ended."""
        alive = weakref.WeakSet(branches)
        self.work.call(self._set_timer, time.monotonic() + seconds, seconds, of, alive)

    def next_request_id(self, branch: Branch) -> str:
        """An id no other request has. On the loop."""
        self._num_requests += 1
        place = ".".join(map(str, branch.path)) or "root"
        return f"{self.run_id}-{place}-{self._num_requests}"

    def check_open(self) -> None:
        """Raise unless the program may go on. With the lock held."""
        if self.is_finished:
            raise ProgramError("the program has ended; its state can only be read")

    def tell(self, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """Let the backend know what is ahead, if that has changed, and which branches are over."""
        if self._listener is None:
            return
        # With the lock held, so that nothing is announced of a program after its end.
        with self.lock:
            if self._is_told_over:
                return
            outlook = self.forecast.latest() if ended else self.forecast.news()
            if outlook is not None:
                self._listener.announce(outlook, ended)

    def close(self, branches: Iterable[Branch]) -> None:
        """The program appends no more to these, as far as one can tell."""
        with self.lock:
            ended = [path for branch in branches for path in branch.close()]
        self.tell(ended)

    def close_all(self) -> None:
        """The program has returned: it appends no more to any branch."""
        with self.lock:
            self.forecast.is_open = False
            ended = []
            stack = [self.root]
            while stack:
                branch = stack.pop()
                stack += branch.live_children()
                ended += branch.close()
        self.tell(ended)

    def cancel(self, why: str = "the run was cancelled") -> None:
        """Abort what runs and drop what is queued; does nothing on a run that has ended."""
        self.root.stop(Stop.cancelled(why))

    def interruption(self) -> PalmetteError:
        """What tells that the run was stopped, and what it had not done then."""
        stop = self.root.stopped
        assert stop is not None
        with self.lock:
            failed = [failure for failure in self._failures if failure.seen is stop.seen]
        return (failed or [stop.failure(None, ())])[0].error()

    def wait_idle(self) -> None:
        """Block until no branch has anything left to do."""
        self.changed.wait(self._is_idle)

    async def wait_idle_async(self) -> None:
        """As `wait_idle`, without blocking the event loop."""
        await self.changed.wait_async(self._is_idle)

    def finish(self, error: BaseException | None = None) -> None:
        """The program has returned, or raised `error`, and no branch has anything left to do."""
        with self.lock:
            if error is None:
                error = self._unraised_failure()
            if self._timers:
                self.work.call(self._clear_timers)
            self.is_finished = True
            self.error = error
            self.record.finish(error)
            self.changed.notify()
            self.root.changed.notify()
            self.root.text_changed.notify()
            self._tell_over()

    def branch_started(self, branch: Branch) -> None:
        """A branch has something to do. With the lock held."""
        self._live.add(branch)

    def branch_ended(self, branch: Branch) -> None:
        """A branch has nothing left to do. With the lock held."""
        self._live.discard(branch)
        self._num_settled += 1
        branch.num_settled = self._num_settled
        for watch in tuple(self.watchers):
            watch(branch)
        if not self._live:
            self.changed.notify()
            self._tell_over()

    def branch_failed(self, failure: Failure) -> None:
        """A branch has failed. With the lock held."""
        self._failures.append(failure)

    def branch_gone(
        self, parent: weakref.ref[Branch], path: tuple[int, ...], submitted: Ahead
    ) -> None:
        """The program has let go of a branch without joining it. On the loop."""
        with self.lock:
            if path not in self.open_paths:
                return
            self.open_paths.discard(path)
            self.forecast.in_branches.subtract(submitted)
            branch = parent()
            ended = [path] if branch is None else [path, *branch.child_gone()]
        self.tell(ended)

    def _tell_over(self) -> None:
        """Let the backend forget the program, once it has ended and nothing of it is under way: a
        run that was interrupted ends before its branches do. With the lock held.
        """
        if self._is_told_over or not self.is_finished or self._live:
            return
        self._is_told_over = True
        if self._listener is not None and self.forecast.has_asked:
            self._listener.end_program(self.run_id)

    def _set_timer(
        self, when: float, seconds: float, of: str, branches: weakref.WeakSet[Branch]
    ) -> None:
        with self.lock:
            if not self.is_finished:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_at(when, self._time_out, seconds, of, branches))

    def _time_out(self, seconds: float, of: str, branches: weakref.WeakSet[Branch]) -> None:
        stop = Stop.timed_out(seconds, of)
        for branch in tuple(branches):
            branch.stop(stop)

    def _clear_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()

    def _is_idle(self) -> bool | None:
        return None if self._live else True

    def _unraised_failure(self) -> PalmetteError | None:
        """The first failure that the program never came to see."""
        failures = list(self._failures)
        if self.root.stopped is not None:
            failures.append(self.root.stopped.failure(None, ()))
        unseen = [failure for failure in failures if not failure.seen.was_raised]
        return unseen[0].error() if unseen else None
