"""What a schema means: for every place, the shapes of instances that are valid there.

Everything that applies to one place is a conjunction. It is gathered as a set of subschemas (a
`Key`): `$ref` and `allOf` add to the set, `anyOf` and `oneOf` split it into branches, and each
branch is merged, type by type, into shapes. Places with the same set share their shapes, so
recursive schemas are finite.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from palmette.grammar.errors import (
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.json_schema.document import Document, Json, identity, spell
from palmette.grammar.json_schema.formats import PATTERNS
from palmette.grammar.json_schema.formats import REFUSED as REFUSED_FORMATS
from palmette.grammar.json_schema.keywords import (
    ALL_TYPES,
    ASSERTIONS,
    REFUSED,
    is_idle,
)
from palmette.grammar.json_schema.numbers import Bounds, NumberKind, NumberRule, number_term
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.json_schema.valid import Validity
from palmette.grammar.terms import Term

# Pointers of the subschemas that all apply at a place. The empty key is any JSON value.
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """Pointers of subschemas that all apply, their references and combinators seen to."""

    pointers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Literals:
    """One of these values, as compact JSON."""

    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number or a string, as a term that is not empty."""

    term: Term


@dataclass(frozen=True, slots=True)
class Array:
    """Items by position, then items of `rest` (None: no more)."""

    prefix: tuple[Key, ...]
    rest: Key | None
    min_items: int
    max_items: int | None


@dataclass(frozen=True, slots=True)
class Property:
    """One declared member of an object; `value` of None: it must not be there."""

    name: str
    key_text: bytes  # with quotes, without the colon
    value: Key | None
    is_required: bool


@dataclass(frozen=True, slots=True)
class Object:
    """Members in declared order, then others of `additional` (None: no others)."""

    properties: tuple[Property, ...]
    additional: Key | None


Shape = Literals | Scalar | Array | Object


@dataclass(slots=True)
class Place:
    """All that may stand at one key or branch, and once decided, the shortest and its length.

    `min_bytes` of None: nothing is valid here.
    """

    branches: list[Branch] = field(default_factory=list)  # of a key
    shapes: list[Shape] = field(default_factory=list)  # of a branch
    min_bytes: int | None = None
    shortest: Shape | Branch | None = None


