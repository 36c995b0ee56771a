"""Streaming: whole characters only, stop strings over token borders, ids and text that agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.runtime.tokenization import OutputBuffer, StopMatcher, StreamDecoder


def tokens(*parts: str | bytes):
    """A vocabulary in which token i stands for part i."""
    table = [part.encode() if isinstance(part, str) else part for part in parts]
    return table.__getitem__, range(len(table))


def run(parts, stop=()):
    """Feed all parts; every release, the stop string found, and the text of a cut token."""
    token_bytes, ids = tokens(*parts)
    buffer = OutputBuffer(token_bytes, stop)
    releases = []
    for token_id in ids:
        matched = buffer.feed(token_id)
        releases.append(buffer.take())
        if matched is not None:
            return releases, matched, buffer.cut_text
    releases.append(buffer.finish())
    return releases, None, buffer.cut_text


def text_of(releases, cut_text):
    return "".join(text for _, text in releases) + cut_text


def test_characters_split_over_tokens_come_once_and_whole():
    parts = [b"A " + b"\xe4\xb8\x96", b"\xc3", b"\xa9", b"b", b"\xf0\x9f\x98", b"\x80"]
    token_bytes, ids = tokens(*parts)
    decoder = StreamDecoder(token_bytes)
    chunks = [decoder.feed(token_id) for token_id in ids]
    assert chunks == ["A 世", "", "é", "b", "", "😀"]
    assert decoder.finish() == ""


def test_a_character_left_open_at_the_end_becomes_one_replacement_character():
    releases, _, _ = run([b"ok", b"\xf0\x9f"])
    assert releases == [([0], "ok"), ([], ""), ([1], "\ufffd")]


def test_bytes_that_cannot_become_a_character_are_replaced_without_holding_up_the_rest():
    releases, _, _ = run([b"a\xff", b"b", b"\xe4\xb8", b"c", b"\x80"])
    assert [text for _, text in releases] == ["a\ufffd", "b", "", "\ufffdc", "\ufffd", ""]


@pytest.mark.parametrize(
    ("stop", "text", "cut_text"),
    [
        (["Par"], "The capital is ", " "),
        (["Pari"], "The capital is ", " "),
        (["is."], "The capital is Par", ""),
        ([" is Paris"], "The capital", ""),
        (["zzz", "s. N"], "The capital is Pari", "i"),
    ],
)
def test_a_stop_string_is_found_across_token_borders(stop, text, cut_text):
    releases, matched, cut = run(["The", " capital", " is", " Par", "is", ".", " Next"], stop)
    assert matched == stop[-1]
    assert text_of(releases, cut) == text
    assert cut == cut_text


def test_only_what_may_be_the_beginning_of_a_stop_string_is_held_back():
    releases, matched, _ = run(["Hello", " there", " ", "<", " more", " text <E", "N"], ["<END>"])
    assert matched is None
    assert [text for _, text in releases] == [
        "Hello",
        " there",
        " ",
        "",
        "< more",
        "",
        "",
        " text <EN",
    ]


def test_the_first_complete_stop_string_wins_however_the_text_is_cut():
    for parts in (["xabcd"], ["xa", "bcd"], ["x", "a", "b", "c", "d"]):
        releases, matched, cut = run(parts, ["abcd", "bc"])
        assert matched == "bc"
        assert text_of(releases, cut) == "xa"


def test_of_stop_strings_complete_at_one_character_the_longest_wins():
    releases, matched, cut = run(["say bye", "now"], ["e", "bye"])
    assert (matched, text_of(releases, cut)) == ("bye", "say ")


def test_a_token_without_bytes_is_released_like_any_other():
    releases, _, _ = run(["a", "", "b"], ["bc"])
    assert releases == [([0], "a"), ([1], ""), ([], ""), ([2], "b")]


def test_nothing_can_be_fed_after_a_stop_or_a_finish():
    token_bytes, _ = tokens("stop")
    buffer = OutputBuffer(token_bytes, ["stop"])
    assert buffer.feed(0) == "stop"
    with pytest.raises(RuntimeError, match="output has ended"):
        buffer.feed(0)
    buffer = OutputBuffer(token_bytes)
    buffer.finish()
    with pytest.raises(RuntimeError, match="output has ended"):
        buffer.feed(0)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher([""])


small_text = st.text("abc", max_size=8)
small_parts = st.lists(st.text("abcé", max_size=4), max_size=12)
stops = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=4)


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """By looking at every beginning of the text: start of the match and the stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@given(small_parts, stops)
def test_output_equals_a_search_of_the_whole_text(parts, stop):
    text = "".join(parts)
    releases, matched, cut = run(parts, stop)
    expected = first_match(text, stop)
    if expected is None:
        assert (matched, text_of(releases, cut)) == (None, text)
    else:
        assert (matched, text_of(releases, cut)) == (expected[1], text[: expected[0]])


@given(st.lists(st.binary(max_size=3), max_size=12), stops)
def test_released_ids_and_text_agree_at_every_release(parts, stop):
    token_bytes, _ = tokens(*parts)
    releases, matched, _ = run(parts, stop)
    ids: list[int] = []
    text = ""
    for released_ids, released_text in releases:
        ids += released_ids
        text += released_text
        assert b"".join(map(token_bytes, ids)).decode("utf-8", "replace") == text
    assert ids == list(range(len(ids)))
    if matched is None:
        assert len(ids) == len(parts)


@given(small_parts, stops.filter(bool))
def test_exactly_the_longest_beginning_of_a_stop_string_is_held_back(parts, stop):
    matcher = StopMatcher(stop)
    text = ""
    for part in parts:
        text += part
        if matcher.feed(part) is not None:
            return
        beginnings = {s[:length] for s in stop for length in range(len(s))}
        longest = max(len(b) for b in beginnings if text.endswith(b))
        assert matcher.num_held == longest
