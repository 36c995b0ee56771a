from __future__ import annotations

import json
import random

import jsonschema
import pytest

from palmette.grammar import Limits, UnsupportedGrammar
from palmette.grammar.json_schema.formats import PATTERNS, WIDER
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.term_store import TermStore

store = TermStore(Limits(max_terms=10_000_000))  # of all tests together
strings = Strings(store)

TABLE: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01", "2023-06-30"],
        [
            "2023-02-29",
            "1900-02-29",
            "2023-06-31",
            "2023-13-01",
            "2023-00-10",
            "23-01-01",
            "2023-1-01",
            "20230101",
            "2023-01-01 ",
            "²023-01-01",
            "0000-01-01",
        ],
    ),
    "time": (
        ["00:00:00Z", "23:59:59.999999-12:30", "07:08:09+23:59"],
        [
            "24:00:00Z",
            "07:60:00Z",
            "07:08:61Z",
            "07:08Z",
            "07:08:09",
            "07:08:09+24:00",
            "07:08:09.Z",
            "07:08:09+0100",
            "7:08:09Z",
        ],
    ),
    "date-time": (
        ["2031-05-06T07:08:09Z", "2031-05-06T07:08:09.5+05:30"],
        ["2031-05-06", "2031-05-06 07:08:09Z", "2031-05-06T07:08:09", "2031-02-30T07:08:09Z"],
    ),
    "duration": (
        ["P1Y2M3DT4H5M6S", "PT36H", "P2W", "P1M", "PT5M", "P4Y", "P0D"],
        ["P", "PT", "1D", "P1D2H", "P1YT", "P2W1D", "P1S", "PT1D", "P1H", "P1Y2D", "P²D"],
    ),
    "email": (
        [
            "a@b",
            "first.last+tag@example.org",
            '"odd name"@example.org',
            "x@[192.0.2.1]",
            "x@[IPv6:::1]",
            "te~st@example.com",
        ],
        ["a", "@b", "a@", "a..b@c", ".a@b", "a.@b", "a@b@c", "a b@c", "x@[300.0.0.1]", "a@-b.c"],
    ),
    "idn-email": (["실례@실례.테스트", "josé@exemplo.pt", "a@b.c"], ["실례", "@실례", "a@-한"]),
    "hostname": (
        ["a", "www.example.org", "a-b.c9", "9a.b", "A" * 63 + ".x", "a--b-c"],
        [
            "",
            "-a",
            "a-",
            "a.-b",
            "a..b",
            "a.",
            ".a",
            "a_b",
            "A" * 64,
            "ab--.c",
            "ab--cd.e",
            "xn--zca.de",
            "ab--c",
            "a" * 63 + ("." + "b" * 62) * 3 + ".cc",
            "é.fr",
        ],
    ),
    "idn-hostname": (
        ["straße.de", "пример.ru", "例え.テスト", "실례.테스트", "a-b.c", "ко-т"],
        ["-a", "a_b", "xn--zca.de", "ко--т", "・.a", "a..b", "l·l", "ABC"],
    ),
    "ipv4": (
        ["0.0.0.0", "192.0.2.1", "255.255.255.255"],
        ["256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.4 ", "1.2.3.a", "1..3.4"],
    ),
    "ipv6": (
        [
            "::",
            "::1",
            "2001:db8::8:800:200c:417a",
            "1:2:3:4:5:6:7:8",
            "::ffff:192.0.2.1",
            "1::3:4:5:6:7:8",
            "1:2:3:4:5:6:7::",
            "1:2:3:4:5:6:192.0.2.1",
            "ABCD::",
        ],
        [
            ":",
            ":::",
            "1:2:3:4:5:6:7",
            "1:2:3:4:5:6:7:8:9",
            "1::2::3",
            "12345::",
            "::1%eth0",
            "1:2:3:4:5:6:7:192.0.2.1",
            "::192.0.2",
            "g::",
            "1:2:3:4:5:6:7:8::",
        ],
    ),
    "uri": (
        [
            "https://example.org/a?b=c#d",
            "urn:isbn:0",
            "http://[2001:db8::1]:80/",
            "mailto:a@b.c",
            "ftp://u:p@h/%7Ea",
            "x:",
            "file:///etc",
            "http://[V1.fe]/",
        ],
        [
            "",
            "//example.org",
            "/a",
            "a b:c",
            "http://a b",
            "http://[::1",
            "1a:b",
            "x:%zz",
            "x:<y>",
            "http://é.fr",
            "x:\\y",
            "http://a:b/",
        ],
    ),
    "uri-reference": (
        ["", "//example.org/a", "/a/b", "a/b:c", "?q", "#f", "../x", "https://a"],
        ["\\a", "a b", "1:a", "#a#b", "a%", ":a", "é"],
    ),
    "iri": (
        ["https://例え.テスト/ä?ö#ü", "x:é", "x:?\ue000"],
        ["é", "x:\ue000", "x:<é>", "x:\x80"],
    ),
    "iri-reference": (["é", "/ä/ö", "//例え", ""], ["é:b c", "\\é", ":é"]),
    "uri-template": (
        ["", "/a/{b}", "{+a,b*}{?c:3}{&x.y}", "http://é/{%41_}", "it's"],
        ["{", "}", "{}", "{a b}", "{a:0}", "{a:12345}", "{a}}", "{=a}", "<a>", "{a..b}", "%4"],
    ),
    "uuid": (
        ["2EB8AA08-aa98-11ea-B4aa-73b441d16380", "00000000-0000-0000-0000-000000000000"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638", "g" * 36],
    ),
    "json-pointer": (["", "/", "/a/0/~0~1/é", "//"], ["a", "/~", "/~2", "#/a", "/a/~"]),
    "relative-json-pointer": (
        ["0", "1/a", "10#", "0/"],
        ["", "/a", "01", "-1", "1##", "+1/a", "0a"],
    ),
    "regex": (
        [
            "",
            "^[a-z0-9_-]+$",
            "a|b|",
            r"(\d{2,3}[.,]?)*?\.",
            "(?:a(b(c)))",
            "(?=a)b{3,}",
            "[^-a]é",
            r"^\w+@\w+\.\w{2,4}$",
            "[0-9]{1,15}",
        ],
        [
            "(",
            ")",
            "[",
            "a**",
            "*",
            "a{2,1}",
            "\\",
            "(?",
            "[z-a]",
            "a{",
            "^*",
            "(a",
            r"\q",
            "(?=a)*",
        ],
    ),
}


