"""Stop patterns: where the first match lies, what may be shown before, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.runtime.tokenization import OutputBuffer
from palmette.runtime.tokenization.stop_regex import PatternMatcher, compiled_pattern
from palmette.runtime.tokenization.stream import StopMatch

PATTERNS = ["a+b", "ab|b", "(ab)+a", "[^a]{2}", "a.b", "aba|bab|bb", "(?i)AB", "é|b\\s"]


def by_re(pattern: str, text: str) -> StopMatch | None:
    """The same by trying every place."""
    wanted = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if wanted.fullmatch(text, start, end):
                return StopMatch(pattern, start, end)
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
@given(parts=st.lists(st.text("abé \n", max_size=4), max_size=8))
def test_the_match_is_the_first_that_is_complete_however_the_text_is_cut(
    pattern: str, parts: list[str]
) -> None:
    matcher, found = PatternMatcher(pattern), None
    num_fed = num_shown = 0
    for part in parts:
        found = matcher.feed(part)
        if found is not None:
            break
        num_fed += len(part)
        num_shown = num_fed - matcher.num_held
    assert found == by_re(pattern, "".join(parts))
    assert found is None or num_shown <= found.start


@pytest.mark.parametrize(
    ("pattern", "text", "num_held"),
    [("a+b", "xaaa", 3), ("a+b", "aac", 0), ("abc", "ab", 2), ("abc", "abab", 2), ("x.y", "x", 1)],
)
def test_only_what_may_become_a_match_is_held_back(pattern: str, text: str, num_held: int) -> None:
    matcher = PatternMatcher(pattern)
    assert matcher.feed(text) is None
    assert matcher.num_held == num_held


def test_strings_and_patterns_stop_together_and_the_first_wins() -> None:
    def fed(*parts: str) -> tuple[str | None, str]:
        buffer = OutputBuffer(lambda i: parts[i].encode(), ["END"], [r"\n\n", "[0-9]{3}"])
        shown = ""
        for index in range(len(parts)):
            matched = buffer.feed(index)
            shown += buffer.take()[1]
            if matched is not None:
                return matched, shown + buffer.cut_text
        return None, shown + buffer.finish()[1]

    assert fed("12", " 12", "3 END") == ("[0-9]{3}", "12 ")
    assert fed("12 E", "ND 123") == ("END", "12 ")
    assert fed("a\n", "b\n", "\nc") == (r"\n\n", "a\nb")
    assert fed("a\n", "b 12") == (None, "a\nb 12")


def test_a_pattern_that_makes_others_try_again_and_again_has_few_states() -> None:
    for pattern in ("(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*a){12}b", "(a?){40}a{40}b"):
        assert len(compiled_pattern(pattern).accepting) < 150
        assert PatternMatcher(pattern).feed("a" * 3000) is None
        found = PatternMatcher(pattern).feed("a" * 3000 + "b")
        assert found is not None
        assert (found.start, found.end) == (3001 - 81 if "?" in pattern else 0, 3001)


@pytest.mark.parametrize(
    "pattern",
    ["(a|b)*a(a|b){12}", "((a{1000}){1000}){1000}", "(){1000000000}x", "x" * 1001, "(" * 500],
)
def test_a_pattern_that_is_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex") as info:
        compiled_pattern(pattern)
    assert info.value.param == "stop_regex"


@pytest.mark.parametrize(
    ("pattern", "error", "words"),
    [
        ("[", InvalidRequest, "stop_regex"),
        (r"(a)\1", InvalidRequest, "back-reference"),
        ("a*", InvalidRequest, "matches the empty text"),
        ("a(?=b)", UnsupportedFeature, "an assertion in stop_regex"),
        (r"\bend", UnsupportedFeature, "an assertion in stop_regex"),
        ("end$", UnsupportedFeature, "an assertion in stop_regex"),
    ],
)
def test_what_is_no_stop_pattern_is_refused(
    pattern: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        compiled_pattern(pattern)
