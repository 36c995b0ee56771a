from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from palmette.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    Limits,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.mask import Body, SharedMasks, TokenSet
from palmette.grammar.testing import accepts, allowed, byte_vocabulary, mask_of

vocabulary = byte_vocabulary([b"ab", b"aa", b'","', b"[[", b"ba" * 20])


def compiler(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, limits=Limits(**limits))


HOSTILE_PATTERNS = [
    "(a|a)*b",
    "((a+)+)+$",
    "(((a*)*)*)*b",
    "a{0,100000}",
    "(a{0,100000}){0,100000}",
    "(?:a|b|ab){1000,2000}",
    ".*a.{12}",
    "(?:" * 90 + "a" + ")*" * 90,
    "|".join(f"w{i}.*x" for i in range(300)),
    "(?=.*a.{3})(?=.*b.{3}).*",
    "a?" * 100,
]


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS)
def test_a_pattern_that_explodes_elsewhere_gives_masks_here(pattern: str) -> None:
    matcher = compiler().compile_regex(pattern).matcher()
    for _ in range(4):
        after = [t for t in allowed(matcher, vocabulary) if t < vocabulary.num_tokens - 1]
        assert after
        assert matcher.accept(after[-1])


def nested_schema(kind: str, depth: int) -> dict[str, Any]:
    """Each definition applies the one before it twice."""
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, depth):
        definitions[f"d{i}"] = {kind: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"}


@pytest.mark.parametrize("kind", ["allOf", "anyOf"])
def test_a_combination_that_doubles_at_each_level_is_what_it_says(kind: str) -> None:
    grammar = compiler().compile_json_schema(nested_schema(kind, 60))
    assert accepts(grammar, '"a"')
    assert not accepts(grammar, "1")


TOO_COMPLEX: list[tuple[Any, str]] = [
    (
        {
            "allOf": [
                {"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(60)
            ]
        },
        "combinations of branches|s of work",
    ),
    ('{"items":' * 100_000 + "{}" + "}" * 100_000, "nested too deeply"),
    ({"type": "number", "minimum": 10**1200}, "more than 1000 digits"),
    ('{"minimum":1e999999}', "more than 1000 digits"),
    ({"pattern": "a" * 200_000}, "#/pattern: the pattern has 200000 characters"),
    ({"pattern": "(" * 200 + ")" * 200}, "#/pattern: position 100: more than 100 groups"),
]


@pytest.mark.parametrize(("schema", "message"), TOO_COMPLEX)
def test_a_schema_beyond_a_limit_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(GrammarTooComplex, match=message):
        compiler().compile_json_schema(schema)


def test_a_source_beyond_the_limit_of_size_is_refused() -> None:
    small = compiler(max_source=10)
    with pytest.raises(GrammarTooComplex, match="the grammar has 11 characters, the limit is 10"):
        small.compile_regex("a" * 11)
    with pytest.raises(GrammarTooComplex, match="the limit is 10"):
        small.compile_choices(["abcdefghij"])
    with pytest.raises(GrammarTooComplex, match="the limit is 10"):
        small.compile_json_schema({"type": "string"})


def test_recursion_without_an_end_is_unsatisfiable_and_with_one_it_is_not() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    }
    with pytest.raises(UnsatisfiableGrammar):
        compiler().compile_json_schema(schema)
    schema["properties"]["a"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    grammar = compiler().compile_json_schema(schema)
    assert accepts(grammar, '{"a":{"a":null}}')


HOPELESS = "(?=(?:.{7})*$)(?=(?:.{11})*$)(?=(?:.{13})*$)(?=(?:.{17})*$)(?=(?:.{19})*$).+"


def test_time_runs_out_for_the_grammar_that_takes_it_and_for_no_other() -> None:
    shared = compiler(compile_seconds=0.1, mask_seconds=0.1, max_terms=10_000_000)
    with pytest.raises(GrammarTooComplex, match=r"needs more than 0\.1 s of work"):
        shared.compile_regex(HOPELESS)
    late = shared.compile_regex(f"a|b(?:{HOPELESS})").matcher()
    with pytest.raises(GrammarTooComplex, match=r"needs more than 0\.1 s of work"):
        mask_of(late, vocabulary)
    with pytest.raises(GrammarTooComplex, match=r"needs more than 0\.1 s of work"):
        late.accept(ord("a"))
    assert late.num_tokens == 0
    other = shared.compile_regex("a+").matcher()
    assert other.accept(ord("a"))
    assert ord("a") in allowed(other, vocabulary)


def test_states_and_terms_are_bounded_over_a_long_output() -> None:
    limited = compiler(max_states=400, max_terms=4000, mask_cache_bytes=10_000)
    for grammar in (limited.compile_json_schema({}), limited.compile_regex("(a{1,9}b){1,5000}")):
        matcher = grammar.matcher()
        step = 0
        while step < 3000 and not matcher.is_finished:
            text = b'[[1,{"k":[' if grammar.start.rule else b"aab"
            for byte in text:
                assert matcher.accept(byte)
                step += 1
            mask_of(matcher, vocabulary)
            assert grammar.num_states <= 400
            assert grammar.num_terms <= 4000
        assert grammar.generation > 3
        matcher.rollback(matcher.num_tokens - 1)  # to where long-dropped states were
        assert allowed(matcher, vocabulary)


def test_many_small_masks_take_no_more_memory_than_their_bound() -> None:
    bound = 1 << 20
    shared = SharedMasks(bound)
    row = np.zeros(300, bool)
    row[7] = True
    tracemalloc.start()
    try:
        for number in range(5_000):
            body = Body(TokenSet(row), np.array([number], np.int32))
            shared.put(number.to_bytes(32, "little"), body)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bound / 2 < held < bound * 1.25


def test_a_grammar_that_needs_more_states_at_once_than_allowed_is_refused() -> None:
    tiny = compiler(max_states=4).compile_json_schema({})
    with pytest.raises(GrammarTooComplex, match="more than 4 states at once"):
        mask_of(tiny.matcher(), vocabulary)
    tiny = compiler(max_terms=20).compile_json_schema({})
    with pytest.raises(GrammarTooComplex, match="more than 20 terms at once"):
        mask_of(tiny.matcher(), vocabulary)
    wide = compiler(max_alternatives=30).compile_regex(".*a.{90}").matcher()
    assert all(map(wide.accept, b"a" * 28))
    with pytest.raises(GrammarTooComplex, match="more than 30 alternatives at one place"):
        all(map(wide.accept, b"a" * 5))


def test_grammars_past_the_size_of_the_cache_are_forgotten_oldest_first() -> None:
    small = compiler(compiled_cache_bytes=1)
    first = small.compile_regex("a")
    assert small.compile_regex("a") is first
    small.compile_regex("b")
    assert small.compile_regex("a") is not first
    assert accepts(first, "a")


@pytest.mark.parametrize("name", ["max_states", "mask_seconds"])
def test_a_limit_is_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("(", InvalidGrammar),
        (r"\1", UnsupportedGrammar),
        ("a$b", UnsatisfiableGrammar),
        ("(" * 500, GrammarTooComplex),
    ],
)
def test_each_kind_of_error_is_a_grammar_error_and_a_value_error(
    pattern: str, kind: type[GrammarError]
) -> None:
    with pytest.raises(ValueError, match=r"position|no text") as caught:
        compiler().compile_regex(pattern)
    assert type(caught.value) is kind
    assert issubclass(kind, GrammarError)
