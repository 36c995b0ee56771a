"""Keywords that combine: negation, conditions, counts, patterns of names, references, dialects."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from palmette.grammar import (
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.testing import accepts, allowed, byte_vocabulary

compiler = GrammarCompiler(byte_vocabulary())

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_6 = {"$schema": "http://json-schema.org/draft-06/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema"}
DRAFT_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
DRAFT_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
CLOSED = {"type": "object", "additionalProperties": False}

# Schema, accepted texts, rejected texts.
NEGATION: list[tuple[Any, list[str], list[str]]] = [
    ({"not": {"type": ["string", "integer"]}}, ["null", "1.5", "[]"], ['""', "1", "1.0"]),
    ({"not": {"minLength": 2}}, ['"a"', '""'], ['"ab"', "1", "null"]),
    ({"type": "string", "not": {"pattern": "^a"}}, ['"b"', '""', '"ba"'], ['"a"', '"ab"']),
    ({"type": "integer", "not": {"multipleOf": 3}}, ["1", "-4", "10"], ["0", "3", "-9"]),
    ({"not": {"minimum": 5}, "type": "number"}, ["4.99", "-7"], ["5", "6.5"]),
    (
        {"not": {"enum": [1, "a", None, [2], {"k": 3}]}, "type": ["integer", "array"]},
        ["2", "[]", "[3]", "[2,2]"],
        ["1", "1.0", "[2]", "null"],
    ),
    (
        {"type": "object", "not": {"const": {"k": 3, "l": []}}},
        ["{}", '{"k":3}', '{"k":4,"l":[]}', '{"l":[1],"k":3}', '{"k":3,"l":[],"m":1}'],
        ['{"k":3,"l":[]}', '{"k":3.0,"l":[]}'],
    ),
    (
        {"type": "object", "not": {"required": ["a", "b"]}},
        ["{}", '{"a":1}', '{"b":1,"c":2}'],
        ['{"a":1,"b":2}', '{"a":1,"b":1,"c":1}'],
    ),
    (
        {"type": "object", "not": {"properties": {"a": {"type": "string"}}}},
        ['{"a":1}', '{"a":null,"b":2}'],
        ["{}", '{"b":1}', '{"a":"x"}'],
    ),
    (
        {"type": "object", "not": {"additionalProperties": {"type": "integer"}}},
        ['{"a":"x"}', '{"a":1,"b":"x"}'],
        ["{}", '{"a":1}', '{"a":"x","a":1}'],
    ),
    (
        {"type": "object", "not": {"patternProperties": {"^x": {"type": "integer"}}}},
        ['{"x":null}', '{"a":1,"xy":"z"}'],
        ["{}", '{"x":1}', '{"a":"z"}'],
    ),
    (
        {"type": "object", "not": {"propertyNames": {"maxLength": 1}}},
        ['{"ab":1}', '{"a":1,"bc":2}'],
        ["{}", '{"a":1}'],
    ),
    (
        {"type": "array", "not": {"items": {"type": "integer"}}},
        ['["a"]', "[1,null]", "[null,1]"],
        ["[]", "[1,2]"],
    ),
    ({"type": "array", "not": {"contains": {"const": 1}}}, ["[]", "[2,3]"], ["[1]", "[2,1]"]),
    ({"type": "array", "not": {"minItems": 2}}, ["[]", "[1]"], ["[1,2]"]),
    ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
    ({"not": {"anyOf": [{"type": "string"}, {"minimum": 0}]}}, ["-1"], ["1", '"a"', "null"]),
    ({"type": "boolean", "not": {"const": False}}, ["true"], ["false"]),
]
CONDITIONS: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            **CLOSED,
            "properties": {"kind": {"enum": ["card", "cash"]}, "no": {"type": "string"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "card"}}},
            "then": {"required": ["no"]},
            "else": {"properties": {"no": False}},
        },
        ['{"kind":"cash"}', '{"kind":"card","no":"1"}'],
        ['{"kind":"card"}', '{"kind":"cash","no":"1"}', '{"no":"1"}'],
    ),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ['"ab"', "1", "null"], ['"a"']),
    ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["2", "6"], ["3", "4", "5"]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["1.5"], ["1", "1.0", '"a"']),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1,"c":2}'],
        ["{}", '{"a":1,"b":2}'],
    ),
    (
        # Told apart by what they refer back to, which is not known yet when they are compared.
        {
            "oneOf": [
                *(
                    {
                        "type": "object",
                        "properties": {"a": {"$ref": "#"}, name: {"type": "integer"}},
                        "required": ["a"],
                    }
                    for name in "xyz"
                ),
                {"type": "null"},
            ]
        },
        ["null", '{"a":null,"x":1,"y":[],"z":[]}', '{"a":{"a":null,"x":"","y":""},"y":"","z":""}'],
        ["1", "{}", '{"a":null}', '{"a":null,"x":1,"y":1,"z":[]}', '{"a":{},"x":1,"y":[],"z":[]}'],
    ),
    (
        {"type": "object", "dependentRequired": {"a": ["b", "c"]}},
        ["{}", '{"b":1}', '{"a":1,"b":1,"c":1}'],
        ['{"a":1}', '{"a":1,"b":1}'],
    ),
    (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        ['{"b":1}', '{"a":1}', '{"a":1,"b":null}'],
        ['{"a":1,"b":1}'],
    ),
    (
        {"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        ["{}", '{"a":1,"b":1}', '{"c":1,"d":1}'],
        ['{"a":1}', '{"c":1}'],
    ),
]
COUNTS: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"a":1,"b":2,"c":3}'],
    ),
    (
        {"type": "object", "minProperties": 2},
        ['{"a":1,"b":1}'],
        ['{"a":1}', '{"a":1,"a":2}', r'{"a":1,"\u0061":2}'],
    ),
    (
        {**CLOSED, "properties": {n: {"type": "null"} for n in "abc"}, "minProperties": 2},
        ['{"a":null,"b":null}', '{"a":null,"c":null}', '{"a":null,"b":null,"c":null}'],
        ['{"a":null}', "{}"],
    ),
    (
        {"type": "array", "contains": {"type": "null"}, "minContains": 2, "maxContains": 3},
        ["[null,null]", "[1,null,2,null,null]"],
        ["[]", "[null]", "[null,null,null,null]"],
    ),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ["[]", "[2]"], ["{}"]),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        ["[]", '["a","b","ab"]'],
        ['["a","a"]', '["a","b","a"]', r'["a","\u0061"]'],
    ),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": "number"}},
        ["[1,2,1.5]"],
        ["[1,1]", "[1,1.0]", "[1.50,1.5]", "[10,1e1]"],
    ),
    (
        {"uniqueItems": True, "items": {"enum": [[1], [2], {"a": 1}, 1, True]}, "type": "array"},
        ["[[1],[2]]", '[{"a":1},1,true]'],
        ["[[1],[1]]", '[{"a":1},{"a":1}]', "[1,1.0]"],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[{}]"], ["[1,2]"]),
]
NAMES: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "type": "object",
            "patternProperties": {"^n": {"type": "integer"}, "s$": {"minimum": 3}},
            "additionalProperties": {"type": "string"},
        },
        ['{"n":1}', '{"xs":3}', '{"ns":4}', '{"xs":null}', '{"q":"a"}'],
        ['{"n":"a"}', '{"ns":1}', '{"xs":2}', '{"q":1}', r'{"\u006e":"a"}'],
    ),
    (
        {
            **CLOSED,
            "properties": {"name": {"type": "string"}},
            "patternProperties": {"^n": {"minLength": 2}},
        },
        ['{"name":"ab"}', '{"no":1}', '{"name":"ab","n":"xy"}'],
        ['{"name":"a"}', '{"a":1}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$", "not": {"const": "ab"}}},
        ["{}", '{"a":1}', '{"abc":1}'],
        ['{"ab":1}', '{"A":1}', '{"abcd":1}'],
    ),
    (
        {
            "type": "object",
            "propertyNames": {"enum": ["x", "y"]},
            "properties": {"x": {"const": 1}},
        },
        ["{}", '{"x":1}', '{"x":1,"y":2}'],
        ['{"x":2}', '{"z":1}'],
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
        ['{"a":null}'],
        ["{}", '{"a":1}'],
    ),
]
UNEVALUATED: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "type": "object",
            "allOf": [{"properties": {"a": True}}],
            "properties": {"b": True},
            "unevaluatedProperties": False,
        },
        ["{}", '{"b":1,"a":1}'],
        ['{"c":1}'],
    ),
    (
        {
            "type": "object",
            "anyOf": [
                {"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": True}, "required": ["b"]},
            ],
            "unevaluatedProperties": {"type": "null"},
        },
        ['{"a":1}', '{"a":1,"b":2}', '{"b":2,"a":null}', '{"a":1,"c":null}'],
        ['{"a":2}', '{"b":1,"a":2}', '{"a":1,"c":1}'],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"const": 1}],
            "anyOf": [{"prefixItems": [True, {"const": 2}]}, True],
            "unevaluatedItems": False,
        },
        ["[]", "[1]", "[1,2]"],
        ["[1,3]", "[1,2,3]"],
    ),
    (
        {"type": "object", "not": {"properties": {"a": True}, "unevaluatedProperties": False}},
        ['{"b":1}', '{"a":1,"b":1}'],
        ["{}", '{"a":1}'],
    ),
]
REFERENCES: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "$id": "https://example.com/root",
            "items": {"$ref": "part"},
            "type": "array",
            "$defs": {"p": {"$id": "part", "$ref": "#/$defs/q", "$defs": {"q": {"type": "null"}}}},
        },
        ["[null]"],
        ["[1]"],
    ),
    ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, ["1"], ["2"]),
    (
        {
            "$id": "urn:example:root",
            "$ref": "urn:example:root#/$defs/a",
            "$defs": {"a": {"const": 1}},
        },
        ["1"],
        ["2"],
    ),
    ({**DRAFT_7, "$ref": "#b", "definitions": {"a": {"$id": "#b", "const": 1}}}, ["1"], ["2"]),
    (
        {
            **DRAFT_4,
            "id": "http://example.com/s",
            "allOf": [{"$ref": "s#/definitions/a"}],
            "definitions": {"a": {"type": "null"}},
        },
        ["null"],
        ["1"],
    ),
    (
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$dynamicAnchor": "node",
                    "type": "array",
                    "items": {"$dynamicRef": "#node"},
                }
            },
        },
        ["[[],[[]]]"],
        ["[1]"],
    ),
    (
        {
            "$id": "https://example.com/strict",
            "$dynamicAnchor": "node",
            "$ref": "tree",
            "maxItems": 1,
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$dynamicAnchor": "node",
                    "type": "array",
                    "items": {"$dynamicRef": "#node"},
                }
            },
        },
        ["[]", "[[[]]]"],
        ["[[],[]]", "[[[],[]]]"],
    ),
    (
        {
            **DRAFT_2019,
            "$id": "https://example.com/strict",
            "$recursiveAnchor": True,
            "$ref": "tree",
            "maxItems": 1,
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$recursiveAnchor": True,
                    "type": "array",
                    "items": {"$recursiveRef": "#"},
                }
            },
        },
        ["[]", "[[[]]]"],
        ["[[],[]]", "[[[],[]]]"],
    ),
    (
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/x/0"}},
            "x": [{"const": 1}],
            "$ref": "#/$defs/a",
        },
        ["1"],
        ["2"],
    ),
]
DIALECTS: list[tuple[Any, list[str], list[str]]] = [
    ({**DRAFT_4, "type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    ({**DRAFT_4, "const": 1}, ["1", "2"], []),
    ({**DRAFT_6, "const": 1, "if": {}, "then": False}, ["1"], ["2"]),
    (
        {
            **DRAFT_7,
            "$ref": "#/definitions/a",
            "minimum": 5,
            "definitions": {"a": {"type": "integer"}},
        },
        ["1"],
        ["null"],
    ),
    (
        {**DRAFT_2019, "type": "array", "items": [{"const": 1}], "additionalItems": False},
        ["[]", "[1]"],
        ["[2]", "[1,1]"],
    ),
    (
        {"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
        ["[1,2,2]"],
        ["[1,1]"],
    ),
    ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    ({**DRAFT_2020, "type": "string", "nullable": True}, ['"a"'], ["null"]),
    ({**DRAFT_2020, "additionalItems": False, "minimum": 2}, ["[1]", "2"], ["1"]),
]
TABLES = {
    "negation": NEGATION,
    "conditions": CONDITIONS,
    "counts": COUNTS,
    "names": NAMES,
    "unevaluated": UNEVALUATED,
    "references": REFERENCES,
    "dialects": DIALECTS,
}


@pytest.mark.parametrize("order", ["declared", "any"])
@pytest.mark.parametrize(
    ("table", "index"), [(name, i) for name, table in TABLES.items() for i in range(len(table))]
)
def test_a_schema_accepts_its_texts_and_no_others(table: str, index: int, order: Any) -> None:
    schema, accepted, rejected = TABLES[table][index]
    grammar = compiler.compile_json_schema(schema, order=order)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"allOf": [{"type": "string"}, {"not": {"type": "string"}}]},
        {"type": "object", "required": ["a"], "propertyNames": {"maxLength": 0}},
        {"type": "object", "minProperties": 2, **CLOSED, "properties": {"a": {}}},
        {"type": "array", "contains": {"const": 1}, "items": {"const": 2}},
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 3},
        {"type": "array", "contains": {"const": 1}, "minContains": 3, "maxItems": 2},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "minProperties": 2},
        {"oneOf": [{"type": "null"}, {"const": None}]},
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "required": ["x"],
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/a"}},
                }
            },
        },
        {
            "type": "object",
            "required": ["a"],
            "dependentRequired": {"a": ["b"]},
            "properties": {"b": False},
        },
    ],
)
def test_what_contradicts_itself_is_unsatisfiable(schema: Any) -> None:
    with pytest.raises(UnsatisfiableGrammar, match="no JSON value satisfies"):
        compiler.compile_json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"$ref": "other.json"}, "#/$ref", "another document"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "#/$ref", "another document"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "arrays or objects"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    schema: Any, pointer: str, message: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match=message) as caught:
        compiler.compile_json_schema(schema)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"multipleOf": 0}, "#/multipleOf", "above 0"),
        ({"not": 3}, "#/not", "a schema is an object or a boolean, got a number"),
        ({"patternProperties": {"(": {}}}, "#/patternProperties/(", "position"),
        ({"dependentRequired": {"a": "b"}}, "#/dependentRequired/a", "array of strings"),
        ({"uniqueItems": "yes"}, "#/uniqueItems", "must be a boolean"),
        ({**DRAFT_4, "exclusiveMinimum": 3}, "#/exclusiveMinimum", "a boolean in draft 4"),
        ({"$ref": "#nowhere"}, "#/$ref", "leads nowhere"),
        ({"not": {"$ref": "#"}}, "#", "refers to itself without end"),
        ({"minContains": -1, "contains": {}}, "#/minContains", "whole number"),
    ],
)
def test_a_malformed_keyword_is_refused_with_its_pointer(
    schema: Any, pointer: str, message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message) as caught:
        compiler.compile_json_schema(schema)
    assert caught.value.pointer == pointer


def test_in_any_order_properties_come_as_they_like() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["a"],
        "additionalProperties": {"type": "null"},
    }
    grammar = compiler.compile_json_schema(schema, order="any")
    declared = compiler.compile_json_schema(schema)
    members = ['"a":1', '"b":2', '"c":3', '"d":null']
    for size in range(1, 5):
        for some in itertools.permutations(members, size):
            text = "{" + ",".join(some) + "}"
            assert accepts(grammar, text) == ('"a":1' in some), text
            is_sorted = list(some) == sorted(some)
            assert accepts(declared, text) == ('"a":1' in some and is_sorted), text
    assert not accepts(grammar, '{"a":1,"a":1}')


def test_a_constant_is_an_object_like_any_other() -> None:
    value = {"b": [1, {"x": "é"}], "a": None}
    flexible = compiler.compile_json_schema({"const": value}, whitespace="flexible", order="any")
    for text in (
        json.dumps(value, indent=2),
        json.dumps(value),
        '{"a":null,"b":[1.0,{"x":"\\u00e9"}]}',
    ):
        assert accepts(flexible, text), text
    assert not accepts(flexible, '{"a":null}')
    assert not accepts(compiler.compile_json_schema({"const": value}), '{"a":null,"b":[]}')


def test_a_number_among_the_values_is_accepted_as_libraries_write_it() -> None:
    grammar = compiler.compile_json_schema({"enum": [1, 2.50, 1e22, 0, -3]})
    for text in ("1", "1.0", "2.5", "1e+22", "10000000000000000000000", "0", "-0.0", "-3.0"):
        assert accepts(grammar, text), text
    for text in ("1.5", "2", "3", "1e+21", "10"):
        assert not accepts(grammar, text), text


def test_a_branch_that_needs_a_missing_member_never_begins() -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["card", "cash"]}, "no": {"type": "string"}},
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "card"}}},
        "then": {"required": ["no"]},
    }
    grammar = compiler.compile_json_schema(schema)
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b'{"kind":"card"'))
    assert allowed(matcher, grammar.vocabulary) == [ord(",")]
    assert all(map(matcher.accept, b',"no":"x"'))
    assert allowed(matcher, grammar.vocabulary) == [ord("}")]


def test_equal_schemas_at_different_places_share_their_states() -> None:
    part = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}
    few = compiler.compile_json_schema({"properties": {"p0": part}})
    many = compiler.compile_json_schema(
        {"properties": {f"p{i}": {**part, "description": f"part {i}"} for i in range(40)}}
    )
    for grammar in (few, many):
        assert accepts(grammar, '{"p0":{"a":"x"}}')
    assert many.num_terms < few.num_terms + 40 * 12


def test_many_branches_with_an_optional_discriminator_are_told_apart() -> None:
    branches = [
        {"properties": {"kind": {"const": f"k{i}"}, f"p{i}": {"type": "integer"}}}
        for i in range(25)
    ]
    grammar = compiler.compile_json_schema({"type": "object", "oneOf": branches})
    assert accepts(grammar, '{"kind":"k3","p3":1}')
    assert not accepts(grammar, '{"kind":"k3","p3":"x"}')
    assert not accepts(grammar, '{"kind":"k99"}')
    assert not accepts(grammar, "{}")


@pytest.mark.parametrize(
    "schema",
    [
        {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(40)}},
        {"patternProperties": {chr(97 + i): {"minLength": i} for i in range(26)}},
        {
            "anyOf": [{"properties": {f"p{i}": {}}} for i in range(30)],
            "unevaluatedProperties": False,
        },
        {"allOf": [{"not": {"required": [f"a{i}", f"b{i}"]}} for i in range(40)]},
    ],
)
def test_cases_that_multiply_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarTooComplex):
        compiler.compile_json_schema(schema)


@pytest.mark.parametrize("machine", [None, "python"])
@pytest.mark.parametrize(
    "names",
    [
        {"propertyNames": {"enum": ["y", "ac"]}, "additionalProperties": {"enum": [1, 2]}},
        {"propertyNames": {"pattern": "^(y|ac)$"}, "additionalProperties": {"enum": [1, 2]}},
        {"patternProperties": {"^(y|ac)$": {"enum": [1, 2]}}, "additionalProperties": False},
    ],
)
def test_the_last_name_is_kept_for_what_is_still_demanded(
    names: dict[str, Any], machine: Any
) -> None:
    schema = {"type": "object", **names, "not": {"additionalProperties": {"const": 1}}}
    if "patternProperties" in names:
        schema["not"] = {"patternProperties": {"": {"const": 1}}}
    own = GrammarCompiler(byte_vocabulary(), machine=machine)
    grammar = own.compile_json_schema(json.dumps(schema))
    assert accepts(grammar, '{"y":1,"ac":2}')
    assert accepts(grammar, '{"ac":2}')
    assert not accepts(grammar, '{"y":1}')
    matcher = grammar.matcher()
    for byte in b'{"y":1,"ac":':
        assert matcher.accept(byte)
    assert allowed(matcher, own.vocabulary) == [ord("2")]


def test_many_names_run_out_only_where_as_many_members_may_come() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{4}$"},
        "not": {"additionalProperties": {"const": 1}},
    }
    with pytest.raises(GrammarTooComplex, match="more than 500 texts of which none may come twice"):
        compiler.compile_json_schema(json.dumps(schema))
    grammar = compiler.compile_json_schema(json.dumps({**schema, "maxProperties": 400}))
    assert accepts(grammar, '{"abcd":1,"abce":2}')
    assert not accepts(grammar, '{"abcd":1,"abce":1}')
