"""What may be said of the values of one type, once references and combinators are seen to.

Numbers and strings have rules of their own (`NumberRule`, `StringRule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from palmette.grammar.json_schema.document import Json, identity
from palmette.grammar.json_schema.numbers import NumberRule
from palmette.grammar.json_schema.schemas import ANYTHING, Claim
from palmette.grammar.json_schema.strings import StringRule

# A regular expression, and the pointer to where it stands.
Pattern = tuple[str, str]


class Values:
    """The value is one of these."""

    __slots__ = ("identities", "values")

    def __init__(self, values: Iterable[Json]) -> None:
        distinct = {identity(value): value for value in values}
        self.values = tuple(distinct.values())
        self.identities = frozenset(distinct)


class Outside(NamedTuple):
    """The names that are none of `names` and match none of `patterns`."""

    names: frozenset[str] = frozenset()
    patterns: tuple[Pattern, ...] = ()


class Demand(NamedTuple):
    """There is a member whose value makes `value` true, and whose name all of the rest."""

    value: Claim
    pattern: Pattern | None = None
    outside: Outside = Outside()
    name: Claim = ANYTHING


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ObjectRule:
    """What one place says of an object."""

    members: Mapping[str, Claim] = field(default_factory=dict)
    patterns: tuple[tuple[Pattern, Claim], ...] = ()
    others: Claim = ANYTHING  # of members in neither
    names: Claim = ANYTHING  # of the names, as strings
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    demands: tuple[Demand, ...] = ()
    is_listing: bool = False  # whether the schema behind it lists properties
    is_refuting: bool = False  # whether it says how another rule fails
    is_open: bool = False  # whether that says itself which others there may be
    # Whether it may speak of members that it does not name.
    is_wide: bool = field(init=False)
    # The one member that must be there, and what is claimed of it, if that is all.
    about: tuple[str, Claim] | None = field(init=False)

    def __post_init__(self) -> None:
        # Asked for much more often than rules are made.
        is_wide = bool(self.patterns or self.others is not ANYTHING or self.names is not ANYTHING)
        object.__setattr__(self, "is_wide", is_wide)
        object.__setattr__(self, "about", self._about())

    def _about(self) -> tuple[str, Claim] | None:
        if len(self.required) != 1 or self.low or self.high is not None or self.demands:
            return None
        name = self.required[0]
        if self.is_wide or self.members.keys() - {name}:
            return None
        return name, self.members.get(name, ANYTHING)

    @property
    def is_idle(self) -> bool:
        return not (
            self.members
            or self.patterns
            or self.required
            or self.low
            or self.demands
            or self.high is not None
            or self.others is not ANYTHING
            or self.names is not ANYTHING
        )

    @property
    def outside(self) -> Outside:
        """The names that `others` speaks of."""
        return Outside(frozenset(self.members), tuple(pattern for pattern, _ in self.patterns))


class Count(NamedTuple):
    """How many items from place `start` on make the claim true."""

    claim: Claim
    low: int = 0
    high: int | None = None
    start: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ArrayRule:
    """What one place says of an array."""

    prefix: tuple[Claim, ...] = ()
    rest: Claim = ANYTHING
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: str | None = None  # no two items are equal, says the keyword at this pointer

    @property
    def is_idle(self) -> bool:
        return not (
            self.prefix
            or self.low
            or self.counts
            or self.unique
            or self.high is not None
            or self.rest is not ANYTHING
        )

    def at(self, index: int) -> Claim:
        """What it says of the item at a place."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


Rule = Values | NumberRule | StringRule | ObjectRule | ArrayRule


_R = TypeVar("_R", NumberRule, StringRule)


def merged(kind: type[_R], rules: Iterable[Rule]) -> _R:
    """One rule that says what all of that kind say."""
    found: _R | None = None
    for rule in rules:
        if isinstance(rule, kind):
            found = rule if found is None else found & rule
    return kind() if found is None else found
