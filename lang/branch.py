"""A branch of a running program: its queue of operations and what they have made so far.

Operations are appended by the program, in whatever thread it runs, and carried out one after the
other by a coroutine on the executor's loop, which exists only while there is something to do.
Everything that both sides see is guarded by the run's lock.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from palmette.errors import PrimitiveFailed, RequestAborted
from palmette.lang.limits import Budget, OutOfTokens, Stop
from palmette.lang.outlook import Ahead
from palmette.lang.signals import Signal
from palmette.lang.transcript import Transcript
from palmette.lang.variables import Failure, Slot
from palmette.protocol import Outlook, Usage

if TYPE_CHECKING:
    from palmette.lang.operations import Operation, Span
    from palmette.lang.run import Run
    from palmette.lang.tracing.recording import BranchRecord


class Branch:
    """One line of a program: the whole of it, or what follows a fork."""

    def __init__(
        self,
        run: Run,
        *,
        path: tuple[int, ...] = (),
        parent: Branch | None = None,
        is_born: bool = True,
        budget: Budget | None = None,
    ) -> None:
        self.run = run
        self.path = path
        self.parent = parent
        above = None if parent is None else parent.record
        self.record: BranchRecord = run.record.new_branch(path, above)
        self.transcript = Transcript(run.backend.tokenizer)
        self.slots: dict[str, Slot] = {}
        self.role: str | None = None  # as the program sees it, ahead of the transcript's
        self.num_forks = 0
        self.inherited: dict[str, Slot] = {}  # the parent's variables at the fork
        # Variable scopes that are open, by name, the innermost last.
        self.spans: dict[str, Sequence[Span]] = {}
        self.chunks: list[str] = []
        self.failure: Failure | None = None
        self.stopped: Stop | None = None  # itself, not with one it came from
        self.budget = budget
        self.num_settled = 0  # the greater, the later it came to have nothing left to do
        self.usage = Usage()
        self.changed = Signal(run.lock)  # an operation ended, a slot came into being
        self.text_changed = Signal(run.lock)  # a chunk of text arrived
        self.num_submitted = 0
        self.num_done = 0
        self.submitted = Ahead()  # by all operations so far
        self._ahead = Ahead()  # by those in the queue
        # The program appends no more, as far as one can tell: it has joined the branch, or ended.
        self._is_closed = False
        self._is_over = False
        self.has_asked = False
        self._to_close: list[Branch] = []  # once something was asked
        self._live_children: weakref.WeakSet[Branch] = weakref.WeakSet()  # not over
        self._queue: deque[tuple[Operation, Ahead]] = deque()
        self._current: Operation | None = None
        self._task: asyncio.Task[None] | None = None
        # A branch that is not born waits for its parent's coroutine to hand it its transcript.
        self._is_born = is_born
        self._is_driven = not is_born

    def submit(self, operations: Sequence[Operation], slots: dict[str, Slot]) -> None:
        """Queue `operations`; `slots` become the values of their names. Returns at once.

        Raises ProgramStopped if the branch was cancelled or came to its timeout, ProgramError if
        the run has ended and there is something to do.
        """
        with self.run.lock:
            if operations or not self.run.is_finished:
                self._check_open(operations[0] if operations else None)
            self.slots.update(slots)
            if operations:
                self._come_back()
            self._enqueue(operations)
            self.num_submitted += len(operations)
            starts = bool(operations) and not self._is_driven
            if starts:
                self._is_driven = True
                self.run.branch_started(self)
            if slots:
                self.changed.notify()
                self.text_changed.notify()
        if starts:
            self.run.work.call(self._start)

    def children(self, count: int, budget: Budget | None = None) -> list[Branch]:
        """`count` branches that wait for this one to get to where they leave it; what they generate
        counts towards `budget`.
        """
        with self.run.lock:
            self._check_open(None)
            fork, self.num_forks = self.num_forks, self.num_forks + 1
            made = []
            for index in range(count):
                child = Branch(
                    self.run,
                    path=(*self.path, fork, index),
                    parent=self,
                    is_born=False,
                    budget=budget,
                )
                child.slots = dict(self.slots)
                child.inherited = dict(self.slots)
                child.role = self.role
                self._live_children.add(child)
                self.run.open_paths.add(child.path)
                self.run.branch_started(child)
                _watch(child)
                made.append(child)
        return made

    def outlook(self, num_prompt_tokens: int) -> tuple[Outlook, bool]:
        """For a request of this branch: what the run knows of its future, and whether the branch
        may ask again. On the loop.
        """
        with self.run.lock:
            forecast = self.run.forecast
            forecast.note_encoded(num_prompt_tokens, self.transcript.num_chars)
            self.has_asked = True
            # Branches that have asked go on from what is theirs.
            is_needed = any(not child.has_asked for child in self.live_children())
            is_last = self._is_closed and not self._ahead.num_asks and not is_needed
            return forecast.ask(), not is_last

    def close(self) -> list[tuple[int, ...]]:
        """The program appends no more to it, as far as one can tell; the paths of branches that are
        over by this. Lock held.
        """
        self._is_closed = True
        return self._over()

    def close_later(self, other: Branch) -> None:
        """Close `other` when this branch has asked for something again, or wants the same for
        another one.
        """
        with self.run.lock:
            closing, self._to_close = self._to_close, [other]
        self.run.close(closing)

    def child_gone(self) -> list[tuple[int, ...]]:
        """A branch forked from it is no more; the paths of those over by this. Lock held."""
        return self._over()

    def live_children(self) -> list[Branch]:
        """Branches forked from it that may still do something. Lock held."""
        return list(self._live_children)

    @property
    def is_dropped(self) -> bool:
        """Whether the program itself has cancelled it."""
        return self.stopped is not None and self.stopped.is_cancel

    def is_settled(self) -> bool:
        """Whether it has nothing left to do. Lock held."""
        return not self._is_driven

    def has_succeeded(self) -> bool:
        """Whether it has done all it was to do, of those that are settled. Lock held."""
        return self.failure is None and not self.is_dropped

    def why_failed(self) -> Failure:
        """Why it has not succeeded. Lock held."""
        if self.failure is not None:
            return self.failure
        assert self.stopped is not None
        return self.stopped.failure(None, self.path)

    def has_done(self, count: int) -> bool:
        """Whether the first `count` operations are over, one way or the other. Lock held."""
        return self.num_done >= count and (self._is_born or self.failure is not None)

    def be_born(self, transcript: Transcript) -> None:
        """Begin with a copy of `transcript`, if it is still to begin. On the loop."""
        if self.failure is not None:
            return
        self.transcript = transcript.copy()
        with self.run.lock:
            self._is_born = True
            self.record.be_born()
            if transcript.text:
                self.chunks.append(transcript.text)
            self.changed.notify()
            self.text_changed.notify()
        self._start()

    def add_text(self, text: str, slot: Slot | None = None, *, is_part: bool = True) -> None:
        """Let readers see `text`; in the slot alone if it is no part of the branch. On the loop."""
        if text:
            with self.run.lock:
                if is_part:
                    self.chunks.append(text)
                if slot is not None:
                    slot.chunks.append(text)
                elif self._current is not None and self._current.record is not None:
                    self._current.record.chunks.append(text)
                self.text_changed.notify()

    def set_slot(self, slot: Slot | None, meta: dict[str, object] | None = None) -> None:
        """The slot has its value. On the loop."""
        if slot is not None:
            with self.run.lock:
                slot.meta = meta or {}
                slot.is_set = True
                self.changed.notify()
                self.text_changed.notify()

    def add_usage(self, usage: Usage) -> None:
        """Count what a primitive used, here and in every branch this one came from. On the loop."""
        with self.run.lock:
            branch: Branch | None = self
            while branch is not None:
                branch.usage = branch.usage.plus(usage)
                branch = branch.parent

    def stop(self, stop: Stop) -> None:
        """End early, with all branches forked from this one: what runs is aborted, what is queued
        dropped, nothing more can be appended. Returns at once; does nothing on a run that has
        ended, or where it ends early already. What was done stays as it is.
        """
        with self.run.lock:
            if self.run.is_finished or self._stop() is not None:
                return
            self.stopped = stop
            self.record.fail(stop.failure(None, self.path).make())
        self.run.work.call(self._interrupt_all)

    def fail(self, failure: Failure) -> None:
        """End with `failure`: what was queued fails with it, branches that were to be forked
        included, and so does what comes later.
        """
        stack = [self]
        while stack:
            stack += reversed(stack.pop()._fail(failure))

    def _fail(self, failure: Failure) -> list[Branch]:
        """End with `failure`; the branches that will never be born."""
        orphans: list[Branch] = []
        with self.run.lock:
            if self.failure is None:
                self.failure = failure
                self.run.branch_failed(failure)
            error = self.failure.make()
            self.record.fail(error)
            dropped = [self._current] if self._current is not None else []
            if self._current is not None and self._current.record is not None:
                self._current.record.finish(error)
            while self._queue:
                operation, _ = self._dequeue()
                dropped.append(operation)
                if operation.record is not None:
                    operation.record.drop()
            self._current = None
            for operation in dropped:
                operation.fail(self.failure)
                orphans += operation.orphans()
            self.num_done = self.num_submitted
            self._is_driven = False
            self.changed.notify()
            self.text_changed.notify()
            self.run.branch_ended(self)
            ended = self._over()
        self.run.tell(ended)
        return orphans

    def _start(self) -> None:
        task = self._task = asyncio.get_running_loop().create_task(self._drive())
        if self._stop() is not None:
            task.cancel()
        task.add_done_callback(self._ended)

    def _interrupt_all(self) -> None:
        stack = [self]
        while stack:
            branch = stack.pop()
            with self.run.lock:
                stack += branch.live_children()
            branch._interrupt()

    def _interrupt(self) -> None:
        if not self._is_born:
            self._fail_stopped()
        elif self.is_settled():
            self.run.close([self])
        elif self._task is not None:  # otherwise it sees when it starts that it is not to
            self._task.cancel()

    def _fail_stopped(self) -> None:
        stop = self._stop()
        assert stop is not None
        self.fail(stop.failure(self._busy_with(), self.path))

    def _stop(self) -> Stop | None:
        """Why it ends early, if it does."""
        branch: Branch | None = self
        while branch is not None:
            if branch.stopped is not None:
                return branch.stopped
            branch = branch.parent
        return None

    def _busy_with(self) -> Operation | None:
        """What it does, or would do next, or waits for."""
        if self._current is not None:
            return self._current
        if not self._is_born and self.parent is not None and self.parent._current is not None:
            return self.parent._current
        return self._queue[0][0] if self._queue else None

    def _check_open(self, operation: Operation | None) -> None:
        """Raise unless the program may append `operation`. Lock held."""
        stop = self._stop()
        if stop is not None and not self.run.is_finished:
            raise stop.failure(operation, self.path).error()
        self.run.check_open()

    async def _drive(self) -> None:
        while True:
            with self.run.lock:
                if not self._queue:
                    self._is_driven = False
                    self.run.branch_ended(self)
                    ended = self._over()
                    break
                if self.failure is not None:
                    ended = []
                    break
                operation, asks = self._dequeue()
                self._current, record = operation, operation.record
                if record is not None:
                    record.begin()
            try:
                await operation.run(self)
            except OutOfTokens as error:
                self.fail(error.failure(operation, self.path))
                return
            except asyncio.CancelledError as error:
                if self._stop() is not None:
                    raise
                aborted = RequestAborted("it was cancelled by something else than the program")
                aborted.__cause__ = error
                self.fail(self._failure(operation, aborted))
                return
            except BaseException as error:  # SystemExit, too: who waits must hear of it
                self.fail(self._failure(operation, error))
                return
            with self.run.lock:
                self._current = None
                if record is not None:
                    record.finish()
                self.num_done += 1
                self.changed.notify()
                self.text_changed.notify()  # readers of text wait for the end of it, too
            if asks and self._to_close:
                with self.run.lock:
                    closing, self._to_close = self._to_close, []
                self.run.close(closing)
        if self.failure is not None:
            self.fail(self.failure)
        else:
            self.run.tell(ended)

    def _failure(self, operation: Operation, error: BaseException) -> Failure:
        name, where = operation.name, operation.where
        return Failure(partial(PrimitiveFailed, name, error, where=where, path=self.path))

    def _enqueue(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.record is None:
                operation.record = self.record.ask(operation)
            ahead = operation.ahead()
            ahead.num_generated = min(ahead.num_generated, self.run.max_context)
            self._queue.append((operation, ahead))
            self.submitted.add(ahead)
            self._ahead.add(ahead)
            self.run.forecast.ahead.add(ahead)
            if self.parent is not None:
                self.run.forecast.in_branches.add(ahead)

    def _dequeue(self) -> tuple[Operation, bool]:
        """The next operation, and whether it asks the backend for something."""
        operation, ahead = self._queue.popleft()
        self._ahead.subtract(ahead)
        self.run.forecast.ahead.subtract(ahead)
        return operation, ahead.num_asks > 0

    def _over(self) -> list[tuple[int, ...]]:
        """The paths of this branch and of those it came from, as far as nothing more will come of
        them. The root is over when the run is. Lock held.
        """
        paths = []
        branch: Branch | None = self
        while branch is not None and branch.parent is not None and branch._can_end():
            branch._is_over = True
            branch.run.open_paths.discard(branch.path)
            branch.run.forecast.in_branches.subtract(branch.submitted)
            branch.parent._live_children.discard(branch)
            paths.append(branch.path)
            branch = branch.parent
        return paths

    def _come_back(self) -> None:
        """It was joined, and is appended to all the same."""
        branch = self
        while branch._is_over and branch.parent is not None:
            branch._is_over = False
            branch.run.open_paths.add(branch.path)
            branch.parent._live_children.add(branch)
            branch.run.forecast.in_branches.add(branch.submitted)
            branch = branch.parent

    def _can_end(self) -> bool:
        return (
            (self._is_closed or self.failure is not None)
            and not self._is_over
            and not self._is_driven
            and not self._queue
            and not self._has_live_children()
        )

    def _has_live_children(self) -> bool:
        # Their number may still count one that is gone, of which others hear at the same time.
        return any(True for _ in self._live_children)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if task.cancelled():
            self._fail_stopped()
            return
        error = task.exception()
        if error is not None:  # a fault of ours: whoever waits must hear of it all the same
            failed = partial(PrimitiveFailed, "the executor", error, where=__name__, path=self.path)
            self.fail(Failure(failed))


def _watch(branch: Branch) -> None:
    """Have its run told when the program has let go of the branch, without keeping either."""
    assert branch.parent is not None
    run, parent = weakref.ref(branch.run), weakref.ref(branch.parent)
    watch = weakref.finalize(branch, _is_gone, run, parent, branch.path, branch.submitted)
    watch.atexit = False


def _is_gone(
    run_ref: weakref.ref[Run],
    parent_ref: weakref.ref[Branch],
    path: tuple[int, ...],
    submitted: Ahead,
) -> None:
    """Wherever the collector happens to run, whatever locks are held there."""
    run = run_ref()
    if run is not None and not run.is_finished and path in run.open_paths:
        run.work.call(run.branch_gone, parent_ref, path, submitted)
