from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    Limits,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.testing import accepts, allowed, byte_vocabulary

compiler = GrammarCompiler(byte_vocabulary())

STRICT = {"additionalProperties": False}
ADDRESSES = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {name: {"type": "string", "format": name}},
                "required": [name],
                **STRICT,
            }
            for name in ("uri", "ipv4", "ipv6", "email")
        ]
    },
}

# Schema, accepted texts, rejected texts.
TABLE: list[tuple[Any, list[str], list[str]]] = [
    # Strings: every bound at once, lengths in code points of the decoded value.
    (
        {"type": "string", "pattern": "^[xyz]+$", "minLength": 2, "maxLength": 4},
        ['"xy"', '"zzz"', '"xyzx"'],
        ['"x"', '"xyzxy"', '"xa"', '""', r'"\u0061y"', r'"\u0078\u0079"'],
    ),
    (
        {"properties": {"note": {"type": "string", "maxLength": 12}}, "type": "object", **STRICT},
        [
            r'{"note":"a\nb"}',
            r'{"note":"say \"hi\""}',
            '{"note":"été 12345678"}',
            '{"note":"' + r"\n" * 12 + '"}',
            '{"note":"' + r"\ud83d\uDE00" * 12 + '"}',
        ],
        [
            '{"note":"0123456789abc"}',
            '{"note":"' + r"\n" * 13 + '"}',
            '{"note":"a\nb"}',
            r'{"note":"\q"}',
            r'{"note":"\ud83d"}',
            r'{"note":"\ude00"}',
            r'{"note":"\ud83dx"}',
        ],
    ),
    (
        {"type": "string", "minLength": 2, "maxLength": 2},
        ['"😀😀"', r'"\ud83d\ude00é"', r'"\/\u002F"'],
        ['"😀"', '"abc"', '"\x01a"', '"\ud800a"'],
    ),
    ({"type": "string", "pattern": "[0-9]"}, ['"7"', '"room 7b"'], ['"room"', '""', "7", '"７"']),
    (
        {"type": "string", "pattern": "^id-|-tmp$"},
        ['"id-"', '"id-9z"', '"x-tmp"'],
        ['"xid-9"', '"tmp"', '""', '"a-tmpx"'],
    ),
    # Numbers.
    (
        {"type": "number"},
        ["0", "-0.5", "1e10", "6.022E+23", "12.50", "3e-7", "-0"],
        ["01", ".5", "1.", "1.e2", "+1", "1e", "0x10", "NaN", "-", "--1", '"1"'],
    ),
    (
        {"type": "number", "minimum": -4, "maximum": 4},
        ["-4", "-3.5", "-0.5", "0", "0.25", "4", "4.0"],
        ["-4.1", "4.01", "5", "-5.5", "40", "-04", '"0"'],
    ),
    (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ["0.1", "0.999", "0.01"],
        ["0", "1", "0.0", "1.0", "-0.1", "1.5", "0,5"],
    ),
    (
        {"type": "integer", "minimum": -5},
        ["-5", "-1", "0", "17"],
        ["-6", "-50", "-", "-05", "-5.5"],
    ),
    (
        {"type": "integer", "minimum": 0, "maximum": 20000000000},
        ["0", "20000000000", "19999999999", "2147483648"],
        ["20000000001", "-1", "99999999999", "1e11"],
    ),
    ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, ["2", "3", "2.0"], ["1", "4", "2.5"]),
    ({"type": "integer", "minimum": 10**40}, [str(10**40)], [str(10**40 - 1)]),
    # Literals.
    (
        {"enum": [True, None, 'say "hi"', "back\\slash", 1.5]},
        ["true", "null", r'"say \"hi\""', r'"back\\slash"', "1.5"],
        ["True", "None", '"say "hi""', r'"back\slash"', "false", '"true"'],
    ),
    (
        {"enum": [{"unit": "m", "p": [0, 1]}, ["on", "off"], "none"]},
        ['{"unit":"m","p":[0,1]}', '["on","off"]', '"none"'],
        ['{"unit":"m"}', '{"unit":"m","p":[1,0]}', '["off","on"]', '"off"'],
    ),
    (
        {
            "enum": [1, "ab", "abc", 7, None],
            "type": ["integer", "string"],
            "maxLength": 2,
            "minimum": 5,
        },
        ['"ab"', "7"],
        ["1", '"abc"', "null"],
    ),
    ({"const": "é\u0007"}, ['"é\\u0007"'], ['"é"']),
    ({"enum": [1, True, 1.0]}, ["1", "1.0", "true"], ["1.5", "10"]),
    # Arrays.
    (
        {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
                "n": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            },
            "required": ["tags", "n"],
        },
        ['{"tags":[],"n":[1,2]}', '{"tags":[],"n":[-1,0],"x":null}'],
        ['{"tags":["a"],"n":[1,2]}', '{"tags":[],"n":[1]}', '{"tags":[],"n":[1,2,3]}'],
    ),
    (
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        },
        ["[[1,2]]", "[[1,2,3],[4,5]]"],
        ["[]", "[[1]]", "[[1,2,3,4]]", "[[1,2],[3,4],[5,6]]", "[[1,2],[3]]", "[[1,2],]"],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"const": "a"}],
            "items": {"const": 0},
        },
        ["[]", "[1]", '[1,"a"]', '[1,"a",0,0]'],
        ['["a"]', '[1,"b"]', '[1,"a",1]', "[,]"],
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}, False, {}], "minItems": 1},
        ["[1]"],
        ["[]", "[2]", "[1,2]"],
    ),
    (
        {"type": "array", "prefixItems": [{}, {}], "items": False, "minItems": 2},
        ["[1,2]"],
        ["[1]", "[1,2,3]"],
    ),
    (
        {"type": "array", "prefixItems": [{}], "minItems": 3, "maxItems": 4},
        ["[1,2,3]", "[1,2,3,4]"],
        ["[1,2]"],
    ),
    # Objects.
    (
        {
            "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
            "type": "object",
            **STRICT,
        },
        ["{}", '{"a":1}', '{"b":2}', '{"c":3}', '{"a":1,"c":3}', '{"a":1,"b":2,"c":3}'],
        [
            '{,"b":2}',
            '{"a":1,}',
            '{"a":1"b":2}',
            '{"a":2}',
            '{"d":4}',
            '{"a":1,,"c":3}',
            '{"c":3,"a":1}',
        ],
    ),
    (
        {
            "type": "object",
            "properties": {"mode": {"const": "auto"}, "level": {"type": "integer"}},
            "required": ["level"],
        },
        ['{"level":3}', '{"mode":"auto","level":3}', '{"level":3,"extra":true}'],
        [
            '{"level":3,"mode":"manual"}',
            '{"mode":"manual","level":3}',
            '{"level":"3"}',
            '{"mode":"auto"}',
            r'{"level":3,"mod\u0065":"manual"}',
            r'{"level":3,"\u006dode":1}',
        ],
    ),
    (
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city", "zip"],
            "additionalProperties": {"type": "integer"},
        },
        [
            '{"city":"Oslo","zip":"0150"}',
            '{"city":"Oslo","zip":"0150","floor":2}',
            '{"city":"","zip":"","cit":-1,"citya":0}',
        ],
        [
            '{"city":"Oslo","zip":"0150","city":3}',
            '{"city":"Oslo"}',
            '{"city":"Oslo","zip":"0150","floor":"2"}',
        ],
    ),
    (
        {
            "type": "object",
            "required": ["a", "b"],
            "properties": {"b": {"const": 1}},
            "additionalProperties": {"type": "null"},
        },
        ['{"b":1,"a":null}', '{"b":1,"a":null,"c":null}'],
        ['{"b":1}', '{"b":1,"a":1}', '{"a":null}'],
    ),
    (
        {"type": "object", "properties": {"no": False, "yes": True}},
        ["{}", '{"yes":0}', '{"n":1}'],
        ['{"no":1}'],
    ),
    (
        {"type": "object", "properties": {'q"\n\\é': {"const": 1}}, **STRICT},
        [r'{"q\"\n\\é":1}'],
        ['{"q":1}'],
    ),
    (
        {"type": "object"},
        ["{}", '{"a":{"b":[]}}'],
        ["[]", '"x"', "3", "null", '{"a"}', '{"a":1}{}'],
    ),
    (
        {},
        ["null", "[]", '{"a":[1,{"b":null}]}', '"x"', "-3.5", "true"],
        ["", "nul", "{a:1}", "[1,]", "'x'", "01", "[ ]"],
    ),
    (True, ["1"], ["x"]),
    # Keywords speak about their own type only.
    ({"minLength": 2, "maximum": 3}, ['"ab"', "3", "null", "[]"], ['"a"', "4"]),
    ({"required": ["a"]}, ["1", '{"a":1}'], ["{}"]),
    (
        {"type": ["string", "null"], "minItems": 3, "uniqueItems": True},
        ["null", '"a"'],
        ["[]", "1"],
    ),
    # Conjunctions and disjunctions.
    (
        {
            "type": "object",
            "properties": {"op": {"enum": ["move", "stop"]}, "to": {"type": "string"}},
            "required": ["op"],
            **STRICT,
            "anyOf": [{"properties": {"op": {"const": "stop"}}}, {"required": ["to"]}],
        },
        ['{"op":"stop"}', '{"op":"move","to":"kitchen"}', '{"op":"stop","to":"hall"}'],
        ['{"op":"move"}', '{"op":"fly","to":"roof"}', '{"op":"stop","x":1}', "42", '{"to":"hall"}'],
    ),
    (
        {
            "allOf": [
                {
                    "type": "object",
                    "properties": {"id": {"type": "integer", "minimum": 1}},
                    "required": ["id"],
                },
                {
                    "properties": {"id": {"maximum": 9}, "tag": {"type": "string"}},
                    "required": ["tag"],
                },
            ]
        },
        ['{"id":1,"tag":"a"}', '{"id":9,"tag":""}', '{"id":5,"tag":"x","more":[]}'],
        [
            '{"id":0,"tag":"a"}',
            '{"id":10,"tag":"a"}',
            '{"id":5}',
            '{"tag":"a"}',
            '{"id":5,"tag":1}',
        ],
    ),
    (
        {
            "allOf": [
                {"additionalProperties": {"type": "integer"}},
                {"properties": {"a": {"minimum": 3}}},
            ],
            "type": "object",
        },
        ["{}", '{"a":3,"b":1}'],
        ['{"a":2}', '{"b":"x"}', '{"a":"x"}'],
    ),
    (
        {
            "type": "object",
            "additionalProperties": {
                "oneOf": [
                    {"type": t} for t in ("string", "number", "boolean", "null", "object", "array")
                ]
            },
        },
        ['{"q":"penguin","n":3}', '{"o":{"k":[1,{}]},"z":null}', "{}"],
        ['{"q":penguin}', '{"q":}', "[]", "{1:2}", '{"q":"a",}'],
    ),
    (
        {
            "oneOf": [
                {
                    "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
                    "required": ["kind"],
                    "type": "object",
                },
                {"properties": {"kind": {"const": "b"}}, "required": ["kind"], "type": "object"},
                {"enum": ["none", 3]},
                {"type": "string", "maxLength": 3},
            ]
        },
        ['{"kind":"a","x":1}', '{"kind":"b","x":"1"}', '"none"', '"abc"', "3"],
        ['{"kind":"a","x":"1"}', '{"kind":"c"}', "{}", '"some"', "4"],
    ),
    (
        {"anyOf": [{"type": "integer"}, {"minLength": 1}], "type": ["integer", "string"]},
        ["1", '"a"'],
        ['""', "null"],
    ),
    # References.
    (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "integer"},
                        "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["v"],
                    **STRICT,
                }
            },
            "$ref": "#/$defs/node",
        },
        ['{"v":1}', '{"v":1,"kids":[]}', '{"v":1,"kids":[{"v":2,"kids":[{"v":3}]}]}'],
        [
            '{"kids":[]}',
            '{"v":1,"kids":[1]}',
            '{"v":1,"kids":[{"kids":[]}]}',
            '{"v":1,"kids":[{"v":2}}',
        ],
    ),
    (
        {
            "definitions": {"a/b~c%": {"type": "null"}},
            "properties": {"x": {"$ref": "#/definitions/a~1b~0c%25"}},
            "required": ["x"],
            "type": "object",
        },
        ['{"x":null}'],
        ['{"x":1}'],
    ),
    (
        {
            "$id": "https://example.com/s",
            "type": "array",
            "items": {"$ref": "https://example.com/s#"},
        },
        ["[[],[[]]]"],
        ["[1]"],
    ),
    (
        {"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string", "minLength": 1}}},
        ['"a"'],
        ['""', '"abc"', "1"],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/s",
            "maxLength": 2,
            "definitions": {"s": {"type": "string"}},
        },
        ['"abc"'],
        ["1"],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"const": 1}],
            "additionalItems": {"const": 2},
        },
        ["[]", "[1,2,2]"],
        ["[2]", "[1,1]"],
    ),
    (
        {
            "anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}],
            "$defs": {"t": {"type": "array", "items": {"$ref": "#"}}},
        },
        ["null", "[null,[[],null]]"],
        ["[1]"],
    ),
    # Formats.
    (
        {
            "type": "object",
            "properties": {
                "at": {"type": "string", "format": "date-time"},
                "t": {"type": "string", "format": "time"},
            },
            "required": ["at"],
            **STRICT,
        },
        [
            '{"at":"2031-05-06T07:08:09Z"}',
            '{"at":"2031-05-06T23:59:59.125+05:30"}',
            '{"at":"2031-05-06T07:08:09Z","t":"23:59:59.5-03:00"}',
        ],
        [
            '{"at":"2031-05-06"}',
            '{"at":"2031-05-06T07:08:09"}',
            '{"at":"2031-05-06T24:00:00Z"}',
            '{"at":"2031-05-06T07:60:00Z"}',
            '{"at":"6 May 2031"}',
            '{"at":"2031-05-06T07:08:09Z","t":"07:08"}',
            '{"at":"2031-05-06T07:08:09+5:30"}',
        ],
    ),
    (
        {"format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-12-31"', "5"],
        ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-13-01"', '"2023-1-1"'],
    ),
    (
        {"type": "string", "format": "date", "pattern": "^2024-02-3|29$"},
        ['"2024-02-29"', '"2025-01-29"'],
        ['"2024-02-30"'],
    ),
    (
        ADDRESSES,
        [
            '[{"uri":"https://example.org/a?b=c#d"}]',
            '[{"uri":"urn:isbn:0000000000"},{"uri":"http://[2001:db8::1]:8080/"}]',
            '[{"ipv4":"192.0.2.1"},{"ipv4":"0.0.0.0"},{"ipv4":"255.255.255.255"}]',
            '[{"ipv6":"::1"},{"ipv6":"2001:db8::8a2e:370:7334"},{"ipv6":"::ffff:192.0.2.128"},{"ipv6":"::"}]',
            '[{"email":"a.b+c@example.org"},{"email":"a@[127.0.0.1]"},{"email":"\\"a b\\"@x.y"}]',
        ],
        [
            '[{"uri":"example.org"}]',
            '[{"uri":"//example.org/x"}]',
            '[{"uri":"http://exa mple.org"}]',
            '[{"ipv4":"256.0.2.1"}]',
            '[{"ipv4":"192.0.2"}]',
            '[{"ipv6":"1::2::3"}]',
            '[{"ipv6":"::g"}]',
            '[{"ipv6":"1:2:3:4:5:6:7:8::"}]',
            '[{"email":"nobody"}]',
            '[{"email":".a@b.c"}]',
            '[{"email":"a@b..c"}]',
        ],
    ),
    (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567"', '"g23e4567-e89b-12d3-a456-426614174000"'],
    ),
    (
        {"type": "string", "format": "hostname"},
        ['"a"', '"a-b.c0"', json.dumps(".".join(["a" * 63] * 3))],
        ['"-a"', '"a-"', '"a..b"', json.dumps("a" * 64), json.dumps(".".join(["a" * 63] * 4))],
    ),
    (
        {"type": "string", "format": "duration"},
        ['"P1Y2M3DT4H5M6S"', '"PT5M"', '"P4W"', '"P1YT1S"'],
        ['"P"', '"PT"', '"P1Y2D"', '"P1W1D"', '"PT1H1S"'],
    ),
    (
        {"type": "string", "format": "json-pointer"},
        ['""', '"/a~1b/~0"', '"/é\\n"'],
        ['"a"', '"/~2"', '"/~"'],
    ),
    (
        {"type": "string", "format": "relative-json-pointer"},
        ['"0"', '"1#"', '"2/a"'],
        ['"01"', '"/a"', '"1a"'],
    ),
    (
        {"type": "string", "format": "uri-reference"},
        ['""', '"a/b?c#d"', '"//h/p"', '"x:y"'],
        ['"1:2"', '"a b"', '"%zz"'],
    ),
]


