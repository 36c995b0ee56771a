"""Whole programs: what they hold between their requests, and whether all of them can end.

A program asks again and again, and each time goes on from what it computed before. Between two
requests a *handle* keeps that in the tree. Handles make the pool a resource that programs hold
while they wait for more of it, so a program is begun, and goes on, only while there is an order in
which all that have begun can end with the pages there are: the banker's algorithm (E. W. Dijkstra,
EWD 623). What a program still needs is what it announced.

All of this is an estimate, and nothing rests on it but how much is computed twice: where pages run
short, handles are given up, idle programs first and then the one begun last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from palmette.protocol import Outlook
from palmette.runtime.sequence import Handle, Sequence

Path = tuple[int, ...]

# Programs that all asked first within this share of `max_wait` are one batch, for so many times
# `max_wait`.
_BATCH_SHARE = 0.1
_MAX_BATCH = 4

# How many tokens of generations count as produced in full before any was seen.
_PRIOR_TOKENS = 512
# Of what generations may produce, this much more is expected than they did on average.
_MARGIN = 1.25
# Of so many of a program's waiting sequences it is counted anew in a step what they need: of all,
# unless a fork is wide. Looking up a long prompt takes a while.
_MAX_COUNTED = 64
# What is announced may be any number; this is more than any pool holds.
_MAX_TOKENS = 1 << 40


class HeldPages(Protocol):
    """What programs need to know of the KV cache."""

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or could be evicted."""
        ...

    def num_pages_for(self, num_tokens: int) -> int: ...

    def num_pages_taken(self, sequence: Sequence) -> int:
        """How many of the available pages computing all of its tokens would take."""
        ...

    def num_pages_freed_without(
        self, handles: Iterable[Handle], sequences: Iterable[Sequence]
    ) -> int:
        """How many pages would be available if these ended."""
        ...


class Program:
    """A program that has asked for something, or has said that it will."""

    __slots__ = (
        "asked_at",
        "constant_tokens",
        "generated_tokens",
        "handles",
        "idle_since",
        "needs",
        "num_pages_needed",
        "program_id",
        "running",
        "serial",
        "version",
        "waiting",
    )

    def __init__(self, program_id: str) -> None:
        self.program_id = program_id
        self.serial = 0  # the order in which programs began; 0: not yet
        self.asked_at = math.inf  # when it asked for something first
        self.idle_since = math.inf  # when it had nothing to do any more
        self.version = 0  # of the outlook that was heard last
        self.constant_tokens = 0
        self.generated_tokens = 0
        self.handles: dict[Path, Handle] = {}
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        self.needs: dict[int, int] = {}  # pages, of those that wait, as counted last
        self.num_pages_needed = 0  # by all of these

    @property
    def has_begun(self) -> bool:
        return self.serial > 0

    @property
    def is_idle(self) -> bool:
        """Whether it computes nothing and asks for nothing: it thinks, or is over."""
        return not self.waiting and not self.running

    def next_to_count(self, count: int) -> list[Sequence]:
        """Waiting sequences, `count` at most, whose needs were counted longest ago."""
        chosen = list(islice(self.waiting.items(), count))
        for key, _ in chosen:
            self.waiting.move_to_end(key)
        return [sequence for _, sequence in chosen]

    def note_need(self, sequence: Sequence, num_pages: int) -> int:
        """A sequence that waits needs so many pages; how many more that is than was known."""
        change = num_pages - self.needs.get(id(sequence), 0)
        self.needs[id(sequence)] = num_pages
        self.num_pages_needed += change
        return change

    def waits_no_more(self, sequence: Sequence) -> None:
        if self.waiting.pop(id(sequence), None) is not None:
            self.num_pages_needed -= self.needs.pop(id(sequence), 0)

    def handle_for(self, path: Path) -> Handle | None:
        """What the branch at `path` goes on from: its own handle or the nearest it was forked from.

        A path has two numbers for each fork.
        """
        for length in range(len(path), -1, -2):
            handle = self.handles.get(path[:length])
            if handle is not None:
                return handle
        return None


