from __future__ import annotations

import gc
import json
import time
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
from palmette.grammar.clock import _here, begin_work, work_seconds
from palmette.grammar.json_schema.document import Document, spend_on
from palmette.grammar.json_schema.logic import Logic
from palmette.grammar.json_schema.schemas import Schemas
from palmette.grammar.json_schema.strings import Strings
from palmette.grammar.mask import Body, SharedMasks, TokenSet
from palmette.grammar.recipes import Recipes
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.testing import accepts, allowed, byte_vocabulary, mask_of

vocabulary = byte_vocabulary([b"ab", b"aa", b'","', b"[[", b"ba" * 20])

PATIENT = {"compile_seconds": 60.0, "mask_seconds": 60.0}


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


def test_rules_that_all_begin_with_each_other_are_refused_by_size() -> None:
    def grammar(number: int) -> str:
        again = " | ".join(f'x{i} "{i}"' for i in range(number))
        return "root ::= x0\n" + "\n".join(f'x{i} ::= {again} | "c"' for i in range(number))

    patient = compiler(max_terms=1000, **PATIENT)
    assert accepts(patient.compile_grammar(grammar(5)), b"c0412")
    with pytest.raises(GrammarTooComplex, match="1000 terms to be without left recursion"):
        patient.compile_grammar(grammar(30))


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
        late.accept(ord("b"))
    assert late.num_tokens == 0
    other = shared.compile_regex("a+").matcher()
    assert other.accept(ord("a"))
    assert ord("a") in allowed(other, vocabulary)


def store(**limits: Any) -> TermStore:
    return compiler(**limits)._machine.store()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1, "pattern": f"^{HOPELESS}$"},
        {"propertyNames": {"pattern": f"^{HOPELESS}$"}, "minProperties": 1},
    ],
)
def test_a_search_ends_at_the_limit_of_terms_wherever_it_is_made(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarTooComplex, match="more than 2000 terms at once"):
        compiler(max_terms=2000, **PATIENT).compile_regex(HOPELESS)
    with pytest.raises(GrammarTooComplex, match="more than 2000 terms at once"):
        compiler(max_terms=2000, **PATIENT).compile_json_schema(schema)


def test_what_grammars_share_is_made_within_the_time_of_the_one_that_needs_it() -> None:
    def working(kitchen: TermStore) -> Term:
        for _ in range(1_000_000):
            kitchen.spend(1000)
        raise AssertionError("it had no time")

    hurried = store()
    hurried.start_clock(1e-9)
    with pytest.raises(GrammarTooComplex, match="needs more than 1e-09 s of work"):
        Recipes().term(hurried, "anything", working)
    hurried.start_clock(60.0)
    assert Recipes().term(hurried, "nothing", lambda kitchen: kitchen.empty) is hurried.empty


def test_one_collection_of_the_garbage_of_the_process_is_not_the_work_of_a_grammar() -> None:
    begin_work()
    gc.collect(0)
    assert _here.collecting == 0
    gc.collect()
    assert work_seconds() < time.thread_time()
    collected = _here.collecting
    assert collected > 0
    gc.collect()
    assert _here.collecting == collected
    begin_work()
    assert _here.collecting == 0


def test_a_table_of_states_may_grow_while_a_text_is_followed() -> None:
    python = GrammarCompiler(vocabulary, machine="python").compile_regex("a{5000}")
    start = python.automaton.state_of(python.start)
    assert python.automaton.accepts(start, b"a" * 5000)
    assert not python.automaton.accepts(start, b"a" * 4999)


def test_time_runs_from_where_a_compile_begins() -> None:
    schema = json.dumps({"description": "x" * 1_000_000, "enum": [[i] for i in range(5000)]})
    with pytest.raises(GrammarTooComplex, match="needs more than 1e-06 s of work"):
        compiler(compile_seconds=1e-6).compile_json_schema(schema)


def test_a_term_with_many_items_or_moves_counts_for_several() -> None:
    many = store()
    words = [many.literal(b"%d" % i + b"x" * i) for i in range(3000)]
    before = many.load, len(many)
    wide = many.alternation([many.sequence(many.byte_set(6), each) for each in words])
    assert many.load - before[0] > len(many) - before[1] + 20
    before = many.load, len(many)
    list(many.parts(wide))
    assert many.load - before[0] > len(many) - before[1] + 100
    long = byte_vocabulary([b"a" * 300])
    limited = GrammarCompiler(long, limits=Limits(max_terms=3000, **PATIENT))
    small = limited.compile_regex(".?" * 400).matcher()
    with pytest.raises(GrammarTooComplex, match="more than 3000 terms at once"):
        mask_of(small, long)


