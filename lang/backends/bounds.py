"""Bounds of lengths and numbers in schemas, for an API that does not enforce them.

They are taken out of the schema that is sent, where the model reads of them in the description, and
the answer is held against the whole schema when it is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from palmette.lang.backends.envelope import map_schemas

Schema = Any
_MAX_DEPTH = 200  # of schemas within schemas; references may go round in a circle
# What is not looked at here: a schema that has these keeps its bounds, and the API refuses them.
_NOT_CHECKED = {"not", "if", "then", "else", "contains", "patternProperties", "dependentSchemas"}


def _is_number(value: Any) -> bool:
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_finite and not isinstance(value, bool)


def _is_multiple(value: Any, step: Any) -> bool:
    return bool(step) and Decimal(str(value)) % Decimal(str(step)) == 0


# Which values each bound is for, and whether one keeps to it.
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "multipleOf": _is_multiple,
}
_LENGTHS: dict[str, Callable[[Any, Any], bool]] = {
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
}
_COUNTS: dict[str, Callable[[Any, Any], bool]] = {
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
}
_KINDS: tuple[tuple[Callable[[Any], bool], dict[str, Callable[[Any, Any], bool]]], ...] = (
    (_is_number, _NUMBERS),
    (lambda value: isinstance(value, str), _LENGTHS),
    (lambda value: isinstance(value, list), _COUNTS),
)
_BOUNDS = {*_NUMBERS, *_LENGTHS, *_COUNTS}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def without_bounds(schema: Schema) -> Schema:
    """A copy that tells of its bounds in descriptions instead; the schema itself, if it has such
    that `breach_of` does not look at.
    """
    return schema if _words(schema) & _NOT_CHECKED else _unbounded(schema)


def _words(value: Any) -> set[str]:
    """Every key in it."""
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list):
        return set()
    words = set(value) if isinstance(value, Mapping) else set()
    return words.union(*map(_words, inner))


def _unbounded(schema: Schema) -> Schema:
    if not isinstance(schema, Mapping):
        return schema
    made = map_schemas(schema, _unbounded)
    names = [name for name in sorted(_BOUNDS & set(made)) if _is_number(made[name])]
    found = [f"{name}: {made.pop(name)}" for name in names]
    if found:
        made["description"] = ", ".join(filter(None, (made.get("description"), *found)))
    return made


def breach_of(schema: Schema, text: str) -> str | None:
    """Where the JSON text is not as the schema has it, and how; None if it is.

    Of what an API enforces, types, values and properties are looked at again, to tell alternatives
    apart; patterns and formats are not. Raises ValueError for text that is no JSON.
    """
    if _words(schema) & _NOT_CHECKED:
        return None  # nothing was left to be looked at
    return next(_breaches(schema, json.loads(text), "#", schema, 0), None)


def _breaches(schema: Schema, value: Any, place: str, root: Schema, depth: int) -> Iterator[str]:
    if schema is False:
        yield f"{place}: nothing is allowed here"
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    deeper = depth + 1
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        yield from _breaches(_at(root, target), value, place, root, deeper)
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted or []
    if names and not any(_TYPES.get(name, bool)(value) for name in names):
        yield f"{place}: no {' or '.join(names)}"
        return
    for of_kind, bounds in _KINDS:
        for name in sorted(set(bounds) & set(schema)) if of_kind(value) else ():
            if _is_number(schema[name]) and not bounds[name](value, schema[name]):
                yield f"{place}: {name} is {schema[name]}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: none of the values of enum"
    if "const" in schema and value != schema["const"]:
        yield f"{place}: not the value of const"
    for each in schema.get("allOf", ()):
        yield from _breaches(each, value, place, root, deeper)
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if branches and not any(
            next(_breaches(each, value, place, root, deeper), None) is None for each in branches
        ):
            yield f"{place}: none of {name}"
    if isinstance(value, dict):
        yield from _in_object(schema, value, place, root, deeper)
    if isinstance(value, list):
        first = schema.get("prefixItems", ())
        for index, item in enumerate(value):
            inner = first[index] if index < len(first) else schema.get("items", True)
            yield from _breaches(inner, item, f"{place}/{index}", root, deeper)


def _in_object(
    schema: Mapping[str, Any], value: dict[str, Any], place: str, root: Schema, depth: int
) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}: no {name}"
    for name, item in value.items():
        inner = known[name] if name in known else schema.get("additionalProperties", True)
        yield from _breaches(inner, item, f"{place}/{name}", root, depth)


def _at(root: Schema, target: str) -> Schema:
    """What a local reference leads to; everything, if it leads nowhere."""
    found = root
    for part in target[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return True
    return found
