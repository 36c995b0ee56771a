from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import GrammarCompiler, InvalidGrammar, Limits, UnsupportedGrammar
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.term_store import TermStore
from palmette.grammar.testing import byte_vocabulary

store = TermStore(Limits(max_terms=10_000_000))  # of all tests together
strings = Strings(store)

PATTERNS = ["^a", "b$", "[ab]", "^[^c]*$", "aa|é", "^.{2,3}$", '["\\n/]']
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "aab",
    "ba",
    "é",
    "c",
    "abc",
    'a"b',
    "a\nb",
    "a/",
    "😀",
    "\x01a",
    "\x7f",
]

patterns = st.lists(st.sampled_from(PATTERNS), max_size=2).map(
    lambda listed: tuple((pattern, "#/pattern") for pattern in listed)
)
rules = st.builds(
    StringRule,
    st.integers(0, 2),
    st.none() | st.integers(0, 3),
    patterns,
    st.just(()),
    patterns,
    st.just(()),
    st.lists(st.sampled_from(TEXTS), max_size=3).map(tuple),
)


def python_regex(pattern: str) -> re.Pattern[str]:
    """The same pattern for Python, with its own ideas of the dollar and the dot set right."""
    return re.compile(pattern.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]"))


def is_allowed(rule: StringRule, text: str) -> bool:
    if len(text) < rule.min_length:
        return False
    if rule.max_length is not None and len(text) > rule.max_length:
        return False
    return (
        all(python_regex(pattern).search(text) for pattern, _ in rule.patterns)
        and not any(python_regex(pattern).search(text) for pattern, _ in rule.excluded_patterns)
        and text not in rule.excluded
    )


@given(rules)
@settings(deadline=None, max_examples=150)
def test_all_that_a_rule_says_holds_at_once(rule: StringRule) -> None:
    store.start_clock(20)
    term, canonical = strings.term(rule), strings.term(rule, canonical=True)
    for text in TEXTS:
        expected = is_allowed(rule, text)
        assert strings.holds(rule, text) == expected
        plain = json.dumps(text, ensure_ascii=False).encode()
        escaped = json.dumps(text).encode()
        everything = '"' + "".join(f"\\u{u:04X}" for u in utf16(text)) + '"'
        assert store.accepts(term, plain) == expected
        assert store.accepts(term, escaped) == expected
        is_spelled = rule.is_free or not any(" " <= c <= "~" and c not in '"\\' for c in text)
        assert store.accepts(term, everything.encode()) == (expected and is_spelled)
        slashes = rule.is_free or "/" not in text
        assert store.accepts(term, escaped.replace(b"/", b"\\/")) == (expected and slashes)
        assert store.accepts(canonical, plain) == expected
        assert store.accepts(canonical, escaped) == (expected and escaped == plain)
    assert not store.accepts(canonical, b'"\\/"')
    if not store.is_empty(term):
        assert is_allowed(rule, json.loads(store.shortest(term)))
    else:
        assert not any(is_allowed(rule, text) for text in TEXTS)


def utf16(text: str) -> list[int]:
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]


def test_texts_are_listed_in_the_spellings_that_patterns_have() -> None:
    listed = ["ab", "a/", 'a"', "é", "ab😀"]
    term = strings.listed(listed)
    for text in listed:
        plain = json.dumps(text, ensure_ascii=False).encode()
        for spelled in (plain, json.dumps(text).encode()):
            assert store.accepts(term, spelled)
    assert not store.accepts(term, b'"\\u0061b"')
    assert not store.accepts(term, b'"a\\/"')
    assert store.accepts(term, b'"a\\u0022"')
    assert not store.accepts(term, b'"a"')


@given(rules, rules, st.sampled_from(TEXTS))
@settings(deadline=None)
def test_rules_intersect(one: StringRule, other: StringRule, text: str) -> None:
    both = one & other
    assert strings.holds(both, text) == (strings.holds(one, text) and strings.holds(other, text))


def test_long_texts_are_counted_not_unrolled() -> None:
    small = TermStore(Limits())
    rule = StringRule(5, 1_000, excluded=("secret", "hidden"))
    term = Strings(small).term(rule)
    assert len(small) < 2_000
    assert small.accepts(term, b'"' + b"a" * 1_000 + b'"')
    assert not small.accepts(term, b'"' + b"a" * 1_001 + b'"')
    assert not small.accepts(term, b'"s\\u0065cret"')
    assert not small.accepts(term, b'"word"')


def test_a_lone_surrogate_is_in_no_string() -> None:
    assert not strings.holds(StringRule(), "a\ud800")
    assert store.is_empty(strings.listed(["\udc00"]))
    assert strings.term(StringRule(excluded=("\ud800",))) is not store.empty


def test_a_pattern_is_matched_anywhere_and_blamed_by_its_pointer() -> None:
    assert strings.matches("b+", "#/p", "abc")
    assert not strings.matches("^b", "#/p", "abc")
    with pytest.raises(InvalidGrammar, match="#/p: position 0: missing") as caught:
        strings.matches("(", "#/p", "abc")
    assert caught.value.pointer == "#/p"
    rule = StringRule(excluded_patterns=(("(a)\\1", "#/not/pattern"),))
    with pytest.raises(UnsupportedGrammar, match="#/not/pattern: position 3: a back-reference"):
        strings.term(rule)


def test_what_a_pattern_spells_out_is_forced() -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    matcher = compiler.compile_json_schema({"type": "string", "pattern": "^AV:[NL]:$"}).matcher()
    assert matcher.forced_bytes() == b'"AV:'
    for byte in b'"AV:N':
        assert matcher.accept(byte)
    assert matcher.forced_bytes() == b':"'
