"""Which sequences compute how many of their tokens in the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from palmette.runtime.config import SchedulerSection
from palmette.runtime.scheduler.queue import make_queue
from palmette.runtime.sequence import Sequence, Status


class Pages(Protocol):
    """What the scheduler needs from the KV cache."""

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of its leading tokens are cached now."""
        ...

    def find_leader(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Who is about to compute more of `sequence` than is there already."""
        ...

    def admit(
        self, sequence: Sequence, num_tokens: int, running: Iterable[Sequence], now: float
    ) -> bool:
        """Hold the cached prefix and room for `num_tokens` of the rest, or nothing at all."""
        ...

    def leaves_half_free(self, sequence: Sequence) -> bool:
        """Whether half the pool would still be free, or could be, once all of it is computed."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> bool: ...

    def release(self, sequence: Sequence, *, keep: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """`sequence` computes its next `num_tokens` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def start(self) -> int:
        return self.sequence.num_computed_tokens

    @property
    def end(self) -> int:
        return self.sequence.num_computed_tokens + self.num_tokens


@dataclass(slots=True)
class Plan:
    """One step's work, and what room is left in it."""

    token_budget: int
    work: list[PlannedWork] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_uncomputed_tokens, self.token_budget)
        self.work.append(PlannedWork(sequence, num_tokens))
        self.token_budget -= num_tokens


class Scheduler:
    """Continuous batching in chunks, with preemption when pages run short.

    `config.policy` orders those that wait (see `queue`). A waiting sequence whose prompt begins
    like one that is being prefilled right now waits for that one instead of computing the shared
    tokens a second time; others may pass it meanwhile.
    """

    def __init__(
        self,
        config: SchedulerSection,
        pages: Pages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.waiting = make_queue(config, pages.cached_tokens)
        self.running: list[Sequence] = []
        self._pages = pages
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def next_plan(self) -> Plan:
        """Running sequences, least left to compute first, so that no long prompt holds up a
        decoding one; then waiting ones in order, unless pages ran short.
        """
        plan = Plan(self.config.max_batch_tokens)
        unplanned = deque(sorted(self.running, key=lambda s: s.num_uncomputed_tokens))
        while unplanned and plan.token_budget:
            sequence = unplanned.popleft()
            if self._make_room(sequence, plan, unplanned):
                plan.add(sequence)
        if not plan.preempted:
            self._admit_waiting(plan)
        return plan

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The sequence leaves; its pages go back, what it computed stays cached if `keep`."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._pages.release(sequence, keep=keep)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.move_to(Status.FINISHED)

    def _make_room(self, sequence: Sequence, plan: Plan, unplanned: deque[Sequence]) -> bool:
        """Pages for the sequence's next tokens, at the cost of those with most left to compute."""
        num_tokens = min(sequence.num_uncomputed_tokens, plan.token_budget)
        while not self._pages.grow(sequence, num_tokens):
            victim = unplanned.pop() if unplanned else sequence
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self._pages.release(sequence)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        sequence.tally.num_preemptions += 1
        sequence.move_to(Status.WAITING)
        self.waiting.resume(sequence)
        plan.preempted.append(sequence)

    def _admit_waiting(self, plan: Plan) -> None:
        now = self._clock()
        if not len(self.waiting):
            return
        walk = self.waiting.round(now)
        num_deferred = 0
        while plan.token_budget and len(self.running) < self.config.max_running:
            sequence = walk.next()
            if sequence is None:
                return
            if self._waits_for_leader(sequence):
                walk.deferred(_num_shared_with_leader(sequence))
                num_deferred += 1
                continue
            # Others may pass those that wait for a leader, but not at the cost of what these are
            # about to use: with the pool half full, another part of the tree is not begun.
            if num_deferred and not self._pages.leaves_half_free(sequence):
                return
            num_tokens = min(sequence.num_uncomputed_tokens, plan.token_budget)
            if not self._pages.admit(sequence, num_tokens, self.running, now):
                return
            walk.admitted()
            sequence.move_to(Status.RUNNING)
            self.running.append(sequence)
            plan.add(sequence)

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        leader = sequence.leader
        if (
            leader is not None
            and leader.status is Status.RUNNING
            and leader.num_computed_tokens < sequence.leader_tokens
        ):
            return True
        sequence.leader = self._pages.find_leader(sequence, self.running)
        return sequence.leader is not None


def _num_shared_with_leader(sequence: Sequence) -> int:
    """So many leading tokens in common with a deferred sequence mean waiting for its leader too:
    all that are there already, and the next one, which the leader is about to compute.
    """
    assert sequence.leader is not None
    return max(sequence.leader_from, sequence.leader.num_computed_tokens) + 1
