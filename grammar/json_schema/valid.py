"""Reads the keywords of one subschema, checked, and tells whether a value is valid under it."""

from __future__ import annotations

from decimal import Decimal

from palmette.grammar.errors import InvalidGrammar, UnsupportedGrammar
from palmette.grammar.json_schema.document import Document, Json, describe, identity, spell
from palmette.grammar.json_schema.formats import PATTERNS
from palmette.grammar.json_schema.formats import REFUSED as REFUSED_FORMATS
from palmette.grammar.json_schema.keywords import ALL_TYPES, KNOWN, REFUSED, TYPES, is_idle
from palmette.grammar.json_schema.numbers import Bounds
from palmette.grammar.json_schema.strings import StringRule, Strings, check_string


class Validity:
    """What each keyword of a document says. InvalidGrammar where one is malformed."""

    def __init__(self, document: Document, strings: Strings) -> None:
        self._document = document
        self._strings = strings
        self._literal_identities: dict[str, frozenset[object]] = {}
        self._checked: set[str] = set()

    def check(self, pointer: str, schema: dict[str, Json]) -> None:
        """Every keyword is known, and combinators are well-formed."""
        if pointer in self._checked:
            return
        for keyword, value in schema.items():
            where = self._document.child(pointer, keyword)
            is_nested_name = keyword in ("$id", "id") and pointer != "#" and isinstance(value, str)
            if is_nested_name or not (keyword in KNOWN or keyword.startswith("x-")):
                raise UnsupportedGrammar(
                    f"the keyword '{keyword}' is not supported here"
                    if is_nested_name
                    else f"the keyword '{keyword}' is not supported",
                    feature=keyword,
                    pointer=where,
                )
            if keyword in ("allOf", "anyOf", "oneOf") and not (value and isinstance(value, list)):
                raise InvalidGrammar(f"{keyword} must be a non-empty array", pointer=where)
        self._checked.add(pointer)

    def types(self, pointer: str, schema: dict[str, Json]) -> frozenset[str]:
        """The types that `type` allows."""
        if "type" not in schema:
            return ALL_TYPES
        where = self._document.child(pointer, "type")
        named = schema["type"]
        listed = named if isinstance(named, list) else [named]
        types: frozenset[str] = frozenset()
        for name in listed:
            if not isinstance(name, str) or name not in TYPES:
                raise InvalidGrammar(f"unknown type {_show(name)}", pointer=where)
            types |= TYPES[name]
        if not types:
            raise InvalidGrammar("the list of types is empty", pointer=where)
        return types

    def literals(self, pointer: str, schema: dict[str, Json]) -> list[Json] | None:
        """The values of `enum` or `const`; None if there is neither."""
        if "const" in schema:
            return [schema["const"]]
        if "enum" not in schema:
            return None
        values = self._enumerated(pointer, schema)
        distinct: dict[object, Json] = {}
        for value in values:
            distinct.setdefault(identity(value), value)
        return list(distinct.values())

    def _enumerated(self, pointer: str, schema: dict[str, Json]) -> list[Json]:
        values = schema["enum"]
        if not isinstance(values, list):
            raise InvalidGrammar(
                f"enum must be an array, got {describe(values)}",
                pointer=self._document.child(pointer, "enum"),
            )
        return values

    def bounds(self, pointer: str, schema: dict[str, Json]) -> Bounds:
        """What `minimum` and its siblings say."""
        low = self._number(pointer, schema, "minimum")
        high = self._number(pointer, schema, "maximum")
        above = self._number(pointer, schema, "exclusiveMinimum")
        below = self._number(pointer, schema, "exclusiveMaximum")
        closed = Bounds(low=low, high=high)
        return closed & Bounds(
            low=above,
            high=below,
            is_low_open=above is not None,
            is_high_open=below is not None,
        )

    def string_rule(self, pointer: str, schema: dict[str, Json]) -> StringRule:
        """What the keywords for strings say."""
        child = self._document.child
        patterns: tuple[tuple[str, str], ...] = ()
        if "pattern" in schema:
            where = child(pointer, "pattern")
            patterns = ((check_string(schema["pattern"], where), where),)
        formats: tuple[str, ...] = ()
        if "format" in schema:
            where = child(pointer, "format")
            name = check_string(schema["format"], where)
            if name in REFUSED_FORMATS:
                raise UnsupportedGrammar(
                    f"the format {name!r} is not supported", feature="format", pointer=where
                )
            formats = (name,) if name in PATTERNS else ()
        return StringRule(
            self._count(pointer, schema, "minLength") or 0,
            self._count(pointer, schema, "maxLength"),
            patterns,
            formats,
        )

    def item_counts(self, pointer: str, schema: dict[str, Json]) -> tuple[int, int | None]:
        """`minItems` and `maxItems`."""
        low = self._count(pointer, schema, "minItems") or 0
        return low, self._count(pointer, schema, "maxItems")

    def items(self, pointer: str, schema: dict[str, Json]) -> tuple[list[str], str | None]:
        """Pointers of the schemas of the first items, and of the schema of the others, if any."""
        child = self._document.child
        prefix: list[str] = []
        items = schema.get("items")
        if "prefixItems" in schema:
            where = child(pointer, "prefixItems")
            listed = schema["prefixItems"]
            if not isinstance(listed, list) or not listed:
                raise InvalidGrammar("prefixItems must be a non-empty array", pointer=where)
            prefix = [child(where, index) for index in range(len(listed))]
        if isinstance(items, list):
            where = child(pointer, "items")
            if prefix or not self._document.allows_item_lists:
                raise InvalidGrammar("a list of schemas is spelled prefixItems", pointer=where)
            prefix = [child(where, index) for index in range(len(items))]
            rest = "additionalItems" in schema
            return prefix, child(pointer, "additionalItems") if rest else None
        return prefix, child(pointer, "items") if "items" in schema else None

    def property_names(self, pointer: str, schema: dict[str, Json]) -> frozenset[str] | list[str]:
        """The declared names, in order."""
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise InvalidGrammar(
                f"properties must be an object, got {describe(properties)}",
                pointer=self._document.child(pointer, "properties"),
            )
        return list(properties)

    def required(self, pointer: str, schema: dict[str, Json]) -> list[str]:
        """The names that must be there."""
        names = schema.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidGrammar(
                "required must be an array of strings",
                pointer=self._document.child(pointer, "required"),
            )
        return names

    def is_valid(self, pointer: str, value: Json) -> bool:
        """Whether `value` is valid under the schema at `pointer`, to the letter."""
        schema = self._document.schema_at(pointer)
        if isinstance(schema, bool):
            return schema
        self.check(pointer, schema)
        document = self._document
        child = document.child
        if "$ref" in schema:
            target = document.resolve(schema["$ref"], child(pointer, "$ref"))
            if not self.is_valid(target, value):
                return False
            if document.is_old_draft:
                return True
        for keyword in schema:
            applies = keyword in REFUSED and REFUSED[keyword] & _types_of(value)
            if applies and not is_idle(keyword, schema):
                raise UnsupportedGrammar(
                    f"'{keyword}' is not supported",
                    feature=keyword,
                    pointer=child(pointer, keyword),
                )
        if not _types_of(value) & self.types(pointer, schema):
            return False
        if not self._is_literal(pointer, schema, value):
            return False
        for keyword, least, most in (("allOf", None, None), ("anyOf", 1, None), ("oneOf", 1, 1)):
            if keyword in schema:
                branches = range(len(schema[keyword]))
                valid = sum(self.is_valid(child(pointer, keyword, i), value) for i in branches)
                if valid < (len(branches) if least is None else least):
                    return False
                if most is not None and valid > most:
                    return False
        return self._is_valid_type(pointer, schema, value)

    def _is_valid_type(self, pointer: str, schema: dict[str, Json], value: Json) -> bool:
        child = self._document.child
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, (int, Decimal)):
            return self.bounds(pointer, schema).holds(value)
        if isinstance(value, str):
            return self._is_valid_string(pointer, schema, value)
        if isinstance(value, list):
            low, high = self.item_counts(pointer, schema)
            if len(value) < low or (high is not None and len(value) > high):
                return False
            prefix, rest = self.items(pointer, schema)
            applied = prefix + [rest or ""] * (len(value) - len(prefix))
            return all(
                not where or self.is_valid(where, item)
                for where, item in zip(applied, value, strict=False)
            )
        names = self.property_names(pointer, schema)
        if not all(name in value for name in self.required(pointer, schema)):
            return False
        for name, member in value.items():
            if name in names:
                if not self.is_valid(child(pointer, "properties", name), member):
                    return False
            elif "additionalProperties" in schema and not self.is_valid(
                child(pointer, "additionalProperties"), member
            ):
                return False
        return True

    def _is_valid_string(self, pointer: str, schema: dict[str, Json], value: str) -> bool:
        rule = self.string_rule(pointer, schema)
        if rule == StringRule():
            return True
        return self._strings.store.accepts(self._strings.term(rule), spell(value))

    def _is_literal(self, pointer: str, schema: dict[str, Json], value: Json) -> bool:
        if "const" in schema and identity(schema["const"]) != identity(value):
            return False
        if "enum" not in schema:
            return True
        known = self._literal_identities.get(pointer)
        if known is None:
            known = frozenset(map(identity, self._enumerated(pointer, schema)))
            self._literal_identities[pointer] = known
        return identity(value) in known

    def _number(self, pointer: str, schema: dict[str, Json], keyword: str) -> int | Decimal | None:
        value = schema.get(keyword)
        if keyword not in schema:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
            raise InvalidGrammar(
                f"{keyword} must be a number, got {describe(value)}",
                pointer=self._document.child(pointer, keyword),
            )
        return value

    def _count(self, pointer: str, schema: dict[str, Json], keyword: str) -> int | None:
        value = self._number(pointer, schema, keyword)
        if value is None:
            return None
        is_huge = isinstance(value, Decimal) and value.adjusted() > 30
        if value < 0 or is_huge or value != int(value):
            raise InvalidGrammar(
                f"{keyword} must be a whole number from 0 on, got {value}",
                pointer=self._document.child(pointer, keyword),
            )
        return int(value)


def _types_of(value: Json) -> frozenset[str]:
    if value is None:
        return TYPES["null"]
    if isinstance(value, bool):
        return TYPES["boolean"]
    if isinstance(value, int):
        return TYPES["integer"]
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return TYPES["integer"] if is_whole else frozenset({"fraction"})
    if isinstance(value, str):
        return TYPES["string"]
    return TYPES["array"] if isinstance(value, list) else TYPES["object"]


def _show(value: Json) -> str:
    return repr(value) if isinstance(value, str) else describe(value)
