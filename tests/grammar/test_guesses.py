"""Guesses: what came last at the same place, and never a token that the grammar does not allow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    Matcher,
    Vocabulary,
)
from palmette.grammar.guesses import Guesses, GuessMatcher
from palmette.grammar.machine import MachineName

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["red", "green"]},
            "size": {"type": "integer"},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
}
WORDS = [bytes([byte]) for byte in range(0x20, 0x7F)] + [b'":', b'","', b"name", b"kind", b"gre"]
STOP = len(WORDS)


@pytest.fixture(params=["native", "python"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    name: MachineName = request.param
    if name == "native":
        pytest.importorskip("palmette.grammar._native", reason="the extension was not built")
    return GrammarCompiler(Vocabulary([*WORDS, b""], {STOP}), machine=name)


def ids(text: str) -> list[int]:
    return [WORDS.index(bytes([byte])) for byte in text.encode()]


def taught(guesses: Guesses, grammar: CompiledGrammar, text: str) -> Matcher:
    """A matcher behind the text, whose letters were drawn one by one."""
    matcher = grammar.matcher()
    for token_id in ids(text):
        assert matcher.accept(token_id)
        guesses.note(matcher, [token_id])
    return matcher


def test_the_next_property_is_guessed_whatever_the_values_were(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_json_schema(SCHEMA)
    guesses = Guesses()
    taught(guesses, grammar, '[{"name":"Ada","size":1')
    other = grammar.matcher()
    for token_id in ids('[{"name":"Bob"'):
        assert other.accept(token_id)
    ahead = guesses.ahead(other, 9)
    assert [guess.token_id for guess in ahead] == ids(',"size":1')
    assert all(guess.is_drawn for guess in ahead)
    assert other.num_tokens == len('[{"name":"Bob"')
    assert len(guesses.ahead(other, 3)) == 3
    assert guesses.ahead(other, 0) == ()


def test_what_differs_each_time_is_not_guessed(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_json_schema(SCHEMA)
    guesses = Guesses()
    matcher = taught(guesses, grammar, '[{"name":"abcdefgh')
    assert guesses.ahead(matcher, 8) == ()  # inside a string each place is the same
    for token_id in ids("hh"):
        assert matcher.accept(token_id)
        guesses.note(matcher, [token_id])
    # How often it comes once more nobody knows.
    assert [guess.token_id for guess in guesses.ahead(matcher, 8)] == ids("h")


def test_forced_tokens_are_guessed_as_such(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_choices(["(ab)", "{cd}"])
    guesses = Guesses()
    matcher = grammar.matcher()
    for token_id in ids("{cd}"):
        assert matcher.accept(token_id)
    guesses.note(matcher, ids("{cd}"))
    drawn, *forced = guesses.ahead(grammar.matcher(), 8)
    assert drawn[:2] == (ids("{")[0], True)
    assert [guess[:2] for guess in forced] == [(token_id, False) for token_id in ids("cd}")]


def test_likely_tokens_come_before_remembered_ones(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_choices(["(ab)", "{cd}"])
    guesses = Guesses()
    taught(guesses, grammar, "(ab)")
    start = grammar.matcher()
    ahead = guesses.ahead(start, 8, first=ids("(a"))
    assert [guess.token_id for guess in ahead] == ids("(ab)")
    assert [guess.token_id for guess in guesses.ahead(start, 8, first=ids("{"))] == ids("{")
    assert [guess.token_id for guess in guesses.ahead(start, 8, first=ids("}"))] == ids("(ab)")
    assert start.num_tokens == 0


@given(
    texts=st.lists(st.lists(st.integers(0, STOP), max_size=30), max_size=6), limit=st.integers(0, 9)
)
@settings(deadline=None, max_examples=60)
def test_all_that_is_guessed_is_allowed(texts: list[list[int]], limit: int) -> None:
    grammar = _COMPILER.compile_json_schema(SCHEMA)
    guesses = Guesses(max_places=8)
    for text in texts:
        matcher = grammar.matcher()
        for token_id in text:
            if matcher.accept(token_id):
                guesses.note(matcher, [token_id])
            num_tokens = matcher.num_tokens
            ahead = guesses.ahead(matcher, limit, first=text[:1])
            assert len(ahead) <= limit
            assert matcher.num_tokens == num_tokens
            twin = matcher.copy()
            assert all(twin.accept(guess.token_id) for guess in ahead)
        assert len(guesses) <= 8


_COMPILER = GrammarCompiler(Vocabulary([*WORDS, b""], {STOP}))


def test_looking_back_further_than_the_text_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile_choices(["ab", "cb"]).matcher()
    start = matcher.state()
    assert matcher.accept(ids("a")[0])
    assert matcher.state(1) == start != matcher.state()
    for back in (-1, 2):
        with pytest.raises(IndexError, match="cannot look"):
            matcher.state(back)


def test_no_more_of_a_forced_run_is_remembered_than_asked_for(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_regex("[ab]xyzxyz")
    guesses = Guesses()
    matcher = grammar.matcher()
    for token_id in ids("axyzxyz"):
        assert matcher.accept(token_id)
    guesses.note(matcher, ids("axyzxyz"), limit=4)
    assert len(guesses) == 4
    ahead = guesses.ahead(grammar.matcher(), 9)
    assert [guess.token_id for guess in ahead] == ids("axyz")
    assert [guess.is_drawn for guess in ahead] == [True, False, False, False]


def test_how_likely_a_guess_is_follows_from_what_came(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_regex("([ab][cd])*")
    guesses = Guesses()
    matcher = grammar.matcher()
    rng = random.Random(0)
    for _ in range(200):
        text = rng.choice("ab") + ("c" if rng.random() < 0.9 else "d")
        for token_id in ids(text):
            assert matcher.accept(token_id)
            guesses.note(matcher, [token_id])
    for token_id in ids("bcbc"):  # so that both places are trusted most
        assert matcher.accept(token_id)
        guesses.note(matcher, [token_id])
    (first, *_) = guesses.ahead(grammar.matcher(), 8)
    # Nobody has looked at a guess. Those of so much trust were mostly those at the second place.
    assert 0.5 < first.probability < 0.95


def test_what_always_comes_is_certain_and_what_never_does_is_not() -> None:
    grammar = _COMPILER.compile_regex("[ab]*")
    always, never = Guesses(), Guesses()
    matcher = grammar.matcher()
    for count in range(100):
        token_id = ids("ab"[count // 2 % 2])[0]
        assert matcher.accept(token_id)
        never.note(matcher, [token_id])  # twice the same, so that it is trusted, then another
        assert matcher.accept(ids("a")[0])
        always.note(matcher, ids("a"))
    (likely,) = always.ahead(grammar.matcher(), 8)
    assert likely.probability > 0.95
    never.note(matcher, ids("a"))
    for guess in never.ahead(grammar.matcher(), 8):
        assert guess.probability < 0.7


def test_tokens_held_back_have_a_record_of_their_own() -> None:
    grammar = _COMPILER.compile_choices(["(ab)", "{cd}"])
    guesses = Guesses()
    (before,) = guesses.ahead(grammar.matcher(), 8, first=ids("("))
    for _ in range(20):
        guesses.note_held_back(False)
    (wrong,) = guesses.ahead(grammar.matcher(), 8, first=ids("("))
    for _ in range(200):
        guesses.note_held_back(True)
    (right,) = guesses.ahead(grammar.matcher(), 8, first=ids("("))
    assert wrong.probability < 0.1 < before.probability < 0.9 < right.probability


class Limited:
    """A matcher that reaches a limit behind so many tokens."""

    def __init__(self, matcher: GuessMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._most = num_tokens

    @property
    def num_tokens(self) -> int:
        return self._matcher.num_tokens

    def accept(self, token_id: int) -> bool:
        if self.num_tokens == self._most:
            raise GrammarTooComplex("too many states")
        return self._matcher.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def state(self, back: int = 0) -> int:
        return self._matcher.state(back)


def test_a_limit_that_is_reached_on_the_way_ends_the_guesses_alone(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.compile_regex("[ab][cd][ef]").matcher()
    limited = Limited(matcher, 2)
    ahead = Guesses().ahead(limited, 9, first=ids("ace"))
    assert [guess.token_id for guess in ahead] == ids("ac")
    assert matcher.num_tokens == 0
