"""The order in which waiting sequences are tried: three policies behind one small protocol."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import islice
from typing import Protocol

from palmette.radix_cache import Namespace
from palmette.runtime.config import SchedulerSection
from palmette.runtime.sequence import Sequence, shared_length

# Of many that are overdue and all wait for another sequence, no more are looked at in a step.
_MAX_OVERDUE_TRIED = 64

# Whoever has waited for this share of the bound comes first, so that the rest of it is left for
# those that run to make room.
OVERDUE_SHARE = 0.75

# Those that are overdue go together with others that came within this share of the bound.
_TOGETHER_SHARE = 0.5

# Among so many of programs that have begun the nearest one is looked for.
_MAX_BESIDE = 64

CachedTokens = Callable[[Sequence], int]
"""How many leading tokens of a sequence the cache holds now; asking is no use of them."""


class Round(Protocol):
    """One step's walk over the waiting sequences, best first. What `next` gave is answered with
    `admitted`, `deferred` or `passed` before the next one is asked for.
    """

    def next(self) -> Sequence | None:
        """Who should be tried now; None if nobody is left to try in this step."""
        ...

    def admitted(self) -> None:
        """It waits no longer."""
        ...

    def deferred(self, num_tokens: int) -> None:
        """It waits for another sequence to compute what both share, and so would all that begin
        with the same `num_tokens` tokens: none of them need be tried in this step.
        """
        ...

    def passed(self) -> None:
        """There is no room for it now. Nobody new may pass it, only those whose program has begun:
        they make room when they end.
        """
        ...


class WaitingQueue(Protocol):
    """Sequences that wait."""

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """A preempted sequence waits again, before all that never ran."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It has ended without being admitted."""
        ...

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """The program of these, which wait, has begun."""
        ...

    def round(self, now: float) -> Round:
        """A walk for one step. Nothing may be added or removed meanwhile."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival, preempted ones first."""
        ...


def make_queue(config: SchedulerSection, cached_tokens: CachedTokens) -> WaitingQueue:
    """The queue that `config.policy` asks for."""
    if config.policy == "fcfs":
        return FirstComeFirstServed(max_tried=2 * config.max_running)
    if config.policy == "lpm":
        return LongestPrefixMatch(cached_tokens, config.max_wait)
    return DepthFirst(cached_tokens, config.max_wait)


