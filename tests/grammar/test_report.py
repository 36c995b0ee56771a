from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from palmette.grammar import GrammarCompiler, Limits, Refusal, Report
from palmette.grammar.testing import byte_vocabulary

compiler = GrammarCompiler(byte_vocabulary())


def test_a_usable_schema_is_reported_with_its_shortest_text_and_its_cost() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 3}},
        "required": ["b"],
    }
    report = compiler.check(schema)
    assert report.is_usable
    assert report.is_satisfiable is True
    assert report.refusals == ()
    assert report.shortest_length == len('{"b":"..."}')
    assert report.shortest_text is not None
    jsonschema.validate(json.loads(report.shortest_text), schema)
    assert report.num_terms > 0
    assert report.seconds > 0
    assert "enforced in full" in str(report)
    assert report.shortest_text in str(report)


def test_every_refusal_is_reported_with_its_pointer_and_keyword() -> None:
    report = compiler.check(
        {
            "properties": {
                "a": {"$ref": "https://example.com/other"},
                "b": {"not": {"uniqueItems": True}},
                "c": {"type": "strin"},
                "d": {"items": {"$ref": "#/nowhere"}},
                "e": {"pattern": r"(x)\1"},
            }
        }
    )
    assert not report.is_usable
    assert report.is_satisfiable is None
    assert [(each.pointer, each.keyword) for each in report.refusals] == [
        ("#/properties/a/$ref", "$ref"),
        ("#/properties/b/not/uniqueItems", "uniqueItems"),
        ("#/properties/c/type", None),
        ("#/properties/d/items/$ref", None),
        ("#/properties/e/pattern", "a back-reference '\\1'"),
    ]
    assert "refused: #/properties/c/type: malformed: unknown type 'strin'" in str(report)


def test_what_is_never_reached_is_not_refused() -> None:
    report = compiler.check(
        {"type": "string", "items": {"type": "strin"}, "$defs": {"unused": {"type": "strin"}}}
    )
    assert report.is_usable


def test_a_schema_that_nothing_satisfies_is_reported_as_such() -> None:
    report = compiler.check({"type": "object", "required": ["a"], "properties": {"a": False}})
    assert report.is_satisfiable is False
    assert not report.is_usable
    assert report.refusals == ()
    assert "nothing satisfies it" in str(report)


def test_what_constrains_nothing_is_noted() -> None:
    report = compiler.check({"items": {"fromat": "date"}, "format": "colour", "x-mine": 1})
    assert report.is_usable
    assert sorted(report.notes) == [
        "#/format: the format 'colour' is unknown and constrains nothing",
        "#/items/fromat: the keyword 'fromat' is unknown in draft 2020-12 and constrains nothing",
    ]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "the schema is not JSON"),
        ("3", "a schema is an object or a boolean"),
        ({"$schema": "https://example.com/mine"}, "the dialect"),
        ('{"a":' * 100_000, "nested too deeply"),
        ({"a": object()}, "the schema is not JSON"),
    ],
)
def test_a_source_that_is_no_schema_is_reported_and_not_raised(schema: Any, reason: str) -> None:
    report = compiler.check(schema)
    assert not report.is_usable
    assert reason in report.refusals[0].reason


def test_a_limit_that_is_reached_is_reported() -> None:
    report = GrammarCompiler(byte_vocabulary(), limits=Limits(max_source=10)).check(
        {"type": "string"}
    )
    assert report == Report(
        refusals=(Refusal("#", None, "the grammar has 18 characters, the limit is 10"),)
    )


def test_an_unknown_option_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="order is 'declared' or 'any', got 'some'"):
        compiler.check({}, order="some")  # type: ignore[arg-type]
