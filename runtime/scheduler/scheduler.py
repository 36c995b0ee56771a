"""Which sequences compute how many of their tokens in the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from palmette.runtime.config import SchedulerSection
from palmette.runtime.scheduler.programs import HeldPages, Programs
from palmette.runtime.scheduler.queue import OVERDUE_SHARE, make_queue
from palmette.runtime.scheduler.step_time import StepLoad, StepTime, num_keys_between
from palmette.runtime.sequence import Handle, Sequence, Status

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from palmette.grammar.guesses import Guess

# So many that find no room are tried in a step.
_MAX_PASSED = 64

# Prefill goes on by so many tokens a step, and for this share of the time that decoding takes in
# it, even where the step then takes longer than it should.
_LEAST_CHUNK = 16
_LEAST_SHARE = 0.25


class Pages(HeldPages, Protocol):
    """What the scheduler needs from the KV cache."""

    @property
    def prefix_cache(self) -> bool:
        """Whether anything is shared and kept."""
        ...

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

    def hold(self, sequence: Sequence) -> Handle | None:
        """As `release`, but keep what was computed for those that go on from there."""
        ...


@dataclass(slots=True)  # one is made behind every forward pass, and a frozen one takes longer
class PlannedWork:
    """`sequence` computes its next `num_tokens` tokens, guesses among them."""

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
    # Nothing can be done now; a program that thinks is waited for so long.
    wait_seconds: float | None = None
    hopeless: Sequence | None = None  # finds no room although nothing else holds any

    def add(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_uncomputed_tokens, self.token_budget)
        self.work.append(PlannedWork(sequence, num_tokens))
        self.token_budget -= num_tokens


class Scheduler:
    """Continuous batching in chunks, with preemption when pages run short.

    `config.policy` orders those that wait (see `queue`). A waiting sequence whose prompt begins
    like one that is being prefilled right now waits for that one instead of computing the shared
    tokens a second time; others may pass it meanwhile. Under the policy "program", what a program
    has computed is held until it asks again, and programs are begun only while all of them can end
    (see `programs`). Whoever is overdue asks for no such thing: as long as somebody is, the order
    is that of arrival, for requests of programs that have begun as well, and what programs hold is
    given up to whoever is first. A batch of programs that all came together is left alone.

    How long steps take is learned from those that were run. It bounds chunks of prefill while
    others decode, by `config.max_step_seconds`, and tells which guesses are worth computing.
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
        self.programs = Programs(pages, hold_seconds=config.max_think, max_wait=config.max_wait)
        self.knows_programs = config.policy == "program" and pages.prefix_cache
        self.step_time = StepTime()
        self._num_guessed = 0  # sequences, waiting or running, that may have guesses
        self._pages = pages
        self._clock = clock
        self._overdue_after = OVERDUE_SHARE * config.max_wait

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        self._num_guessed += sequence.is_guessed
        self.programs.added(sequence)  # which says where it goes on from
        self.waiting.add(sequence)

    def next_plan(self) -> Plan:
        """Running sequences, least left to compute first, so that no long prompt holds up a
        decoding one; then waiting ones in order, unless pages ran short.
        """
        plan = Plan(self._token_budget())
        unplanned = deque(sorted(self.running, key=lambda s: s.num_uncomputed_tokens))
        while unplanned and plan.token_budget:
            sequence = unplanned.popleft()
            if self._make_room(sequence, plan, unplanned):
                plan.add(sequence)
        if not plan.preempted and len(self.waiting):
            self._admit_waiting(plan)
            if not self.running:
                self._admit_first(plan)
        if self._num_guessed and self.config.max_guesses:
            self._plan_guesses(plan)
        return plan

    def note_step(self, work: SequenceOf[PlannedWork], seconds: float) -> None:
        """`work` took so long; its sequences have not gone on yet."""
        self.step_time.note(_load_of(work), seconds)

    def finish(self, sequence: Sequence, *, keep: bool = True, goes_on: bool = False) -> None:
        """The sequence leaves; its pages go back, what it computed stays cached if `keep`, and is
        held for its program if that `goes_on`.
        """
        handle = None
        self._num_guessed -= sequence.is_guessed
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            if keep and goes_on and sequence.program is not None:
                handle = self._pages.hold(sequence)
            else:
                self._pages.release(sequence, keep=keep)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.move_to(Status.FINISHED)
        self.programs.ended(sequence, handle, self._clock())

    def _token_budget(self) -> int:
        """So many tokens that those who decode get their next ones in time."""
        most, target = self.config.max_batch_tokens, self.config.max_step_seconds
        if target is None or not self.step_time.is_learned:
            return most
        others = [sequence for sequence in self.running if not _is_decoding(sequence)]
        nothing_to_prefill = not others and not len(self.waiting)
        if nothing_to_prefill or len(others) == len(self.running):
            return most
        decoding = filter(_is_decoding, self.running)
        load = _load_of(PlannedWork(each, each.num_uncomputed_tokens) for each in decoding)
        seconds = self.step_time.seconds(load)
        seconds_left = max(target - seconds, _LEAST_SHARE * seconds)
        first = min(others, key=lambda s: s.num_uncomputed_tokens, default=None)
        # Of those that wait it is not known yet how much of them is cached.
        start = 0 if first is None else first.num_computed_tokens
        chunk = self.step_time.num_tokens_in(seconds_left, start, most)
        return min(most, load.num_tokens + max(_LEAST_CHUNK, chunk))

    def _make_room(self, sequence: Sequence, plan: Plan, unplanned: deque[Sequence]) -> bool:
        """Pages for the sequence's next tokens, at the cost of what programs hold that compute
        nothing, and then of those with most left to compute.
        """
        num_tokens = min(sequence.num_uncomputed_tokens, plan.token_budget)
        while not self._pages.grow(sequence, num_tokens):
            if self.programs.give_up(self._clock(), keep=sequence.program):
                continue
            victim = unplanned.pop() if unplanned else sequence
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _plan_guesses(self, plan: Plan) -> None:
        """Behind what is computed in any case, in the room that this leaves, as far as they are
        worth it.
        """
        num_left = min(self.config.max_guesses, plan.token_budget)
        seconds_saved = self._seconds_to_decode_one(plan) if self.step_time.is_learned else None
        for index, item in enumerate(plan.work):
            sequence = item.sequence
            if not sequence.num_guesses or item.num_tokens < sequence.num_uncomputed_tokens:
                continue
            num_kept = num_left
            if seconds_saved is not None:
                seconds_each = self.step_time.added_seconds(StepLoad(1, item.end + 1, 1))
                num_kept = num_worth_computing(
                    sequence.guesses, num_left, seconds_saved, seconds_each
                )
            sequence.keep_guesses(num_kept)
            if not self._pages.grow(sequence, item.num_tokens + sequence.num_guesses):
                sequence.keep_guesses(0)
            plan.work[index] = PlannedWork(sequence, item.num_tokens + sequence.num_guesses)
            num_left -= sequence.num_guesses

    def _seconds_to_decode_one(self, plan: Plan) -> float:
        """What one token costs a sequence that decodes together with the others of the plan."""
        lengths = [
            len(item.sequence.token_ids)
            for item in plan.work
            if item.num_tokens == item.sequence.num_uncomputed_tokens
        ]
        load = StepLoad(len(lengths), sum(lengths), len(lengths))
        return self.step_time.seconds(load) / max(1, len(lengths))

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self._pages.release(sequence)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        sequence.tally.num_preemptions += 1
        sequence.move_to(Status.WAITING)
        self.waiting.resume(sequence)
        self.programs.preempted(sequence)
        plan.preempted.append(sequence)

    def _admit_waiting(self, plan: Plan) -> None:
        now = self._clock()
        walk = self.waiting.round(now)
        account = self.programs.account(now)
        num_deferred = num_passed = 0
        is_batch = self.programs.are_one_batch(now)
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
            has_begun = sequence.program is not None and sequence.program.has_begun
            if num_deferred and not has_begun and not self._pages.leaves_half_free(sequence):
                return
            # Whoever has waited for too long asks nobody, and nobody who came later passes.
            is_starving = not is_batch and self._is_overdue(sequence, now)
            if is_starving:
                account.allows_without_asking()
                may_run = self._take_room(sequence, now)
            else:
                may_run = account.allows(sequence, now)
            if may_run and self._admit(sequence, plan, now):
                walk.admitted()
                account.admitted(sequence)
                continue
            num_passed += 1
            if is_starving or num_passed == _MAX_PASSED:
                return
            walk.passed()

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        return now - sequence.submitted_at >= self._overdue_after

    def _take_room(self, sequence: Sequence, now: float) -> bool:
        """Room for who has waited for too long, from what other programs hold."""
        while self._pages.num_pages_taken(sequence) > self._pages.num_available_pages:
            if not self.programs.give_up(now, keep=sequence.program, of_others=True):
                return False
        return True

    def _admit(self, sequence: Sequence, plan: Plan, now: float) -> bool:
        num_tokens = min(sequence.num_uncomputed_tokens, plan.token_budget)
        if not self._pages.admit(sequence, num_tokens, self.running, now):
            return False
        sequence.move_to(Status.RUNNING)
        self.running.append(sequence)
        plan.add(sequence)
        if self.programs.admitted(sequence) and sequence.program is not None:
            self.waiting.begin(sequence.program.waiting.values())
        return True

    def _admit_first(self, plan: Plan) -> None:
        """Nothing runs, and nobody finds room. Unless a program that thinks may soon make some,
        whoever is first takes what programs hold.
        """
        now = self._clock()
        seconds = self.programs.seconds_to_wait(now)
        if seconds is not None and not self.programs.are_one_batch(now):
            oldest = min(sequence.submitted_at for sequence in self.waiting)
            seconds = min(seconds, oldest + self._overdue_after - now)
        if seconds is not None and seconds > 0:
            plan.wait_seconds = seconds
            return
        walk = self.waiting.round(now)
        sequence = walk.next()
        assert sequence is not None
        while not self._admit(sequence, plan, now):
            if not self.programs.give_up(now, keep=sequence.program):
                plan.hopeless = sequence
                return
        walk.admitted()

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