class Programs:
    """All programs that an engine knows of.

    `hold_seconds` is how long a program that has begun, and asks for nothing, is waited for where
    pages run short; later its handles are the first to go.
    """

    def __init__(self, pages: HeldPages, *, hold_seconds: float, max_wait: float) -> None:
        self._pages = pages
        self._hold_seconds = hold_seconds
        self._max_wait = max_wait
        self._by_id: dict[str, Program] = {}
        self._begun: dict[str, Program] = {}  # by id, in the order in which they began
        self._num_begun = 0
        self.num_given_up = 0  # so many times a program's handles were let go
        self._alone: dict[int, Sequence] = {}  # running sequences of no program
        self._num_outside = 0  # sequences of no program that run or wait
        self._asked_tokens = 0
        self._produced_tokens = 0

    # What is heard of them

    def hear(self, outlook: Outlook) -> Program:
        """The program that `outlook` is of; what it needs is known by now."""
        program = self._by_id.get(outlook.program_id)
        if program is None:
            program = self._by_id[outlook.program_id] = Program(outlook.program_id)
        if outlook.version >= program.version:
            program.version = outlook.version
            program.constant_tokens = min(outlook.constant_tokens, _MAX_TOKENS)
            program.generated_tokens = min(outlook.generated_tokens, _MAX_TOKENS)
        return program

    def end_branches(self, program_id: str, paths: Iterable[Path]) -> None:
        """These branches ask no more."""
        program = self._by_id.get(program_id)
        if program is not None:
            for path in paths:
                _drop(program, path)

    def end(self, program_id: str) -> None:
        """The program asks no more."""
        program = self._by_id.pop(program_id, None)
        if program is not None:
            self._begun.pop(program_id, None)
            _drop_all(program)

    def drop_handles(self) -> None:
        """No program holds anything beyond what runs; what was held may be evicted."""
        for program in self._by_id.values():
            _drop_all(program)

    # What happens to their sequences

    def added(self, sequence: Sequence) -> None:
        """It waits, for the first time or again."""
        program = sequence.program
        if program is None:
            self._num_outside += 1
        else:
            program.waiting[id(sequence)] = sequence
            program.asked_at = min(program.asked_at, sequence.submitted_at)
            program.idle_since = math.inf
            handle = program.handle_for(sequence.path)
            token_ids = sequence.token_ids
            if handle is not None and not handle.fits(
                sequence.namespace, token_ids, len(token_ids)
            ):
                handle = None  # it begins elsewhere
            sequence.handle = handle
            sequence.takes_over = handle is not None and sequence.path in program.handles

    def admitted(self, sequence: Sequence) -> bool:
        """It runs; whether its program began with it."""
        program = sequence.program
        if program is None:
            self._alone[id(sequence)] = sequence
            return False
        program.waits_no_more(sequence)
        program.running[id(sequence)] = sequence
        sequence.handle = None
        if program.has_begun or program.program_id not in self._by_id:
            return False
        self._num_begun += 1
        program.serial = self._num_begun
        self._begun[program.program_id] = program
        return True

    def preempted(self, sequence: Sequence) -> None:
        """It gave up its pages and waits again."""
        if sequence.program is None:
            del self._alone[id(sequence)]  # and still is of no program
        else:
            del sequence.program.running[id(sequence)]
            self.added(sequence)

    def ended(self, sequence: Sequence, handle: Handle | None, now: float) -> None:
        """It runs and waits no more; `handle` is what it leaves to those that go on from it."""
        self._alone.pop(id(sequence), None)
        program = sequence.program
        if program is None:
            self._num_outside -= 1
            return
        program.waits_no_more(sequence)
        program.running.pop(id(sequence), None)
        _drop(program, sequence.path)
        if handle is not None:
            if self._by_id.get(program.program_id) is program:
                program.handles[sequence.path] = handle
            else:  # it ended meanwhile
                handle.lease.release()
        if program.is_idle:
            program.idle_since = now

    def note_output(self, asked: int, produced: int) -> None:
        """A generation of at most `asked` tokens produced so many: others will be alike."""
        self._asked_tokens += asked
        self._produced_tokens += produced
        if self._asked_tokens > 1 << 16:  # what was long ago counts less
            self._asked_tokens //= 2
            self._produced_tokens //= 2

    # What they may do

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def account(self, now: float) -> Account:
        """Who holds and needs what, as of now: for the admissions of one step."""
        for program in [p for p in self._begun.values() if self._is_idle(p, now)]:
            # It may think for as long as it likes, and has to begin again when it comes back.
            del self._begun[program.program_id]
            program.serial = 0
        return Account(self, self._pages)

    def give_up(self, now: float, *, keep: Program | None = None, of_others: bool = False) -> bool:
        """Let the handles of one program go, those of `keep` last; False if there are none.

        Idle programs come first, then those that began last. With `of_others` never `keep`.
        """
        holding = [p for p in self._by_id.values() if p.handles and not (of_others and p is keep)]
        if not holding:
            return False

        def rank(program: Program) -> tuple[bool, bool, float]:
            is_idle = self._is_idle(program, now)
            order = program.idle_since if is_idle else -program.serial
            return program is keep, not is_idle, order

        worst = min(holding, key=rank)
        self._give_up_handles(worst)
        return True

    def give_up_idle(self, now: float) -> None:
        """Let the handles of all idle programs go."""
        for program in self._by_id.values():
            if program.handles and self._is_idle(program, now):
                self._give_up_handles(program)

    def seconds_to_wait(self, now: float) -> float | None:
        """How long the one who has thought for longest may still be waited for; None if nobody
        thinks.
        """
        ends = [
            p.idle_since + self._hold_seconds
            for p in self._begun.values()
            if p.is_idle and not self._is_idle(p, now)
        ]
        return min(ends) - now if ends else None

    def wait_for_nobody(self) -> None:
        """Programs that think have thought for long enough."""
        for program in self._begun.values():
            if program.is_idle:
                program.idle_since = -math.inf

    def are_one_batch(self, now: float) -> bool:
        """Whether all that is asked for came together, from programs, and nobody has come since.

        Nothing is won for anybody if those of a batch stand in line: they would take turns at
        computing the same again, and all end later. But some of it may never end.
        """
        if self._num_outside:
            return False
        asked_at = [p.asked_at for p in self._by_id.values() if p.has_begun or not p.is_idle]
        if not asked_at:
            return True
        first = min(asked_at)
        came_together = max(asked_at) - first <= _BATCH_SHARE * self._max_wait
        return came_together and now - first < _MAX_BATCH * self._max_wait

    def begun(self) -> Iterable[Program]:
        return self._begun.values()

    def alone(self) -> Iterable[Sequence]:
        """Running sequences of no program."""
        return self._alone.values()

    def num_expected(self, num_tokens: int) -> int:
        """How many tokens will be produced where `num_tokens` may be, going by the others."""
        produced = self._produced_tokens + _PRIOR_TOKENS
        share = _MARGIN * produced / (self._asked_tokens + _PRIOR_TOKENS)
        return math.ceil(min(1.0, share) * num_tokens)

    def _give_up_handles(self, program: Program) -> None:
        self.num_given_up += 1
        _drop_all(program)

    def _is_idle(self, program: Program, now: float) -> bool:
        return now - program.idle_since >= self._hold_seconds


