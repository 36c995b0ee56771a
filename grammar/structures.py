"""Objects and arrays as the machine sees them: parts that are counted, in order or in any order.

They hold whatever a schema says of the members of an object or the items of an array once its
logic is worked out: which parts may come, which must, and how often one of a kind may.

Values are terms when a shape is given to `TermStore.object` or `TermStore.array`. A front end may
use keys of its own in their place for as long as the terms do not exist, ask `moves.Cheapest` how
long a shortest text is, and put the terms in with `with_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from palmette.grammar.terms import Term

Order = Literal["declared", "any"]

V = TypeVar("V")
W = TypeVar("W")


class Counter(NamedTuple):
    """How many parts of a kind there must be at least, and may be at most (None: no bound)."""

    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Part(Generic[V]):
    """One kind of value for a place. Its term is never empty.

    Each value of this kind moves the counters with these indices on by one. Kinds for one place
    whose counters differ have no value in common, or a count would depend on the reading.
    """

    value: V
    counters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Member(Generic[V]):
    """A declared member: `key` is its name as written, with quotes; `parts` is not empty."""

    key: bytes
    parts: tuple[Part[V], ...]
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Names(Generic[V]):
    """Members whose names are not declared one by one.

    `name` is a regular term that is not empty, with quotes; it holds no spelling of a declared
    name, nor anything of another `Names` of the same object. `parts` is not empty.
    """

    name: Term
    parts: tuple[Part[V], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Punctuation:
    """Structural characters with the whitespace that may stand around them."""

    blank: Term  # before the first member or item
    comma: Term
    colon: Term
    open_array: Term
    close_array: Term
    open_object: Term
    close_object: Term


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Members(Generic[V]):
    """An object.

    With `has_distinct_names` no name out of `names` comes twice in one spelling.

    In declared order, members come as they are listed, optional ones left out at will, and then
    any number of members out of `names`. In any order, all of them come as they like. Either way a
    declared member comes at most once.
    """

    punctuation: Punctuation
    members: tuple[Member[V], ...] = ()
    names: tuple[Names[V], ...] = ()
    counters: tuple[Counter, ...] = ()
    min_members: int = 0
    max_members: int | None = None
    order: Order = "declared"
    has_distinct_names: bool = False

    def with_values(self, make: Callable[[V], W | None]) -> Members[W] | None:
        """The same with other values; parts for which `make` gives None are left out.

        None if a required member is left without parts.
        """
        members = []
        for member in self.members:
            parts = _parts_with_values(member.parts, make)
            if parts:
                members.append(Member(member.key, parts, member.is_required))
            elif member.is_required:
                return None
        names = []
        for each in self.names:
            parts = _parts_with_values(each.parts, make)
            if parts:
                names.append(Names(each.name, parts))
        changed = replace(cast(Any, self), members=tuple(members), names=tuple(names))
        return cast("Members[W]", changed)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Items(Generic[V]):
    """An array: the kinds for each of the first places, and those for all others (none: no more).

    No place of `prefix` is without kinds: an array cannot be longer than the places it can fill.
    If it `is_unique`, no text of an item comes twice; all values must be regular terms then, and
    what differs as a value but may be spelled alike, or the other way round, is left to the caller.
    """

    punctuation: Punctuation
    prefix: tuple[tuple[Part[V], ...], ...] = ()
    rest: tuple[Part[V], ...] = ()
    counters: tuple[Counter, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False

    def with_values(self, make: Callable[[V], W | None]) -> Items[W] | None:
        """The same with other values; parts for which `make` gives None are left out.

        An array ends before the first place that is left without parts; None if it has to be
        longer than that.
        """
        prefix = []
        rest: tuple[Part[W], ...] = ()
        for place in self.prefix:
            parts = _parts_with_values(place, make)
            if not parts:
                break
            prefix.append(parts)
        else:
            rest = _parts_with_values(self.rest, make)
        if not rest and len(prefix) < self.min_items:
            return None
        changed = replace(cast(Any, self), prefix=tuple(prefix), rest=rest)
        return cast("Items[W]", changed)


def _parts_with_values(
    parts: tuple[Part[V], ...], make: Callable[[V], W | None]
) -> tuple[Part[W], ...]:
    made = ((make(part.value), part.counters) for part in parts)
    return tuple(Part(value, counters) for value, counters in made if value is not None)
