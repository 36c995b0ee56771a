"""Which keywords there are: enforced, without effect on validity, or refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

ALL_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})

# A `number` is an integer or a fraction; `fraction` stands for every number, however written.
TYPES: dict[str, frozenset[str]] = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
    "string": frozenset({"string"}),
    "array": frozenset({"array"}),
    "object": frozenset({"object"}),
}

# Enforced.
ASSERTIONS = frozenset(
    [
        "type",
        "enum",
        "const",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "properties",
        "required",
        "additionalProperties",
    ]
)
COMBINATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})

# They say something to people or tools, and nothing about which instances are valid.
ANNOTATIONS = frozenset(
    [
        "$schema",
        "$comment",
        "$defs",
        "definitions",
        "$vocabulary",
        "$anchor",
        "$dynamicAnchor",
        "title",
        "description",
        "default",
        "discriminator",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "externalDocs",
        "xml",
        "enumNames",
        "markdownDescription",
    ]
)

# Refused where they could matter, with the types of instances they apply to.
REFUSED: dict[str, frozenset[str]] = {
    "not": ALL_TYPES,
    "if": ALL_TYPES,
    "then": ALL_TYPES,
    "else": ALL_TYPES,
    "$dynamicRef": ALL_TYPES,
    "$recursiveRef": ALL_TYPES,
    "nullable": ALL_TYPES,
    "multipleOf": frozenset({"integer", "fraction"}),
    "contains": frozenset({"array"}),
    "minContains": frozenset({"array"}),
    "maxContains": frozenset({"array"}),
    "uniqueItems": frozenset({"array"}),
    "unevaluatedItems": frozenset({"array"}),
    "patternProperties": frozenset({"object"}),
    "propertyNames": frozenset({"object"}),
    "minProperties": frozenset({"object"}),
    "maxProperties": frozenset({"object"}),
    "dependentRequired": frozenset({"object"}),
    "dependentSchemas": frozenset({"object"}),
    "dependencies": frozenset({"object"}),
    "unevaluatedProperties": frozenset({"object"}),
}

KNOWN = ASSERTIONS | COMBINATORS | ANNOTATIONS | REFUSED.keys() | {"$id", "id"}


def is_idle(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword that is not enforced says nothing here."""
    value: object = schema[keyword]
    if keyword in ("uniqueItems", "nullable"):
        return value is False
    if keyword in ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value == {}
    if keyword in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return value is True or value == {}
    if keyword == "minProperties":
        names = schema.get("required", [])
        num_names = len(set(map(str, names))) if isinstance(names, list) else 0
        return isinstance(value, (int, Decimal)) and 0 <= value <= num_names
    if keyword in ("then", "else"):
        return "if" not in schema
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    return keyword in ("minContains", "maxContains") and "contains" not in schema