class _Arrivals:
    """Waiting sequences by arrival, preempted ones before all others."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._resumed: OrderedDict[int, Sequence] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        self._waiting[id(sequence)] = sequence

    def resume(self, sequence: Sequence) -> None:
        self._resumed[id(sequence)] = sequence
        self._resumed.move_to_end(id(sequence), last=False)

    def remove(self, sequence: Sequence) -> None:
        if self._resumed.pop(id(sequence), None) is None:
            del self._waiting[id(sequence)]

    @property
    def new(self) -> Iterable[Sequence]:
        """Those that never ran, oldest first."""
        return self._waiting.values()

    @property
    def resumed(self) -> Iterable[Sequence]:
        return self._resumed.values()

    def __len__(self) -> int:
        return len(self._resumed) + len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed.values()
        yield from self._waiting.values()


class FirstComeFirstServed:
    """By arrival. A step tries `max_tried` at most, so it costs the same however many wait."""

    def __init__(self, *, max_tried: int) -> None:
        self._arrivals = _Arrivals()
        self._max_tried = max_tried

    def add(self, sequence: Sequence) -> None:
        self._arrivals.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        self._arrivals.resume(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._arrivals.remove(sequence)

    def begin(self, sequences: Iterable[Sequence]) -> None:
        pass  # this order knows no programs

    def round(self, now: float) -> Round:
        tried = list(islice(iter(self._arrivals), self._max_tried))
        return _ListedRound(tried, self._arrivals.remove)

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._arrivals)


class LongestPrefixMatch(FirstComeFirstServed):
    """Most cached tokens first, as SGLang's cache-aware policy (arXiv:2312.07104, section 3).

    Whoever has waited for most of `max_wait` seconds comes before all others, by arrival. Every
    waiting sequence is looked up in every step that has room, so a step costs more the more wait.
    """

    def __init__(self, cached_tokens: CachedTokens, max_wait: float) -> None:
        super().__init__(max_tried=0)
        self._cached_tokens = cached_tokens
        self._max_wait = OVERDUE_SHARE * max_wait

    def round(self, now: float) -> Round:
        arrivals = self._arrivals
        overdue = [s for s in arrivals.new if now - s.submitted_at >= self._max_wait]
        others = [s for s in arrivals.new if now - s.submitted_at < self._max_wait]
        others.sort(key=self._cached_tokens, reverse=True)
        return _ListedRound([*arrivals.resumed, *overdue, *others], arrivals.remove)


class _ListedRound:
    """A round in an order that is known beforehand."""

    def __init__(self, order: list[Sequence], remove: Callable[[Sequence], None]) -> None:
        self._order = iter(order)
        self._remove = remove
        self._current: Sequence | None = None

    def next(self) -> Sequence | None:
        self._current = next(self._order, None)
        return self._current

    def admitted(self) -> None:
        assert self._current is not None
        self._remove(self._current)

    def deferred(self, num_tokens: int) -> None:
        pass  # the others find out by themselves

    def passed(self) -> None:
        self._order = iter(())


class DepthFirst:
    """Depth-first over the tree that the waiting prompts form: next comes whoever shares most with
    the one admitted last, so that a shared beginning is used up before it may be evicted.

    For a known batch, depth-first order computes no token twice if the cache holds the longest
    request (SGLang, arXiv:2312.07104, theorem 3.1). Prompts are kept in lexicographic order, in
    which those of a subtree are neighbours: whoever shares most with a given one stands beside it.
    A newcomer for whom the cache holds more than that comes first.

    Before all of these come requests that go on from what their program holds, the oldest program
    first. And before everybody, these included, comes whoever has waited for most of `max_wait`
    seconds, by arrival, so nobody starves; of those that are overdue together, the ones that begin
    alike go together, as long as they came within half of `max_wait` of the first.

    A round costs O(log n) comparisons for each sequence it tries, whatever waits.
    """

    def __init__(self, cached_tokens: CachedTokens, max_wait: float) -> None:
        self.cached_tokens = cached_tokens
        self.overdue_after = OVERDUE_SHARE * max_wait
        self.mates_within = _TOGETHER_SHARE * max_wait
        self.arrivals = _Arrivals()
        self.keys: list[Key] = []
        self.last: Sequence | None = None  # admitted last; the walk goes on from there
        # Newcomers for whom the cache held something: (-tokens then, serial, sequence)
        self.warm: list[tuple[int, int, Sequence]] = []
        # One of each subtree that the walk left because all in it wait for a leader, by its id.
        self.left: dict[int, Sequence] = {}
        # Requests of programs that have begun: (the program's serial, own serial, sequence). Those
        # that go on from nothing have their place among the newcomers as well.
        self.begun: list[tuple[int, int, Sequence]] = []
        self._begun_by_id: dict[int, tuple[int, int, Sequence]] = {}
        # Of those, the ones that go on from something, by arrival.
        self.going_on: OrderedDict[int, Sequence] = OrderedDict()
        self._by_serial: dict[int, Sequence] = {}  # the last part of a key
        self._keys_by_id: dict[int, Key] = {}
        self._key_of_last: tuple[Sequence | None, int, Key] = (None, 0, (("", "", "", ()), b"", 0))
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        self._num_added += 1
        serial = self._num_added
        if sequence.program is not None and sequence.program.has_begun:
            self._add_begun(sequence, serial)
            if sequence.handle is not None:
                self.going_on[id(sequence)] = sequence
                return
        key = (_place(sequence.namespace), _in_order(sequence.token_ids), serial)
        self._by_serial[serial] = sequence
        self._keys_by_id[id(sequence)] = key
        insort(self.keys, key)
        self.arrivals.add(sequence)
        held = self.cached_tokens(sequence)
        if held:
            heappush(self.warm, (-held, serial, sequence))

    def resume(self, sequence: Sequence) -> None:
        self.arrivals.resume(sequence)

    def remove(self, sequence: Sequence) -> None:
        entry = self._begun_by_id.pop(id(sequence), None)
        if entry is not None:
            del self.begun[bisect_left(self.begun, entry)]
        key = self._keys_by_id.pop(id(sequence), None)
        if key is not None:
            del self.keys[bisect_left(self.keys, key)]
            del self._by_serial[key[2]]
            self.left.pop(id(sequence), None)
        if self.going_on.pop(id(sequence), None) is None:
            self.arrivals.remove(sequence)

    def begin(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if self.is_new(sequence):
                self._add_begun(sequence, self.key(sequence)[2])

    def round(self, now: float) -> Round:
        return _DepthFirstRound(self, now)

    def __len__(self) -> int:
        return len(self.arrivals) + len(self.going_on)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.arrivals.resumed
        for _, _, sequence in self.begun:
            if not self.is_new(sequence):
                yield sequence
        yield from self.arrivals.new

    def key(self, sequence: Sequence) -> Key:
        """Its place in the lexicographic order."""
        return self._keys_by_id[id(sequence)]

    def key_of_last(self, last: Sequence) -> Key:
        """Where `last`, which is in no order any more, would stand, before all that are alike."""
        known, num_tokens, key = self._key_of_last
        if known is not last or num_tokens != len(last.token_ids):
            key = (_place(last.namespace), _in_order(last.token_ids), 0)
            self._key_of_last = last, len(last.token_ids), key
        return key

    def at(self, index: int) -> Sequence:
        return self._by_serial[self.keys[index][2]]

    def is_new(self, sequence: Sequence) -> bool:
        """Whether it waits, never ran, and goes on from nothing."""
        return id(sequence) in self._keys_by_id

    def _add_begun(self, sequence: Sequence, serial: int) -> None:
        assert sequence.program is not None
        entry = (sequence.program.serial, serial, sequence)
        self._begun_by_id[id(sequence)] = entry
        insort(self.begun, entry)


class _DepthFirstRound:
    """Preempted and overdue sequences by arrival, those of programs that have begun, the walk."""

    def __init__(self, queue: DepthFirst, now: float) -> None:
        self._queue = queue
        self._now = now
        self._resumed = iter(list(queue.arrivals.resumed))
        self._last_begun: tuple[int, int, Sequence] | None = None  # looked at last, going on
        # Back to the subtrees that were left, the one left last first.
        self._left = reversed(list(queue.left.values()))
        self._passed: set[int] = set()  # tried out of the walk's order and deferred
        # Ranges of keys, none within another: the lower ends, which are in, and the upper ones.
        self._blocked_from: list[Key] = []
        self._blocked_to: list[Key] = []
        self._current: Sequence | None = None
        self._is_closed = False  # to those whose program has not begun

    def next(self) -> Sequence | None:
        current = next(self._resumed, None)
        if current is None and not self._is_closed:
            current = self._overdue()
        if current is None:
            current = self._going_on()
        if current is None and not self._is_closed:
            current = self._returning() or self._nearest()
        if current is None and self._is_closed:
            current = self._begun_beside()
        self._current = current
        return current

    def admitted(self) -> None:
        current = self._current
        assert current is not None
        if self._queue.is_new(current):
            self._queue.last = current
        self._queue.remove(current)

    def passed(self) -> None:
        assert self._current is not None
        self._passed.add(id(self._current))
        self._is_closed = True

    def deferred(self, num_tokens: int) -> None:
        assert self._current is not None
        self._passed.add(id(self._current))
        if not self._queue.is_new(self._current):
            return
        self._queue.left[id(self._current)] = self._current
        beginning = self._current.token_ids[:num_tokens]
        # Above everything that begins so: the last token, one greater.
        after = [*beginning[:-1], beginning[-1] + 1] if beginning else [_ABOVE_TOKENS]
        place = _place(self._current.namespace)
        low, high = (place, _in_order(beginning), 0), (place, _in_order(after), 0)
        first, end = bisect_left(self._blocked_from, low), bisect_left(self._blocked_from, high)
        self._blocked_from[first:end] = [low]  # in place of those within
        self._blocked_to[first:end] = [high]

    def _going_on(self) -> Sequence | None:
        """Those that go on from what their program holds, in order."""
        begun = self._queue.begun
        index = 0 if self._last_begun is None else bisect_right(begun, self._last_begun)
        while index < len(begun):
            self._last_begun = begun[index]
            sequence = begun[index][2]
            if not self._queue.is_new(sequence) and id(sequence) not in self._passed:
                return sequence
            index += 1
        return None

    def _begun_beside(self) -> Sequence | None:
        """The others of programs that have begun, now that nobody new is tried any more: of the
        oldest ones the one for whom the cache has most.
        """
        last = self._queue.last
        candidates = islice(
            (
                sequence
                for _, _, sequence in self._queue.begun
                if self._queue.is_new(sequence) and id(sequence) not in self._passed
            ),
            _MAX_BESIDE,
        )
        if last is None:
            return next(candidates, None)
        # What the cache has may go while others of their program are waited for.
        return max(
            candidates,
            key=lambda s: (self._queue.cached_tokens(s), shared_length(s, last)),
            default=None,
        )

    def _overdue(self) -> Sequence | None:
        queue = self._queue
        waiting = merge(
            queue.going_on.values(), queue.arrivals.new, key=lambda sequence: sequence.submitted_at
        )
        for sequence in islice(waiting, _MAX_OVERDUE_TRIED):
            if self._now - sequence.submitted_at < queue.overdue_after:
                return None
            if id(sequence) in self._passed:
                continue
            if not queue.is_new(sequence):
                return sequence
            if not self._is_blocked(sequence):
                return self._mate(sequence) or sequence
        return None

    def _mate(self, first: Sequence) -> Sequence | None:
        """Who is overdue as well, came soon after `first`, and begins like the one admitted last:
        half of its tokens or more.
        """
        last = self._queue.last
        if last is None:
            return None
        latest = min(
            first.submitted_at + self._queue.mates_within, self._now - self._queue.overdue_after
        )
        for neighbour in self._neighbours(last):
            if neighbour.submitted_at <= latest:
                shared = shared_length(neighbour, last)
                if 2 * shared >= len(neighbour.token_ids):
                    return neighbour
        return None

    def _returning(self) -> Sequence | None:
        for sequence in self._left:
            waits = self._queue.is_new(sequence) and id(sequence) not in self._passed
            if waits and not self._is_blocked(sequence):
                return sequence
        return None

    def _nearest(self) -> Sequence | None:
        """Who shares most with the one admitted last, or with the cache."""
        queue = self._queue
        best, best_tokens = self._warmest()
        last = queue.last or next(iter(queue.arrivals.new), None)
        if last is None:
            return None
        for neighbour in self._neighbours(last):
            tokens = shared_length(neighbour, last)
            if best is None or tokens > best_tokens:
                best, best_tokens = neighbour, tokens
        return best

    def _neighbours(self, last: Sequence) -> Iterator[Sequence]:
        """Who stands next to `last` in the order: nobody shares more with it than one of them."""
        index = bisect_left(self._queue.keys, self._queue.key_of_last(last))
        for neighbour in (self._after(index), self._before(index)):
            if neighbour is not None:
                yield neighbour

    def _warmest(self) -> tuple[Sequence | None, int]:
        """The newcomer for whom the cache holds most, if it still does."""
        warm = self._queue.warm
        aside = []
        found: tuple[Sequence | None, int] = (None, 0)
        while warm:
            promised, serial, sequence = warm[0]
            if not self._queue.is_new(sequence):
                heappop(warm)
                continue
            if id(sequence) in self._passed or self._is_blocked(sequence):
                aside.append(heappop(warm))
                continue
            held = self._queue.cached_tokens(sequence)
            if held < -promised:  # evicted meanwhile: it stands where it now belongs
                heappop(warm)
                if held:
                    heappush(warm, (-held, serial, sequence))
                continue
            found = sequence, held
            break
        for entry in aside:
            heappush(warm, entry)
        return found

    def _after(self, index: int) -> Sequence | None:
        """The first that is not blocked, from `index` on."""
        keys = self._queue.keys
        while index < len(keys):
            blocked = self._range_of(keys[index])
            if blocked is None:
                sequence = self._queue.at(index)
                if id(sequence) not in self._passed:
                    return sequence
                index += 1
            else:
                index = bisect_left(keys, blocked[1])
        return None

    def _before(self, index: int) -> Sequence | None:
        """The last that is not blocked, before `index`."""
        keys = self._queue.keys
        index -= 1
        while index >= 0:
            blocked = self._range_of(keys[index])
            if blocked is None:
                sequence = self._queue.at(index)
                if id(sequence) not in self._passed:
                    return sequence
                index -= 1
            else:
                index = bisect_left(keys, blocked[0]) - 1
        return None

    def _is_blocked(self, sequence: Sequence) -> bool:
        return bool(self._blocked_from) and self._range_of(self._queue.key(sequence)) is not None

    def _range_of(self, key: Key) -> tuple[Key, Key] | None:
        place = bisect_right(self._blocked_from, key) - 1
        if place < 0 or key >= self._blocked_to[place]:
            return None
        return self._blocked_from[place], self._blocked_to[place]


Key = tuple[tuple[str, str, str, tuple[str, ...]], bytes, int]

_ABOVE_TOKENS = (1 << 32) - 1


def _in_order(token_ids: list[int]) -> bytes:
    """Bytes that compare as the token ids do, and many times faster where much is the same."""
    words = array("I", token_ids)
    assert words.itemsize == 4
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _place(namespace: Namespace) -> tuple[str, str, str, tuple[str, ...]]:
    return namespace.model, namespace.adapter, namespace.salt, namespace.media
