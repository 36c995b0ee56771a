"""Subschemas and claims about them: that one holds, or that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from palmette.grammar.errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from palmette.grammar.json_schema.document import (
    Document,
    Json,
    describe,
    escape_token,
    identity,
    pointer_to,
    spelling_of,
    spend_on,
)
from palmette.grammar.json_schema.keywords import (
    ANNOTATIONS,
    LISTS,
    MAPS,
    SINGLE,
    TYPE_NAMES,
    UNDECLARED,
    Dialect,
    Type,
)

_ONE_TYPE = {name: frozenset((name,)) for name in TYPE_NAMES}

# Schemas of up to so many levels and parts are compared, and equal ones are one.
_COMPARED_DEPTH = 4
_COMPARED_PARTS = 64
_SYNTHETIC = ""  # begins the scope of what no document has


class Schema:
    """One subschema, entered through the resources in `scope` (empty if that cannot matter)."""

    __slots__ = (
        "claim",
        "dialect",
        "error",
        "formulas",
        "is_open",
        "pointer",
        "scope",
        "types",
        "value",
    )

    def __init__(
        self,
        pointer: str,
        value: dict[str, Json],
        scope: tuple[str, ...],
        dialect: Dialect,
        error: GrammarError | None = None,
    ) -> None:
        self.pointer = pointer
        self.value = value
        self.scope = scope
        self.dialect = dialect
        self.error = error  # what is wrong with it; to be raised if it is ever needed
        self.types: frozenset[str] | None = None  # the names that `type` allows; None: all
        try:
            self.types = _types(self)
        except InvalidGrammar as wrong:
            self.error = wrong
        self.claim = Claim(self, True)
        # For `Logic`: formulas by type and polarity, and those that are being worked out.
        self.formulas: dict[tuple[Type, bool], object] = {}
        self.is_open: dict[tuple[Type, bool], int] = {}

    def has(self, keyword: str) -> bool:
        """Whether the keyword is there, and one of the dialect's."""
        return keyword in self.value and keyword in self.dialect.keywords

    def get(self, keyword: str) -> Json:
        """The keyword's value, or None if it is not there or none of the dialect's."""
        return self.value.get(keyword) if keyword in self.dialect.keywords else None

    def where(self, *tokens: str | int) -> str:
        """The pointer of a part."""
        return pointer_to(self.pointer, tokens)


class Claim:
    """That a schema holds for a value, or that it does not. Equal claims are the same object."""

    __slots__ = ("_opposite", "holds", "schema")

    def __init__(self, schema: Schema, holds: bool, opposite: Claim | None = None) -> None:
        self.schema = schema
        self.holds = holds
        self._opposite = opposite  # made when it is first asked for

    @property
    def opposite(self) -> Claim:
        """That the same does not hold, or does."""
        if self._opposite is None:
            self._opposite = Claim(self.schema, not self.holds, self)
        return self._opposite

    def __repr__(self) -> str:
        if self is ANYTHING:
            return "anything"
        if self is NOTHING:
            return "nothing"
        return self.schema.pointer if self.holds else f"not {self.schema.pointer}"


# Claims that all apply to one value, in the order in which they were met.
Key = tuple[Claim, ...]


def key_of(claims: Iterable[Claim]) -> Key | None:
    """The claims without repetitions; None if they obviously contradict each other."""
    listed = list(claims)
    if len(listed) == 1:
        claim = listed[0]
        if claim is ANYTHING:
            return ()
        return None if claim is NOTHING else (claim,)
    kept: dict[Claim, None] = {}
    for claim in listed:
        if claim is NOTHING or claim._opposite in kept:
            return None
        if claim is not ANYTHING:
            kept[claim] = None
    return tuple(kept)


class _Contents:
    """What schemas say, as numbers, so that what contains another is compared at its own size."""

    def __init__(self) -> None:
        # By the schema's identity: the schema, its dialect, and `_content` if there is one.
        self.known: dict[int, tuple[dict[str, Json], Dialect, int | None]] = {}
        self._numbers: dict[object, int] = {}

    def number_of(self, said: object) -> int:
        return self._numbers.setdefault(said, len(self._numbers))


