"""The branches of a fork, as a list and as the place where they come together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from palmette.errors import ProgramError
from palmette.lang.appending import caller
from palmette.lang.nodes import Expr
from palmette.lang.operations import AppendBranches
from palmette.lang.variables import Slot, gathered

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
        """Wait for all branches and bring back what they made. Raises what a branch failed with.

        ``"gather_variable"``: every variable that a branch has set becomes a list in the parent,
        with one item for each branch that set it, in the order of the branches. A variable that
        the parent has already stays as it is, unless it came from an earlier join. The parent's
        text does not change. ``"concate_and_append"``: what each branch has added is appended to
        the parent: constants as constants, what was generated with its ids.
        """
        self._check(mode)
        self._close()
        for state in self._states:
            state._wait_ready("await branches.join_async()")
        self._bring_back(mode)

    async def join_async(self, mode: str = "gather_variable") -> None:
        """As `join`, without blocking the event loop."""
        self._check(mode)
        self._close()
        for state in self._states:
            await state.ready()
        self._bring_back(mode)

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

    def _bring_back(self, mode: str) -> None:
        parent, branches = self._parent, self._branches
        if mode == "concate_and_append":
            for branch in branches:
                if not branch.transcript.is_as_begun():
                    raise ProgramError(
                        "a branch that opened or closed a role cannot be appended to the parent: "
                        f"branch {branch.path} left one in between"
                    )
            joined = AppendBranches(name="join()", where=caller(), branches=branches)
            parent.submit([joined], {})
            return
        parent.close_later(branches[0])
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