@pytest.mark.parametrize(("schema", "accepted", "rejected"), TABLE)
def test_a_schema_accepts_its_texts_and_no_others(
    schema: Any, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compiler.compile_json_schema(schema)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"type": "strin"}, "#/type", "unknown type 'strin'"),
        ({"type": []}, "#/type", "list of types is empty"),
        (
            {"type": "array", "items": 3},
            "#/items",
            "a schema is an object or a boolean, got a number",
        ),
        (
            {"properties": {"a": {"minLength": -1}}},
            "#/properties/a/minLength",
            "whole number from 0",
        ),
        ({"maxItems": 1.5}, "#/maxItems", "whole number from 0 on, got 1.5"),
        ({"maximum": "3"}, "#/maximum", "must be a number, got a string"),
        ({"minimum": True}, "#/minimum", "must be a number, got a boolean"),
        ({"required": "a"}, "#/required", "array of strings"),
        ({"properties": []}, "#/properties", "must be an object, got an array"),
        ({"enum": 3}, "#/enum", "must be an array, got a number"),
        ({"anyOf": []}, "#/anyOf", "must be a non-empty array"),
        ({"allOf": {}}, "#/allOf", "must be a non-empty array"),
        ({"$ref": "#/nowhere"}, "#/$ref", "leads nowhere"),
        ({"$ref": "#/title", "title": "t"}, "#/$ref", "leads to no schema"),
        ({"$ref": "#"}, "#", "refers to itself without end"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "#", "refers to itself without end"),
        ({"pattern": "a("}, "#/pattern", "position 1: missing '\\)'"),
        ({"pattern": 3}, "#/pattern", "must be a string"),
        (
            {"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [{}]},
            "#/items",
            "spelled prefixItems",
        ),
        ({"prefixItems": []}, "#/prefixItems", "non-empty array"),
        ({"$schema": 3}, "#/$schema", "must be a string"),
        (3, "#", "a schema is an object or a boolean, got a number"),
    ],
)
def test_a_malformed_schema_is_refused_with_its_pointer(
    schema: Any, pointer: str, message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message) as caught:
        compiler.compile_json_schema(schema)
    assert caught.value.pointer == pointer
    assert str(caught.value).startswith(f"{pointer}: ")