class Schemas:
    """The subschemas of a document, each made when it is first needed."""

    def __init__(self, document: Document, spend: Callable[[int], None]) -> None:
        """`spend` is told of the work that it takes."""
        self.document = document
        self._spend = spend
        self.notes: dict[str, None] = {}
        self._known: dict[tuple[str, tuple[str, ...]], Claim] = {}
        self._equal: dict[object, Claim] = {}
        self._followed_to: dict[str, Claim] = {}
        self._contents = _Contents()
        self._constants: dict[object, Claim] = {}
        self._is_dynamic = document.is_dynamic
        # Whether a reference means the same wherever it stands.
        self._is_plain = document.is_one_resource and not document.is_dynamic

    def root(self) -> Claim:
        """That the whole schema holds."""
        scope = self._entered((), "#")
        return self._claim("#", self.document.root, scope, self.document.resource_of("#").dialect)

    def each_below(self, schema: Schema, keyword: str) -> dict[str, Claim]:
        """As `below`, for all the subschemas that a mapping in `schema` names."""
        mapping: dict[str, Json] = schema.value[keyword]
        if not self._is_plain:
            return {name: self.below(schema, keyword, name) for name in mapping}
        above = schema.where(keyword)
        return {
            name: self._claim(pointer_to(above, (name,)), value, schema.scope, schema.dialect)
            for name, value in mapping.items()
        }

    def below(self, schema: Schema, *tokens: str | int) -> Claim:
        """That the subschema in a part of `schema` holds."""
        value: Json = schema.value
        for token in tokens:
            value = value[token]
        pointer = schema.where(*tokens)
        if schema.scope[:1] == (_SYNTHETIC,):
            return self._claim(pointer, value, schema.scope, schema.dialect)
        resource = self.document.resource_of(pointer)
        scope = self._entered(schema.scope, resource.pointer)
        return self._claim(pointer, value, scope, resource.dialect)

    def referred(self, schema: Schema, keyword: str) -> Claim:
        """That the schema holds which a `$ref` or the like leads to."""
        return self._at(self._target(schema, keyword), schema.scope)

    def constant(self, value: Json, pointer: str) -> Claim:
        """That a value equals this one."""
        spend_on(value, self._spend)
        same = identity(value)
        claim = self._constants.get(same)
        if claim is None:
            schema = Schema(pointer, _structure(value), self._new_scope(), UNDECLARED)
            claim = self._constants[same] = schema.claim
        return claim

    def any_of(self, claims: Iterable[Claim], pointer: str) -> Claim:
        """That one of the claims holds."""
        listed = list(dict.fromkeys(claim for claim in claims if claim is not NOTHING))
        if ANYTHING in listed:
            return ANYTHING
        if len(listed) < 2:
            return listed[0] if listed else NOTHING
        key = ("any of", *listed)
        claim = self._constants.get(key)
        if claim is None:
            schema = Schema(pointer, {"anyOf": listed}, self._new_scope(), UNDECLARED)
            claim = self._constants[key] = schema.claim
        return claim

    def _new_scope(self) -> tuple[str, ...]:
        return (_SYNTHETIC, str(len(self._constants)))

    def _target(self, schema: Schema, keyword: str) -> str:
        reference = schema.value[keyword]
        if keyword == "$ref":
            return self.document.resolve(reference, schema.pointer)
        return self.document.resolve_dynamic(reference, schema.pointer, schema.scope, keyword)

    def _at(self, pointer: str, scope: tuple[str, ...]) -> Claim:
        resource = self.document.resource_of(pointer)
        return self._claim(
            pointer,
            self.document.at(pointer),
            self._entered(scope, resource.pointer),
            resource.dialect,
        )

    def _entered(self, scope: tuple[str, ...], resource: str) -> tuple[str, ...]:
        if not self._is_dynamic or resource in scope:
            return scope
        return (*scope, resource)

    def _claim(self, pointer: str, value: Json, scope: tuple[str, ...], dialect: Dialect) -> Claim:
        if value is True:
            return ANYTHING
        if value is False:
            return NOTHING
        if isinstance(value, Claim):  # part of a schema that was put together
            return value
        claim = self._known.get((pointer, scope))
        if claim is None:
            self._spend(8)
            self.document.count(len(pointer))
            try:
                claim = self._made(pointer, value, scope, dialect)
            except (InvalidGrammar, UnsupportedGrammar) as error:
                claim = Schema(pointer, {}, scope, dialect, error).claim
            self._known[pointer, scope] = claim
        return claim

    def _made(self, pointer: str, value: Json, scope: tuple[str, ...], dialect: Dialect) -> Claim:
        if not isinstance(value, dict):
            raise InvalidGrammar(
                f"a schema is an object or a boolean, got {describe(value)}", pointer=pointer
            )
        if not dialect.known.issuperset(value):
            self._note_unknown(pointer, value, dialect)
        if dialect.keywords.isdisjoint(value):
            return ANYTHING
        if _is_reference(value, dialect):
            reference = value["$ref"]
            if scope or not self._is_plain or type(reference) is not str:
                return self._followed(Schema(pointer, value, scope, dialect))
            claim = self._followed_to.get(reference)
            if claim is None:
                claim = self._followed(Schema(pointer, value, scope, dialect))
                self._followed_to[reference] = claim
            return claim
        comparable = scope if scope[:1] != (_SYNTHETIC,) else (_SYNTHETIC,)
        said = _content(value, dialect, [_COMPARED_PARTS], self._contents)
        if said is None:
            return Schema(pointer, value, scope, dialect).claim
        # What a reference in it leads to depends on the resource.
        content = (dialect.name, comparable, self.document.resource_of(pointer).pointer, said)
        claim = self._equal.get(content)
        if claim is None:
            claim = self._equal[content] = Schema(pointer, value, scope, dialect).claim
        return claim

    def _followed(self, schema: Schema) -> Claim:
        """Where a schema leads that is nothing but a reference."""
        seen = {schema.pointer}
        while True:
            target = self._target(schema, "$ref")
            if target in seen:
                raise InvalidGrammar("the schema refers to itself without end", pointer=target)
            seen.add(target)
            self._spend(4)
            value = self.document.at(target)
            resource = self.document.resource_of(target)
            scope = self._entered(schema.scope, resource.pointer)
            dialect = resource.dialect
            if not isinstance(value, dict) or not _is_reference(value, dialect):
                return self._claim(target, value, scope, dialect)
            schema = Schema(target, value, scope, dialect)

    def _note_unknown(self, pointer: str, value: dict[str, Json], dialect: Dialect) -> None:
        for keyword in value:
            if (
                keyword not in dialect.keywords
                and keyword not in ANNOTATIONS
                and not keyword.startswith("x-")
            ):
                note = (
                    f"{pointer}/{escape_token(keyword)}: the keyword {keyword!r} is unknown in "
                    f"{dialect.name} and constrains nothing"
                )
                self.document.count(len(note))
                self.notes[note] = None


