"""What may come next in an object or an array, and how cheaply it can be completed.

Only counts and costs are looked at here; the terms are made in `unfold`. Whether several counters
can be satisfied together is a search over what is still to come, with every answer remembered. It
is exact, and the store's limit of time bounds it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from palmette.grammar.structures import Counter, Items, Members, Part, Punctuation

if TYPE_CHECKING:
    from palmette.grammar.term_store import TermStore
    from palmette.grammar.terms import Term

V = TypeVar("V")

_MOST_KNOWN = 1 << 17  # answers of one object or array that are remembered

Left = tuple[Counter, ...]
_State = tuple[int, int, Left]  # place, members that came (or, past all places, groups given up)


class Where(NamedTuple):
    """A place between two parts of an object or array."""

    place: int  # places before it are decided; 0 throughout in an object of any order
    came: int  # in any order: bits of the declared members that came
    left: Left  # of the counters that matter: how many must come yet, and how many may
    is_first: bool = False
    seen: frozenset[bytes] = frozenset()  # texts that must not come again
    # Of texts that came besides, but are not remembered, the number: only while masks are made.
    # None: all are remembered.
    forgotten: int | None = None

    @property
    def num_bytes(self) -> int:
        """How much it takes beyond an ordinary one."""
        words = (self.came.bit_length() + 63) // 64
        return 8 * words + 16 * len(self.left) + 100 * len(self.seen)


@dataclass(frozen=True, slots=True)
class Choice(Generic[V]):
    """Parts for one place that move the same counters; the first value is the cheapest."""

    values: tuple[V, ...]
    counters: tuple[int, ...]
    num_bytes: int  # of the cheapest, with its name and a comma


@dataclass(frozen=True, slots=True)
class Step(Generic[V]):
    """The next part of a cheapest completion, `times` times over."""

    place: int  # of a declared member or of the prefix; None of these: -1 - index of the filler
    choice: Choice[V]
    times: int
    after: Where


class Moves(ABC, Generic[V]):
    """The moves of one object or array.

    `places` are the declared members or the places of the prefix, `fillers` what may come without
    end: undeclared members, or the rest of an array. Each has its choices.
    """

    def __init__(
        self, counters: Sequence[Counter], marks: Punctuation, close: Term, store: TermStore
    ) -> None:
        self.places: list[tuple[Choice[V], ...]] = []
        self.fillers: list[tuple[Choice[V], ...]] = []
        self.is_distinct = False  # whether the fillers, or all items, must not come twice
        self.close = close
        self.close_bytes = store.min_bytes(close)
        self.comma_bytes = store.min_bytes(marks.comma)
        # What the first part takes more than another.
        self.first_bytes = store.min_bytes(marks.blank) - self.comma_bytes
        self._spend = store.spend
        self._hold = store.hold
        # Which counters matter at all, and their places in `Where.left`.
        kept = [i for i, each in enumerate(counters) if each != (0, None)]
        self._place_of = {index: place for place, index in enumerate(kept)}
        self._counters: Left = tuple(counters[i] for i in kept)
        self._is_total_only = kept in ([], [0])
        self._known: dict[_State, int | None] = {}
        self._groups: list[tuple[int, Choice[V]]] = []  # of fillers, cheapest first
        self._movers: list[int] = []  # by counter: bits of the places that may move it
        self._is_movable: list[bool] = []  # by counter: whether a filler moves it
        self._moved_from: list[frozenset[int]] = []  # by group: what it and later ones move

    def _finish(self) -> None:
        """Call once the places and fillers are in."""
        self._groups = sorted(
            ((filler, choice) for filler, choices in enumerate(self.fillers) for choice in choices),
            key=lambda group: group[1].num_bytes,
        )
        for counter in range(len(self._counters)):
            bits = 0
            for place, choices in enumerate(self.places):
                if any(counter in choice.counters for choice in choices):
                    bits |= 1 << place
            self._movers.append(bits)
            self._is_movable.append(any(counter in g[1].counters for g in self._groups))
        moved_from: set[int] = set()
        for _, choice in reversed(self._groups):
            moved_from.update(choice.counters)
            self._moved_from.append(frozenset(moved_from))
        self._moved_from.reverse()

    def _choices(
        self, parts: Iterable[Part[V]], cost: Callable[[V], int], overhead: int
    ) -> tuple[Choice[V], ...]:
        groups: dict[tuple[int, ...], list[tuple[int, V]]] = {}
        for part in parts:
            moved = [0, *(index + 1 for index in part.counters)]
            counters = tuple(self._place_of[i] for i in moved if i in self._place_of)
            groups.setdefault(counters, []).append((cost(part.value), part.value))
        choices = []
        for counters, costed in groups.items():
            costed.sort(key=lambda each: each[0])
            values = tuple(value for _, value in costed)
            choices.append(Choice(values, counters, costed[0][0] + overhead))
        return tuple(choices)

    # Where one may go

    @property
    def start(self) -> Where:
        return Where(0, 0, self._settled(0, 0, self._counters), True)

    def may_close(self, where: Where) -> bool:
        """Whether nothing more has to come."""
        return not any(each.low for each in where.left) and not self._must_go_on(where)

    def min_bytes(self, where: Where) -> int | None:
        """The length of a shortest completion; None if there is none.

        It is a lower bound only where parts must not come twice.
        """
        if self.may_close(where):
            return self.close_bytes
        cost = self._cost(self._state(where))
        if cost is None:
            return None
        return cost + self.close_bytes + (self.first_bytes if where.is_first else 0)

    def step(self, where: Where) -> Step[V] | None:
        """The first part of a cheapest completion; None to close."""
        if self.may_close(where):
            return None
        place, came, left = self._state(where)
        if not left:
            place = self._next_due(where)
        while place < len(self.places):
            cost = self._cost((place, came, left))
            assert cost is not None
            for choice, after in self._takes(place, came, left):
                beyond = self._cost(after)
                if beyond is not None and choice.num_bytes + beyond == cost:
                    return Step(place, choice, 1, self._after(where, place, after[2]))
            place += 1
        return self._filler_step(where, left)

    def _filler_step(self, where: Where, left: Left) -> Step[V]:
        direct = self._direct(0, left)
        if direct is not None:
            (filler, choice), times = direct
            if self.is_distinct:
                times = 1
        else:
            times = 1
            given_up, rest = 0, left
            while True:
                cost = self._cost((len(self.places), given_up, rest))
                filler, choice = self._groups[given_up]
                used = self._use(given_up, rest)
                beyond = None if used is None else self._cost(used)
                if beyond is not None and cost == beyond + choice.num_bytes:
                    break
                _, given_up, rest = self._give_up(given_up, rest)
        left = _moved_by(left, choice.counters, times)
        return Step(-1 - filler, choice, times, self._after(where, None, left))

    def offers(self, where: Where, place: int) -> list[tuple[Choice[V], Where]]:
        """The choices for a place (numbered as in `Step`) after which all can be completed."""
        choices = self.places[place] if place >= 0 else self.fillers[-1 - place]
        if place < 0 and not self._may_fill(where):
            return []
        offered = []
        for choice in choices:
            left = moved(where.left, choice.counters)
            if left is not None:
                after = self._after(where, place if place >= 0 else None, left)
                if self.min_bytes(after) is not None:
                    offered.append((choice, after))
        return offered

    @abstractmethod
    def _must_go_on(self, where: Where) -> bool:
        """Whether a certain part has to come, whatever the counters say."""

    @abstractmethod
    def _next_due(self, where: Where) -> int:
        """The first place that has to be filled, or the number of places."""

    @abstractmethod
    def _may_fill(self, where: Where) -> bool:
        """Whether a filler may come next."""

    @abstractmethod
    def _after(self, where: Where, place: int | None, left: Left) -> Where:
        """Where one is after the part at `place` (None: after a filler)."""

    @abstractmethod
    def _state(self, where: Where) -> _State: ...

    @abstractmethod
    def _direct_cost(self, state: _State) -> tuple[int | None] | None:
        """The cost where it is plain to see, in a tuple; else None."""

    @abstractmethod
    def _may_skip(self, place: int, came: int) -> bool: ...

    @abstractmethod
    def _may_take(self, place: int, came: int) -> bool: ...

    def _settled(self, index: int, came: int, left: Left) -> Left:
        """Maxima that what is still to come cannot reach are as good as none."""
        if not any(each.high is not None for each in left):
            return left
        ahead = ~(came >> index)
        settled = []
        for counter, each in enumerate(left):
            if each.high is not None and not self._is_movable[counter]:
                num_ahead = (self._movers[counter] >> index & ahead).bit_count()
                if num_ahead <= each.high:
                    each = Counter(each.low, None)
            settled.append(each)
        return tuple(settled)

    # What it costs

    def _cost(self, state: _State) -> int | None:
        """Bytes of a cheapest way to satisfy what is left, each part with a comma."""
        known = self._known
        if state in known:
            return known[state]
        if len(known) > _MOST_KNOWN:
            known.clear()
        pending = [state]
        while pending:
            here = pending[-1]
            if here in known:
                pending.pop()
                continue
            _, came, left = here
            self._spend(1 + came.bit_length() // 512)
            self._hold(200 + came.bit_length() // 8 + 16 * len(left))
            direct = self._direct_cost(here)
            if direct is not None:
                known[here] = direct[0]
                continue
            ways = self._ways(here)
            unknown = [after for _, after in ways if after not in known]
            if unknown:
                pending += unknown
                continue
            costs = [
                num_bytes + beyond
                for num_bytes, after in ways
                if (beyond := known[after]) is not None
            ]
            known[here] = min(costs, default=None)
        return known[state]

    def _ways(self, state: _State) -> list[tuple[int, _State]]:
        place, came, left = state
        if place == len(self.places):
            return self._filler_ways(came, left)
        ways = [(choice.num_bytes, after) for choice, after in self._takes(place, came, left)]
        if self._may_skip(place, came):
            ways.append((0, self._beyond(place, came, left)))
        return ways

    def _takes(self, place: int, came: int, left: Left) -> list[tuple[Choice[V], _State]]:
        if not self._may_take(place, came):
            return []
        takes = []
        for choice in self.places[place]:
            after = moved(left, choice.counters)
            if after is not None:
                takes.append((choice, self._beyond(place, came, after)))
        return takes

    def _beyond(self, place: int, came: int, left: Left) -> _State:
        place += 1
        if place == len(self.places):
            return place, 0, left
        return place, came >> place << place, left

    def _filler_ways(self, given_up: int, left: Left) -> list[tuple[int, _State]]:
        """Past the places: the order of what comes is free, so the last counter that lacks
        something is seen to first, and with the cheapest groups first. One that was given up does
        not come again until that counter has enough.
        """
        if given_up >= len(self._groups):
            return []
        ways = [(0, self._give_up(given_up, left))]
        after = self._use(given_up, left)
        if after is not None:
            ways.append((self._groups[given_up][1].num_bytes, after))
        return ways

    def _give_up(self, group: int, left: Left) -> _State:
        """Without the group, and without the maxima that no other can reach any more."""
        group += 1
        if group < len(self._groups) and sum(each.low > 0 for each in left) == 1:
            moved_from = self._moved_from[group]
            left = tuple(
                each if counter in moved_from else Counter(each.low, None)
                for counter, each in enumerate(left)
            )
        return len(self.places), group, left

    def _use(self, group: int, left: Left) -> _State | None:
        _, choice = self._groups[group]
        lacking = _last_lacking(left)
        if lacking not in choice.counters:
            return None
        after = moved(left, choice.counters)
        if after is None:
            return None
        return len(self.places), group if _last_lacking(after) == lacking else 0, after

    def _direct(self, given_up: int, left: Left) -> tuple[tuple[int, Choice[V]], int] | None:
        """The filler that does all that is left, if only one counter lacks something and the
        cheapest that moves it can come often enough; and how often.
        """
        lacking = [counter for counter, each in enumerate(left) if each.low]
        if len(lacking) != 1:
            return None
        times = left[lacking[0]].low
        for group in self._groups[given_up:]:
            if lacking[0] in group[1].counters:
                rooms = [left[counter].high for counter in group[1].counters]
                if 0 in rooms:
                    continue
                return (group, times) if all(r is None or r >= times for r in rooms) else None
        return None

    def _direct_filler_cost(self, given_up: int, left: Left) -> tuple[int | None] | None:
        if not any(each.low for each in left):
            return (0,)
        if any(
            each.low
            and (not self._is_movable[i] or (each.high is not None and each.low > each.high))
            for i, each in enumerate(left)
        ):
            return (None,)
        return self._greedy_cost(given_up, left)

    def _greedy_cost(self, given_up: int, left: Left) -> tuple[int | None] | None:
        """If only one counter lacks something, and no two groups that move it are kept short by
        the same maximum: the cheapest groups, each as often as it may come.
        """
        lacking = [counter for counter, each in enumerate(left) if each.low]
        if len(lacking) != 1:
            return None
        times = missing = left[lacking[0]].low
        total = 0
        short: set[int] = set()
        for _, choice in self._groups[given_up:]:
            if lacking[0] not in choice.counters:
                continue
            room = missing
            for counter in choice.counters:
                high = left[counter].high
                if high is not None and high < times:
                    if counter in short:
                        return None
                    short.add(counter)
                    room = min(room, high)
            total += room * choice.num_bytes
            missing -= room
            if not missing:
                return (total,)
        return (None,)


class ObjectMoves(Moves[V]):
    """The moves of an object. `places` are its declared members, `fillers` its `names`."""

    def __init__(self, shape: Members[V], cost: Callable[[V], int], store: TermStore) -> None:
        """`cost` tells the length of a shortest text of a value."""
        required = [i for i, member in enumerate(shape.members) if member.is_required]
        most = shape.max_members
        if most is not None and not shape.names and most >= len(shape.members):
            most = None
        least = shape.min_members if shape.min_members > len(required) else 0
        marks = shape.punctuation
        counters = (Counter(least, most), *shape.counters)
        super().__init__(counters, marks, marks.close_object, store)
        self.shape = shape
        around = store.min_bytes(marks.colon) + self.comma_bytes
        self.is_any_order = shape.order == "any"
        self.is_distinct = shape.has_distinct_names and bool(shape.names)
        self.required = required
        for member in shape.members:
            self.places.append(self._choices(member.parts, cost, len(member.key) + around))
        for names in shape.names:
            overhead = store.min_bytes(names.name) + around
            self.fillers.append(self._choices(names.parts, cost, overhead))
        self._finish()
        # The members in the order of their keys.
        self.sorted_places = sorted(range(len(shape.members)), key=lambda i: shape.members[i].key)
        self.keys = [shape.members[i].key for i in self.sorted_places]
        self._cheapest = [min(c.num_bytes for c in each) for each in self.places]
        self._required_bits = sum(1 << i for i in required)
        # Of the required members from each on: bytes, when nothing is counted.
        self._bytes_from = [0] * (len(required) + 1)
        for at in range(len(required) - 1, -1, -1):
            self._bytes_from[at] = self._bytes_from[at + 1] + self._cheapest[required[at]]
        self._optional_by_cost: list[int] | None = None

    def next_required(self, where: Where) -> int | None:
        """The first required member that has not come."""
        if self.is_any_order:
            missing = self._required_bits & ~where.came
            return (missing & -missing).bit_length() - 1 if missing else None
        at = bisect_left(self.required, where.place)
        return self.required[at] if at < len(self.required) else None

    def candidates(self, where: Where, low: int, high: int) -> list[int]:
        """The members with a key out of `keys[low:high]` that may come next."""
        self._spend((high - low) // 16)
        listed = self.sorted_places[low:high]
        if self.is_any_order:
            came = where.came
            ahead = [i for i in listed if not came >> i & 1]
        else:
            first, last = where.place, self._last_ahead(where)
            ahead = [i for i in listed if first <= i <= last]
        if not where.left:
            return ahead
        if not self._is_total_only:
            return [i for i in ahead if self.offers(where, i)]
        room = where.left[0].high
        if room is not None and room <= self._required_cost(where.place, where.came)[1]:
            return [i for i in ahead if self.shape.members[i].is_required]
        return ahead

    def _last_ahead(self, where: Where) -> int:
        """No member beyond this one may come next: it must come, or too few would be left."""
        required = self.next_required(where)
        last = len(self.places) - 1 if required is None else required
        if where.left and self._is_total_only and not self.fillers:
            last = min(last, len(self.places) - where.left[0].low)
        return last

    def _must_go_on(self, where: Where) -> bool:
        return self.next_required(where) is not None

    def _next_due(self, where: Where) -> int:
        required = self.next_required(where)
        return len(self.places) if required is None else required

    def _may_fill(self, where: Where) -> bool:
        return self.is_any_order or self.next_required(where) is None

    def _after(self, where: Where, place: int | None, left: Left) -> Where:
        index, came = where.place, where.came
        if not self.is_any_order:
            index = len(self.places) if place is None else place + 1
        elif place is not None:
            came |= 1 << place
        return where._replace(
            place=index, came=came, left=self._settled(index, came, left), is_first=False
        )

    def _state(self, where: Where) -> _State:
        came = 0 if where.place == len(self.places) else where.came
        return where.place, came, where.left

    def _may_skip(self, place: int, came: int) -> bool:
        return bool(came >> place & 1) or not self.shape.members[place].is_required

    def _may_take(self, place: int, came: int) -> bool:
        return not came >> place & 1

    def _direct_cost(self, state: _State) -> tuple[int | None] | None:
        place, came, left = state
        if place == len(self.places):
            return self._direct_filler_cost(came, left)
        if not left:
            return (self._required_cost(place, came)[0],)
        if not self._is_total_only:
            return None
        total, num_required = self._required_cost(place, came)
        low, high = left[0]
        if high is not None and max(num_required, low) > high:
            return (None,)
        num_more = low - num_required
        if num_more > 0:
            more = self._optional_cost(place, came, num_more)
            return (None if more is None else total + more,)
        return (total,)

    def _required_cost(self, place: int, came: int) -> tuple[int, int]:
        at = bisect_left(self.required, place)
        if not came:
            return self._bytes_from[at], len(self.required) - at
        missing = [i for i in self.required[at:] if not came >> i & 1]
        return sum(self._cheapest[i] for i in missing), len(missing)

    def _optional_cost(self, place: int, came: int, count: int) -> int | None:
        """Bytes of the `count` cheapest members that do not have to come."""
        if self._optional_by_cost is None:
            optional = [i for i, m in enumerate(self.shape.members) if not m.is_required]
            self._optional_by_cost = sorted(optional, key=self._cheapest.__getitem__)
        filler = self._groups[0][1].num_bytes if self._groups else None
        total = 0
        self._spend(len(self._optional_by_cost) // 16)
        for i in self._optional_by_cost:
            if not count or (filler is not None and self._cheapest[i] >= filler):
                break
            if i >= place and not came >> i & 1:
                total += self._cheapest[i]
                count -= 1
        if not count:
            return total
        return None if filler is None else total + count * filler


class ArrayMoves(Moves[V]):
    """The moves of an array. `places` are those of the prefix, the only filler is the rest."""

    def __init__(self, shape: Items[V], cost: Callable[[V], int], store: TermStore) -> None:
        """`cost` tells the length of a shortest text of a value."""
        most = shape.max_items
        if most is not None and not shape.rest and most >= len(shape.prefix):
            most = None
        marks = shape.punctuation
        counters = (Counter(shape.min_items, most), *shape.counters)
        super().__init__(counters, marks, marks.close_array, store)
        self.shape = shape
        self.is_distinct = shape.is_unique
        self.places = [self._choices(parts, cost, self.comma_bytes) for parts in shape.prefix]
        self.fillers = [self._choices(shape.rest, cost, self.comma_bytes)] if shape.rest else []
        self._finish()
        # Of the first places: bytes of the cheapest items there, when only their number counts.
        self._bytes_before = [0]
        for choices in self.places:
            cheapest = min(choice.num_bytes for choice in choices)
            self._bytes_before.append(self._bytes_before[-1] + cheapest)

    def place(self, where: Where) -> int | None:
        """The place for `offers` that comes next; None if there is none."""
        if where.place < len(self.places):
            return where.place
        return -1 if self.fillers else None

    def _must_go_on(self, where: Where) -> bool:
        return False

    def _next_due(self, where: Where) -> int:
        return len(self.places)

    def _may_fill(self, where: Where) -> bool:
        return where.place == len(self.places)

    def _after(self, where: Where, place: int | None, left: Left) -> Where:
        index = len(self.places) if place is None else place + 1
        return where._replace(place=index, left=self._settled(index, 0, left), is_first=False)

    def _state(self, where: Where) -> _State:
        return where.place, 0, where.left

    def _may_skip(self, place: int, came: int) -> bool:
        return False

    def _may_take(self, place: int, came: int) -> bool:
        return True

    def _direct_cost(self, state: _State) -> tuple[int | None] | None:
        place, given_up, left = state
        if place == len(self.places):
            return self._direct_filler_cost(given_up, left)
        if not any(each.low for each in left):
            return (0,)
        if not self._is_total_only:
            return None
        low, high = left[0]
        if high is not None and low > high:
            return (None,)
        end = min(place + low, len(self.places))
        total = self._bytes_before[end] - self._bytes_before[place]
        more = low - (end - place)
        if more and not self._groups:
            return (None,)
        return (total + more * (self._groups[0][1].num_bytes if more else 0),)


def moved(left: Left, counters: tuple[int, ...]) -> Left | None:
    """What is left after one part that moves these counters; None if one of them is full."""
    if not counters:
        return left
    after = list(left)
    for counter in counters:
        low, high = after[counter]
        if high == 0:
            return None
        after[counter] = Counter(low - 1 if low else 0, None if high is None else high - 1)
    return tuple(after)


def _moved_by(left: Left, counters: tuple[int, ...], times: int) -> Left:
    after = list(left)
    for counter in counters:
        low, high = after[counter]
        after[counter] = Counter(max(low - times, 0), None if high is None else high - times)
    return tuple(after)


def _last_lacking(left: Left) -> int | None:
    for counter in range(len(left) - 1, -1, -1):
        if left[counter].low:
            return counter
    return None


def cheapest(
    shape: Members[V] | Items[V], cost: Callable[[V], int | None], store: TermStore
) -> int | None:
    """The length of a shortest text of the shape, from bracket to bracket; None if there is none.

    `cost` tells the length of a shortest text of a value, None where nothing is valid. Values are
    whatever a front end has in the place of terms.
    """
    known: dict[V, int] = {}

    def keep(value: V) -> V | None:
        num_bytes = cost(value)
        if num_bytes is None:
            return None
        known[value] = num_bytes
        return value

    marks = shape.punctuation
    possible = shape.with_values(keep)
    if isinstance(possible, Members):
        spelled = without_unspelled(possible, store)
        if spelled is None:
            return None
        objects = ObjectMoves(spelled, known.__getitem__, store)
        num_bytes, opening = objects.min_bytes(objects.start), marks.open_object
    elif possible is not None:
        arrays = ArrayMoves(possible, known.__getitem__, store)
        num_bytes, opening = arrays.min_bytes(arrays.start), marks.open_array
    else:
        return None
    return None if num_bytes is None else num_bytes + store.min_bytes(opening)


def without_unspelled(shape: Members[V], store: TermStore) -> Members[V] | None:
    """The shape without members whose keys the alphabet cannot spell; None if one is required."""
    spelled = tuple(member for member in shape.members if store.can_spell(member.key))
    if len(spelled) == len(shape.members):
        return shape
    if any(m.is_required and not store.can_spell(m.key) for m in shape.members):
        return None
    return replace(shape, members=spelled)


class Cheapest(Generic[V]):
    """The length of a shortest text of a shape, while those of its values become known.

    This is what Knuth's generalisation of Dijkstra's algorithm (1977) asks of each production:
    tell it the values in order of their lengths, take the answer when it is the least of all.
    """

    def __init__(self, shape: Members[V] | Items[V], store: TermStore) -> None:
        self.num_bytes: int | None = None  # None: not possible with what is known
        self._shape = shape
        self._store = store
        self._known: dict[V, int] = {}
        # Necessary, and quick to see: each due place has a known value, and the counters that
        # need something have enough places that move them.
        self._due: set[int] = set()
        self._lacking: list[float] = []
        self._occurrences: dict[V, list[tuple[int, tuple[int, ...]]]] = {}
        self._counted: set[tuple[int, int]] = set()
        if isinstance(shape, Members):
            places = [member.parts for member in shape.members]
            fillers = [part for names in shape.names for part in names.parts]
            self._due = {i for i, member in enumerate(shape.members) if member.is_required}
            low = shape.min_members
            has_choice = low > len(self._due)
        else:
            places, fillers, low = list(shape.prefix), list(shape.rest), shape.min_items
            self._due = set(range(min(low, len(places))))
            has_choice = False
        self._has_choice = has_choice or bool(shape.counters)
        self._lacking = [low, *(each.low for each in shape.counters)]
        for place, parts in enumerate([*places, fillers]):
            for part in parts:
                self._occurrences.setdefault(part.value, []).append((place, part.counters))
        self._filler_place = len(places)
        self._update()

    @property
    def values(self) -> tuple[V, ...]:
        """The values that matter, each once."""
        return tuple(self._occurrences)

    def learn(self, value: V, num_bytes: int) -> bool:
        """Say how long a shortest text of a value is; whether the shape's own length fell."""
        if value in self._known or value not in self._occurrences:
            return False
        self._known[value] = num_bytes
        for place, counters in self._occurrences[value]:
            self._due.discard(place)
            for counter in (0, *(index + 1 for index in counters)):
                if (place, counter) not in self._counted:
                    self._counted.add((place, counter))
                    is_filler = place == self._filler_place
                    self._lacking[counter] -= math.inf if is_filler else 1
        if self.num_bytes is not None and (not self._has_choice or num_bytes >= self.num_bytes):
            return False
        return self._update()

    def _update(self) -> bool:
        if self._due or any(lacking > 0 for lacking in self._lacking):
            return False
        num_bytes = cheapest(self._shape, self._known.get, self._store)
        if num_bytes is None or (self.num_bytes is not None and num_bytes >= self.num_bytes):
            return False
        self.num_bytes = num_bytes
        return True