@pytest.mark.parametrize(
    "source", ["{", "{'a':1}", '{"a":NaN}', "", '{"minimum":1e99999999999999999999}']
)
def test_a_source_that_is_not_json_is_refused(source: str) -> None:
    with pytest.raises(InvalidGrammar, match="the schema is not JSON"):
        compiler.compile_json_schema(source)


def test_a_name_that_is_used_twice_in_a_schema_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="names 'type' twice"):
        compiler.compile_json_schema('{"type":"string","type":"null"}')


@pytest.mark.parametrize(
    ("schema", "pointer", "feature"),
    [
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "uniqueItems"),
        ({"not": {"uniqueItems": True}}, "#/not/uniqueItems", "uniqueItems"),
        ({"$ref": "https://example.com/other"}, "#/$ref", "$ref"),
        ({"items": {"$id": "x/y", "$ref": "z#/a"}}, "#/items/$ref", "$ref"),
        ({"pattern": r"(a)\1"}, "#/pattern", "a back-reference '\\1'"),
        ({"$schema": "https://example.com/mine"}, "#/$schema", "$schema"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name_and_pointer(
    schema: Any, pointer: str, feature: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match="supported") as caught:
        compiler.compile_json_schema(schema)
    assert caught.value.pointer == pointer
    assert caught.value.feature == feature
    assert str(caught.value).startswith(f"{pointer}: ")


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 1.2, "maximum": 1.8},
        {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
        {"type": "array", "minItems": 2, "prefixItems": [{}], "items": False},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "string", "format": "ipv4", "pattern": "x"},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"const": 3, "type": "string"},
        {"type": "array", "items": False, "minItems": 1},
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(UnsatisfiableGrammar, match="no JSON value satisfies the schema"):
        compiler.compile_json_schema(schema)


