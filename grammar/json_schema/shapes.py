"""For every place of a schema, the shapes of values that are valid there, and the shortest.

Everything that applies to one place is a conjunction of claims (a `Key`). Its cases are merged,
type by type, into shapes; the values of members and items are keys again. Places with the same key
share their shapes, so recursive schemas are finite.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice

from palmette.grammar.errors import (
    GrammarError,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.json_schema.arrays import Arrays
from palmette.grammar.json_schema.document import Document, Json, as_spent, spell
from palmette.grammar.json_schema.keywords import Type
from palmette.grammar.json_schema.languages import Languages
from palmette.grammar.json_schema.logic import Conjunction, Logic
from palmette.grammar.json_schema.numbers import NumberRule, number_term
from palmette.grammar.json_schema.objects import Objects
from palmette.grammar.json_schema.policy import Policy
from palmette.grammar.json_schema.rules import ArrayRule, ObjectRule, Values, merged
from palmette.grammar.json_schema.schemas import CANONICAL, Key, Schemas, key_of
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.moves import Cheapest
from palmette.grammar.recipes import RECIPES
from palmette.grammar.structures import Items, Members, Punctuation
from palmette.grammar.terms import Kind, Term

# Numbers of so many cases or more are listed one by one, if each case has at most so many.
_MANY_CASES = 8
_LISTED_NUMBERS = 1000
_MAX_PLAIN_DIGITS = 300  # of a number that is written out without an exponent


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """Values that need no others, as a term that is not empty."""

    term: Term


Shape = Scalar | Members[Key] | Items[Key]


@dataclass(slots=True)
class Place:
    """All that may stand at one key, and once decided, the shortest and its length.

    `min_bytes` of None: nothing is valid here.
    """

    shapes: list[Shape] = field(default_factory=list)
    min_bytes: int | None = None
    shortest: Shape | None = None


class Shapes:
    """Reads the places of a document."""

    def __init__(
        self,
        document: Document,
        strings: Strings,
        punctuation: Punctuation,
        policy: Policy,
        *,
        max_branches: int,
    ) -> None:
        self.schemas = Schemas(document, strings.store.spend)
        self.logic = Logic(self.schemas, strings, max_branches, policy)
        self.places: dict[Key, Place] = {}
        self.order: list[Key] = []  # satisfiable, after those the shortest text needs
        self._store = strings.store
        self._strings = strings
        self._languages = Languages(self.logic)
        self._objects = Objects(self.logic, self._languages, punctuation, policy)
        self._arrays = Arrays(self.logic, punctuation)
        self._numbers: dict[tuple[NumberRule, bool], Term] = {}
        self._refusals: list[GrammarError] | None = None

    def read(self, refusals: list[GrammarError] | None = None) -> Key:
        """Read every place that can be reached from the root; the root's key.

        What cannot be read is added to `refusals`, or raised if there is no such list. Raises
        UnsatisfiableGrammar if nothing is valid.
        """
        self._refusals = refusals
        root = key_of([self.schemas.root()])
        pending = [] if root is None else [root]
        while pending:
            key = pending.pop()
            if key in self.places:
                continue
            self._store.spend(8)
            place = self.places[key] = Place(self._shapes(key))
            for shape in reversed(place.shapes):
                keys = list(keys_in(shape))
                self._store.spend(len(keys))
                pending.extend(reversed(keys))
        self._decide()
        if root is None or self.places[root].min_bytes is None:
            raise UnsatisfiableGrammar("no JSON value satisfies the schema", pointer="#")
        return root

    # From keys to shapes

    def _shapes(self, key: Key) -> list[Shape]:
        pointer = key[0].schema.pointer if key else "#"
        literals: list[Json] = []
        shapes: list[Shape] = []
        for kind in self.logic.kinds(key):
            try:
                self._add_shapes(key, kind, pointer, literals, shapes)
            except (InvalidGrammar, UnsupportedGrammar) as error:
                if self._refusals is None:
                    raise
                self._refusals.append(error)
        if literals:
            shapes[:0] = self._literal_shapes(literals, pointer, canonical=CANONICAL in key)
        return shapes

    def _add_shapes(
        self, key: Key, kind: Type, pointer: str, literals: list[Json], shapes: list[Shape]
    ) -> None:
        cases = self.logic.conjunctions(key, kind)
        if kind == "number" and len(cases) > _MANY_CASES:
            numbers = self._listed_numbers(cases)
            if numbers is not None:
                literals += numbers
                return
        undeclared: list[Shape] = []
        num_before = len(shapes)
        for case in cases:
            listed = self.logic.listed(case, kind)
            if listed is not None:
                literals += listed
            elif kind in ("number", "string"):
                term = self._scalar(case, kind, canonical=CANONICAL in key)
                if not self._store.is_empty(term):
                    shapes.append(Scalar(term))
            elif self._store.can_spell(b"[]{},:"):
                shape = self._structure(case, kind, pointer)
                if isinstance(shape, Items) and shape.is_unique:
                    shape = self._distinct(shape)
                if shape is None:
                    continue
                if isinstance(shape, Members) and self._objects.asks_for_undeclared(shape, case):
                    undeclared.append(shape)
                else:
                    shapes.append(shape)
        if len(shapes) == num_before:
            shapes += undeclared  # nothing else is valid

    def _listed_numbers(self, cases: Sequence[Conjunction]) -> list[Json] | None:
        """The numbers of all cases, if they are a few each."""
        found: list[Json] = []
        for case in cases:
            if not all(isinstance(rule, NumberRule) for rule in case):
                return None
            values = merged(NumberRule, case).values(_LISTED_NUMBERS)
            if values is None:
                return None
            found += values
        return found

    def _scalar(self, case: Conjunction, kind: Type, *, canonical: bool) -> Term:
        if kind == "number":
            number_rule = merged(NumberRule, case)
            known = self._numbers.get((number_rule, canonical))
            if known is None:
                known = RECIPES.term(
                    self._store,
                    ("number", number_rule, canonical),
                    lambda kitchen: kitchen.lexeme(
                        number_term(kitchen, number_rule, canonical=canonical)
                    ),
                )
                self._numbers[number_rule, canonical] = known
            return known
        return self._strings.term(merged(StringRule, case), canonical=canonical)

    def _structure(self, case: Conjunction, kind: Type, pointer: str) -> Shape | None:
        if kind == "array":
            return self._arrays.shape([r for r in case if isinstance(r, ArrayRule)], pointer)
        return self._objects.shape([r for r in case if isinstance(r, ObjectRule)], pointer)

    def _distinct(self, shape: Items[Key]) -> Scalar | None:
        """An array of distinct scalars, whose texts must be known to tell whether they suffice."""

        def term(key: Key) -> Term | None:
            scalars = [each.term for each in self._shapes(key) if isinstance(each, Scalar)]
            return self._store.alternation(scalars) if scalars else None

        items = shape.with_values(term)
        array = self._store.empty if items is None else self._store.array(items)
        return None if array.kind == Kind.EMPTY else Scalar(array)

    def _literal_shapes(
        self, values: Sequence[Json], pointer: str, *, canonical: bool
    ) -> Iterator[Shape]:
        texts: list[bytes] = []
        for value in Values(as_spent(values, self._store.spend)).values:
            self._store.spend(4)
            if isinstance(value, (list, dict)):
                claim = self.schemas.constant(value, pointer)
                yield from self._shapes((claim,))
                continue
            if type(value) is str and value.isascii():  # most are
                text = spell(value)
                if self._store.can_spell(text):
                    texts.append(text)
                continue
            try:
                listed = filter(self._store.can_spell, spellings(value))
                texts += islice(listed, 1) if canonical else listed
            except UnicodeEncodeError as error:
                raise InvalidGrammar(
                    "a lone surrogate among the values is not valid Unicode", pointer=pointer
                ) from error
        if texts:
            yield Scalar(self._store.words(texts))

    # Which places are satisfiable, and how shortly

    def _decide(self) -> None:
        """Knuth's generalisation of Dijkstra's algorithm (1977): shortest texts, smallest first."""
        waiting: dict[Key, list[_Option]] = {}
        queue: list[tuple[int, int, Key, Shape]] = []
        serial = 0
        for at, place in self.places.items():
            for shape in place.shapes:
                option = _Option(at, shape, self._cost(shape))
                for key in option.cost.values:
                    waiting.setdefault(key, []).append(option)
                if option.cost.num_bytes is not None:
                    serial += 1
                    heapq.heappush(queue, (option.cost.num_bytes, serial, at, shape))
        while queue:
            num_bytes, _, key, shape = heapq.heappop(queue)
            place = self.places[key]
            if place.min_bytes is not None:
                continue
            place.min_bytes, place.shortest = num_bytes, shape
            self.order.append(key)
            for option in waiting.get(key, ()):
                self._store.spend()
                if option.cost.learn(key, num_bytes):
                    assert option.cost.num_bytes is not None
                    serial += 1
                    heapq.heappush(queue, (option.cost.num_bytes, serial, option.key, option.shape))

    def _cost(self, shape: Shape) -> _Sum | Cheapest[Key]:
        if isinstance(shape, Scalar):
            return _Sum(self._store.min_bytes(shape.term), {})
        simple = _simple_cost(shape)
        return Cheapest(shape, self._store) if simple is None else simple


class _Sum:
    """The length of a shortest text that needs just these values, so many times each."""

    def __init__(self, own: int, times: dict[Key, int]) -> None:
        self.values = tuple(times)
        self._total = own
        self._times = times

    @property
    def num_bytes(self) -> int | None:
        return None if self._times else self._total

    def learn(self, key: Key, num_bytes: int) -> bool:
        times = self._times.pop(key, 0)
        self._total += times * num_bytes
        return times > 0 and not self._times


def _simple_cost(shape: Members[Key] | Items[Key]) -> _Sum | None:
    """The cost of what has no choice; None if there may be one."""
    if shape.counters:
        return None
    times: dict[Key, int] = {}
    if isinstance(shape, Members):
        required = [member for member in shape.members if member.is_required]
        if shape.min_members > len(required) or (
            shape.max_members is not None and shape.max_members < len(required)
        ):
            return None
        for member in required:
            value = member.parts[0].value
            times[value] = times.get(value, 0) + 1
        own = 2 + sum(len(member.key) + 1 for member in required) + max(len(required) - 1, 0)
        return _Sum(own, times)
    if shape.min_items > len(shape.prefix) and not shape.rest:
        return None
    for index in range(min(shape.min_items, len(shape.prefix))):
        value = shape.prefix[index][0].value
        times[value] = times.get(value, 0) + 1
    others = shape.min_items - len(shape.prefix)
    if others > 0:
        value = shape.rest[0].value
        times[value] = times.get(value, 0) + others
    return _Sum(2 + max(shape.min_items - 1, 0), times)


@dataclass(slots=True, eq=False)
class _Option:
    key: Key
    shape: Shape
    cost: _Sum | Cheapest[Key]


def keys_in(shape: Shape) -> Iterator[Key]:
    """The keys of the members or items."""
    if isinstance(shape, Members):
        for member in shape.members:
            yield from (part.value for part in member.parts)
        for names in shape.names:
            yield from (part.value for part in names.parts)
    elif isinstance(shape, Items):
        for parts in shape.prefix:
            yield from (part.value for part in parts)
        yield from (part.value for part in shape.rest)


def spellings(value: Json) -> Iterator[bytes]:
    """The ways in which libraries write a value without parts, the plainest first.

    A string comes in UTF-8 and all in ASCII; a whole number with and without a fraction.
    """
    if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
        yield from _numerals(value)
        return
    yield spell(value)
    if isinstance(value, str) and not value.isascii():
        yield spell(value, escaped=True)


def _numerals(value: int | Decimal) -> Iterator[bytes]:
    exact = Decimal(value)
    if abs(exact.adjusted()) > _MAX_PLAIN_DIGITS:
        yield spell(value)
        return
    if exact == exact.to_integral_value():
        whole = str(int(exact))
        yield from (whole.encode(), f"{whole}.0".encode())
        if not exact:
            yield from (b"-0", b"-0.0")
    else:
        yield format(exact, "f").rstrip("0").encode()
    yield spell(value)
    as_float = float(exact)
    if Decimal(as_float) == exact or Decimal(repr(as_float)) == exact:
        yield json.dumps(as_float).encode()
