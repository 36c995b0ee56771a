from __future__ import annotations

import copy
import json
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    Limits,
    Matcher,
    UnsatisfiableGrammar,
    Vocabulary,
)
from palmette.grammar.machine import machine_for
from palmette.grammar.testing import (
    allowed,
    brute_force_mask,
    byte_vocabulary,
    mask_of,
    text_of,
)

SCHEMAS: dict[str, Any] = {
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 2},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    "open": {"type": "object", "properties": {"na": {"type": "number"}}},
    "anything": {},
    "ambiguous": {
        "anyOf": [
            {"type": "array", "items": {"type": "string", "pattern": "^a*$"}},
            {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1},
        ]
    },
    "several": {
        "type": "array",
        "items": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        "minItems": 4,
        "maxItems": 6,
    },
    "pattern": {"type": "string", "pattern": "^(a|ab)+c", "minLength": 3, "maxLength": 9},
    "nested": {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
        "anyOf": [{"$ref": "#/$defs/n"}, {"const": {"k": [1, "é"]}}],
    },
}

MORE = rb"""{" ": "," "} "na name":" ]} [[ ]] ,[ ":" ab "a a", a"," "] 00 12 1, null tru e} \u \u00
\" ":[ {"na me": 15 abab ac c" """.split()
MORE += [b"\xc3\xa9", b"\xc3", b'\xa9"']
vocabulary = byte_vocabulary(MORE, num_padding=2)
compiler = GrammarCompiler(vocabulary)
STOP = 256 + len(MORE)


def compile_named(name: str, limits: Limits | None = None) -> CompiledGrammar:
    chosen = compiler if limits is None else GrammarCompiler(vocabulary, limits=limits)
    return chosen.compile_json_schema(SCHEMAS[name])


def walk(matcher: Matcher, seed: int, num_tokens: int) -> list[int]:
    """Accept allowed tokens at random, long ones more often; those that were accepted."""
    generator = random.Random(seed)
    path = []
    for _ in range(num_tokens):
        after = [t for t in allowed(matcher, vocabulary) if t != STOP]
        if not after:
            break
        weights = [len(vocabulary.token_bytes[t]) ** 3 for t in after]
        token_id = generator.choices(after, weights)[0]
        assert matcher.accept(token_id)
        path.append(token_id)
    return path


names = st.sampled_from(sorted(SCHEMAS))
seeds = st.integers(0, 2**32)


@given(names, seeds, st.integers(0, 12))
@settings(deadline=None, max_examples=100)
def test_the_mask_is_the_brute_force_mask(name: str, seed: int, num_tokens: int) -> None:
    matcher = compile_named(name).matcher()
    walk(matcher, seed, num_tokens)
    assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()