def test_an_unsatisfiable_part_that_is_optional_is_left_out() -> None:
    loop = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/loop"}}}
    grammar = compiler.compile_json_schema(
        {
            "$defs": {"loop": loop},
            "type": "object",
            "properties": {
                "x": {"$ref": "#/$defs/loop"},
                "y": {"type": "array", "items": {"$ref": "#/$defs/loop"}},
            },
        }
    )
    assert accepts(grammar, '{"y":[]}')
    assert accepts(grammar, '{"xx":1}')
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b'{"'))
    assert allowed(matcher, grammar.vocabulary).count(ord("x")) == 1  # as the start of "xx"
    assert matcher.accept(ord("x"))
    assert not matcher.accept(ord('"'))


def test_an_unknown_format_is_noted_and_constrains_nothing() -> None:
    grammar = compiler.compile_json_schema({"items": {"type": "string", "format": "colour"}})
    assert grammar.notes == (
        "#/items/format: the format 'colour' is unknown and constrains nothing",
    )
    assert accepts(grammar, '["blue"]')


def test_annotations_and_extensions_are_let_through() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "c",
        "title": "t",
        "description": "d",
        "default": 3,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "x-order": 3,
        "type": "null",
        "$defs": {"unused": {"not": {}}},
    }
    assert accepts(compiler.compile_json_schema(schema), "null")


