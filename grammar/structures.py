"""Objects and arrays as the machine sees them: parts that are counted, in order or in any order.

They hold whatever a schema says of the members of an object or the items of an array once its
logic is worked out: which parts may come, which must, and how often one of a kind may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from palmette.grammar.terms import Term

Order = Literal["declared", "any"]


class Counter(NamedTuple):
    """How many parts of a kind there must be at least, and may be at most (None: no bound)."""

    low: int = 0
    high: int | None = None


class Part(NamedTuple):
    """One kind of value for a place. Its term is never empty.

    Each value of this kind moves the counters with these indices on by one. Kinds for one place
    whose counters differ have no value in common, or a count would depend on the reading.
    """

    value: Term
    counters: tuple[int, ...] = ()


class Member(NamedTuple):
    """A declared member: `key` is its name as written, with quotes; `parts` is not empty."""

    key: bytes
    parts: tuple[Part, ...]
    is_required: bool = False


class Names(NamedTuple):
    """Members whose names are not declared one by one.

    `name` is a regular term that is not empty, with quotes; it holds no spelling of a declared
    name, nor anything of another `Names` of the same object. `parts` is not empty.
    """

    name: Term
    parts: tuple[Part, ...]


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
class Members:
    """An object.

    In declared order, members come as they are listed, optional ones left out at will, and then
    any number of members out of `names`. In any order, all of them come as they like. Either way a
    declared member comes at most once.
    """

    punctuation: Punctuation
    members: tuple[Member, ...] = ()
    names: tuple[Names, ...] = ()
    counters: tuple[Counter, ...] = ()
    min_members: int = 0
    max_members: int | None = None
    order: Order = "declared"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Items:
    """An array: the kinds for each of the first places, and those for all others (none: no more).

    No place of `prefix` is without kinds: an array cannot be longer than the places it can fill.
    """

    punctuation: Punctuation
    prefix: tuple[tuple[Part, ...], ...] = ()
    rest: tuple[Part, ...] = ()
    counters: tuple[Counter, ...] = ()
    min_items: int = 0
    max_items: int | None = None
