"""Forced bytes, and texts whose tokens are the tokenizer's own."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest

from palmette.grammar import CompiledGrammar, GrammarCompiler, Matcher, Vocabulary
from palmette.grammar.guesses import Guesses
from palmette.grammar.jump import CanonicalText, Spelling, forced_share
from palmette.grammar.testing import allowed

# Greedy, longest first: an encoding that is not a function of pairs, as a tokenizer's may be.
WORDS = [b'{"', b'":', b'":"', b'"}', b'""', b"name", b"na", b"true", b"tr", b"ue}", b"abc", b"bcd"]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b""]
STOP = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, {STOP})
IDS = {token: index for index, token in enumerate(TOKENS) if token}


def encode(text: str) -> list[int]:
    raw, ids = text.encode(), []
    while raw:
        length = next(n for n in range(min(6, len(raw)), 0, -1) if raw[:n] in IDS)
        ids.append(IDS[raw[:length]])
        raw = raw[length:]
    return ids


def regex(pattern: str) -> CompiledGrammar:
    return GrammarCompiler(VOCABULARY).compile_regex(pattern)


def after(grammar: CompiledGrammar, text: bytes) -> Matcher:
    matcher = grammar.matcher()
    for byte in text:
        assert matcher.accept(byte)
    return matcher


PATTERNS = ['{"name":"[a-d]{0,3}"}', "abc(d|e)", "(abc)?d", "x[é-ë]y", "true|tr", "(na|name)*x", ""]


def prefixes(grammar: CompiledGrammar, depth: int = 6) -> list[bytes]:
    """Some beginnings of texts, by single bytes."""
    rng, found = random.Random(1), [b""]
    for _ in range(20):
        matcher, text = grammar.matcher(), b""
        for _ in range(depth):
            bytes_ = [token for token in allowed(matcher, VOCABULARY) if token < 256]
            if not bytes_:
                break
            text += bytes([rng.choice(bytes_)])
            matcher.accept(text[-1])
            found.append(text)
    return sorted(set(found))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_forced_bytes_are_those_without_another_choice(pattern: str) -> None:
    grammar = regex(pattern)
    for text in prefixes(grammar):
        matcher = after(grammar, text)
        forced = matcher.forced_bytes()
        assert matcher.forced_bytes(1) == forced[:1]
        for byte in forced:
            assert not matcher.is_complete
            assert [token for token in allowed(matcher, VOCABULARY) if token < 256] == [byte]
            matcher.accept(byte)
        choices = [token for token in allowed(matcher, VOCABULARY) if token < 256]
        assert matcher.is_complete or len(choices) != 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_extensions_are_the_tokens_that_reach_back_into_the_text(pattern: str) -> None:
    grammar = regex(pattern)
    for text in prefixes(grammar):
        wanted = set()
        for token in TOKENS:
            for length in range(1, len(token)):
                if text.endswith(token[:length]):
                    matcher = after(grammar, text)
                    if all(matcher.accept(byte) for byte in token[length:]):
                        wanted.add(token[length:])
        found = after(grammar, text).extensions(text, 1000)
        assert found == sorted(wanted)
        assert after(grammar, text).extensions(text, 1) == found[:1] or len(found) > 1


def test_what_can_be_completed_within_a_budget_is_known() -> None:
    grammar = regex("name(abc){2}")
    matcher = grammar.matcher()
    assert not matcher.can_complete(2)
    assert matcher.can_complete(3)
    assert matcher.accept(IDS[b"name"])
    assert matcher.can_complete(2)


def test_tokens_that_a_continuation_could_change_are_held_back() -> None:
    spelling = Spelling(VOCABULARY, encode)
    text = CanonicalText(regex('x{"name":("abc"|true)}').matcher(), spelling)
    advance = text.begin(100)
    # A colon is forced, but with the quote behind it it would be one token with both quotes.
    assert [TOKENS[i] for i in advance.token_ids] == [b"x", b'{"', b"name"]
    assert text.num_forced == 3


def test_a_drawn_token_is_replaced_by_what_the_tokenizer_has_for_the_text() -> None:
    text = CanonicalText(regex("[a-z]{4}").matcher(), Spelling(VOCABULARY, encode))
    text.begin(100)
    assert text.draw(IDS[b"n"], 100) == (0, (IDS[b"n"],))
    assert text.draw(IDS[b"a"], 100) == (0, (IDS[b"na"],))
    assert text.draw(IDS[b"m"], 100) == (1, (IDS[b"m"],))
    assert text.draw(IDS[b"e"], 100) == (0, (IDS[b"name"],))
    assert text.text == b"name"
    assert text.draw(IDS[b"e"], 100) is None


def test_tokens_stay_as_drawn_where_others_would_leave_no_room() -> None:
    # In two tokens the text can be spelled, but not with the tokenizer's own, which are three.
    grammar = regex("a(bcd)")
    assert [TOKENS[i] for i in encode("abcd")] == [b"abc", b"d"]
    text = CanonicalText(regex("a(bcd|x{9})").matcher(), Spelling(VOCABULARY, encode))
    assert text.draw(IDS[b"a"], 2) is not None
    assert text.draw(IDS[b"bcd"], 1) is not None
    assert [TOKENS[i] for i in text.token_ids] in ([b"abc", b"d"], [b"a", b"bcd"])
    assert grammar.shortest_length == 2


def test_a_text_goes_back_to_where_it_stood() -> None:
    text = CanonicalText(regex('{"name":"[a-d]{0,3}"}').matcher(), Spelling(VOCABULARY, encode))
    text.begin(100)
    saved, before = text.save(), list(text.token_ids)
    assert text.draw(IDS[b"a"], 100) is not None
    assert text.draw(IDS[b"d"], 100) is not None
    text.restore(saved)
    assert (text.token_ids, text.num_forced) == (before, len(before))
    assert text.draw(IDS[b"b"], 100) == (len(before), (IDS[b"b"],))


@pytest.mark.parametrize("pattern", [*PATTERNS, '{"name":(true|"[a-z ]*")}', "[a-e]{0,9}"])
def test_whatever_is_drawn_the_tokens_of_the_whole_are_the_tokenizers(pattern: str) -> None:
    grammar, spelling = regex(pattern), Spelling(VOCABULARY, encode)
    for seed in range(30):
        rng = random.Random(seed)
        matcher = grammar.matcher()
        text = CanonicalText(matcher, spelling)
        text.begin(60)
        told: list[int] = []
        drawn: set[int] = set()  # bytes, by their place
        while True:
            assert text.token_ids[: len(told)] == told  # final tokens stay
            ends = [*accumulate((len(TOKENS[i]) for i in text.token_ids), initial=0)]
            assert text.num_forced == sum(
                drawn.isdisjoint(range(start, end)) for start, end in pairwise(ends)
            )
            told = text.token_ids[: text.num_final]
            choices = allowed(text.matcher, VOCABULARY)  # type: ignore[arg-type]
            token_id = rng.choice(choices) if choices else STOP
            if token_id == STOP or len(text.token_ids) > 40:
                break
            drawn.update(range(ends[-1], ends[-1] + len(TOKENS[token_id])))
            assert text.draw(token_id, 60) is not None
        text.finish(100)
        assert text.token_ids[: len(told)] == told
        assert text.token_ids == encode(text.text.decode("utf-8", "ignore")) or len(told) > 40


def test_the_share_of_forced_tokens_of_a_text() -> None:
    spelling = Spelling(VOCABULARY, encode)
    grammar = regex('{"name":(true|false)}')
    found = forced_share(grammar.matcher(), spelling, '{"name":true}')
    assert found is not None
    # Drawn: `true` and what is behind it in one token; forced: all before.
    assert found.num_tokens == len(encode('{"name":true}'))
    assert found.num_forced + found.num_draws == found.num_tokens
    assert 0.5 < found.share < 1
    assert found.num_passes == found.num_draws
    assert forced_share(grammar.matcher(), spelling, '{"name":null}') is None


def test_draws_behind_right_guesses_take_no_pass() -> None:
    spelling = Spelling(VOCABULARY, encode)
    grammar = regex('{"name":(true|false),"a":(true|false)}')
    guesses = Guesses()
    texts = ['{"name":true,"a":false}'] * 2 + ['{"name":false,"a":false}']
    first, second, third = (
        forced_share(grammar.matcher(), spelling, text, guesses=guesses) for text in texts
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.num_forced == second.num_forced
    assert first.num_draws == second.num_draws > 1
    assert second.num_passes == 1 <= first.num_passes
    assert third.num_passes == 2  # the first guess was wrong
