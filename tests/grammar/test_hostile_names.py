"""Names and addresses that are long, odd, or alike: what they cost, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from palmette.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.testing import accepts, byte_vocabulary

compiler = GrammarCompiler(byte_vocabulary())
LONG = "n" * 200_000
_RANGE = range(1_000)

# Schema, accepted texts, rejected texts.
ALIKE: list[tuple[Any, list[str], list[str]]] = [
    # Constants that look alike.
    (
        {"properties": {"a": {"const": []}, "b": {"const": {}}}},
        ['{"a":[],"b":{}}'],
        ['{"a":[],"b":[]}', '{"a":{},"b":{}}'],
    ),
    ({"oneOf": [{"const": {}}, {"const": []}]}, ["{}", "[]"], ["[[]]"]),
    (
        {"anyOf": [{"const": {"a": 1}}, {"const": [["a", 1]]}]},
        ['{"a":1}', '[["a",1]]'],
        ["{}", "[]"],
    ),
    (
        {"anyOf": [{"enum": [[{}]]}, {"enum": [[[]]]}, {"const": [None]}, {"const": [False]}]},
        ["[{}]", "[[]]", "[null]", "[false]"],
        ["[0]", "[[{}]]"],
    ),
    # The same words in another resource lead elsewhere.
    (
        {
            "$id": "http://example.org/root",
            "$defs": {
                "o": {
                    "$id": "o",
                    "$defs": {"a": {"type": "string"}},
                    "items": {"items": {"$ref": "#/$defs/a"}},
                },
                "a": {"type": "integer"},
            },
            "items": {"items": {"$ref": "#/$defs/a"}},
            "properties": {"q": {"$ref": "o"}},
        },
        ['{"q":[["s"]]}', "[[1]]"],
        ['{"q":[[1]]}', '[["s"]]'],
    ),
]


@pytest.mark.parametrize("index", range(len(ALIKE)))
def test_what_looks_alike_is_told_apart(index: int) -> None:
    schema, accepted, rejected = ALIKE[index]
    grammar = compiler.compile_json_schema(schema, order="any")
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "reference",
    ["#/allOf/" + "9" * 5_000, "#/allOf/00", "#/allOf/\u0660", "#/$defs/a~2", "#" + "/a" * 5_000],
)
def test_a_reference_that_is_no_pointer_leads_nowhere(reference: str) -> None:
    schema = {"$ref": reference, "allOf": [True], "$defs": {"a~2": True}}
    with pytest.raises(InvalidGrammar, match="leads nowhere"):
        compiler.compile_json_schema(schema)
    assert not compiler.check(schema).is_usable


def test_what_is_wrong_with_a_lone_surrogate_can_be_printed() -> None:
    for schema in (
        {"patternProperties": {"\ud800": {}}},
        {"properties": {"\ud800": {"type": "strange"}}, "required": ["\ud800"]},
    ):
        with pytest.raises(GrammarError) as caught:
            compiler.compile_json_schema(schema)
        assert str(caught.value).encode()


def _nested_addresses() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"$id": "a/" * 4_500, "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"properties": {LONG: {"properties": {f"p{i}": {"minimum": i} for i in _RANGE}}}},
        lambda: {"properties": {LONG: {"prefixItems": [{"minimum": i} for i in _RANGE]}}},
        lambda: {"properties": {LONG: {"anyOf": [{"required": [f"p{i}"]} for i in _RANGE]}}},
        lambda: {"properties": {LONG: {f"k{i}": 0 for i in _RANGE}}},
        lambda: {
            "properties": {LONG: {"properties": {f"p{i}": {"$anchor": f"a{i}"} for i in _RANGE}}}
        },
        lambda: {
            "$id": "http://example.org/" + "a/" * 100_000,
            "$defs": {f"d{i}": {"$id": f"x{i}"} for i in _RANGE},
        },
        _nested_addresses,
    ],
)
def test_long_names_of_many_parts_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(GrammarTooComplex, match="names of the schema's parts"):
        compiler.compile_json_schema(json.dumps(make()))


def test_what_names_take_is_counted_as_memory_of_the_grammar() -> None:
    plain = {"properties": {"n": {"properties": {f"p{i}": {"minimum": i} for i in range(100)}}}}
    grown = {"properties": {LONG: plain["properties"]["n"]}}
    plain_bytes = compiler.compile_json_schema(plain).num_bytes
    assert compiler.compile_json_schema(grown).num_bytes > plain_bytes + 100 * len(LONG) // 2


def test_a_structural_tag_may_be_json_text() -> None:
    tag = {"type": "const_string", "value": "a"}
    assert accepts(compiler.compile_structural_tag(json.dumps(tag)), "a")
    for wrong, words in (
        ("[", "not JSON"),
        ('{"a":1}', "needs the field"),
        ([1], "is a format or an object, got list"),
        (7, "is a format or an object, got int"),
    ):
        with pytest.raises((InvalidGrammar, UnsupportedGrammar), match=words):
            compiler.compile_structural_tag(wrong)  # type: ignore[arg-type]
