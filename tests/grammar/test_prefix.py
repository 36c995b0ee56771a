"""Texts that begin with what a healed prompt has taken back."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.grammar import GrammarCompiler, GrammarError, Vocabulary
from palmette.grammar.errors import GrammarTooComplex, UnsatisfiableGrammar
from palmette.grammar.machine import MachineName
from palmette.grammar.prefix import PrefixGrammar, PrefixMatcher

TOKENS = [b"a", b"b", b":", b"/", b"//", b"://", b":/a", b"ab", b"aba", b"\xc3", b"\xa9", b"\xa9a"]
STOP = len(TOKENS)
VOCABULARY = Vocabulary([*TOKENS, b"", b""], [STOP], num_rows=len(TOKENS) + 4)
MACHINES: list[MachineName] = ["native", "python"]


def mask_of(matcher: PrefixMatcher, budget: int | None = None) -> set[int]:
    row = np.zeros(VOCABULARY.num_rows, bool)
    matcher.fill_mask(row, budget=budget)
    return set(np.flatnonzero(row).tolist())


def needed(rest: bytes) -> float:
    """The fewest tokens that spell `rest` or reach beyond it, by trying all."""
    for count in range(len(rest) + 1):
        for tokens in itertools.product(TOKENS, repeat=count):
            if b"".join(tokens).startswith(rest) and not b"".join(tokens[:-1]).startswith(rest):
                return count
            if not rest:
                return 0
    return math.inf


PREFIXES = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3).map(b"".join)


@given(prefix=PREFIXES, data=st.data())
def test_until_the_prefix_is_there_the_mask_has_the_tokens_that_go_with_it(
    prefix: bytes, data: st.DataObject
) -> None:
    matcher = PrefixGrammar(VOCABULARY, prefix).matcher()
    rest = prefix
    while rest:
        expected = {i for i, t in enumerate(TOKENS) if rest.startswith(t) or t.startswith(rest)}
        assert not matcher.is_complete
        assert mask_of(matcher) == expected
        for token_id in range(-1, VOCABULARY.num_rows + 1):
            assert matcher.copy().accept(token_id) == (token_id in expected)
        token_id = data.draw(st.sampled_from(sorted(expected)))
        assert matcher.accept(token_id)
        rest = rest[len(TOKENS[token_id]) :]
    assert matcher.is_complete
    assert not matcher.is_finished
    assert mask_of(matcher) == set(range(VOCABULARY.num_rows))  # control tokens too
    num_tokens = matcher.num_tokens
    assert matcher.accept(STOP)
    matcher.rollback(1 + num_tokens)
    assert matcher.num_tokens == 0
    assert mask_of(matcher) == mask_of(PrefixGrammar(VOCABULARY, prefix).matcher())


@given(prefix=PREFIXES.filter(lambda prefix: len(prefix) <= 5), budget=st.integers(1, 6))
def test_within_a_budget_the_prefix_can_always_be_completed(prefix: bytes, budget: int) -> None:
    grammar = PrefixGrammar(VOCABULARY, prefix)
    assert grammar.shortest_length == needed(prefix)
    limit = max(budget, grammar.shortest_length)
    allowed = mask_of(grammar.matcher(), budget)
    assert allowed == {
        i
        for i, t in enumerate(TOKENS)
        if (prefix.startswith(t) or t.startswith(prefix)) and 1 + needed(prefix[len(t) :]) <= limit
    }
    assert allowed


def test_a_prefix_that_the_vocabulary_cannot_spell_is_an_error() -> None:
    with pytest.raises(GrammarTooComplex, match="cannot spell"):
        PrefixGrammar(VOCABULARY, b"axb").shortest_length  # noqa: B018


def texts_of(compiler: GrammarCompiler, kind: str, source: str, prefix: str) -> set[bytes]:
    """All complete texts of at most four tokens."""
    options = {"prefix": prefix} if prefix else {}
    grammar = getattr(compiler, f"compile_{kind}")(source, **options)
    found = set()
    for count in range(5):
        for token_ids in itertools.product(range(len(TOKENS)), repeat=count):
            matcher = grammar.matcher()
            if all(map(matcher.accept, token_ids)) and matcher.is_complete:
                found.add(b"".join(TOKENS[token_id] for token_id in token_ids))
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "/{0,2}a?"),
        ("regex", "(ab)*"),
        ("choices", ["//", "/a", "b"]),
        ("grammar", 'root ::= "a" root "b" | "//"'),
    ],
)
def test_a_grammar_with_a_prefix_has_its_texts_with_that_before_them(
    machine: MachineName, kind: str, source: str
) -> None:
    compiler = GrammarCompiler(VOCABULARY, machine=machine)
    plain = texts_of(compiler, kind, source, "")
    healed = texts_of(compiler, kind, source, ":")
    assert all(text.startswith(b":") for text in healed)
    # So many bytes take no more tokens than were tried.
    assert {text[1:] for text in healed if len(text) <= 4} == {t for t in plain if len(t) <= 3}
    grammar = getattr(compiler, f"compile_{kind}")(source, prefix=":")
    assert not grammar.matcher().accept(0)
    assert grammar is not getattr(compiler, f"compile_{kind}")(source)


@pytest.mark.parametrize("machine", MACHINES)
def test_json_and_structural_tags_come_behind_a_prefix(machine: MachineName) -> None:
    every_byte = [bytes([value]) for value in range(256)]
    compiler = GrammarCompiler(Vocabulary([*every_byte, b":[", b""], [257]), machine=machine)
    array = {"type": "array", "items": {"const": 1}, "maxItems": 2}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": array}}
    for grammar in (
        compiler.compile_json_schema(array, prefix=":"),
        compiler.compile_structural_tag(tag, prefix=":"),
    ):
        matcher = grammar.matcher()
        assert not matcher.accept(ord("["))
        assert all(map(matcher.accept, [256, ord("1"), ord("]")]))
        assert matcher.is_finished


def test_a_prefix_of_a_grammar_is_checked() -> None:
    compiler = GrammarCompiler(VOCABULARY)
    with pytest.raises(UnsatisfiableGrammar, match="cannot spell the prefix"):
        compiler.compile_regex("a", prefix="x")
    with pytest.raises(GrammarError, match="not valid Unicode"):
        compiler.compile_regex("a", prefix="\ud800")
