"""Random JSON Schemas whose keywords get in each other's way, and the judge of what they allow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jsonschema

Schema = dict[str, Any] | bool

NAMES = ("a", "b", "ab", "id", "x-1", 'q"t', "é")
PATTERNS = (
    "^[a-c]+$",
    "b",
    "^a",
    "c$",
    "^(ab|cd)*$",
    "^[^a]*$",
    "^\\d{2,4}$",
    "^.{1,3}$",
    "^(?!ab)[a-z]{0,3}$",
    "[é-ü]",
    "^\\w+-\\d$",
)
NAME_PATTERNS = ("^a", "^x-", "b$", "^[a-z]{1,2}$", "^[^a]", "d")
FORMATS = ("date", "ipv4", "uuid", "no-such-format")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -3,
    2.5,
    "",
    "a",
    "abc",
    "é\n",
    [],
    [1],
    ["a", None],
    {},
    {"a": 1},
    {"b": [], "a": "x"},
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class RandomSchemas:
    """Draws schemas from a seed; about one in three says something about every type."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_definitions = 0

    def draw(self) -> dict[str, Any]:
        """A schema, definitions included."""
        rng = self._rng
        self._num_definitions = rng.choice((0, 0, 1, 2))
        schema = self._object(3)
        if rng.random() < 0.3:
            schema.setdefault("type", rng.choice(("object", "array", "string", "number")))
        if self._num_definitions:
            schema["$defs"] = {f"d{i}": self._schema(2) for i in range(self._num_definitions)}
        return schema

    def _schema(self, depth: int) -> Schema:
        chance = self._rng.random()
        if chance < 0.04:
            return True
        if chance < 0.06:
            return False
        if self._num_definitions and chance < 0.16:
            return {"$ref": f"#/$defs/d{self._rng.randrange(self._num_definitions)}"}
        return self._object(depth)

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds: list[Callable[[int], dict[str, Any]]] = [
            self._string,
            self._number,
            self._literal,
            self._type,
        ]
        if depth:
            kinds += [self._array, self._members, self._members, self._logic]
        schema: dict[str, Any] = {}
        for kind in rng.choices(kinds, k=rng.choice((1, 1, 2))):
            schema |= kind(depth)
        return schema

    def _some(self, **keywords: Callable[[], Any]) -> dict[str, Any]:
        """One to three of the keywords."""
        names = self._rng.sample(list(keywords), min(len(keywords), self._rng.choice((1, 2, 2, 3))))
        return {name: keywords[name]() for name in names}

    def _type(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.6:
            return {"type": rng.choice(TYPES)}
        return {"type": rng.sample(TYPES, rng.randint(1, 3))}

    def _literal(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.3:
            return {"const": rng.choice(VALUES)}
        return {"enum": rng.sample(VALUES, rng.randint(1, 5))}

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return self._maybe_typed("string") | self._some(
            minLength=lambda: rng.randint(0, 4),
            maxLength=lambda: rng.choice((0, 1, 3, 8, 500)),
            pattern=lambda: rng.choice(PATTERNS),
            format=lambda: rng.choice(FORMATS),
        )

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return self._maybe_typed(rng.choice(("integer", "number"))) | self._some(
            minimum=lambda: rng.choice((-20, -1, 0, 0.5, 3, 100)),
            maximum=lambda: rng.choice((-5, 0, 1.25, 9, 1000)),
            exclusiveMinimum=lambda: rng.choice((-1, 0, 2.5)),
            exclusiveMaximum=lambda: rng.choice((0, 1, 7, 10.5)),
            multipleOf=lambda: rng.choice((1, 2, 3, 5, 0.5, 10)),
        )

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def inner() -> Schema:
            return self._schema(depth - 1)

        schema = self._maybe_typed("array") | self._some(
            items=inner,
            prefixItems=lambda: [inner() for _ in range(rng.randint(1, 2))],
            contains=inner,
            minItems=lambda: rng.randint(0, 3),
            maxItems=lambda: rng.randint(0, 4),
            uniqueItems=lambda: True,
            unevaluatedItems=inner,
        )
        if "contains" in schema and rng.random() < 0.5:
            schema |= {rng.choice(("minContains", "maxContains")): rng.randint(0, 2)}
        return schema

    def _members(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def inner() -> Schema:
            return self._schema(depth - 1)

        def names(most: int) -> list[str]:
            return rng.sample(NAMES, rng.randint(1, most))

        return self._maybe_typed("object") | self._some(
            properties=lambda: {name: inner() for name in names(4)},
            required=lambda: names(2),
            additionalProperties=inner,
            patternProperties=lambda: {rng.choice(NAME_PATTERNS): inner() for _ in range(2)},
            propertyNames=lambda: rng.choice(
                ({"pattern": rng.choice(NAME_PATTERNS)}, {"maxLength": 2}, {"enum": names(3)})
            ),
            minProperties=lambda: rng.randint(0, 3),
            maxProperties=lambda: rng.randint(0, 4),
            dependentRequired=lambda: {rng.choice(NAMES): names(2)},
            dependentSchemas=lambda: {rng.choice(NAMES): inner()},
            unevaluatedProperties=inner,
        )

    def _logic(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def inner() -> Schema:
            return self._schema(depth - 1)

        def several() -> list[Schema]:
            return [inner() for _ in range(rng.randint(1, 3))]

        schema: dict[str, Any] = {}
        for keyword in rng.sample(("allOf", "anyOf", "oneOf", "not", "if"), rng.choice((1, 1, 2))):
            schema[keyword] = inner() if keyword in ("not", "if") else several()
        if "if" in schema:
            schema |= {keyword: inner() for keyword in rng.choice((("then",), ("then", "else")))}
        return schema

    def _maybe_typed(self, name: str) -> dict[str, Any]:
        return {"type": name} if self._rng.random() < 0.5 else {}


def read_json(text: str) -> Any:
    """As `json.loads`, but numbers are exact, and whole ones are integers.

    Exponents beyond 4,000 count as that.
    """

    def number(written: str) -> int | Fraction:
        mantissa, _, exponent = written.lower().partition("e")
        value = Fraction(mantissa) * Fraction(10) ** max(-4000, min(4000, int(exponent or "0")))
        return value.numerator if value.denominator == 1 else value

    return json.loads(text, parse_float=number, parse_constant=_no_constant)


def is_valid(schema: Schema, value: Any) -> bool:
    """What `jsonschema` says under draft 2020-12, formats included."""
    validator = jsonschema.Draft202012Validator
    schema = read_json(json.dumps(schema))
    return bool(validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value))


def _no_constant(written: str) -> Any:
    raise ValueError(f"{written} is no JSON number")