class Shapes:
    """Reads the places of a document."""

    def __init__(self, document: Document, strings: Strings, max_branches: int) -> None:
        self.document = document
        self.notes: list[str] = []
        self.places: dict[Key | Branch, Place] = {}
        self.order: list[Key | Branch] = []  # satisfiable, after those the shortest text needs
        self._strings = strings
        self._store = strings.store
        self._validity = Validity(document, strings)
        self._max_branches = max_branches
        self._checked: set[str] = set()

    def read(self) -> Key:
        """Read every place that can be reached from the root; the root's key.

        Raises UnsatisfiableGrammar if nothing is valid.
        """
        root = self._key(["#"])
        pending: list[Key | Branch] = [root] if root is not None else []
        while pending:
            key = pending.pop()
            if key in self.places:
                continue
            place = self.places[key] = self._place(key)
            for shape in (*place.branches, *place.shapes):
                pending.extend(_keys_in(shape))
        self._decide()
        if root is None or self.places[root].min_bytes is None:
            raise UnsatisfiableGrammar("no JSON value satisfies the schema", pointer="#")
        return root

    def is_satisfiable(self, key: Key | Branch | None) -> bool:
        """Whether some value is valid at the key."""
        return key is not None and self.places[key].min_bytes is not None

    # From schemas to keys

    def _key(self, pointers: list[str]) -> Key | None:
        """The key of a conjunction; None if it contains `false`."""
        kept: dict[str, None] = {}
        for pointer in pointers:
            schema = self.document.schema_at(pointer)
            if schema is False:
                return None
            if schema is not True and schema:
                kept[pointer] = None
        return tuple(kept)

    def _place(self, key: Key | Branch) -> Place:
        if isinstance(key, Branch):
            return Place(shapes=list(self._shapes(key)))
        return Place(branches=list(dict.fromkeys(self._branches(key))))

    def _branches(self, key: Key) -> Iterator[Branch]:
        """The conjunctions, without references and combinators, whose union is `key`."""
        # Each pointer comes with those that led to it, to tell a circle from a mere repetition.
        pending: list[_Conjunction] = [
            ([(pointer, frozenset()) for pointer in reversed(key)], {}, set(), [])
        ]
        count = 0
        while pending:
            stack, kept, seen, choices = pending.pop()
            self._store.spend(8)
            if stack:
                pointer, trail = stack.pop()
                schema = self.document.schema_at(pointer)
                if schema is False:
                    continue
                if isinstance(schema, dict):
                    self._expand(pointer, schema, trail, stack, kept, seen, choices)
                pending.append((stack, kept, seen, choices))
            elif choices:
                options, trail = choices.pop(0)
                pending.extend(
                    ([(option, trail)], dict(kept), set(seen), list(choices))
                    for option in reversed(options)
                )
            else:
                count += 1
                if count > self._max_branches:
                    raise GrammarTooComplex(
                        f"more than {self._max_branches} combinations of branches",
                        pointer=key[0],
                    )
                yield Branch(tuple(kept))

    def _expand(
        self,
        pointer: str,
        schema: dict[str, Json],
        trail: frozenset[str],
        stack: list[tuple[str, frozenset[str]]],
        kept: dict[str, None],
        seen: set[str],
        choices: list[tuple[list[str], frozenset[str]]],
    ) -> None:
        document = self.document
        if pointer in trail:
            raise InvalidGrammar("the schema refers to itself without end", pointer=pointer)
        if pointer in seen:
            return
        seen.add(pointer)
        self._validity.check(pointer, schema)
        trail = trail | {pointer}
        if "$ref" in schema:
            target = document.resolve(schema["$ref"], document.child(pointer, "$ref"))
            stack.append((target, trail))
            if document.is_old_draft:
                return
        if any(keyword in ASSERTIONS or keyword in REFUSED for keyword in schema):
            kept[pointer] = None
        stack.extend(
            (document.child(pointer, "allOf", index), trail)
            for index in range(len(schema.get("allOf", ())) - 1, -1, -1)
        )
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [
                    document.child(pointer, keyword, index) for index in range(len(schema[keyword]))
                ]
                if keyword == "oneOf" and pointer not in self._checked:
                    self._checked.add(pointer)
                    self._require_disjoint(pointer, options)
                choices.append((options, trail))

    # oneOf

    def _require_disjoint(self, pointer: str, options: list[str]) -> None:
        branches: list[tuple[int, Branch]] = []
        for index, option in enumerate(options):
            key = self._key([option])
            if key is not None:
                branches += ((index, branch) for branch in self._branches(key))
        if self._are_told_apart(branches):
            return
        for i, (index, one) in enumerate(branches):
            for other_index, other in branches[i + 1 :]:
                self._store.spend(4)
                if index != other_index and not self._are_disjoint(one, other, 4):
                    raise UnsupportedGrammar(
                        f"branches {index} and {other_index} of 'oneOf' may both hold; "
                        "this is supported only where they obviously exclude each other",
                        feature="oneOf",
                        pointer=self.document.child(pointer, "oneOf"),
                    )

    def _are_told_apart(self, branches: list[tuple[int, Branch]]) -> bool:
        """Whether all are objects with one required member whose literal values tell them apart."""
        owners: dict[str, dict[object, int]] = {}  # by member and value: the branch
        for position, (index, branch) in enumerate(branches):
            if self._types(branch) != {"object"}:
                return False
            told = set()
            for each in self._object(branch).properties:
                values = self._literal_values(each) if each.is_required else None
                if values is None or (position and each.name not in owners):
                    continue
                known = owners.setdefault(each.name, {})
                if all(known.setdefault(value, index) == index for value in values):
                    told.add(each.name)
            owners = {name: known for name, known in owners.items() if name in told}
            if not owners:
                return False
        return bool(branches)

    def _literal_values(self, member: Property) -> frozenset[object] | None:
        values: frozenset[object] = frozenset()
        for branch in self._branches(member.value) if member.value is not None else ():
            some = self._values(branch)
            if some is None:
                return None
            values |= some
        return values

    def _are_disjoint(self, one: Branch, other: Branch, depth: int) -> bool:
        """Whether no value satisfies both, as far as a quick look can tell."""
        values, other_values = self._values(one), self._values(other)
        if values is not None and other_values is not None:
            return not values & other_values
        types = self._types(one) & self._types(other)
        if values is not None or other_values is not None:
            literal = one if values is not None else other
            rest = other if values is not None else one
            return not any(
                all(self._validity.is_valid(pointer, value) for pointer in rest.pointers)
                for value in self._literals(literal) or ()
            )
        if not types:
            return True
        if types != {"object"} or depth == 0:
            return False
        return self._have_disjoint_member(one, other, depth)

    def _have_disjoint_member(self, one: Branch, other: Branch, depth: int) -> bool:
        mine, others = self._object(one), self._object(other)
        declared = {each.name: each for each in mine.properties}
        other_declared = {each.name: each for each in others.properties}
        for name in dict.fromkeys((*declared, *other_declared)):
            a, b = declared.get(name), other_declared.get(name)
            if not (a and a.is_required) and not (b and b.is_required):
                continue
            value = a.value if a else mine.additional
            other_value = b.value if b else others.additional
            if value is None or other_value is None:
                return True
            if all(
                self._are_disjoint(left, right, depth - 1)
                for left in self._branches(value)
                for right in self._branches(other_value)
            ):
                return True
        return False

    def _values(self, branch: Branch) -> frozenset[object] | None:
        literals = self._literals(branch)
        return None if literals is None else frozenset(map(identity, literals))

    # From branches to shapes

    def _shapes(self, branch: Branch) -> Iterator[Shape]:
        types = self._types(branch)
        self._refuse(branch, types)
        literals = self._literals(branch)
        if literals is not None:
            texts = self._spell_literals(branch, literals)
            if texts:
                yield Literals(texts)
            return
        constants = [b"null"] if "null" in types else []
        constants += [b"true", b"false"] if "boolean" in types else []
        if constants:
            spelled = tuple(filter(self._store.can_spell, constants))
            if spelled:
                yield Literals(spelled)
        if types & {"integer", "fraction"}:
            kind: NumberKind = "integer"
            if "fraction" in types:
                kind = "any" if "integer" in types else "fraction"
            rule = NumberRule(self._bounds(branch), kind=kind)
            term = number_term(self._store, rule)
            if not self._store.is_empty(term):
                yield Scalar(self._store.lexeme(term))
        if "string" in types:
            term = self._strings.term(self._string_rule(branch))
            if not self._store.is_empty(term):
                yield Scalar(term)
        if not self._store.can_spell(b"[]{},:"):
            return
        if "array" in types:
            array = self._array(branch)
            if array.max_items is None or array.min_items <= array.max_items:
                yield array
        if "object" in types:
            yield self._object(branch)

    def _schemas(self, branch: Branch) -> Iterator[tuple[str, dict[str, Json]]]:
        for pointer in branch.pointers:
            schema = self.document.schema_at(pointer)
            assert isinstance(schema, dict)
            yield pointer, schema

    def _types(self, branch: Branch) -> frozenset[str]:
        types = ALL_TYPES
        for pointer, schema in self._schemas(branch):
            types &= self._validity.types(pointer, schema)
        return types

    def _refuse(self, branch: Branch, types: frozenset[str]) -> None:
        """Refuse what is not enforced, unless it cannot matter for these types."""
        for pointer, schema in self._schemas(branch):
            for keyword in schema:
                if REFUSED.get(keyword, _NONE) & types and not is_idle(keyword, schema):
                    raise UnsupportedGrammar(
                        f"'{keyword}' is not supported",
                        feature=keyword,
                        pointer=self.document.child(pointer, keyword),
                    )

    def _literals(self, branch: Branch) -> list[Json] | None:
        """The values of `enum` and `const` that all else allows; None if there is neither."""
        lists = [
            (pointer, values)
            for pointer, schema in self._schemas(branch)
            if (values := self._validity.literals(pointer, schema)) is not None
        ]
        if not lists:
            return None
        shortest = min((values for _, values in lists), key=len)
        return [
            value
            for value in shortest
            if all(self._validity.is_valid(pointer, value) for pointer in branch.pointers)
        ]

    def _spell_literals(self, branch: Branch, values: list[Json]) -> tuple[bytes, ...]:
        try:
            texts = [self._spelled(value) for value in values]
            return tuple(text for text in texts if text is not None)
        except UnicodeEncodeError as error:
            raise InvalidGrammar(
                "a lone surrogate among the values is not valid Unicode", pointer=branch.pointers[0]
            ) from error

    def _bounds(self, branch: Branch) -> Bounds:
        bounds = Bounds()
        for pointer, schema in self._schemas(branch):
            bounds &= self._validity.bounds(pointer, schema)
        return bounds

    def _string_rule(self, branch: Branch) -> StringRule:
        rule = StringRule()
        for pointer, schema in self._schemas(branch):
            rule &= self._validity.string_rule(pointer, schema)
            name = schema.get("format")
            if name is not None and name not in PATTERNS and name not in REFUSED_FORMATS:
                where = self.document.child(pointer, "format")
                note = f"{where}: the format {name!r} is unknown and constrains nothing"
                if note not in self.notes:
                    self.notes.append(note)
        return rule

    def _array(self, branch: Branch) -> Array:
        minimum, maximum = 0, None
        positions: list[list[str]] = []
        rests: list[str] = []
        parts = []
        for pointer, schema in self._schemas(branch):
            low, high = self._validity.item_counts(pointer, schema)
            minimum = max(minimum, low)
            maximum = high if maximum is None or (high is not None and high < maximum) else maximum
            parts.append(self._validity.items(pointer, schema))
        for prefix, _ in parts:
            positions += [[] for _ in range(len(prefix) - len(positions))]
        for prefix, rest in parts:
            for index, applied in enumerate(positions):
                if index < len(prefix):
                    applied.append(prefix[index])
                elif rest is not None:
                    applied.append(rest)
            if rest is not None:
                rests.append(rest)
        keys: list[Key] = []
        for applied in positions:
            item = self._key(applied)
            if item is None:
                return Array(tuple(keys), None, minimum, _least(maximum, len(keys)))
            keys.append(item)
        rest_key = self._key(rests)
        if rest_key is None:
            maximum = _least(maximum, len(keys))
        return Array(tuple(keys), rest_key, minimum, maximum)

    def _object(self, branch: Branch) -> Object:
        parts = [
            (pointer, schema, self._validity.property_names(pointer, schema))
            for pointer, schema in self._schemas(branch)
        ]
        names = dict.fromkeys(name for _, _, declared in parts for name in declared)
        required: dict[str, None] = {}
        for pointer, schema, _ in parts:
            required.update(dict.fromkeys(self._validity.required(pointer, schema)))
        names.update(dict.fromkeys(required))
        properties = []
        others = [
            self.document.child(pointer, "additionalProperties")
            for pointer, schema, _ in parts
            if "additionalProperties" in schema
        ]
        for name in names:
            applied = []
            for pointer, schema, declared in parts:
                if name in declared:
                    applied.append(self.document.child(pointer, "properties", name))
                elif "additionalProperties" in schema:
                    applied.append(self.document.child(pointer, "additionalProperties"))
            try:
                text = self._spelled(name)
            except UnicodeEncodeError as error:
                raise InvalidGrammar(
                    "a lone surrogate in the name of a property", pointer=branch.pointers[0]
                ) from error
            value = None if text is None else self._key(applied)
            properties.append(Property(name, text or b"", value, name in required))
        return Object(tuple(properties), self._key(others))

    def _spelled(self, value: Json) -> bytes | None:
        """The value in bytes that the vocabulary has, or None."""
        for escaped in (False, True):
            text = spell(value, escaped=escaped)
            if self._store.can_spell(text):
                return text
        return None

    # Which places are satisfiable, and how shortly

    def _decide(self) -> None:
        """Knuth's generalisation of Dijkstra's algorithm (1977): shortest texts, smallest first."""
        waiting: dict[Key | Branch, list[_Option]] = {}
        queue: list[tuple[int, int, Key | Branch, Shape | Branch]] = []
        serial = 0
        for at, place in self.places.items():
            for shape in (*place.branches, *place.shapes):
                option = _Option(at, shape, *self._cost(shape))
                needed = {key for key, _ in option.needs}
                option.num_unknown = len(needed)
                for key in needed:
                    waiting.setdefault(key, []).append(option)
                if option.is_possible and not needed:
                    serial += 1
                    heapq.heappush(queue, (option.cost, serial, at, shape))
        while queue:
            cost, _, key, shape = heapq.heappop(queue)
            place = self.places[key]
            if place.min_bytes is not None:
                continue
            place.min_bytes, place.shortest = cost, shape
            self.order.append(key)
            for option in waiting.get(key, ()):
                option.num_unknown -= 1
                if option.num_unknown == 0 and option.is_possible:
                    total = option.cost
                    for needed_key, times in option.needs:
                        total += times * (self.places[needed_key].min_bytes or 0)
                    serial += 1
                    heapq.heappush(queue, (total, serial, option.key, option.shape))

    def _cost(self, shape: Shape | Branch) -> tuple[int, list[tuple[Key | Branch, int]], bool]:
        """Bytes of its own, the places it needs how often, and whether it is possible at all."""
        needs: list[tuple[Key | Branch, int]] = []
        if isinstance(shape, Branch):
            return 0, [(shape, 1)], True
        if isinstance(shape, Literals):
            return min(map(len, shape.texts)), [], True
        if isinstance(shape, Scalar):
            return self._store.min_bytes(shape.term), [], True
        if isinstance(shape, Array):
            needs = [(item, 1) for item in shape.prefix[: shape.min_items]]
            more = shape.min_items - len(needs)
            if more:
                if shape.rest is None:
                    return 0, [], False
                needs.append((shape.rest, more))
            return 2 + max(shape.min_items - 1, 0), needs, True
        cost = 2
        for each in shape.properties:
            if each.is_required:
                if each.value is None:
                    return 0, [], False
                needs.append((each.value, 1))
                cost += len(each.key_text) + 1
        return cost + max(len(needs) - 1, 0), needs, True


_Conjunction = tuple[
    list[tuple[str, frozenset[str]]],  # still to be looked at
    dict[str, None],  # kept
    set[str],  # seen
    list[tuple[list[str], frozenset[str]]],  # choices still to be made
]


@dataclass(slots=True)
class _Option:
    key: Key | Branch
    shape: Shape | Branch
    cost: int
    needs: list[tuple[Key | Branch, int]]
    is_possible: bool
    num_unknown: int = 0


def _keys_in(shape: Shape | Branch) -> Iterator[Key | Branch]:
    if isinstance(shape, Branch):
        yield shape
    elif isinstance(shape, Array):
        yield from shape.prefix
        if shape.rest is not None:
            yield shape.rest
    elif isinstance(shape, Object):
        yield from (each.value for each in shape.properties if each.value is not None)
        if shape.additional is not None:
            yield shape.additional


def _least(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)


_NONE: frozenset[str] = frozenset()