# Not written, though another reader may take it for valid.
MAYBE = {"0000-01-01", "xn--zca.de", "ab--cd.e", "ab--c"}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_format_holds_of_its_texts_and_no_others(name: str) -> None:
    valid, invalid = TABLE[name]
    rule = StringRule(formats=(name,))
    assert [text for text in valid if not strings.holds(rule, text)] == []
    assert [text for text in invalid if strings.holds(rule, text)] == []


def random_texts(name: str, count: int) -> list[str]:
    """Texts of the format, by random walks that are then completed."""
    store.start_clock(60)
    start = strings.term(StringRule(formats=(name,)), canonical=True)
    draw = random.Random(name)
    texts = []
    for _ in range(count):
        term, written = start, bytearray()
        for _ in range(draw.choice((3, 9, 25))):
            parts = list(store.parts(term))
            if not parts:
                break
            bits, term = draw.choice(parts)
            written.append(draw.choice([byte for byte in range(256) if bits >> byte & 1]))
        texts.append(json.loads(written + store.shortest(term)))
    return texts


CHECKED = sorted(set(PATTERNS) & set(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers))


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_what_is_written_is_valid_to_another_checker(name: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    assert [text for text in random_texts(name, 150) if not checker.conforms(text, name)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "0000-02-29"),
        ("time", "23:59:60Z"),
        ("time", "07:08:09z"),
        ("date-time", "2031-05-06t07:08:09z"),
        ("hostname", "xn--zca.de"),
    ],
)
def test_what_may_be_valid_is_neither_written_nor_taken_for_invalid(name: str, text: str) -> None:
    assert not strings.holds(StringRule(formats=(name,)), text)
    assert not strings.holds(StringRule(excluded_formats=(name,)), text)
    assert not store.accepts(
        strings.term(StringRule(excluded_formats=(name,))), json.dumps(text).encode()
    )


@pytest.mark.parametrize("name", [name for name in PATTERNS if WIDER.get(name, "") is not None])
def test_a_format_can_be_excluded(name: str) -> None:
    valid, invalid = TABLE[name]
    rule = StringRule(excluded_formats=(name,))
    term = strings.term(rule)
    for text in valid:
        assert not strings.holds(rule, text)
        assert not store.accepts(term, json.dumps(text).encode())
    for text in set(invalid) - MAYBE:
        assert strings.holds(rule, text)
        assert store.accepts(term, json.dumps(text).encode())


@pytest.mark.parametrize("name", [name for name in WIDER if WIDER[name] is None])
def test_that_a_text_is_not_of_a_loose_format_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=f"not of the format '{name}'"):
        strings.term(StringRule(excluded_formats=(name,)))
