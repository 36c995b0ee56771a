"""The state of a program: what it appends to, and where it reads what came of it.

``state += ...`` returns at once. The work is done in order, in the background, and whatever reads
waits for what it reads: a variable until it is set, `text()` and its like until everything appended
so far is done. A failure is raised where the program reads what depends on it, or at the end of the
run. In an ``async def`` program, ``await state.value("x")`` and ``await state.ready()`` wait; plain
reading returns what is there already and raises rather than block the event loop.

Two handles show the same state. The one a program gets knows what the program has appended: a
name that has not been appended is unset. The one that `run` and `stream` return waits for the
program: a name may still come, and `text()` is there when the program has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any, Literal, TypeVar, overload

from palmette.errors import InvalidRequest, ProgramError, UnsupportedFeature, VariableNotSet
from palmette.lang.appending import append, caller
from palmette.lang.branch import Branch
from palmette.lang.branches import Branches
from palmette.lang.figures import Figures, figures_of, print_figures
from palmette.lang.limits import Budget, Limits, Stop
from palmette.lang.nodes import Expr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, as_expr
from palmette.lang.operations import Fork
from palmette.lang.signals import Signal
from palmette.lang.tracing import Trace
from palmette.lang.variables import Slot
from palmette.protocol import Message, Usage

T = TypeVar("T")


class State:
    """One branch of a running program, or of one that has ended."""

    def __init__(self, branch: Branch, *, is_outside: bool = False) -> None:
        self._branch = branch
        self._is_outside = is_outside

    # Appending

    def __iadd__(self, other: Expr | str) -> State:
        self._append(as_expr(other))
        return self

    def system(self, content: Expr | str | None = None) -> contextlib.AbstractContextManager[State]:
        """Append a message of the system; without content, open one for a ``with`` block."""
        return self._message("system", content)

    def user(self, content: Expr | str | None = None) -> contextlib.AbstractContextManager[State]:
        """Append a message of the user; without content, open one for a ``with`` block."""
        return self._message("user", content)

    def assistant(
        self, content: Expr | str | None = None
    ) -> contextlib.AbstractContextManager[State]:
        """Append a message of the assistant; without content, open one for a ``with`` block."""
        return self._message("assistant", content)

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[State]:
        """What is appended in the ``with`` block is, as text, the value of variable `name`."""
        self._append(ScopeBegin(name))
        yield self
        self._append(ScopeEnd(name))

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        max_total_tokens: int | None = None,
    ) -> Branches:
        """`size` branches which begin with what this state holds when its pending work is done.

        They copy ids, pending constants, variables and the open role. Returns at once; from then
        on parent and branches are independent.

        After `timeout` seconds what the branches, and those forked from them, have not done fails
        with ProgramTimeout. Together they generate at most `max_total_tokens`: a `gen` gets what is
        left of them, and fails with TokenBudgetExceeded if that is nothing.
        """
        limits = Limits(timeout, max_total_tokens)
        if position_ids_offset is not None:
            raise UnsupportedFeature(
                "position_ids_offset",
                "branches take the positions that follow from their token ids",
                param="position_ids_offset",
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"a fork needs a size of at least 1, got {size!r}")
        where = caller()
        of = f"fork({size}) at {where}"
        # At once: a cancellation between the two would leave children that nobody ever ends.
        with self._branch.run.lock:
            budget = self._branch.budget
            if limits.max_total_tokens is not None:
                budget = Budget(limits.max_total_tokens, of, within=budget)
            children = self._branch.children(size, budget)
            fork = Fork(name=f"fork({size})", where=where, children=children)
            self._branch.submit([fork], {})
            for child in children:
                child.record.forked_by = fork.record
            if fork.record is not None:
                fork.record.children = [child.record for child in children]
        if limits.timeout is not None:
            self._branch.run.stop_after(limits.timeout, of, children)
        return Branches([State(child) for child in children], children, self._branch)

    @contextlib.contextmanager
    def copy(
        self,
        position_ids_offset: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        max_total_tokens: int | None = None,
    ) -> Iterator[State]:
        """``with state.copy() as branch: ...`` is a fork of one that is joined at the end."""
        branches = self.fork(
            1, position_ids_offset, timeout=timeout, max_total_tokens=max_total_tokens
        )
        yield branches[0]
        branches.join()

    # Variables

    def __getitem__(self, name: str) -> Any:
        """The value of a variable, once it is set.

        Raises VariableNotSet if nothing has appended it, PrimitiveFailed if what should have set it
        failed, InvalidOutput if its text is not of the type asked for.
        """
        return self._settled(name).value()

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def __contains__(self, name: object) -> bool:
        """Whether something appended so far sets the variable; does not wait for its value."""
        return name in self._branch.slots

    def names(self) -> list[str]:
        """The variables that something appended so far sets, in order; does not wait for values."""
        return list(self._branch.slots)

    def get(self, name: str, default: Any = None) -> Any:
        """As ``state[name]``, or `default` if the variable is not set."""
        try:
            slot = self._settled(name)
        except VariableNotSet:
            return default
        return slot.value()

    get_var = __getitem__

    def set(self, name: str, value: Any) -> None:
        """Give a variable a value of the program's own; a list is copied and can be appended to.

        Goes on working when the program has ended.
        """
        self._branch.submit([], {name: Slot.of_value(name, self._branch, value)})

    set_var = set

    def raw(self, name: str) -> Any:
        """The text of a variable, whatever its type; of a list variable, the list of texts."""
        return self._settled(name).raw()

    def meta(self, name: str) -> Any:
        """What is known of the primitive that set the variable: a dict (of a list, a list of them).

        ``prompt_tokens = cached_tokens + prefilled_tokens`` and ``completion_tokens =
        decoded_tokens + forced_tokens + shared_tokens``, ``milliseconds`` and parts of them,
        ``finish_reason``. For `gen` also ``stop_reason``, ``token_ids`` and, if asked for,
        ``logprobs`` and ``prompt_logprobs`` (of its prompt, from the position asked for), each a
        tuple of `TokenLogprob`, and the same as SGLang has it, in entries of (log-probability, id,
        text): ``output_token_logprobs``, ``output_top_logprobs``, ``input_token_logprobs``. For
        `select` ``probabilities``, ``log_likelihoods``, ``scores``, ``method``, ``token_ids`` and
        ``token_logprobs``, each by option; a chat API gives less, and may leave ``probabilities``
        None. Where a backend was told prices, ``cost``. After ``run(..., explain=True)`` also
        ``prompt``: its tokens in stretches, each cached or with the reason why it was not.
        """
        return self._settled(name).all_meta()

    get_meta_info = meta

    def figures(self) -> list[Figures]:
        """What each primitive that set a variable cost in tokens and time; waits for all."""
        self.sync()
        return figures_of(self)

    def print_figures(self, file: IO[str] | None = None) -> None:
        """`figures` as a table on `file`, by default standard output."""
        self.sync()
        print_figures(self, file)

    def trace(self) -> Trace:
        """What the whole run, from the root on, has done so far, primitive by primitive.

        Does not wait, and raises nothing for a run that failed. A run with ``trace=True`` has
        log-probabilities of its tokens and the reasons of cache misses, too.
        """
        return Trace.of(self)

    async def value(self, name: str) -> Any:
        """The value of a variable, waited for without blocking the event loop."""
        slot = await self._find_async(name)
        self._branch.run.tell()
        for leaf in slot.leaves():
            await leaf.branch.changed.wait_async(leaf.settled)
        return slot.value()

    # The whole

    def text(self) -> str:
        """Everything appended and generated so far, chat template included."""
        self.sync()
        return self._branch.transcript.text

    def messages(self) -> list[Message]:
        """The messages closed so far."""
        self.sync()
        return self._branch.transcript.messages

    def token_ids(self) -> tuple[int, ...]:
        """The ids of everything so far: those that stand for `text()`, after the tokenizer's own
        prefix if the state begins with plain text. Changes nothing: pending constants stay pending.
        """
        self.sync()
        return self._branch.transcript.peek()

    def usage(self) -> Usage:
        """What this state and the branches forked from it have used so far."""
        self.sync()
        return self._branch.usage

    def sync(self) -> None:
        """Wait until all is done that was appended so far; raise if any of it failed."""
        self._wait_ready("await state.ready()")

    async def ready(self) -> State:
        """As `sync`, without blocking the event loop; afterwards reading does not wait."""
        self._branch.run.tell()
        await self._branch.changed.wait_async(self._when_ready())
        self._raise_failure()
        return self

    def error(self) -> BaseException | None:
        """What the state failed with, once all is done that was appended so far."""
        self._wait(self._branch.changed, self._when_ready(), "await state.ready()")
        if self._is_outside and self._branch.run.error is not None:
            return self._branch.run.error
        failure = self._branch.failure
        return None if failure is None else failure.error()

    @property
    def ret_value(self) -> Any:
        """What the program's function returned; None as long as it runs."""
        return self._branch.run.return_value

    @property
    def path(self) -> tuple[int, ...]:
        """The place in the fork tree: for each fork on the way, its number and the branch's."""
        return self._branch.path

    def cancel(self) -> None:
        """Abort what this state and the branches forked from it still do; others go on.

        Of the state that `run` began with, that is the whole run. Returns at once. What was done
        can be read as before; who reads what was not done gets ProgramCancelled, and so does who
        appends.
        """
        where = caller()
        if not self.path:
            self._branch.run.cancel(f"the run was cancelled at {where}")
            return
        why = f"branch {self.path} was cancelled at {where}"
        self._branch.stop(Stop.cancelled(why, by_program=True))

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    # Streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text as it comes, or that of one variable; all of it, however late one asks.

        Ends when all is done that was appended so far; outside of the program, when it has ended.
        """
        if var_name is None:
            yield from self._chunks(self._branch, self._branch.chunks, self._when_ready())
            self._raise_failure()
            return
        slot = _streamed(self._find(var_name))
        for leaf in slot.leaves():
            yield from self._chunks(leaf.branch, leaf.chunks, leaf.settled)
        slot.raw()

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, Any]]: ...
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str] | AsyncIterator[tuple[str, Any]]:
        """As `text_iter`, without blocking the event loop.

        With `return_meta_data`, which is for a variable, each text comes with the `meta` known by
        then: an empty dict as long as the variable is not set. The last pair has an empty text and
        all of it.
        """
        if not return_meta_data:
            return self._text_async_iter(var_name)
        if var_name is None:
            raise InvalidRequest(
                "return_meta_data needs var_name: meta data are of one variable",
                param="return_meta_data",
            )
        return self._text_and_meta(var_name)

    async def _text_and_meta(self, var_name: str) -> AsyncIterator[tuple[str, Any]]:
        async for chunk in self._text_async_iter(var_name):
            yield chunk, self._slot_of(var_name, self._look_up(var_name) or False).known_meta()
        yield "", (await self._find_async(var_name)).all_meta()

    async def _text_async_iter(self, var_name: str | None) -> AsyncIterator[str]:
        if var_name is None:
            ready = self._when_ready()
            async for chunk in self._chunks_async(self._branch, self._branch.chunks, ready):
                yield chunk
            self._raise_failure()
            return
        slot = _streamed(await self._find_async(var_name))
        for leaf in slot.leaves():
            async for chunk in self._chunks_async(leaf.branch, leaf.chunks, leaf.settled):
                yield chunk
        slot.raw()

    def __aiter__(self) -> AsyncIterator[str]:
        return self.text_async_iter()

    def __iter__(self) -> Iterator[str]:
        return self.text_iter()

    def __repr__(self) -> str:
        names = ", ".join(self._branch.slots) or "none"
        return f"<State path={self.path} variables: {names}>"

    def _repr_html_(self) -> str:
        """As notebooks show it: what is there by now, without waiting."""
        from palmette.lang.tracing.notebook import state_html

        branch = self._branch
        with branch.run.lock:
            values = {
                name: ", ".join(leaf.shown() for leaf in slot.leaves())
                for name, slot in branch.slots.items()
            }
            error = branch.run.error if self._is_outside else None
            parts = branch.record.shown_parts()
        return state_html(parts, values, "" if error is None else str(error))

    # Inside

    def _append(self, expr: Expr) -> None:
        append(self._branch, expr)

    def _message(
        self, role: str, content: Expr | str | None
    ) -> contextlib.AbstractContextManager[State]:
        if content is None:
            return self._open_message(role)
        self._append(RoleBegin(role) + as_expr(content) + RoleEnd(role))
        return contextlib.nullcontext(self)

    @contextlib.contextmanager
    def _open_message(self, role: str) -> Iterator[State]:
        self._append(RoleBegin(role))
        yield self
        self._append(RoleEnd(role))

    def _settled(self, name: str) -> Slot:
        slot = self._find(name)
        for leaf in slot.leaves():
            self._wait(leaf.branch.changed, leaf.settled, f"await state.value({name!r})")
        return slot

    def _find(self, name: str) -> Slot:
        check = functools.partial(self._look_up, name)
        instead = f"await state.value({name!r})"
        return self._slot_of(name, self._wait(self._branch.changed, check, instead))

    async def _find_async(self, name: str) -> Slot:
        check = functools.partial(self._look_up, name)
        return self._slot_of(name, await self._branch.changed.wait_async(check))

    def _look_up(self, name: str) -> Slot | Literal[False] | None:
        """The slot; False if it will never be there; None if it may still come."""
        slot = self._branch.slots.get(name)
        if slot is not None:
            return slot
        return None if self._is_outside and not self._branch.run.is_finished else False

    def _slot_of(self, name: str, found: Slot | Literal[False]) -> Slot:
        if isinstance(found, Slot):
            return found
        if self._is_outside and self._branch.run.error is not None:
            raise self._branch.run.error
        raise VariableNotSet(name, list(self._branch.slots))

    def _when_ready(self) -> Callable[[], bool | None]:
        """A check for "all is done that was appended so far"."""
        branch = self._branch
        if self._is_outside:
            return lambda: True if branch.run.is_finished else None
        mark = branch.num_submitted
        return lambda: branch.has_done(mark) or None

    def _wait_ready(self, instead: str) -> None:
        self._wait(self._branch.changed, self._when_ready(), instead)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._is_outside and self._branch.run.error is not None:
            raise self._branch.run.error
        if self._branch.failure is not None:
            raise self._branch.failure.error()

    def _wait(self, signal: Signal, check: Callable[[], T | None], instead: str) -> T:
        if self._branch.run.is_async and not self._is_outside:
            found = signal.poll(check)
            if found is None:
                raise ProgramError(
                    f"an async program must not block its event loop: use `{instead}` first"
                )
            return found
        if not self._is_outside:
            self._branch.run.tell()  # the program stops here: all it knows is in the queues
        return signal.wait(check)

    def _chunks(
        self, branch: Branch, chunks: list[str], is_over: Callable[[], bool | None]
    ) -> Iterator[str]:
        position = 0
        while True:
            new, ended = self._wait(
                branch.text_changed,
                _after(chunks, position, is_over),
                "async for chunk in state.text_async_iter()",
            )
            yield from new
            position += len(new)
            if ended:
                return

    async def _chunks_async(
        self, branch: Branch, chunks: list[str], is_over: Callable[[], bool | None]
    ) -> AsyncIterator[str]:
        position = 0
        while True:
            check = _after(chunks, position, is_over)
            new, ended = await branch.text_changed.wait_async(check)
            for chunk in new:
                yield chunk
            position += len(new)
            if ended:
                return


def _streamed(slot: Slot) -> Slot:
    """The slot, if its text comes as one stream."""
    if not slot.is_stream():
        raise UnsupportedFeature(
            f"streaming {slot.name!r}, which has n above 1",
            "its texts grow side by side: read the variable, or stream the whole text",
            param="n",
        )
    return slot


def _after(
    chunks: list[str], position: int, is_over: Callable[[], bool | None]
) -> Callable[[], tuple[list[str], bool] | None]:
    """A check for more chunks than `position`, or the end."""

    def check() -> tuple[list[str], bool] | None:
        ended = bool(is_over())
        new = chunks[position:]
        return (new, ended) if new or ended else None

    return check