def test_a_long_shortest_text_is_not_kept_once_for_each_of_its_ends() -> None:
    many = store(max_terms=1_000_000, **PATIENT)
    letter = many.byte_set(6 << 96)  # a, b
    cycles = (many.repeat(many.repeat(letter, n, n), 0, None) for n in (7, 11, 13, 17))
    term = many.both(*cycles, many.sequence(letter, many.anything))
    assert many.shortest(term) == b"a" * 7 * 11 * 13 * 17
    assert many.min_bytes(term) == 7 * 11 * 13 * 17
    assert many.load < 2 * len(many)


def test_texts_of_which_none_may_come_twice_are_held_only_while_they_are_looked_for() -> None:
    limited = compiler(max_terms=2000, **PATIENT)
    schema: dict[str, Any] = {"type": "array", "uniqueItems": True, "minItems": 3}
    schema["items"] = {"type": "string", "minLength": 5000}
    with pytest.raises(GrammarTooComplex, match="more than 2000 terms at once"):
        limited.compile_json_schema(schema)
    schema["items"] = {"type": "string", "minLength": 50}
    matcher = limited.compile_json_schema(schema).matcher()
    assert allowed(matcher, vocabulary) == [ord("[")]


def test_values_are_paid_for_one_by_one() -> None:
    spent: list[int] = []
    spend_on([[1] * 500, {"a": {"b": [2] * 500}}], spent.append)
    assert 450 < sum(spent) < 550
    spent = []
    claims = Schemas(Document({"allOf": [{"minimum": i} for i in range(100)]}), spent.append)
    root = claims.root().schema
    for i in range(100):
        claims.below(root, "allOf", i)
    assert sum(spent) > 500


def test_cases_of_a_schema_count_as_memory() -> None:
    many = store(**PATIENT)
    either = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(10)]
    schema = {"allOf": [*either, *({"minProperties": i} for i in range(100))]}
    schemas = Schemas(Document(schema), many.spend)
    logic = Logic(schemas, Strings(many), 2000)
    before = many.load, len(many)
    assert len(logic.conjunctions((schemas.root(),), "object")) == 1024
    assert many.load - before[0] > len(many) - before[1] + 1024 * 100 * 8 // 1024 - 2


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


def test_the_sources_of_remembered_grammars_are_not_kept() -> None:
    many = compiler()
    many.compile_json_schema({"type": "integer", "description": "x" * 1_000_000})
    tracemalloc.start()
    try:
        for index in range(10):
            many.compile_json_schema({"type": "integer", "description": f"{index}" * 1_000_000})
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()


def test_what_a_grammar_says_it_takes_counts_its_objects() -> None:
    pairs = [{"a": index, "b": [index]} for index in range(60)]
    assert compiler().compile_json_schema({"enum": pairs}).num_bytes > 200_000
    assert 10_000 < compiler().compile_regex("a").num_bytes < 400_000


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "minProperties": 10**400}, None),
        ({"type": "array", "contains": {"const": 1}, "minContains": 10**400}, None),
        ({"type": "string", "minLength": 10**400}, None),
        ({"type": "array", "minItems": 10**400}, None),
        ({"type": "array", "maxItems": 10**400}, "[1,2]"),
        ('{"type": "object", "maxProperties": 1e999999}', '{"a":1}'),
    ],
)
def test_a_count_without_measure_is_one_that_no_text_has(schema: Any, text: str | None) -> None:
    report = compiler().check(schema)
    assert str(report)
    if text is not None:
        assert accepts(compiler().compile_json_schema(schema), text)
    elif report.shortest_length is not None:
        assert report.shortest_length >= 2**53


def test_a_lone_surrogate_in_a_name_can_be_told() -> None:
    report = compiler().check({"type": "object", "patternProperties": {"\ud800": {"type": "no"}}})
    assert report.refusals
    assert "\\ud800" in report.refusals[0].pointer
    str(report).encode()