def _is_reference(value: dict[str, Json], dialect: Dialect) -> bool:
    """Whether a schema says nothing but where it leads."""
    if "$ref" not in value:
        return False
    return dialect.is_ref_alone or [each for each in value if each in dialect.keywords] == ["$ref"]


def _types(schema: Schema) -> frozenset[str] | None:
    if "type" not in schema.value:
        return None
    named = schema.value["type"]
    if isinstance(named, str) and named in TYPE_NAMES and "nullable" not in schema.value:
        return _ONE_TYPE[named]
    listed = named if isinstance(named, list) else [named]
    for name in listed:
        if not isinstance(name, str) or name not in TYPE_NAMES:
            shown = repr(name) if isinstance(name, str) else describe(name)
            raise InvalidGrammar(f"unknown type {shown}", pointer=schema.where("type"))
    if not listed:
        raise InvalidGrammar("the list of types is empty", pointer=schema.where("type"))
    if schema.get("nullable") is True:
        listed = [*listed, "null"]
    return frozenset(listed)


def _structure(value: Json) -> dict[str, Json]:
    """A schema for one value, whose containers are spelled out part by part."""
    if isinstance(value, list):
        items = [_structure(each) for each in value]
        count = len(items)
        listed = {"prefixItems": items} if items else {}
        return {"type": "array", **listed, "minItems": count, "maxItems": count}
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: _structure(each) for name, each in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    return {"const": value}


def _content(
    value: dict[str, Json],
    dialect: Dialect,
    parts: list[int],
    contents: _Contents,
    depth: int = 0,
) -> int | None:
    """A number that is the same for schemas that say the same in the same order.

    None if the schema is too large, or where it stands matters to what it says. What is found is
    added to `contents`, together with what is found of the schemas in it.
    """
    known = contents.known.get(id(value))
    if known is not None and known[0] is value and known[1] is dialect:
        return known[2]
    if depth > _COMPARED_DEPTH:
        return None
    found: list[object] = []
    for keyword, each in value.items():
        if keyword not in dialect.keywords:
            if keyword in ("$id", "id", "$schema", "$anchor", "$dynamicAnchor"):
                return None
            continue
        parts[0] -= 1
        if parts[0] < 0 or (keyword[0] == "$" and keyword != "$ref"):
            return None
        content: object
        if type(each) is str:  # most are
            found.append((keyword, each))
            continue
        if keyword in SINGLE and isinstance(each, dict):
            content = _content(each, dialect, parts, contents, depth + 1)
        elif keyword in LISTS and isinstance(each, list):
            content = _all_content(each, dialect, parts, contents, depth)
        elif keyword in MAPS and isinstance(each, dict):
            inner = _all_content(list(each.values()), dialect, parts, contents, depth)
            content = None if inner is None else (tuple(each), inner)
        else:
            if isinstance(each, (list, dict)):
                parts[0] -= len(each)
                if parts[0] < 0:
                    return None
            content = ("value", spelling_of(each))
        if content is None:
            return None
        found.append((keyword, content))
    said = contents.number_of(tuple(found))
    contents.known[id(value)] = (value, dialect, said)
    return said


def _all_content(
    schemas: list[Json], dialect: Dialect, parts: list[int], contents: _Contents, depth: int
) -> tuple[object, ...] | None:
    found: list[object] = []
    for each in schemas:
        parts[0] -= 1
        content = (
            _content(each, dialect, parts, contents, depth + 1)
            if isinstance(each, dict)
            else ("value", identity(each))
        )
        if content is None or parts[0] < 0:
            return None
        found.append(content)
    return tuple(found)


ANYTHING: Claim = Schema("#", {}, (_SYNTHETIC,), UNDECLARED).claim
NOTHING: Claim = ANYTHING.opposite
# True of every value, and says that it is to be written in one way only.
CANONICAL: Claim = Schema("#", {}, (_SYNTHETIC,), UNDECLARED).claim
