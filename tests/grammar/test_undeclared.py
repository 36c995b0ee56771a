"""`undeclared="forbidden"`: no properties that the schema does not name, where it names some."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from palmette.grammar import GrammarCompiler, GrammarError, Limits
from palmette.grammar.structural import JsonSchema, Tag
from palmette.grammar.testing import accepts, byte_vocabulary
from tests.grammar.random_schemas import RandomSchemas, is_valid, read_json
from tests.grammar.test_fuzz import TOKENS, drawn

VOCABULARY = byte_vocabulary(TOKENS)
compiler = GrammarCompiler(VOCABULARY, limits=Limits(compile_seconds=2.0))

A = {"a": {"type": "integer"}}
B = {"b": {"type": "integer"}}

# Schema, texts that are left, texts that are valid and kept out.
TABLE: list[tuple[Any, list[str], list[str]]] = [
    # Whoever lists properties and says no more.
    ({"properties": A}, ["{}", '{"a":1}', "[]"], ['{"a":1,"c":2}', '{"c":2}']),
    ({"properties": A, "required": ["z"]}, ['{"a":1,"z":[]}'], ['{"z":1,"c":2}']),
    ({"properties": {"o": {"properties": A}}}, ['{"o":{"a":1}}'], ['{"o":{"c":1}}']),
    # The schema says itself what else there may be.
    ({"properties": A, "additionalProperties": True}, ['{"a":1,"c":2}'], []),
    ({"properties": A, "additionalProperties": {"type": "null"}}, ['{"c":null}'], []),
    ({"properties": A, "unevaluatedProperties": True}, ['{"a":1,"c":2}'], []),
    ({"properties": A, "unevaluatedProperties": {"type": "null"}}, ['{"c":null}'], []),
    ({"properties": A, "propertyNames": {"maxLength": 1}}, ['{"c":null}'], []),
    # What lists nothing stays as it is: free objects, and maps.
    ({"type": "object"}, ['{"c":2}'], []),
    ({"required": ["a"]}, ['{"a":1,"c":2}'], []),
    ({"minProperties": 1}, ['{"c":2}'], []),
    ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x1":null}', '{"c":2}'], []),
    # Names that match a pattern are named.
    (
        {"properties": A, "patternProperties": {"^x": {"type": "null"}}},
        ['{"a":1,"x1":null}'],
        ['{"x1":null,"c":2}'],
    ),
    # Places are closed as a whole: what one part names, the others have too.
    (
        {"allOf": [{"properties": A}, {"properties": B}]},
        ['{"a":1,"b":2}'],
        ['{"a":1,"b":2,"c":3}'],
    ),
    (
        {"allOf": [{"properties": A}, {"properties": B, "additionalProperties": True}]},
        ['{"a":1,"b":2,"c":3}'],
        [],
    ),
    ({"properties": A, "allOf": [{"unevaluatedProperties": True}]}, ['{"a":1,"c":3}'], []),
    (
        {"$ref": "#/$defs/base", "properties": B, "$defs": {"base": {"properties": A}}},
        ['{"b":2,"a":1}'],
        ['{"c":3}'],
    ),
    (
        {"anyOf": [{"properties": A, "required": ["a"]}, {"properties": B, "required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ['{"a":1,"c":2}', '{"b":1,"a":2}'],
    ),
    (
        {"properties": A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["t"]}},
        ['{"a":1,"t":0}', '{"a":2}'],
        ['{"a":2,"c":0}'],
    ),
    ({"properties": A, "not": {"required": ["b"]}}, ['{"a":1}'], ['{"c":1}']),
    # What the schema asks for cannot be forbidden.
    ({"properties": A, "minProperties": 2}, ['{"a":1,"c":2}'], []),
    ({"properties": A, "minProperties": 1}, ['{"a":1}'], ['{"c":2}', '{"a":1,"c":2}']),
    ({"properties": A, "not": {"maxProperties": 0}}, ['{"a":1}'], ['{"c":2}']),
    # What must fail lists nothing, unless there is no other way.
    (
        {"oneOf": [{"properties": A, "required": ["a"]}, {"properties": B, "required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ['{"a":1,"b":"x"}'],
    ),
    ({"properties": A, "not": {"properties": B}}, ['{"b":"x"}', '{"a":1,"b":"x"}'], []),
    # A branch that is always true leaves nothing of the others.
    (
        {"properties": A, "anyOf": [{"properties": B}, {}]},
        ['{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
    ({"properties": A, "not": {"additionalProperties": {"type": "null"}}}, ['{"c":2}'], []),
    (
        {"properties": A, "dependentRequired": {"a": ["d"]}},
        ["{}", '{"a":1,"d":2}'],
        ['{"a":1,"d":2,"e":3}'],
    ),
]


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_only_what_the_schema_names_is_left(index: int) -> None:
    schema, accepted, kept_out = TABLE[index]
    closed = compiler.compile_json_schema(schema, order="any", undeclared="forbidden")
    full = compiler.compile_json_schema(schema, order="any")
    assert [text for text in accepted if not accepts(closed, text)] == []
    assert [text for text in kept_out if accepts(closed, text)] == []
    assert [text for text in accepted + kept_out if not accepts(full, text)] == []


def test_whatever_is_drawn_is_valid_and_whatever_has_a_text_keeps_one() -> None:
    outcomes = Counter[str]()
    for seed in range(250):
        schema = RandomSchemas(seed).draw()
        try:
            full = compiler.compile_json_schema(schema)
        except GrammarError as error:
            with pytest.raises(type(error)):
                compiler.compile_json_schema(schema, undeclared="forbidden")
            continue
        closed = compiler.compile_json_schema(schema, undeclared="forbidden")
        assert closed.shortest_length == full.shortest_length, (seed, schema)
        rng = np.random.default_rng(seed)
        text = drawn(closed, VOCABULARY, rng, closed.shortest_length + 40)
        assert is_valid(schema, read_json(text)), (seed, schema, text)
        assert accepts(full, text), (seed, schema, text)
        free = drawn(full, VOCABULARY, rng, full.shortest_length + 40)
        outcomes[f"free text kept: {accepts(closed, free)}"] += 1
    assert outcomes["free text kept: True"] > 100, outcomes
    assert outcomes["free text kept: False"] > 0, outcomes


def test_reports_and_structural_tags_have_the_option_too() -> None:
    schema = {"type": "object", "properties": A, "minProperties": 1}
    assert compiler.check(schema, undeclared="forbidden").is_usable
    for tag in (
        Tag("<", JsonSchema(schema, undeclared="forbidden"), ">"),
        {
            "type": "tag",
            "begin": "<",
            "content": {
                "type": "json_schema",
                "json_schema": {"properties": A},
                "undeclared": "forbidden",
            },
            "end": ">",
        },
    ):
        grammar = compiler.compile_structural_tag(tag)
        assert accepts(grammar, '<{"a":1}>')
    assert not accepts(grammar, '<{"a":1,"c":2}>')
    by_default = compiler.compile_structural_tag(
        Tag("<", {"properties": A}, ">"), undeclared="forbidden"
    )
    assert not accepts(by_default, '<{"a":1,"c":2}>')
    own = compiler.compile_structural_tag(
        Tag("<", JsonSchema({"properties": A}, undeclared="allowed"), ">"), undeclared="forbidden"
    )
    assert accepts(own, '<{"a":1,"c":2}>')


def test_another_value_is_refused() -> None:
    words = "undeclared is 'allowed' or 'forbidden', got 'no'"
    for call in (compiler.compile_json_schema, compiler.check):
        with pytest.raises(ValueError, match=words):
            call({}, undeclared="no")  # type: ignore[operator]
    with pytest.raises(ValueError, match=words):
        compiler.compile_structural_tag(Tag("<", {}, ">"), undeclared="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        JsonSchema({}, undeclared="no")  # type: ignore[arg-type]
