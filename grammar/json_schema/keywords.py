"""Which keywords each dialect has, and which of them only annotate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# A type of instances. Whether a number is an integer is a matter of its value.
Type = Literal["null", "boolean", "number", "string", "array", "object"]

ALL_TYPES: tuple[Type, ...] = ("null", "boolean", "number", "string", "array", "object")
TYPE_NAMES = frozenset({*ALL_TYPES, "integer"})

# What may hold a schema, a list of schemas, a map of names to schemas.
SINGLE = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "items",
        "additionalItems",
        "contains",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    ]
)
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAPS = frozenset(
    [
        "$defs",
        "definitions",
        "properties",
        "patternProperties",
        "dependentSchemas",
        "dependencies",
    ]
)

_DRAFT_4 = frozenset(
    [
        "$ref",
        "type",
        "enum",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "items",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "dependencies",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
    ]
)
_DRAFT_6 = _DRAFT_4 | {"const", "contains", "propertyNames"}
_DRAFT_7 = _DRAFT_6 | {"if", "then", "else"}
_DRAFT_2019 = _DRAFT_7 | {
    "$recursiveRef",
    "dependentRequired",
    "dependentSchemas",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
}
_DRAFT_2020 = (_DRAFT_2019 - {"$recursiveRef", "additionalItems"}) | {"$dynamicRef", "prefixItems"}
_UNDECLARED = _DRAFT_2020 | {"additionalItems", "nullable"}


# They say something to people or tools, and nothing about which instances are valid.
ANNOTATIONS = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$comment",
        "$defs",
        "definitions",
        "$vocabulary",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What sets one version of JSON Schema apart from the others."""

    name: str
    keywords: frozenset[str]  # those that say something about instances
    id_keyword: str = "$id"
    is_ref_alone: bool = False  # whatever stands beside $ref is ignored
    has_item_lists: bool = False  # items may be a list of schemas
    has_boolean_bounds: bool = False  # exclusiveMinimum may be a boolean beside minimum
    has_numeric_bounds: bool = True  # exclusiveMinimum may be a number
    known: frozenset[str] = field(init=False)  # the keywords, and those that say nothing

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", self.keywords | ANNOTATIONS)


DRAFT_4 = Dialect(
    name="draft 4",
    keywords=_DRAFT_4,
    id_keyword="id",
    is_ref_alone=True,
    has_item_lists=True,
    has_boolean_bounds=True,
    has_numeric_bounds=False,
)
DRAFT_6 = Dialect(name="draft 6", keywords=_DRAFT_6, is_ref_alone=True, has_item_lists=True)
DRAFT_7 = Dialect(name="draft 7", keywords=_DRAFT_7, is_ref_alone=True, has_item_lists=True)
DRAFT_2019 = Dialect(name="draft 2019-09", keywords=_DRAFT_2019, has_item_lists=True)
DRAFT_2020 = Dialect(name="draft 2020-12", keywords=_DRAFT_2020)
# Without $schema: draft 2020-12, and what OpenAPI 3.0 and older drafts spell differently.
UNDECLARED = Dialect(
    name="draft 2020-12",
    keywords=_UNDECLARED,
    has_item_lists=True,
    has_boolean_bounds=True,
)

# By the address in $schema, without scheme and fragment.
DIALECTS = {
    "json-schema.org/schema": UNDECLARED,
    "json-schema.org/draft-04/schema": DRAFT_4,
    "json-schema.org/draft-05/schema": DRAFT_4,
    "json-schema.org/draft-06/schema": DRAFT_6,
    "json-schema.org/draft-07/schema": DRAFT_7,
    "json-schema.org/draft/2019-09/schema": DRAFT_2019,
    "json-schema.org/draft/2020-12/schema": DRAFT_2020,
    "spec.openapis.org/oas/3.1/dialect/base": DRAFT_2020,
}