@given(names, seeds, st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_the_mask_is_the_same_from_a_fresh_grammar_and_with_hardly_any_room(
    name: str, seed: int, num_tokens: int
) -> None:
    matcher = compile_named(name).matcher()
    cramped = compile_named(name, Limits(max_states=600, mask_cache_bytes=1, shared_cache_bytes=1))
    other = cramped.matcher()
    for token_id in walk(compile_named(name).matcher(), seed, num_tokens):
        assert (mask_of(matcher, vocabulary) == mask_of(other, vocabulary)).all()
        assert matcher.accept(token_id)
        assert other.accept(token_id)
    assert cramped.num_states <= 600


@given(names, seeds, st.integers(0, 10), st.integers(0, 10))
@settings(deadline=None, max_examples=60)
def test_rollback_undoes_accept_and_a_copy_goes_its_own_way(
    name: str, seed: int, kept: int, undone: int
) -> None:
    grammar = compile_named(name)
    matcher = grammar.matcher()
    path = walk(matcher, seed, kept)
    before = mask_of(matcher, vocabulary)
    twin = matcher.copy()
    more = walk(matcher, seed + 1, undone)
    assert matcher.num_tokens == len(path) + len(more)
    assert twin.num_tokens == len(path)
    assert (mask_of(twin, vocabulary) == before).all()
    matcher.rollback(len(more))
    assert (mask_of(matcher, vocabulary) == before).all()
    assert all(map(twin.accept, more))
    with pytest.raises(ValueError, match=f"cannot roll back {len(path) + 1} of {len(path)}"):
        matcher.rollback(len(path) + 1)
    with pytest.raises(ValueError, match="cannot roll back -1"):
        matcher.rollback(-1)


@given(names, seeds, st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_a_refused_token_changes_nothing(name: str, seed: int, num_tokens: int) -> None:
    matcher = compile_named(name).matcher()
    walk(matcher, seed, num_tokens)
    before = mask_of(matcher, vocabulary)
    refused = np.flatnonzero(~before).tolist()
    assert not any(matcher.accept(token_id) for token_id in refused)
    assert (mask_of(matcher, vocabulary) == before).all()


@given(names, seeds, st.integers(0, 40))
@settings(deadline=None, max_examples=80)
def test_the_stop_token_is_open_exactly_where_the_text_is_complete(
    name: str, seed: int, num_tokens: int
) -> None:
    matcher = compile_named(name).matcher()
    path = walk(matcher, seed, num_tokens)
    try:
        value = json.loads(text_of(vocabulary, path))
    except ValueError:
        value = None
        assert not matcher.is_complete
    after = allowed(matcher, vocabulary)
    assert (STOP in after) == matcher.is_complete
    assert matcher.is_finished == (after == [STOP])
    assert matcher.accept(STOP) == (STOP in after)
    if STOP in after:
        assert matcher.is_finished
        assert not matcher.is_complete
        assert matcher.forced_tokens() == []
        assert not mask_of(matcher, vocabulary).any()
        matcher.rollback(1)
        assert matcher.is_complete
        assert value is not None or text_of(vocabulary, path) == b"null"


@given(names, seeds, st.integers(0, 12), st.none() | st.integers(0, 4))
@settings(deadline=None, max_examples=80)
def test_forced_tokens_are_the_only_ones_allowed_and_the_run_ends_where_it_must(
    name: str, seed: int, num_tokens: int, limit: int | None
) -> None:
    matcher = compile_named(name).matcher()
    walk(matcher, seed, num_tokens)
    before = matcher.num_tokens
    forced = matcher.forced_tokens(limit)
    assert matcher.num_tokens == before
    for token_id in forced:
        assert allowed(matcher, vocabulary) == [token_id]
        assert matcher.accept(token_id)
    after = allowed(matcher, vocabulary)
    assert len(after) != 1 or after == [STOP] or len(forced) == limit


def test_a_long_literal_over_single_bytes_is_forced_in_whole() -> None:
    single = byte_vocabulary()
    matcher = (
        GrammarCompiler(single)
        .compile_json_schema(
            {
                "type": "object",
                "properties": {"name": {"const": None}},
                "required": ["name"],
                "additionalProperties": False,
            }
        )
        .matcher()
    )
    assert bytes(matcher.forced_tokens()) == b'{"name":null}'
    assert bytes(matcher.forced_tokens(3)) == b'{"n'


# Budgets


@given(names, seeds, st.integers(0, 30), st.integers(0, 6))
@settings(deadline=None, max_examples=150)
def test_within_a_budget_every_way_ends_complete(
    name: str, seed: int, more: int, num_undone: int
) -> None:
    grammar = compile_named(name)
    generator = random.Random(seed)
    budget = grammar.shortest_length + more
    matcher = grammar.matcher()
    path: list[int] = []
    has_undone = False
    while len(path) < budget:
        after = allowed(matcher, vocabulary, budget=budget - len(path))
        assert set(after) <= set(allowed(matcher, vocabulary))
        open_tokens = [t for t in after if t != STOP]
        if not open_tokens:
            assert after == [STOP]
            break
        token_id = generator.choice(open_tokens)
        assert matcher.accept(token_id)
        path.append(token_id)
        if len(path) == budget // 2 and not has_undone:
            has_undone = True
            undone = min(num_undone, len(path))
            matcher.rollback(undone)
            del path[len(path) - undone :]
    assert matcher.is_complete
    json.loads(text_of(vocabulary, path))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_shortest_length_is_realised_and_is_what_a_search_finds(name: str) -> None:
    grammar = compile_named(name)
    length = grammar.shortest_length
    matcher = grammar.matcher()
    for left in range(length, 0, -1):
        assert not matcher.is_complete
        after = allowed(matcher, vocabulary, budget=left)
        assert after
        assert matcher.accept(after[-1])
    assert matcher.is_complete


def test_a_budget_with_room_changes_nothing_and_a_tight_one_leaves_the_way_out() -> None:
    single = byte_vocabulary([b"aa", b'a"'])
    matcher = (
        GrammarCompiler(single).compile_json_schema({"type": "string", "minLength": 2}).matcher()
    )
    assert matcher.accept(ord('"'))
    unlimited = allowed(matcher, single)
    assert allowed(matcher, single, budget=100) == unlimited
    # With two left: a character and then 'a"', or 'aa' and then '"'; no escape, no half character.
    printable = [t for t in range(0x20, 0x80) if t not in b'"\\']
    assert allowed(matcher, single, budget=2) == [*printable, 256]
    assert allowed(matcher, single, budget=1) == [256]  # too little for any; the shortest way
    assert matcher.accept(256)
    assert allowed(matcher, single, budget=1) == [ord('"'), 257]
    assert allowed(matcher, single, budget=0) == [ord('"')]
    assert allowed(matcher, single, budget=3)[-1] == 257


def test_a_grammar_whose_shortest_text_is_beyond_writing_down_still_has_a_length() -> None:
    doubling: dict[str, Any] = {"d0": {"type": "null"}}
    for i in range(1, 60):
        link = {"$ref": f"#/$defs/d{i - 1}"}
        doubling[f"d{i}"] = {"type": "array", "prefixItems": [link, link], "minItems": 2}
    grammar = compiler.compile_json_schema({"$ref": "#/$defs/d59", "$defs": doubling})
    assert grammar.shortest_length > 2**59
    matcher = grammar.matcher()
    assert allowed(matcher, vocabulary, budget=10)
    grammar = compiler.compile_regex("a{2000000000}")
    assert grammar.shortest_length == 2000000000
    assert set(allowed(grammar.matcher(), vocabulary, budget=5)) == set(
        allowed(grammar.matcher(), vocabulary)
    )


def test_a_long_shortest_text_is_still_reached_within_its_length() -> None:
    item = {"type": "object", "properties": {"key": {"type": "boolean"}}, "required": ["key"]}
    schema = {"type": "array", "items": item, "minItems": 100}
    grammar = compiler.compile_json_schema(schema)
    matcher = grammar.matcher()
    generator = random.Random(3)
    for left in range(grammar.shortest_length + 5, 0, -1):
        after = [t for t in allowed(matcher, vocabulary, budget=left) if t != STOP]
        if not after:
            break
        assert matcher.accept(generator.choice(after))
    assert matcher.is_complete


# Sharing


def test_matchers_of_one_grammar_may_be_used_from_several_threads() -> None:
    grammar = GrammarCompiler(vocabulary, limits=Limits(max_states=2000)).compile_json_schema({})
    expected = []
    for seed in range(4):
        matcher = compiler.compile_json_schema({}).matcher()
        walk(matcher, seed, 30)
        expected.append(mask_of(matcher, vocabulary))
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for _ in range(3):
                matcher = grammar.matcher()
                walk(matcher, seed, 30)
                assert (mask_of(matcher, vocabulary) == expected[seed]).all()
        except BaseException as error:  # shown below, in the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_body_of_a_string_is_walked_once_for_all_places_and_grammars() -> None:
    fresh = GrammarCompiler(vocabulary)
    first = fresh.compile_json_schema({"type": "string"}).matcher()
    assert first.accept(ord('"'))
    mask_of(first, vocabulary)
    held = fresh._machine.num_bodies
    other = fresh.compile_json_schema(
        {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}
    )
    matcher = other.matcher()
    assert all(map(matcher.accept, b'{"a":"x'))
    assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()
    assert fresh._machine.num_bodies == held


@given(st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None, max_examples=15)
def test_counters_beyond_any_token_are_right_at_every_distance_from_their_end(
    low: int, size: int
) -> None:
    tokens = [bytes([i]) for i in range(128)] + [b"a" * n for n in range(2, 9)]
    small = Vocabulary([*tokens, b'aaa"', b"\\u0061a", b""], {len(tokens) + 2})
    schema = {"type": "string", "minLength": low, "maxLength": low + size}
    matcher = GrammarCompiler(small).compile_json_schema(schema).matcher()
    assert matcher.accept(ord('"'))
    for done in range(low + size + 1):
        near_an_end = any(0 <= end - done <= 10 for end in (low, low + size))
        if near_an_end or done % 17 == 0:
            assert (mask_of(matcher, small) == brute_force_mask(matcher, small)).all()
        assert matcher.accept(ord("a")) == (done < low + size)


PATTERNS = ["^(ab|c)+d", "a{3}$", "^[a-c]*$", "(?=.*b)a.*c", "^(?!.*aa)", "é$", "^(a.{4}b)?$"]
PATTERNS += ["^a|bb$"]
LIST = {"type": "array", "minItems": 1}
string_schemas = st.builds(
    lambda patterns, low, size: {
        "type": "string",
        "allOf": [{"pattern": pattern} for pattern in patterns],
        "minLength": low,
        **({} if size is None else {"maxLength": low + size}),
    },
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    st.sampled_from([0, 0, 0, 2, 7]),
    st.none() | st.integers(0, 60),
)


@given(string_schemas, seeds, st.integers(0, 70))
@settings(deadline=None, max_examples=120)
def test_patterns_within_lengths_have_the_brute_force_mask_all_along(
    schema: Any, seed: int, num_tokens: int
) -> None:
    try:
        matcher = compiler.compile_json_schema(schema).matcher()
    except UnsatisfiableGrammar:
        return
    walk(matcher, seed, num_tokens)
    assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()


@given(string_schemas, seeds, st.integers(0, 40))
@settings(deadline=None, max_examples=120)
def test_patterns_within_lengths_end_within_their_budget(schema: Any, seed: int, more: int) -> None:
    try:
        grammar = compiler.compile_json_schema({"prefixItems": [schema], **LIST})
    except UnsatisfiableGrammar:
        return
    generator = random.Random(seed)
    matcher = grammar.matcher()
    for left in range(grammar.shortest_length + more, 0, -1):
        after = [t for t in allowed(matcher, vocabulary, budget=left) if t != STOP]
        if not after:
            break
        assert matcher.accept(generator.choice(after))
    assert matcher.is_complete


def test_a_row_in_the_other_byte_order_is_refused() -> None:
    matcher = GrammarCompiler(vocabulary).compile_regex("a").matcher()
    row = np.zeros(-(-vocabulary.num_rows // 32), np.dtype(np.int32).newbyteorder())
    with pytest.raises(ValueError, match="row must be bool"):
        matcher.fill_mask(row)


def test_a_copy_by_the_copy_module_stands_by_itself() -> None:
    matcher = GrammarCompiler(vocabulary).compile_regex("ab*").matcher()
    for twin in (copy.copy(matcher), copy.deepcopy(matcher)):
        assert twin.accept(ord("a"))
        assert (twin.num_tokens, matcher.num_tokens) == (1, 0)


def test_numbers_beyond_all_measure_are_numbers() -> None:
    matcher = GrammarCompiler(vocabulary).compile_regex("abc").matcher()
    assert matcher.forced_bytes(10**30) == b"abc"
    assert matcher.forced_tokens(10**30) == matcher.forced_tokens()
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(10**30)
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(-(10**30))


def test_a_matcher_comes_from_its_grammar() -> None:
    grammar = GrammarCompiler(vocabulary, machine="python").compile_regex("a")
    assert Matcher(grammar).num_tokens == 0
    if machine_for(vocabulary, Limits(), None).name == "native":
        with pytest.raises(TypeError, match="take its `matcher"):
            Matcher(GrammarCompiler(vocabulary, machine="native").compile_regex("a"))


def test_a_vocabulary_can_be_sent_to_another_process() -> None:
    GrammarCompiler(vocabulary).compile_regex("a")
    twin = pickle.loads(pickle.dumps(vocabulary))
    assert twin.token_bytes == vocabulary.token_bytes
    assert GrammarCompiler(twin).compile_regex("a").matcher().accept(ord("a"))
