"""The branches of a fork, as a list and as the place where they come together again; waiting for
the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from palmette.errors import ProgramError
from palmette.lang.appending import caller
from palmette.lang.limits import Stop
from palmette.lang.nodes import Expr
from palmette.lang.operations import AppendBranches
from palmette.lang.signals import Signal
from palmette.lang.tracing.recording import EventRecord, finishing
from palmette.lang.variables import Failure, Slot, gathered

if TYPE_CHECKING:
    from palmette.lang.branch import Branch
    from palmette.lang.state import State


class Branches(Sequence["State"]):
    """What `fork` returns: a list of states, and the place where they come together again."""

    def __init__(self, states: list[State], branches: list[Branch], parent: Branch) -> None:
        self._states = states
        self._branches = branches
        self._parent = parent

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> list[State]: ...
    def __getitem__(self, index: int | slice) -> State | list[State]:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        # ``branches[i] += ...`` assigns back what it has appended to.
        if self._states[index] is not state:
            raise TypeError("a branch cannot be replaced: append to it with +=")

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(
        self, other: Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]
    ) -> Branches:
        """Append to every branch: the same, or one item each, or a function of the index."""
        if isinstance(other, (Expr, str)):
            each: list[Expr | str] = [other] * len(self)
        elif callable(other):
            each = [other(index) for index in range(len(self))]
        else:
            each = list(other)
            if len(each) != len(self):
                raise ValueError(f"{len(each)} items for {len(self)} branches")
        for state, item in zip(self._states, each, strict=True):
            state += item
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all branches and bring back what they made.

        As soon as one fails, what it failed with is raised, and those that still run are cancelled.
        Branches that the program itself has cancelled are left out.

        ``"gather_variable"``: every variable that a branch has set becomes a list in the parent,
        with one item for each branch that set it, in the order of the branches. A variable that
        the parent has already stays as it is, unless it came from an earlier join. The parent's
        text does not change. ``"concate_and_append"``: what each branch has added is appended to
        the parent: constants as constants, what was generated with its ids.
        """
        self._check(mode)
        with self._recorded(mode) as record:
            self._close()
            race = self._race()
            if race is not None:
                race.result_of(race.wait("await branches.join_async()"))
            self._bring_back(mode, record)

    async def join_async(self, mode: str = "gather_variable") -> None:
        """As `join`, without blocking the event loop."""
        self._check(mode)
        with self._recorded(mode) as record:
            self._close()
            race = self._race()
            if race is not None:
                race.result_of(await race.wait_async())
            self._bring_back(mode, record)

    def _race(self) -> _Race | None:
        """One that all must end in which the program has not cancelled."""
        states = [state for state in self._states if not state._branch.is_dropped]
        return _Race(states, len(states), by="join()") if states else None

    def _check(self, mode: str) -> None:
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(
                f"join mode must be 'gather_variable' or 'concate_and_append', got {mode!r}"
            )

    def _close(self) -> None:
        """Nothing more is appended to the branches, so what they computed need not be held. Only
        the first one's stays until the parent asks again, since it begins with all that the parent
        has, and may be the beginning of what is about to be appended to it.
        """
        self._parent.run.close(self._branches[1:])

    @contextmanager
    def _recorded(self, mode: str) -> Iterator[EventRecord]:
        """What a trace knows of the join, from now until the block ends."""
        parent = self._parent
        with parent.run.lock:
            record = parent.record.begin(
                "join",
                "join()",
                caller(),
                children=[branch.record for branch in self._branches],
                mode=mode,
            )
        with finishing(record):
            yield record

    def _bring_back(self, mode: str, record: EventRecord) -> None:
        parent = self._parent
        branches = [branch for branch in self._branches if not branch.is_dropped]
        if mode == "concate_and_append":
            for branch in branches:
                if not branch.transcript.is_as_begun():
                    raise ProgramError(
                        "a branch that opened or closed a role cannot be appended to the parent: "
                        f"branch {branch.path} left one in between"
                    )
            joined = AppendBranches(
                name="join()", where=record.where, branches=branches, record=record
            )
            parent.submit([joined], {})
            return
        parent.close_later(self._branches[0])
        found: dict[str, list[Slot]] = {}
        for branch in branches:
            for name, slot in branch.slots.items():
                before = parent.slots.get(name)
                is_free = before is None or before.was_joined
                if is_free and branch.inherited.get(name) is not slot:
                    found.setdefault(name, []).append(slot)
        joined_slots = {name: gathered(name, parent, slots) for name, slots in found.items()}
        for slot in joined_slots.values():
            slot.was_joined = True
        parent.submit([], joined_slots)