def test_a_declared_name_typed_again_leaves_a_way_out() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
        "required": ["city", "zip"],
        "additionalProperties": {"type": "integer"},
    }
    grammar = compiler.compile_json_schema(schema)
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b'{"city":"Oslo","zip":"0150","city'))
    after = allowed(matcher, grammar.vocabulary)
    assert ord('"') not in after
    assert set(b"abyz0 \\").issubset(after)


def test_after_a_complete_value_both_more_digits_and_the_end_are_open() -> None:
    grammar = compiler.compile_json_schema({})
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b"12"))
    assert matcher.is_complete
    assert not matcher.is_finished
    after = allowed(matcher, grammar.vocabulary)
    assert ord("3") in after
    assert 256 in after


def test_flexible_whitespace_is_allowed_between_tokens_and_bounded() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}},
    }
    flexible = compiler.compile_json_schema(schema, whitespace="flexible")
    value = {"a": [1, 2], "b": {"c": []}, "d": 1}
    for text in (
        json.dumps(value),
        json.dumps(value, indent=4),
        json.dumps(value, indent="\t"),
        json.dumps(value, separators=(",", ":")),
        "{\r\n}",
    ):
        assert accepts(flexible, text), text
    assert not accepts(compiler.compile_json_schema(schema), json.dumps(value))
    for text in ("\n{}", "{}\n", "{\n\n}", "{" + " " * 33 + "}", '{"a": [1 2]}', '{"a":[1\u00a0]}'):
        assert not accepts(flexible, text), text
    matcher = flexible.matcher()
    longest = 0
    while not matcher.is_finished and longest < 500:  # white space wherever it is open
        after = allowed(matcher, flexible.vocabulary)
        token = next((t for t in b"\n \t" if t in after), None)
        longest += 1
        assert matcher.accept(
            ord("}") if token is None and ord("}") in after else token or after[0]
        )
    assert matcher.is_finished
    with pytest.raises(ValueError, match="whitespace is 'compact' or 'flexible', got 'none'"):
        compiler.compile_json_schema({}, whitespace="none")  # type: ignore[arg-type]


