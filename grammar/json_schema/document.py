"""A schema as a document: read, referred into, and compared as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from json.encoder import encode_basestring as _encode
from json.encoder import encode_basestring_ascii as _encode_ascii
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar, UnsupportedGrammar
from palmette.grammar.json_schema.keywords import (
    DIALECTS,
    LISTS,
    MAPS,
    SINGLE,
    UNDECLARED,
    Dialect,
)

# What gives a part of a document a name, or a dialect.
_NAMING = frozenset(["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"])

# Characters of all names and addresses of parts together. Each is written out whole, so that a long
# one costs as much again for every part below it.
_MAX_CHARACTERS = 32_000_000
_BAD_ESCAPE = re.compile("~(?![01])")
_INDEX = re.compile("0|[1-9][0-9]{0,9}")

# A JSON value: None, bool, int, Decimal, str, list or dict.
Json = Any


class Document:
    """A schema document, whose parts are named by JSON pointers in fragment form (``#/a/b``).

    Parts with an address of their own (``$id``) are resources: references inside them are relative
    to that address, and anchors belong to them.
    """

    def __init__(self, root: Json, named: Sequence[dict[str, Json]] | None = None) -> None:
        """`named` are all objects in it with members that could be names, if that is known.

        Raises InvalidGrammar if `root` is no schema, UnsupportedGrammar for another dialect.
        """
        if not isinstance(root, (dict, bool)):
            raise InvalidGrammar(
                f"a schema is an object or a boolean, got {describe(root)}", pointer="#"
            )
        self.num_characters = 0
        self.root: Json = root
        self._parts: dict[str, Json] = {"#": root}
        dialect = self._declared_dialect(root, "#") or UNDECLARED
        self._resources: dict[str, Resource] = {}  # by the pointer of the root
        self._by_address: dict[str, Resource] = {}
        self._add_resource("#", "", dialect)
        if named is None or any(each is not root for each in named):
            self._index()
        elif named and isinstance(root, dict):
            self._note_names("#", root, self._resources["#"])

    @classmethod
    def read(cls, source: str) -> Document:
        """Parse JSON text. Numbers keep their exact decimal value."""
        named: list[dict[str, Json]] = []

        def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
            found = dict(pairs)
            if len(found) < len(pairs):
                _refuse_repeated(pairs)
            if not _NAMING.isdisjoint(found):
                named.append(found)
            return found

        try:
            root = json.loads(
                source,
                parse_float=_decimal,
                parse_constant=_refuse_constant,
                object_pairs_hook=unique,
            )
        except RecursionError as error:
            raise GrammarTooComplex("the schema is nested too deeply") from error
        except InvalidGrammar:
            raise
        except ValueError as error:
            raise InvalidGrammar(f"the schema is not JSON: {error}") from error
        return cls(root, named)

    def count(self, num_characters: int) -> None:
        """Count what is kept of names and addresses. Raises GrammarTooComplex if it is too much."""
        self.num_characters += num_characters
        if self.num_characters > _MAX_CHARACTERS:
            raise GrammarTooComplex(
                f"the names of the schema's parts have more than {_MAX_CHARACTERS} characters"
            )

    def at(self, pointer: str) -> Json:
        """The part that `pointer` names; KeyError if there is none."""
        if pointer not in self._parts:
            self.count(len(pointer))
            start, *tokens = pointer.split("/")
            if start != "#":
                raise KeyError(pointer)
            part = self.root
            for token in tokens:
                if "~" in token:
                    if _BAD_ESCAPE.search(token):
                        raise KeyError(pointer)
                    token = token.replace("~1", "/").replace("~0", "~")
                if isinstance(part, dict) and token in part:
                    part = part[token]
                elif isinstance(part, list) and _INDEX.fullmatch(token) and int(token) < len(part):
                    part = part[int(token)]
                else:
                    raise KeyError(pointer)
            self._parts[pointer] = part
        return self._parts[pointer]

    # Resources and references

    @property
    def is_one_resource(self) -> bool:
        """Whether no part has an address of its own."""
        return len(self._resources) == 1

    def resource_of(self, pointer: str) -> Resource:
        """The resource that the part at `pointer` belongs to."""
        if self.is_one_resource:
            return self._resources["#"]
        while pointer not in self._resources:
            pointer = pointer.rpartition("/")[0]
        return self._resources[pointer]

    def resolve(self, reference: Json, pointer: str, keyword: str = "$ref") -> str:
        """The pointer that the reference of the schema at `pointer` leads to."""
        where = pointer_to(pointer, [keyword])
        if not isinstance(reference, str):
            raise InvalidGrammar(
                f"{keyword} must be a string, got {describe(reference)}", pointer=where
            )
        resource, fragment = self._address(reference, pointer, keyword)
        target: str | None = resource.pointer
        if fragment and not fragment.startswith("/"):
            target = resource.anchors.get(fragment) or resource.dynamic_anchors.get(fragment)
        elif fragment:
            target = f"{resource.pointer}{fragment}"
        try:
            part = None if target is None else self.at(target)
        except KeyError:
            target = None
        if target is None:
            raise InvalidGrammar(f"{keyword} leads nowhere: {reference!r}", pointer=where)
        if not isinstance(part, (dict, bool)):
            raise InvalidGrammar(f"{keyword} leads to no schema: {reference!r}", pointer=where)
        return target

    def resolve_dynamic(
        self, reference: Json, pointer: str, scope: Sequence[str], keyword: str = "$dynamicRef"
    ) -> str:
        """The same for `$dynamicRef` or `$recursiveRef`, entered through the resources in `scope`.

        If it leads to a dynamic anchor, the outermost resource with one of that name is meant.
        """
        target = self.resolve(reference, pointer, keyword)
        name = "" if keyword == "$recursiveRef" else unquote(str(reference).partition("#")[2])
        home = self.resource_of(target)
        if home.dynamic_anchors.get(name) != target:
            return target
        for root in scope:
            outermost = self._resources[root].dynamic_anchors.get(name)
            if outermost is not None:
                return outermost
        return target

    @property
    def is_dynamic(self) -> bool:
        """Whether what a reference means may depend on how one came to it."""
        return any(each.dynamic_anchors for each in self._resources.values())

    def _address(self, reference: str, pointer: str, keyword: str) -> tuple[Resource, str]:
        """The resource that a reference names, and the decoded fragment."""
        here = self.resource_of(pointer)
        address, _, fragment = reference.partition("#")
        resource: Resource | None = here
        if address:
            known = self._by_address
            resource = known.get(self._joined(here.address, address)) or known.get(address)
        if resource is None:
            raise UnsupportedGrammar(
                f"{keyword} to another document, {reference!r}, is not supported",
                feature=keyword,
                pointer=pointer_to(pointer, [keyword]),
            )
        return resource, unquote(fragment)

    def _add_resource(self, pointer: str, address: str, dialect: Dialect) -> Resource:
        resource = self._resources[pointer] = Resource(pointer, address, dialect)
        self._by_address.setdefault(address, resource)
        return resource

    def _declared_dialect(self, schema: Json, pointer: str) -> Dialect | None:
        declared = schema.get("$schema") if isinstance(schema, dict) else None
        if declared is None:
            return None
        where = pointer_to(pointer, ["$schema"])
        if not isinstance(declared, str):
            raise InvalidGrammar("$schema must be a string", pointer=where)
        dialect = DIALECTS.get(declared.rstrip("#").partition("://")[2].rstrip("/"))
        if dialect is None:
            raise UnsupportedGrammar(
                f"the dialect {declared!r} is not supported", feature="$schema", pointer=where
            )
        return dialect

    def _index(self) -> None:
        """Find the resources and anchors, wherever a schema may stand."""
        if not isinstance(self.root, dict):
            return
        # Few parts have names, so that pointers are put together when they are needed.
        pending: list[tuple[_Path, dict[str, Json], Resource]] = [
            (_Path(None, ()), self.root, self._resources["#"])
        ]
        while pending:
            path, schema, resource = pending.pop()
            if not _NAMING.isdisjoint(schema):
                pointer = path.pointer
                self.count(len(pointer))
                resource = self._note_names(pointer, schema, resource)
            for keyword, value in schema.items():
                if isinstance(value, dict):
                    if keyword in SINGLE:
                        pending.append((_Path(path, (keyword,)), value, resource))
                    elif keyword in MAPS:
                        pending += [
                            (_Path(path, (keyword, name)), each, resource)
                            for name, each in value.items()
                            if isinstance(each, dict)
                        ]
                elif isinstance(value, list) and keyword in LISTS:
                    pending += [
                        (_Path(path, (keyword, index)), each, resource)
                        for index, each in enumerate(value)
                        if isinstance(each, dict)
                    ]

    def _note_names(self, pointer: str, schema: dict[str, Json], resource: Resource) -> Resource:
        dialect = resource.dialect
        if "$schema" in schema and (
            isinstance(schema.get("$id"), str) or isinstance(schema.get("id"), str)
        ):
            dialect = self._declared_dialect(schema, pointer) or dialect
        name = schema.get(dialect.id_keyword)
        if isinstance(name, str) and not (dialect.is_ref_alone and "$ref" in schema):
            address, _, fragment = name.partition("#")
            if address:
                address = self._joined(resource.address, address)
                if pointer == "#":
                    resource.address = address
                    self._by_address[address] = resource
                else:
                    resource = self._add_resource(pointer, address, dialect)
            if fragment and dialect.is_ref_alone:
                resource.anchors.setdefault(unquote(fragment), pointer)
        for keyword, known in (
            ("$anchor", resource.anchors),
            ("$dynamicAnchor", resource.dynamic_anchors),
        ):
            anchor = schema.get(keyword)
            if isinstance(anchor, str) and not dialect.is_ref_alone:
                known.setdefault(anchor, pointer)
        if schema.get("$recursiveAnchor") is True and pointer == resource.pointer:
            resource.dynamic_anchors[""] = pointer
        return resource

    def _joined(self, base: str, reference: str) -> str:
        self.count(4 * len(base))  # which is taken apart, and put together again
        try:
            return urljoin(base, reference) if base else reference
        except ValueError:  # no address at all
            return reference


class _Path(NamedTuple):
    """A part of a document, as a part of a part."""

    above: _Path | None
    tokens: tuple[str | int, ...]

    @property
    def pointer(self) -> str:
        paths = []
        path: _Path | None = self
        while path is not None:
            paths.append(path)
            path = path.above
        return pointer_to("#", (token for each in reversed(paths) for token in each.tokens))


class Resource:
    """A part of a document with an address of its own."""

    __slots__ = ("address", "anchors", "dialect", "dynamic_anchors", "pointer")

    def __init__(self, pointer: str, address: str, dialect: Dialect) -> None:
        self.pointer = pointer
        self.address = address  # absolute if any address above it is; without fragment
        self.dialect = dialect
        self.anchors: dict[str, str] = {}  # pointers by name
        self.dynamic_anchors: dict[str, str] = {}


def escape_token(token: str) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return token.replace("~", "~0").replace("/", "~1")


def pointer_to(pointer: str, tokens: Iterable[str | int]) -> str:
    """The pointer of a part of what is at `pointer`."""
    for token in tokens:
        if not isinstance(token, str):
            pointer = f"{pointer}/{token}"
        elif "~" in token or "/" in token:
            pointer = f"{pointer}/{escape_token(token)}"
        else:
            pointer = f"{pointer}/{token}"
    return pointer


def to_source(schema: Mapping[str, Any] | bool | str) -> str:
    """The schema as JSON text, keys in their order."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise GrammarTooComplex("the schema is nested too deeply, or contains itself") from error
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from error


def spell(value: Json, *, escaped: bool = False) -> bytes:
    """A value as compact JSON in UTF-8, or all in ASCII.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    plain = _text_of(value).encode()
    return _text_of(value, escaped=True).encode() if escaped else plain


def _text_of(value: Json, escaped: bool = False) -> str:
    if isinstance(value, str):
        return _encode_ascii(value) if escaped else _encode(value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(_text_of(each, escaped) for each in value) + "]"
    if isinstance(value, dict):
        members = (
            f"{_text_of(name, escaped)}:{_text_of(each, escaped)}" for name, each in value.items()
        )
        return "{" + ",".join(members) + "}"
    return json.dumps(value, ensure_ascii=escaped)


def identity(value: Json) -> object:
    """Something hashable that is equal for values that JSON Schema holds equal, and only those."""
    if isinstance(value, str):
        return ("string", value)
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, (int, Decimal)):
        return ("number", value)
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(each)) for name, each in value.items()))
    return ("other", value)


def spelling_of(value: Json) -> object:
    """The same, and also equal only where objects have their members in one order."""
    if isinstance(value, list):
        return ("array", tuple(map(spelling_of, value)))
    if isinstance(value, dict):
        return ("object", tuple((name, spelling_of(each)) for name, each in value.items()))
    return identity(value)


def spend_on(value: Json, spend: Callable[[int], None]) -> None:
    """Spend the work of going through all the values that this one is made of."""
    num_values = 0
    pending = [value]
    while pending:
        here = pending.pop()
        num_values += 1
        if num_values % 64 == 0:
            spend(32)
        if isinstance(here, list):
            pending += here
        elif isinstance(here, dict):
            pending += here.values()


def as_spent(values: Iterable[Json], spend: Callable[[int], None]) -> Iterator[Json]:
    """The values, one after the other, each with the work that its identity takes."""
    for value in values:
        spend(8)
        spend_on(value, spend)
        yield value


def describe(value: Json) -> str:
    """The JSON type of a value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, Decimal)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError as error:
        raise ValueError(f"the number {text[:40]} is out of range") from error


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"{text} is no JSON number")


def _refuse_repeated(pairs: list[tuple[str, Json]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidGrammar(f"the schema names {name!r} twice in one object")
        seen.add(name)