def first_k(branches: Sequence[State], k: int, *, cancel: bool = True) -> list[State]:
    """The first `k` of some branches to have done all that was appended to them so far, in the
    order in which they did.

    Waits for them, and then cancels the others, unless `cancel` is False. Branches that fail do not
    count. When fewer than `k` can still succeed, what the first one failed with is raised, and the
    others are cancelled all the same. Raises ValueError unless the branches are different ones,
    forked in one run, and at least `k`.
    """
    race = _Race(branches, k, by=f"first_k(..., {k!r})")
    with race.recorded() as record:
        won = race.result_of(race.wait("await first_k_async(...)"), cancels=cancel)
        record.winners = [state._branch.record for state in won]
    return won


async def first_k_async(branches: Sequence[State], k: int, *, cancel: bool = True) -> list[State]:
    """As `first_k`, without blocking the event loop."""
    race = _Race(branches, k, by=f"first_k(..., {k!r})")
    with race.recorded() as record:
        won = race.result_of(await race.wait_async(), cancels=cancel)
        record.winners = [state._branch.record for state in won]
    return won


@dataclass(frozen=True, slots=True)
class _Outcome:
    states: list[State]
    failure: Failure | None = None


class _Race:
    """Branches of which `k` are wanted; `by` is what the program calls."""

    def __init__(self, states: Sequence[State], k: int, *, by: str) -> None:
        self._states = list(states)
        self._k = k
        self._by = f"{by} at {caller()}"
        branches = {state._branch for state in self._states}
        if len(branches) < len(self._states):
            raise ValueError(f"{by}: the same branch is there twice")
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= len(branches):
            raise ValueError(f"{by}: {len(branches)} branches, so k is from 1 to {len(branches)}")
        if any(branch.parent is None for branch in branches):
            raise ValueError(f"{by}: a state that was not forked is no branch")
        if len({id(branch.run) for branch in branches}) > 1:
            raise ValueError(f"{by}: the branches are of different runs")
        self._run = self._states[0]._branch.run
        self._decided = Signal(self._run.lock)
        self._pending = {state._branch: state for state in self._states}
        self._done: list[State] = []
        self._failed: list[Branch] = []

    @contextmanager
    def recorded(self) -> Iterator[EventRecord]:
        """What a trace knows of it, where the first of the branches was forked."""
        branches = [state._branch for state in self._states]
        parent = branches[0].parent
        assert parent is not None
        with self._run.lock:
            record = parent.record.begin(
                "first_k",
                f"first_k(..., {self._k})",
                caller(),
                children=[branch.record for branch in branches],
            )
        with finishing(record):
            yield record

    def wait(self, instead: str) -> _Outcome:
        """Those that won, or the failure after which fewer than `k` can."""
        with self._watching():
            return self._states[0]._wait(self._decided, self._outcome, instead)

    async def wait_async(self) -> _Outcome:
        """As `wait`, without blocking the event loop."""
        with self._watching():
            self._run.tell()
            return await self._decided.wait_async(self._outcome)

    def result_of(self, outcome: _Outcome, *, cancels: bool = False) -> list[State]:
        """Those that won, and the others cancelled if they are to be. A failure is raised, and what
        still runs cancelled.
        """
        if outcome.failure is not None:
            self._cancel(state for state in self._states if not state._branch.is_settled())
            raise outcome.failure.error()
        if cancels:
            won = set(outcome.states)
            self._cancel(state for state in self._states if state not in won)
        return outcome.states

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with self._run.lock:
            settled = [branch for branch in self._pending if branch.is_settled()]
            for branch in sorted(settled, key=lambda branch: branch.num_settled):
                self._note(branch)
            self._run.watchers.add(self._note)
        try:
            yield
        finally:
            with self._run.lock:
                self._run.watchers.discard(self._note)

    def _note(self, branch: Branch) -> None:
        """The branch has nothing left to do. Lock held."""
        state = self._pending.pop(branch, None)
        if state is None or self._outcome() is not None:
            return
        if branch.has_succeeded():
            self._done.append(state)
        else:
            self._failed.append(branch)
        if self._outcome() is not None:
            self._decided.notify()

    def _outcome(self) -> _Outcome | None:
        """None as long as it is open. Lock held."""
        if len(self._done) >= self._k:
            return _Outcome(self._done)
        if len(self._states) - len(self._failed) < self._k:
            return _Outcome([], self._failed[0].why_failed())
        return None

    def _cancel(self, states: Iterable[State]) -> None:
        for state in states:
            why = f"branch {state.path} was cancelled by {self._by}"
            state._branch.stop(Stop.cancelled(why, by_program=True))