# Random schemas. An instance is accepted in declared order only, so all orders are tried.


def schemas() -> st.SearchStrategy[Any]:
    small = st.integers(0, 3)
    leaves = st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        st.booleans(),
        st.just({}),
        st.builds(
            lambda low, size, kind: {"type": kind, "minimum": low, "maximum": low + size},
            st.integers(-5, 5),
            small,
            st.sampled_from(["integer", "number"]),
        ),
        st.builds(
            lambda low, size, pattern: {
                "type": "string",
                "minLength": low,
                "maxLength": low + size,
                **pattern,
            },
            small,
            small,
            st.sampled_from([{}, {"pattern": "a"}, {"pattern": "^[ab]*$"}, {"pattern": "^a|b$"}]),
        ),
        st.builds(lambda values: {"enum": values}, st.lists(instances, min_size=1, max_size=3)),
        st.just({"minLength": 1, "maximum": 2}),
        st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}]),
    )

    def combine(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        objects = st.builds(
            lambda a, b, additional, required, extra: {
                "type": "object",
                "properties": {**a, **b},
                **({} if additional is None else {"additionalProperties": additional}),
                "required": sorted({*required} & {*a, *b}) + ["c"] * extra,
            },
            st.just({}) | st.builds(lambda s: {"a": s}, inner),
            st.just({}) | st.builds(lambda s: {"b": s}, inner),
            st.none() | inner,
            st.sets(st.sampled_from("ab")),
            st.booleans(),
        )
        arrays = st.builds(
            lambda prefix, rest, low, size: {
                "type": "array",
                **({"prefixItems": prefix} if prefix else {}),
                **({} if rest is None else {"items": rest}),
                "minItems": low,
                **({} if size is None else {"maxItems": low + size}),
            },
            st.lists(inner, max_size=2),
            st.none() | inner,
            st.integers(0, 2),
            st.none() | st.integers(0, 2),
        )
        unions = st.builds(
            lambda k, s: {k: s},
            st.sampled_from(["anyOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        )
        mixed = st.builds(
            lambda s, other: {**s, "anyOf": other} if isinstance(s, dict) else s,
            inner,
            st.lists(inner, min_size=1, max_size=2),
        )
        return objects | arrays | unions | mixed

    tree = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    return st.recursive(leaves, combine, max_leaves=6).map(
        lambda schema: {
            "$defs": {"tree": tree, "leaf": {"type": ["string", "null"], "maxLength": 1}},
            **(schema if isinstance(schema, dict) else {"allOf": [schema]}),
        }
    )


instances: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-6, 6)
    | st.sampled_from([0.5, -1.5, 2.25])
    | st.text("ab", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(
            lambda d: dict(sorted(d.items()))
        )
    ),
    max_leaves=6,
)


@given(schemas(), st.lists(instances, max_size=10))
@settings(deadline=None, max_examples=250)
def test_acceptance_is_validity(schema: Any, listed: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    try:
        grammar = compiler.compile_json_schema(schema)
    except UnsatisfiableGrammar:
        assert not any(validator.is_valid(instance) for instance in listed)
        return
    for instance in listed:
        texts = list(texts_of(instance))
        assert any(accepts(grammar, text) for text in texts) == validator.is_valid(instance), texts


def texts_of(instance: Any) -> Iterator[str]:
    """The instance with the members of its objects in every order."""
    if isinstance(instance, list):
        for items in itertools.product(*map(texts_of, instance)):
            yield "[" + ",".join(items) + "]"
    elif isinstance(instance, dict):
        for names in itertools.permutations(instance):
            for values in itertools.product(*(texts_of(instance[name]) for name in names)):
                members = map(":".join, zip(map(json.dumps, names), values, strict=True))
                yield "{" + ",".join(members) + "}"
    else:
        yield json.dumps(instance)


@given(schemas(), st.data())
@settings(deadline=None, max_examples=150)
def test_whatever_the_masks_allow_ends_valid(schema: Any, data: st.DataObject) -> None:
    try:
        grammar = compiler.compile_json_schema(schema)
    except UnsatisfiableGrammar:
        assume(False)
    matcher = grammar.matcher()
    text = bytearray()
    budget = grammar.shortest_length + data.draw(st.integers(0, 25))
    for left in range(budget, 0, -1):
        if matcher.is_finished:
            break
        after = allowed(matcher, grammar.vocabulary, budget=left)
        token = data.draw(st.sampled_from(after))
        if token == 256:
            break
        assert matcher.accept(token)
        text.append(token)
    assert matcher.is_complete
    instance = json.loads(text.decode())
    jsonschema.Draft202012Validator(schema).validate(instance)


scalars = st.sampled_from([None, True, False, 0, 1, -1, 2.5, "", "#", "a", "string", "date"])
keywords = st.sampled_from(
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
        "minItems",
        "maxItems",
        "properties",
        "required",
        "minProperties",
        "additionalProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "$defs",
        "$schema",
        "$id",
        "not",
        "uniqueItems",
        "a",
    ]
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keywords, anything, max_size=4))
@settings(deadline=None, max_examples=300)
def test_any_json_is_a_schema_or_refused_as_one(schema: Any) -> None:
    try:
        grammar = compiler.compile_json_schema(schema)
    except GrammarError:
        return
    assert grammar.shortest_length > 0


def test_a_large_enum_and_many_optional_properties_compile_to_little() -> None:
    many = {"type": "string", "maxLength": 5, "enum": [f"k{i:04d}" for i in range(5000)]}
    grammar = compiler.compile_json_schema(many)
    assert [accepts(grammar, t) for t in ('"k0000"', '"k4999"', '"k5000"', '"k499"', '""')] == [
        True,
        True,
        False,
        False,
        False,
    ]
    sizes = []
    for count in (1000, 2000):
        properties = {f"p{i:04d}": {"type": "string"} for i in range(count)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        fresh = GrammarCompiler(compiler.vocabulary).compile_json_schema(schema)
        assert accepts(fresh, '{"p0007":"","p0999":"y"}')
        assert not accepts(fresh, '{"p0999":"","p0007":"y"}')
        assert not accepts(fresh, '{"p2000":"x"}')
        sizes.append(fresh.num_terms + fresh.num_states)
    assert sizes[1] < 3 * sizes[0]


def test_branches_that_multiply_are_refused_and_not_multiplied() -> None:
    schema = {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]
    }
    grammar_or_error: Any
    try:
        grammar_or_error = GrammarCompiler(
            compiler.vocabulary, limits=Limits(max_alternatives=500)
        ).compile_json_schema(schema)
    except GrammarError as error:
        grammar_or_error = error
    assert isinstance(grammar_or_error, GrammarTooComplex)
    assert "combinations of branches" in str(grammar_or_error)
