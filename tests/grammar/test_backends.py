"""Other libraries behind one protocol: each does what ours does, or refuses by name."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from palmette.grammar import GrammarError, InvalidGrammar, Limits, UnsupportedGrammar, Vocabulary
from palmette.grammar.backends import (
    BACKENDS,
    Backend,
    BackendMatcher,
    BackendNotInstalled,
    UnknownBackend,
    UnsupportedByBackend,
    load_backend,
)
from palmette.grammar.testing import byte_vocabulary

WORDS = [b"ab", "é".encode(), b'{"', b'":', b"true", b"12", b"\xc3", b"ab"]
VOCABULARY = byte_vocabulary(WORDS, num_padding=3)
STOP = 256 + len(WORDS)
PEERS = tuple(name for name in BACKENDS if name != "palmette")
LOADED: dict[str, Backend] = {}


def backend_of(name: str) -> Backend:
    if name not in LOADED:
        try:
            LOADED[name] = load_backend(name, VOCABULARY)
        except BackendNotInstalled as error:
            pytest.skip(str(error))
    return LOADED[name]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


def mask_of(matcher: BackendMatcher) -> list[int]:
    row = np.ones(VOCABULARY.num_rows, bool)
    matcher.fill_mask(row)
    return [int(token_id) for token_id in np.flatnonzero(row)]


def takes(matcher: BackendMatcher, token_ids: Sequence[int]) -> bool:
    """Whether the tokens are in the masks, are accepted, and complete a text."""
    for token_id in token_ids:
        if token_id not in mask_of(matcher):
            return False
        assert matcher.accept(token_id)
    return matcher.is_complete and STOP in mask_of(matcher)


OBJECT = {
    "type": "object",
    "properties": {"aé": {"type": "boolean"}, "b": {"enum": ["x", "xy", True]}},
    "required": ["aé", "b"],
    "additionalProperties": False,
}
CASES = {
    "literal": ("regex", "ab?c", ["abc", "ac"], ["a", "ab", "b", "abcc"]),
    "alternatives": ("regex", "(a|ab)(c|bcd)?x", ["ax", "abx", "abcx", "abcdx"], ["x", "abcd"]),
    "classes": ("regex", r"(\d|x\w){2}", ["12", "x_3", "3xa"], ["١1", "xé1", "123"]),
    "characters": ("regex", "[^a]é+", ["éé", "bé", "😀é"], ["aé", "é", "\n"]),
    "repetition": ("regex", "(ab){2,3}", ["abab", "ababab"], ["ab", "abababab"]),
    "choices": ("choices", ["a", "ab", 'é\n"\\x😀'], ["a", "ab", 'é\n"\\x😀'], ["", "b", "é"]),
    "operators": ("choices", ["a.c", "[(*+?^$|{", "#&~-/"], ["a.c", "#&~-/"], ["abc", "#&~"]),
    "object": (
        "json_schema",
        OBJECT,
        ['{"aé":true,"b":"x"}', '{"aé":false,"b":"xy"}', '{"aé":true,"b":true}'],
        ['{"aé":true}', '{"aé": true,"b":"x"}', '{"aé":true,"b":"z"}', "[]", '{"aé":1,"b":"x"}'],
    ),
    "array": (
        "json_schema",
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        ["[true]", "[true,false,true]"],
        ["[]", "[1]", "[true,]", "[true,true,true,true]"],
    ),
}


def source_of(kind: str, source: object) -> str:
    return str(source) if kind == "regex" else json.dumps(source, ensure_ascii=False)


def spelled(text: str) -> list[int]:
    token_ids = VOCABULARY.fewest_tokens(text.encode())
    assert token_ids is not None
    return token_ids


@pytest.mark.parametrize("name", CASES)
def test_every_backend_takes_and_rejects_the_same_texts(backend: Backend, name: str) -> None:
    kind, source, taken, rejected = CASES[name]
    grammar = backend.compile(kind, source_of(kind, source))
    assert [text for text in taken if not takes(grammar.matcher(), spelled(text))] == []
    assert [text for text in rejected if takes(grammar.matcher(), spelled(text))] == []


@pytest.mark.parametrize("name", [name for name in CASES if name != "characters"])
def test_masks_of_other_backends_are_ours_on_random_ways(peer: Backend, name: str) -> None:
    kind, source, _, _ = CASES[name]
    ours = load_backend("palmette", VOCABULARY).compile(kind, source_of(kind, source))
    theirs = peer.compile(kind, source_of(kind, source))
    for seed in range(20):
        rng = random.Random(seed)
        one, other = ours.matcher(), theirs.matcher()
        for _ in range(30):
            allowed = mask_of(other)
            if peer.name == "llguidance":  # one spelling of what is forced
                assert allowed
                assert set(allowed) <= set(mask_of(one))
            else:
                assert allowed == mask_of(one)
            assert one.is_complete == other.is_complete
            assert one.is_finished == other.is_finished
            token_id = rng.choice(allowed)
            assert one.accept(token_id)
            assert other.accept(token_id)
            if token_id == STOP:
                break


def test_a_stop_token_ends_a_text_and_can_be_taken_back(backend: Backend) -> None:
    matcher = backend.compile("regex", "ab?").matcher()
    assert not matcher.accept(STOP)
    assert matcher.accept(ord("a"))
    assert (matcher.is_complete, matcher.is_finished) == (True, False)
    assert matcher.accept(STOP)
    assert (matcher.is_complete, matcher.is_finished) == (False, True)
    assert matcher.num_tokens == 2
    assert not matcher.accept(STOP)
    assert not matcher.accept(ord("b"))
    row = np.ones(VOCABULARY.num_rows, bool)
    matcher.fill_mask(row)
    assert not row.any()
    matcher.rollback(1)
    assert matcher.accept(ord("b"))
    assert (matcher.is_complete, matcher.is_finished) == (True, True)
    matcher.rollback(2)
    assert matcher.num_tokens == 0
    assert mask_of(matcher) == [ord("a"), 256, 263]
    with pytest.raises(ValueError, match="cannot roll back 1 of 0"):
        matcher.rollback(1)


def test_a_token_that_may_not_come_changes_nothing(backend: Backend) -> None:
    matcher = backend.compile("regex", "(ab){2}c").matcher()
    assert matcher.accept(256)
    before = mask_of(matcher)
    for token_id in (ord("c"), ord("b"), STOP, STOP + 1, VOCABULARY.num_rows, -1):
        assert not matcher.accept(token_id)
    assert mask_of(matcher) == before
    assert matcher.num_tokens == 1
    assert takes(matcher, spelled("abc"))


def test_a_copy_goes_its_own_way(backend: Backend) -> None:
    matcher = backend.compile("regex", "a(b|c)d").matcher()
    assert matcher.accept(ord("a"))
    twin = matcher.copy()
    assert twin.accept(ord("b"))
    assert (matcher.num_tokens, twin.num_tokens) == (1, 2)
    assert mask_of(matcher) == [ord("b"), ord("c")]
    twin.rollback(2)
    assert takes(matcher, spelled("cd"))
    assert takes(twin, spelled("abd"))


def test_forced_tokens_are_those_that_come_alone(backend: Backend) -> None:
    matcher = backend.compile("regex", "x[yz]123é?").matcher()
    assert matcher.forced_tokens() == [ord("x")]
    assert matcher.forced_tokens(0) == []
    assert matcher.num_tokens == 0
    assert all(matcher.accept(ord(letter)) for letter in "xz")
    assert matcher.num_tokens == 2
    if backend.name != "llguidance":  # it takes the one spelling of its tokenizer
        assert matcher.forced_tokens() == []
        assert mask_of(matcher) == [ord("1"), 261]
    assert matcher.accept(261)
    assert matcher.forced_tokens() == [ord("3")]
    assert matcher.accept(ord("3"))
    assert matcher.forced_tokens() == []


def test_two_spellings_of_a_token_are_both_allowed(peer: Backend) -> None:
    matcher = peer.compile("choices", '["abx", "cx"]').matcher()
    assert mask_of(matcher) == [ord("a"), ord("c"), 256, 263]


def test_a_budget_and_a_shortest_length_are_ours_alone(peer: Backend) -> None:
    assert "budget" in backend_of("palmette").features
    assert "budget" not in peer.features
    grammar = peer.compile("regex", "ab")
    row = np.zeros(VOCABULARY.num_rows, bool)
    with pytest.raises(UnsupportedByBackend, match=f"'{peer.name}' does not support budget"):
        grammar.matcher().fill_mask(row, budget=3)
    with pytest.raises(UnsupportedByBackend, match="does not know a shortest length"):
        _ = grammar.shortest_length


def test_a_row_of_another_vocabulary_is_refused(peer: Backend) -> None:
    with pytest.raises(ValueError, match=r"row must be bool \[\d+\], got bool \[7\]"):
        peer.compile("regex", "ab").matcher().fill_mask(np.zeros(7, bool))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "any"}, "order='any' of json_schema|the option 'order'"),
        ({"undeclared": "forbidden"}, "undeclared='forbidden' of json_schema|the option 'undecl"),
        ({"indent": 2}, "the option 'indent' of json_schema"),
    ],
)
def test_an_option_is_honoured_or_refused(peer: Backend, options: object, words: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=words) as refusal:
        peer.compile("json_schema", "{}", options)
    assert refusal.value.backend == peer.name


def test_our_own_backend_refuses_options_that_it_does_not_know() -> None:
    backend = backend_of("palmette")
    with pytest.raises(UnsupportedByBackend, match="'palmette' does not support the option 'x'"):
        backend.compile("regex", "a", {"x": 1})
    with pytest.raises(InvalidGrammar, match="whitespace is 'compact' or 'flexible'"):
        backend.compile("json_schema", "{}", {"whitespace": "loose"})
    with pytest.raises(UnsupportedByBackend, match="does not support a_kind"):
        backend.compile("a_kind", "a")


def test_flexible_whitespace_is_honoured_or_refused(backend: Backend) -> None:
    schema = json.dumps(OBJECT)
    text = '{ "aé":\n  true, "b": "x" }'
    assert not takes(backend.compile("json_schema", schema).matcher(), list(text.encode()))
    if backend.name == "outlines-core":
        with pytest.raises(UnsupportedByBackend, match="whitespace='flexible'"):
            backend.compile("json_schema", schema, {"whitespace": "flexible"})
        return
    grammar = backend.compile("json_schema", schema, {"whitespace": "flexible"})
    matcher = grammar.matcher()
    assert all(matcher.accept(t) for t in spelled('{ "aé":'))
    assert all(matcher.accept(ord(t)) for t in '\n  true, "b": "x" }')
    assert matcher.is_complete
    blanks = 0
    matcher = grammar.matcher()
    assert matcher.accept(ord("{"))
    while blanks < 40 and matcher.accept(ord(" ")):
        blanks += 1
    assert 16 <= blanks <= 34


def test_a_kind_that_a_backend_lacks_is_refused_by_name(peer: Backend) -> None:
    for kind in ("regex", "choices", "json_schema"):
        assert kind in peer.kinds
    for kind in {"grammar", "structural_tag"} - peer.kinds:
        with pytest.raises(UnsupportedByBackend, match=f"does not support {kind}"):
            peer.compile(kind, "x")


@pytest.mark.parametrize(
    ("name", "syntax", "source"),
    [
        ("xgrammar", "gbnf", 'root ::= "(" root ")" | "x"'),
        ("xgrammar", "lark", 'start: "(" start ")" | "x"'),
        ("llguidance", "lark", 'start: "(" start ")" | "x"'),
    ],
)
def test_a_recursive_grammar_is_followed(name: str, syntax: str, source: str) -> None:
    grammar = backend_of(name).compile("grammar", source, {"syntax": syntax})
    assert takes(grammar.matcher(), list(b"((x))"))
    assert not takes(grammar.matcher(), list(b"((x)"))
    assert not takes(grammar.matcher(), list(b"()"))


def test_xgrammar_takes_structural_tags_in_its_own_format() -> None:
    backend = backend_of("xgrammar")
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "const_string", "value": "x"}}
    source = json.dumps({"type": "structural_tag", "format": {**tag, "end": "</f>"}})
    grammar = backend.compile("structural_tag", source)
    assert takes(grammar.matcher(), list(b"<f>x</f>"))
    assert not takes(grammar.matcher(), list(b"<f>y</f>"))
    with pytest.raises(GrammarError, match="the backend 'xgrammar' refuses it"):
        backend.compile("structural_tag", '{"structures": [], "triggers": []}')


def test_a_grammar_of_our_own_backend_takes_its_syntax() -> None:
    backend = backend_of("palmette")
    assert {"regex", "choices", "json_schema", "grammar"} <= backend.kinds
    for syntax, source in {
        "gbnf": 'root ::= "x" root | "y"',
        "lark": 'start: "x" start | "y"',
    }.items():
        grammar = backend.compile("grammar", source, {"syntax": syntax})
        assert takes(grammar.matcher(), list(b"xxy"))
        assert not takes(grammar.matcher(), list(b"xx"))


def test_a_syntax_that_a_backend_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedByBackend, match="syntax='gbnf' of grammar: it has 'lark'"):
        backend_of("llguidance").compile("grammar", 'root ::= "x"')


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "a("),
        ("regex", "a)(b"),
        ("regex", r"(a)\1"),
        ("choices", "[]"),
        ("choices", '["a", 1]'),
        ("choices", "a, b"),
        ("choices", '["\\ud800"]'),
        ("json_schema", "{"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
    ],
)
def test_what_is_malformed_or_impossible_is_a_grammar_error(
    backend: Backend, kind: str, source: str
) -> None:
    with pytest.raises(GrammarError):
        backend.compile(kind, source)


def test_a_library_that_enforces_less_says_so_where_it_refuses() -> None:
    schema = '{"type": "object", "not": {"required": ["a"]}}'
    for name in ("outlines-core", "llguidance"):
        try:
            backend = backend_of(name)
        except pytest.skip.Exception:
            continue
        refused = schema if name == "llguidance" else '{"not": {"required": ["a"]}}'
        with pytest.raises(UnsupportedGrammar, match=f"the backend '{name}' refuses it"):
            backend.compile("json_schema", refused)


def test_a_pattern_that_matches_the_empty_text_is_refused_by_outlines_core() -> None:
    with pytest.raises(UnsupportedGrammar, match="matches the empty text"):
        backend_of("outlines-core").compile("regex", "(ab)?")


def test_a_source_past_the_limit_is_refused(peer: Backend) -> None:
    backend = load_backend(peer.name, VOCABULARY, limits=Limits(max_source=10, max_pattern=10))
    with pytest.raises(GrammarError, match="the json_schema has 16 characters, the limit is 10"):
        backend.compile("json_schema", '{"type":"array"}')
    with pytest.raises(GrammarError, match="the regex has 11 characters, the limit is 10"):
        backend.compile("regex", "a" * 11)


def test_a_vocabulary_without_stop_tokens_and_with_several_works(peer: Backend) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"", b"", b""]
    for stops in (set(), {256, 258}):
        backend = load_backend(peer.name, Vocabulary(tokens, stops, 262))
        matcher = backend.compile("regex", "ab?").matcher()
        assert matcher.accept(ord("a"))
        row = np.ones(262, bool)
        matcher.fill_mask(row)
        assert set(np.flatnonzero(row)) == {ord("b"), *stops}


def test_llguidance_spells_what_is_forced_as_the_tokenizer_does() -> None:
    backend_of("llguidance")
    in_bytes = load_backend("llguidance", VOCABULARY, encode=lambda text: list(text.encode()))
    matcher = in_bytes.compile("choices", '["xab1"]').matcher()
    assert matcher.forced_tokens() == list(b"xab1")
    matcher = backend_of("llguidance").compile("choices", '["xab1"]').matcher()
    assert [VOCABULARY.token_bytes[i] for i in matcher.forced_tokens()] == [b"x", b"ab", b"1"]


def test_a_tokenizer_that_spells_something_else_is_not_believed() -> None:
    backend_of("llguidance")

    def encode(text: str) -> list[int]:
        if text == "x":
            raise ValueError("no")
        return [ord("z")]

    for text in ("x", "yab"):
        matcher = (
            load_backend("llguidance", VOCABULARY, encode=encode)
            .compile("choices", json.dumps([text]))
            .matcher()
        )
        assert b"".join(VOCABULARY.token_bytes[i] for i in matcher.forced_tokens()) == text.encode()


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownBackend, match="no grammar backend 'guidance'; there are palmette, "):
        load_backend("guidance", VOCABULARY)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendNotInstalled, match=rf"needs the package {name} .*grammar-peers"):
        load_backend(name, VOCABULARY)


def test_equal_sources_share_a_compile_and_versions_are_known(backend: Backend) -> None:
    assert backend.version[0].isdigit()
    assert backend.vocabulary is VOCABULARY
    if backend.name in ("palmette", "outlines-core", "llguidance"):
        assert backend.compile("regex", "ab+") is backend.compile("regex", "ab+")
