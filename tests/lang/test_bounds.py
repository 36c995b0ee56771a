"""Bounds that an API does not enforce are told to the model and looked at afterwards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from palmette.lang.backends.bounds import breach_of, without_bounds

SMALL = st.integers(0, 4)
SCHEMAS = st.recursive(
    st.builds(
        lambda least, most: {"type": "integer", "minimum": least, "exclusiveMaximum": most},
        SMALL,
        SMALL,
    )
    | st.builds(lambda step: {"type": "number", "multipleOf": step}, st.sampled_from([1, 2, 0.5]))
    | st.builds(
        lambda least, most: {"type": "string", "minLength": least, "maxLength": most}, SMALL, SMALL
    )
    | st.sampled_from([{"const": 1}, {"enum": ["a", None]}, True, {"$ref": "#/$defs/short"}]),
    lambda inner: (
        st.builds(
            lambda item, least, most: {
                "type": "array",
                "items": item,
                "minItems": least,
                "maxItems": most,
            },
            inner,
            SMALL,
            SMALL,
        )
        | st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda several: {"allOf": several}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(
            lambda some, is_closed: {
                "type": "object",
                "properties": some,
                "required": list(some)[:1],
                "additionalProperties": not is_closed,
            },
            st.dictionaries(st.sampled_from(["a", "b", "minimum"]), inner, max_size=3),
            st.booleans(),
        )
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 5) | st.sampled_from([0.5, 1.0, "", "a", "abcde"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "minimum"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def rooted(schema: Any) -> Any:
    short = {"type": "string", "maxLength": 1}
    return {"allOf": [schema], "$defs": {"short": short}}


@given(SCHEMAS.map(rooted), VALUES)
def test_there_is_a_breach_where_the_schema_is_not_kept_to(schema: Any, value: Any) -> None:
    breach = breach_of(schema, json.dumps(value))
    assert (breach is None) == Draft202012Validator(schema).is_valid(value), breach


@given(SCHEMAS.map(rooted), VALUES)
def test_what_is_sent_allows_all_that_is_right_and_has_no_bounds(schema: Any, value: Any) -> None:
    loose = without_bounds(schema)
    if Draft202012Validator(schema).is_valid(value):
        assert Draft202012Validator(loose).is_valid(value)
    assert '"maxLength"' not in json.dumps(loose)
    assert '"minItems"' not in json.dumps(loose)


def test_the_model_is_told_of_the_bounds() -> None:
    schema = {"type": "string", "maxLength": 40, "description": "A subject"}
    assert without_bounds(schema) == {"type": "string", "description": "A subject, maxLength: 40"}


def test_a_breach_says_where() -> None:
    schema = {"properties": {"days": {"type": "array", "items": {"maximum": 14}}}}
    assert breach_of(schema, '{"days": [1, 30]}') == "#/days/1: maximum is 14"


@pytest.mark.parametrize("schema", [{"not": {"maximum": 3}}, {"contains": {"maxLength": 3}}])
def test_what_is_not_looked_at_is_left_to_the_api(schema: Any) -> None:
    assert without_bounds(schema) == schema


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#"}, "1"),
        ({"$ref": "#/nowhere"}, "1"),
        ({"maximum": "much"}, "1"),
        ({"multipleOf": 0.1}, "1e400"),
        ({"type": "integer"}, "1" * 4000),
    ],
)
def test_odd_schemas_and_values_are_no_trouble(schema: Any, text: str) -> None:
    assert breach_of(schema, text) is None