def num_worth_computing(
    guesses: SequenceOf[Guess], limit: int, seconds_saved: float, seconds_each: float
) -> int:
    """How many of the guesses to compute, `limit` at most: as many as save most time on average.

    A guess takes `seconds_each` now, which a right one takes later otherwise. Where all up to one
    are right and another token is drawn behind it, a step less is made, of which `seconds_saved`
    are this sequence's share, its own token included.
    """
    num_worth = 0
    saved = most_saved = 0.0
    probability = 1.0
    for num_guesses, guess in enumerate(guesses[:limit], 1):
        probability *= guess.probability
        draws_behind = num_guesses == len(guesses) or guesses[num_guesses].is_drawn
        saved += probability * (seconds_saved if draws_behind else seconds_each) - seconds_each
        if saved > most_saved:
            num_worth, most_saved = num_guesses, saved
    return num_worth


def _is_decoding(sequence: Sequence) -> bool:
    """Whether its output has begun and goes on with this step."""
    has_begun = len(sequence.token_ids) > sequence.num_prompt_tokens
    return has_begun and sequence.num_uncomputed_tokens <= _LEAST_CHUNK


def _load_of(work: Iterable[PlannedWork]) -> StepLoad:
    num_tokens = num_keys = num_logits = 0
    for item in work:
        num_tokens += item.num_tokens
        num_keys += num_keys_between(item.start, item.end)
        num_logits += len(item.sequence.logit_positions(item.start, item.end))
    return StepLoad(num_tokens, num_keys, num_logits)