class Account:
    """Who holds and needs how many pages, counted once for the admissions of one step.

    What running sequences will still produce counts as taken: they take it without asking.
    """

    def __init__(self, programs: Programs, pages: HeldPages) -> None:
        self._programs = programs
        self._pages = pages
        self._shares: dict[int, _Share] = {}  # of programs that have begun and of the others
        self._is_counted = False
        self._new: dict[int, _Share] = {}  # of programs that were asked for and have not begun
        self._num_committed = 0  # by all shares
        self._num_later = 0
        self._num_known_pages = 0  # that a handle holds of the sequence asked for last
        self._num_given_up = programs.num_given_up

    def allows(self, sequence: Sequence, now: float) -> bool:
        """Whether all that have begun could still end if this one ran now.

        One of them may need more than there is: it will be alone in the end, and does what it can.
        Where they cannot, since programs came to need more than they had announced or had to give
        up what they held, those that began first may still go on: as if the ones behind them were
        not there.
        """
        programs, program = self._programs, sequence.program
        if program is None and not programs.num_begun:
            return True
        handle = sequence.handle
        is_held = handle is not None and not handle.lease.is_released
        self._num_known_pages = handle.lease.num_pages if handle is not None and is_held else 0
        self._count_all()
        key = id(sequence if program is None else program)
        own, is_counted = self._own_share(key, program)
        needed = self._num_pages_needed(sequence)
        later = 0
        if program is not None:
            self._change(own, is_counted, later=program.note_need(sequence, needed))
            # What it needs later, but for this sequence, which is among those that wait.
            later = own.num_later - needed
        others_committed, others_later = self._num_committed, self._num_later
        if is_counted:
            others_committed -= own.num_committed
            others_later -= own.num_later
        num_taken = needed + own.num_committed + others_committed
        num_left = self._pages.num_available_pages - num_taken
        if later + others_later <= num_left:
            return True
        programs.give_up_idle(now)
        num_left = self._pages.num_available_pages - num_taken
        if num_left < 0:
            return False
        mine = later, needed + own.num_committed + self._num_held(own)
        needs = [
            (share.serial, share.num_later, share.num_committed + self._num_held(share))
            for other, share in self._shares.items()
            if other != key
        ]
        if _can_all_end(num_left, [mine, *(need[1:] for need in needs)]):
            return True
        if program is None or not program.has_begun:
            return False
        before = [need[1:] for need in needs if need[0] < program.serial]
        return _can_all_end(num_left, [mine, *before])

    def allows_without_asking(self) -> None:
        """The next sequence that is admitted is so whether all can end or not."""
        self._num_known_pages = 0

    def admitted(self, sequence: Sequence) -> None:
        """It runs now."""
        if not self._is_counted:
            return
        program = sequence.program
        key = id(sequence if program is None else program)
        share = self._shares.get(key)
        if share is None:
            share = (
                self._share_of_sequence(sequence) if program is None else self._share_of(program)
            )
            self._add(key, share)
        elif program is not None:
            num_later = self._num_pages_later(program) - share.num_later
            committed = self._num_pages_to_come(sequence)
            self._change(share, True, committed=committed, later=num_later)
        share.num_held = None
        if sequence.lease is not None and sequence.lease.num_pages > self._num_known_pages:
            self._forget_held()  # it may hold what another was alone to hold before

    def _count_all(self) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        for program in self._programs.begun():
            self._count_again(program)
            self._add(id(program), self._share_of(program))
        for sequence in self._programs.alone():
            self._add(id(sequence), self._share_of_sequence(sequence))

    def _add(self, key: int, share: _Share) -> None:
        self._shares[key] = share
        self._num_committed += share.num_committed
        self._num_later += share.num_later

    def _change(
        self, share: _Share, is_counted: bool, *, committed: int = 0, later: int = 0
    ) -> None:
        share.num_committed += committed
        share.num_later += later
        if is_counted:
            self._num_committed += committed
            self._num_later += later

    def _own_share(self, key: int, program: Program | None) -> tuple[_Share, bool]:
        """The share of who asks, and whether it is among those that were counted."""
        share = self._shares.get(key)
        if share is not None:
            return share, True
        if program is None:
            return _Share(), False
        share = self._new.get(key)
        if share is None:
            self._count_again(program)
            share = self._new[key] = self._share_of(program)
        return share, False

    def _count_again(self, program: Program) -> None:
        """What sequences that wait need, those first for which that was counted longest ago."""
        for sequence in program.next_to_count(_MAX_COUNTED):
            program.note_need(sequence, self._num_pages_needed(sequence))

    def _share_of(self, program: Program) -> _Share:
        return _Share(
            serial=program.serial,
            num_committed=sum(map(self._num_pages_to_come, program.running.values())),
            num_later=self._num_pages_later(program),
            holders=(program.handles, program.running),
        )

    def _share_of_sequence(self, sequence: Sequence) -> _Share:
        return _Share(
            num_committed=self._num_pages_to_come(sequence),
            holders=({}, {id(sequence): sequence}),
        )

    def _num_held(self, share: _Share) -> int:
        if self._num_given_up != self._programs.num_given_up:
            self._num_given_up = self._programs.num_given_up
            self._forget_held()
        if share.num_held is None:
            handles, running = share.holders
            share.num_held = self._pages.num_pages_freed_without(handles.values(), running.values())
        return share.num_held

    def _forget_held(self) -> None:
        for share in (*self._shares.values(), *self._new.values()):
            share.num_held = None

    def _num_pages_later(self, program: Program) -> int:
        """What it will ask for, and what it waits for now."""
        num_expected = self._programs.num_expected(program.generated_tokens)
        num_pages = self._pages.num_pages_for(program.constant_tokens + num_expected)
        return num_pages + program.num_pages_needed

    def _num_pages_needed(self, sequence: Sequence) -> int:
        """What a waiting sequence takes of the available pages until it has ended."""
        num_tokens = len(sequence.token_ids)
        num_expected = self._programs.num_expected(sequence.num_tokens_to_come)
        to_come = self._pages.num_pages_for(num_tokens + num_expected)
        return (
            self._pages.num_pages_taken(sequence) + to_come - self._pages.num_pages_for(num_tokens)
        )

    def _num_pages_to_come(self, sequence: Sequence) -> int:
        """What a running sequence still takes until it has ended."""
        num_expected = self._programs.num_expected(sequence.num_tokens_to_come)
        num_pages = self._pages.num_pages_for(len(sequence.token_ids) + num_expected)
        return max(0, num_pages - len(sequence.page_ids))


@dataclass(slots=True)
class _Share:
    """Pages of a program, or of a sequence of none."""

    serial: int = 0  # of a program that has begun
    num_committed: int = 0  # what its running sequences will still take
    num_later: int = 0  # what it will ask for
    # What comes back when it ends; None: not counted yet, since that is not cheap.
    num_held: int | None = None
    holders: tuple[Mapping[Path, Handle], Mapping[int, Sequence]] = ({}, {})


def _can_all_end(num_left: int, needs: list[tuple[int, int]]) -> bool:
    """Whether all but one can end in some order, each (needs, gives back when it ends).

    Whoever needs least goes first: if that one cannot end, nobody can.
    """
    needs.sort()
    for needed, given_back in needs[:-1]:
        if needed > num_left:
            return False
        num_left += given_back
    return True


def _drop(program: Program, path: Path) -> None:
    handle = program.handles.pop(path, None)
    if handle is not None:
        handle.lease.release()


def _drop_all(program: Program) -> None:
    for path in list(program.handles):
        _drop(program, path)
