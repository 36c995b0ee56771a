"""What a run, or the branches of a fork, may take together: seconds, and completion tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from palmette.errors import InvalidRequest, ProgramCancelled, ProgramTimeout, TokenBudgetExceeded
from palmette.lang.variables import Failure, Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from palmette.errors import PalmetteError
    from palmette.lang.operations import Operation


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout` in seconds from the start, `max_total_tokens` of completions; None is no limit.

    Raises InvalidRequest for a value that makes no sense.
    """

    timeout: float | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        seconds, tokens = self.timeout, self.max_total_tokens
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise InvalidRequest(
                f"timeout must be a number of seconds above 0, got {seconds!r}", param="timeout"
            )
        is_count = isinstance(tokens, int) and not isinstance(tokens, bool)
        if tokens is not None and not (is_count and tokens > 0):
            raise InvalidRequest(
                f"max_total_tokens must be an integer of at least 1, got {tokens!r}",
                param="max_total_tokens",
            )


class Stop:
    """Why a branch, and what was forked from it, ends before its time.

    One error for each branch that had something to do; who has seen one has seen them all.
    """

    def __init__(self, make: Callable[..., PalmetteError], *, is_cancel: bool) -> None:
        self._make = make
        self.is_cancel = is_cancel
        self.seen = Seen()

    @classmethod
    def cancelled(cls, why: str, *, by_program: bool = False) -> Stop:
        """The program itself, which then knows of it, or who runs it, wants no more of it."""
        stop = cls(partial(ProgramCancelled, why), is_cancel=True)
        stop.seen.was_raised = by_program
        return stop

    @classmethod
    def timed_out(cls, seconds: float, of: str) -> Stop:
        """`of`, a run or a fork, took longer than it may."""
        return cls(partial(ProgramTimeout, seconds, of), is_cancel=False)

    def failure(self, operation: Operation | None, path: tuple[int, ...]) -> Failure:
        """That of the branch at `path`, which was busy with `operation`."""
        if operation is None:
            return Failure(partial(self._make, path=path), self.seen)
        name, where = operation.name, operation.where
        make = partial(self._make, primitive=name, where=where, path=path)
        return Failure(make, self.seen)


@dataclass(slots=True, eq=False)
class Grant:
    """What one generation may take of every budget it counts towards, and what it took."""

    num_tokens: int
    num_used: int = 0


class Budget:
    """How many completion tokens the branches of a run or fork, `of`, may still make together.

    A generation holds its `max_tokens` while it runs, so that all together never take more than
    the limit. Only used on the loop.
    """

    def __init__(self, limit: int, of: str, *, within: Budget | None = None) -> None:
        self.limit = limit
        self.of = of
        self.seen = Seen()
        self.num_used = 0
        self._num_held = 0
        self._within = within
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def grant(self, max_tokens: int, min_tokens: int) -> AsyncIterator[Grant]:
        """`max_tokens`, once no other generation holds them; fewer if nobody will give any back.

        Raises OutOfTokens if not even `min_tokens`, or one, are left.
        """
        budgets = self._enclosing()
        while (short := next((b for b in budgets if b._may_get(max_tokens)), None)) is not None:
            await short._given_back.wait()
        tightest = min(budgets, key=lambda budget: budget._num_free)
        num_tokens = min(max_tokens, tightest._num_free)
        if num_tokens < min(max_tokens, max(1, min_tokens)):
            raise OutOfTokens(tightest, min_tokens)
        grant = Grant(num_tokens)
        for budget in budgets:
            budget._num_held += num_tokens
        try:
            yield grant
        finally:
            for budget in budgets:
                budget._settle(grant)

    @property
    def _num_free(self) -> int:
        return self.limit - self.num_used - self._num_held

    def _enclosing(self) -> list[Budget]:
        budgets, budget = [self], self._within
        while budget is not None:
            budgets.append(budget)
            budget = budget._within
        return budgets

    def _may_get(self, max_tokens: int) -> bool:
        """Whether it has too few, and others may give some back."""
        return self._num_free < max_tokens and self._num_held > 0

    def _settle(self, grant: Grant) -> None:
        self._num_held -= grant.num_tokens
        self.num_used += grant.num_used
        given_back, self._given_back = self._given_back, asyncio.Event()
        given_back.set()


class OutOfTokens(Exception):
    """Nothing is left for a generation; what the program sees of it is made by `failure`."""

    def __init__(self, budget: Budget, min_tokens: int) -> None:
        super().__init__(budget.of)
        self._budget = budget
        self._make = partial(
            TokenBudgetExceeded, budget.limit, budget.num_used, budget.of, min_tokens=min_tokens
        )

    def failure(self, operation: Operation, path: tuple[int, ...]) -> Failure:
        """That of `operation`, in the branch at `path`."""
        make = partial(self._make, primitive=operation.name, where=operation.where, path=path)
        return Failure(make, self._budget.seen)
