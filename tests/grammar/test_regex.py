from __future__ import annotations

import json
import re
import unicodedata

import interegular
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    Limits,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.grammar.codepoints import ANY, SPACE, CodePoints, general_category
from palmette.grammar.regex import full_match, parse_regex, search
from palmette.grammar.spelling import JsonString, Utf8
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of

compiler = GrammarCompiler(
    byte_vocabulary([b"ab", b"ba", b"aab", b"bb", b"ca", b"abc", b"\xc3\xa9"])
)
vocabulary = compiler.vocabulary


TABLE = [
    # Classes hold characters, however many bytes these take.
    ("[à-ÿ]+[^à-ÿ\\s]", ["éa", "àÿ1", "é東", "é🚲"], ["e1", "é é", "éé", "", "éab"]),
    ("[😀-🙏]{2}!?", ["😀😎", "🙏🙏!"], ["😀", "😀a", "🚲🚲", "😀😎!!"]),
    (".{3}", ["abc", "a c", "é東🚲"], ["a\nc", "ab", "abcd", "a\rc", "a\u2028c"]),
    ("[^]x]?".replace("^]", "^\\]"), ["", "a", "\n"], ["]", "x"]),
    # Shorthand classes are ASCII, but for white space, which is that of ECMA-262.
    (r"\d{2}\w", ["12a", "00_"], ["१२a", "12é", "1aa", "12-"]),
    (r"[^\D]{2}[^\s\d]\S", ["12ab", "00-é"], ["1xab", "12 a", "123a", "12a ", "12a\u00a0"]),
    (r"[\w\-.\/]+\/[a-z\]\[]{2}", ["a-b/xy", "x.y/]["], ["a b/xy", "a-b/x", "/xy"]),
    (r"[\w-.]+[a-]", ["a-.-", ".a"], ["a b", ".b"]),
    (r"\p{Lu}\P{Lu}\p{Letter}", ["Éa東"], ["ÉÉ東", "aaa", "Éa1"]),
    # Escapes.
    (r"\x41\u00e9\u{1F600}\uD83D\uDE00\cA\0\t", ["Aé😀😀\x01\x00\t"], ["Aé😀"]),
    (r"[\b]\.\$\^\(\)\{\}\|\*\+\?\\", ["\b.$^(){}|*+?\\"], ["b"]),
    ("a{,b}{}]", ["a{,b}{}]"], ["a"]),
    # Groups, laziness, repetition.
    ("<(?P<t>[a-z]+?)>.*?</x>", ["<b></x>", "<ab>hi</x>", "<b></x></x>"], ["<>h</x>", "<b>hi"]),
    ("(?<n>a|)b", ["ab", "b"], ["a"]),
    ("(?:[ab]*)*c", ["c", "abac"], ["", "ab", "abcc"]),
    ("(?:a|b{2,3}?){2}", ["aa", "abb", "bbbbb"], ["a", "bb", "ab", "aaa"]),
    ("a{3}b{2,}c{0}", ["aaabb", "aaabbbb"], ["aaab", "aabb", "aaabbc"]),
    ("(?:a{0,2}){2}", ["", "a", "aaaa"], ["aaaaa"]),
    # Anchors: useless outside, binding in their branch, and never before a final line end.
    ("^(?:ab|^cd|ef$)g?$", ["ab", "abg", "cd", "cdg", "ef"], ["efg", "xab", "ab\n", "", "cdgg"]),
    ("(?:^|x)a", ["a", "xa"], ["xxa", "x"]),
    ("b*^a", ["a"], ["ba"]),
    (r"\Aa|b\Z", ["a", "b"], ["ab", "b\n"]),
    ("a$b?", ["a"], ["ab"]),
    # Lookahead.
    ("(?=.*[0-9])[a-z0-9]{3,5}", ["a1b", "123", "abcd9"], ["abc", "a1", "abcdef1", "A1b"]),
    ("(?!.*bb)[ab]+", ["aba", "b"], ["abba", "", "bb"]),
    ("(?:(?=a)[ab]|c)b", ["ab", "cb"], ["bb", "a"]),
    ("a(?!$)b?", ["ab"], ["a"]),
    ("(?=(?:.{2})*$)a*", ["", "aa", "aaaa"], ["a", "aaa"]),
    # Lookbehind and word boundaries.
    ("(?:a|b)(?<!b)c?(?<=ac|a)", ["a", "ac"], ["b", "bc"]),
    ("(?<=^a*)b|a+(?<=^aaa)", ["b", "aaa"], ["ab", "aa", "aaaa"]),
    ("a?(?<!^)b", ["ab"], ["b"]),
    (r".*\bcat\b.*", ["cat", "a cat.", "cat-flap", "écaté"], ["cats", "a_cat", "concat"]),
    (r"a\B.", ["aa", "a1"], ["a ", "a", "aé"]),
    (r"\B|a\b", ["", "a"], ["b"]),
    (r".*(?<=\bno) .", ["no x", "a no x"], ["yno x", "x"]),
    # Assertions in repetitions.
    ("(?:[^,]+(?:,|$)){3,}", ["a,b,c", "a,b,c,", "a,b,c,d"], ["a,b", "a,,b,c", "a,b,"]),
    ("(?:^a|b)*", ["", "a", "abb", "b"], ["aa", "ba"]),
    ("(?:a(?!a)|b(?=.*c)|c)*", ["", "a", "abac", "cabc"], ["aa", "ab", "acb"]),
    (r"(?:\b\w{1,2}\b ?){2}", ["ab c", "a b ", "ab cd"], ["abc d", "abcd", "ab"]),
    ("(?:(?<=a)b|(?<!a)a|c){3}", ["abc", "cab", "aba", "cca"], ["bab", "aab", "acb"]),
    # Flags within the pattern.
    ("(?i)straße|k", ["STRASSE".replace("SS", "ß"), "ſtraẞe", "\u212a"], ["strasse", ""]),
    ("a(?i:b[c-e])(?-i:f)", ["abcf", "aBDf"], ["ABcf", "abcF"]),
    ("(?i:[^k])(?s:.)(?m:$\n^)b", ["aa\nb".replace("aa", "a\n"), "1b\nb"], ["Ka\nb", "aa b"]),
    ("a(?i)b|c", ["ab", "aB", "C"], ["Ab"]),
    ("x(?#what)y", ["xy"], ["x"]),
    # Classes and escapes of ECMA-262.
    ("[^]{2}|[]a]", ["\na", "\r\u2028"], ["]", "abc"]),
    (r"\07\012[\101\x42]\U0001F600", ["\x07\nB😀"], ["7\nA"]),
    (
        r"\p{Hex_Digit}\P{Lowercase}\p{XID_Start}",
        ["Fa東".replace("a", "A")],
        ["ga東", "Fa東", "FA1"],
    ),
    (r"\p{White_Space}[\p{gc=Nd}\p{Sc}]", ["\u0085٣", " €"], ["a1", " a"]),
]

PYTHON_TABLE = [
    (r"\d\w\s", "", ["٣é\u00a0", "1_ ", "1a\x1c"], ["1- ", "a1 "]),
    (r"\d\w\s", "a", ["1_ "], ["٣é ", "1é ", "1a\u00a0"]),
    (".", "", ["\r", "\u2028", "é"], ["\n"]),
    ("(?s:.)$\n^a", "m", ["\n\na"], ["\na"]),
    ("a$\n?", "", ["a", "a\n"], ["a\n\n"]),
    ("a$", "", ["a"], ["a\n"]),
    ("[]a]{,2}", "", ["", "]a", "a"], ["aaa", "b"]),
    ("a {2} b # so\n\\  [ ]\\#", "x", ["aab  #"], ["a  b", "aab #"]),
    ("(?ix) a (?-i: b ) # c", "", ["ab", "Ab"], ["aB", "a b"]),
    (r"\N{GREEK SMALL LETTER ALPHA}\u03b2\07\101[\b]\a", "", ["αβ\x07A\x08\x07"], ["ab"]),
    ("i", "i", ["I", "ı", "İ"], ["j"]),
    ("[^i]k", "i", ["jK", "j\u212a"], ["ık"]),
    ("[^i]k", "ia", ["ıK", "jk"], ["Ik", "j\u212a"]),
    (r"(?a:\w)\w(?P<n>x)", "u", ["aéx"], ["éax"]),
]


@pytest.mark.parametrize(("pattern", "flags", "accepted", "rejected"), PYTHON_TABLE)
def test_a_pattern_in_python_syntax_accepts_what_python_does(
    pattern: str, flags: str, accepted: list[str], rejected: list[str]
) -> None:
    python = re.compile(f"(?{flags})" * bool(flags) + pattern)
    assert [text for text in accepted if not python.fullmatch(text)] == []
    assert [text for text in rejected if python.fullmatch(text)] == []
    grammar = compiler.compile_regex(pattern, syntax="python", flags=flags)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?i)b", "flags that are not at the start"),
        (r"\p{L}", r"unknown escape '\\p'"),
        ("(?au:a)", "exclude each other"),
        ("(?i-s)a", "flags are switched off for a group only"),
        (r"[\d-z]", "a range with a class at one end"),
        (r"\N{no such name}", "name of a character"),
        ("(?#a", r"missing '\)' of a comment"),
        ("$+", "nothing to repeat"),
    ],
)
def test_what_python_does_not_read_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compiler.compile_regex(pattern, syntax="python")


def test_unknown_syntax_and_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="'ecma' or 'python', got 'perl'"):
        compiler.compile_regex("a", syntax="perl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in ecma syntax are i, m, s, got 'x'"):
        compiler.compile_regex("a", flags="ix")
    assert accepts(compiler.compile_regex("a", flags="i"), "A")
    assert not accepts(compiler.compile_regex("a"), "A")


@pytest.mark.parametrize(("pattern", "accepted", "rejected"), TABLE)
def test_a_pattern_accepts_its_texts_and_no_others(
    pattern: str, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compiler.compile_regex(pattern)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", r"position 0: missing '\)'"),
        ("a)", r"position 1: unbalanced '\)'"),
        ("[a", "position 0: missing ']'"),
        ("*a", "position 0: nothing to repeat"),
        ("a|+", "position 2: nothing to repeat"),
        ("^*", "position 0: nothing to repeat"),
        ("a**", "position 2: a quantifier after a quantifier"),
        ("a{2}{3}", "position 4: a quantifier after a quantifier"),
        ("a{3,2}", r"position 1: the count \{3,2\} ends below its start"),
        ("a\\", "position 1: a backslash at the end"),
        (r"\q", r"position 0: unknown escape '\\q'"),
        (r"\u12", "position 0: the escape needs 4 hexadecimal digits"),
        (r"\u{110000}", r"position 0: a code point beyond U\+10FFFF"),
        ("[b-a]", "position 1: a range that ends before it starts"),
        ("(?x", "position 0: unknown kind of group"),
        (r"a\c1", "position 1: '\\\\c' needs a letter"),
    ],
)
def test_a_malformed_pattern_is_refused_with_its_position(pattern: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compiler.compile_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "feature"),
    [
        (r"(a)\1", "back-reference"),
        (r"(?P<x>a)(?P=x)", "back-reference"),
        (r"\k<x>", "back-reference"),
        ("(?(1)a|b)", "conditional group"),
        ("(?<=a(?=bc))b", "lookahead that looks beyond the end of a lookbehind"),
        ("(?>a)b", "atomic group"),
        ("a*+", "possessive"),
        ("(?x)a", "inline flag 'x'"),
        ("(?u:a)", "inline flag 'u'"),
        (r"\p{Script=Greek}", "Unicode property 'Script=Greek'"),
        ("[[:alpha:]]", "POSIX class"),
        ("a{,3}", "count without a lower bound"),
        (r"\ud800", "lone surrogate"),
        (r"\p{IsGreek}", "Unicode property 'IsGreek'"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(pattern: str, feature: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=feature) as caught:
        compiler.compile_regex(pattern)
    assert feature in caught.value.feature


@pytest.mark.parametrize("pattern", ["a^", "$a", "(?!a)a", "(?=b)a", "[^\\s\\S]"])
def test_a_pattern_that_nothing_matches_is_refused(pattern: str) -> None:
    with pytest.raises(UnsatisfiableGrammar, match="no text matches"):
        compiler.compile_regex(pattern)


def test_nesting_is_limited() -> None:
    small = GrammarCompiler(vocabulary, limits=Limits(max_nesting=5))
    assert accepts(small.compile_regex("(" * 5 + "a" + ")" * 5), "a")
    with pytest.raises(GrammarTooComplex, match="more than 5 groups"):
        small.compile_regex("(" * 6 + "a" + ")" * 6)
    deepest = Limits().max_nesting
    assert accepts(
        compiler.compile_regex("(?:b|(?:" * (deepest // 2) + "a" + ")*){2}" * (deepest // 2)), "aa"
    )


atoms = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", "é", "[b-é]", r"\w", r"\d", r"[^\w]"])


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}"])
    return st.one_of(
        st.builds("(?:{}{})".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, quantifiers),
    )


def _combine_with_assertions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("(?:{}{})".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{})?".format, inner),
    )


patterns = st.recursive(atoms, _combine, max_leaves=8)
assertions = st.builds("(?{}{})".format, st.sampled_from("=!"), patterns) | st.sampled_from("^$")
asserting = st.recursive(patterns | assertions, _combine_with_assertions, max_leaves=6)

# Anything anywhere. What Python looks behind for has a fixed width.
anywhere = st.one_of(
    assertions,
    st.sampled_from([r"\b", r"\B", "(?<=a)", "(?<!ab)", r"(?<=\w.)", r"(?<!\bc)", "(?<=^[ab])"]),
)
repeating = st.recursive(atoms | anywhere, _combine, max_leaves=7)
texts = st.text(alphabet="abcé1_\n😀", max_size=7)


def python_regex(pattern: str) -> re.Pattern[str]:
    """The same pattern for Python, with its own ideas of the dollar and the dot set right."""
    return re.compile(pattern.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]"), re.ASCII)


def compile_or_none(pattern: str) -> CompiledGrammar | None:
    try:
        return compiler.compile_regex(pattern)
    except UnsatisfiableGrammar:
        return None


@given(patterns, st.lists(texts, max_size=8))
@settings(deadline=None, max_examples=150)
def test_acceptance_is_that_of_python(pattern: str, listed: list[str]) -> None:
    grammar = compile_or_none(pattern)
    for text in listed:
        expected = python_regex(pattern).fullmatch(text) is not None
        assert (grammar is not None and accepts(grammar, text)) == expected


@given(asserting, st.lists(texts, max_size=8))
@settings(deadline=None, max_examples=250)
@example("(?:a*^b*)?c", ["c", "bc", "ac"])
@example("(?!(?:a|^b)c)b?c", ["c", "bc"])
def test_anchors_and_lookahead_are_those_of_python(pattern: str, listed: list[str]) -> None:
    grammar = compile_or_none(pattern)
    for text in listed:
        expected = python_regex(pattern).fullmatch(text) is not None
        assert (grammar is not None and accepts(grammar, text)) == expected


@given(asserting, st.lists(texts, max_size=6))
@settings(deadline=None, max_examples=150)
def test_a_schema_pattern_is_searched_for_as_python_does(pattern: str, listed: list[str]) -> None:
    try:
        grammar = compiler.compile_json_schema({"type": "string", "pattern": pattern})
    except UnsatisfiableGrammar:
        grammar = None
    for text in listed:
        expected = python_regex(pattern).search(text) is not None
        for ensure_ascii in (True, False):
            written = json.dumps(text, ensure_ascii=ensure_ascii)
            assert (grammar is not None and accepts(grammar, written)) == expected


@given(repeating, st.lists(texts, max_size=8), st.sampled_from(["", "a", "ai", "as", "am"]))
@settings(deadline=None, max_examples=120)
@example("(?:a?\\b)*", ["a", "ab", ""], "")
@example("(?:(?!ab)[ab])*", ["ba", "ab", "bb"], "aim")
@example("\\B", ["", "a"], "")
@example("(?!\\B)", ["", "a"], "")
@example("\\B \\B|\\B|a\\Bb", ["", " ", "ab"], "")
def test_assertions_anywhere_are_those_of_python(
    pattern: str, listed: list[str], flags: str
) -> None:
    python = re.compile(f"(?{flags})" * bool(flags) + pattern)
    node = parse_regex(pattern, Limits(), syntax="python", flags=flags)
    store = TermStore(Limits())
    whole, anywhere = full_match(node, Utf8(store)), search(node, Utf8(store))
    for text in listed:
        if not text and "B" in pattern:
            continue  # before its version 3.14, Python did not see that nothing is no word
        assert matches(store, whole, text.encode()) == (python.fullmatch(text) is not None)
        assert matches(store, anywhere, text.encode()) == (python.search(text) is not None)


cased = st.sampled_from("aAkKsSßµéÉǅıİſÅåβϐΣς\u212a\u212b\u1e9eŉ")


@given(cased, st.lists(cased, min_size=1, max_size=2), st.booleans())
@settings(deadline=None, max_examples=150)
def test_case_is_ignored_as_in_python(text: str, members: list[str], is_negated: bool) -> None:
    pattern = "[" + "^" * is_negated + "".join(members) + "]"
    grammar = compiler.compile_regex(pattern, syntax="python", flags="i")
    assert accepts(grammar, text) == (re.fullmatch(pattern, text, re.IGNORECASE) is not None)


ascii_atoms = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "[bc]"])
ascii_patterns = st.recursive(ascii_atoms, _combine, max_leaves=7)


@given(ascii_patterns, st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"bb"]), max_size=3))
@settings(deadline=None, max_examples=100)
def test_the_mask_is_what_an_independent_automaton_can_complete(
    pattern: str, path: list[bytes]
) -> None:
    small = GrammarCompiler(
        byte_vocabulary_of("abc", [b"ab", b"ba", b"bb", b"aab", b"cab", b"abab"])
    )
    matcher = small.compile_regex(pattern).matcher()
    machine = interegular.parse_pattern(pattern).to_fsm().reduce()

    def step(state: int | None, token: bytes) -> int | None:
        for character in token.decode():
            state = None if state is None else machine.map[state].get(machine.alphabet[character])
        return state if state is not None and machine.islive(state) else None

    state: int | None = machine.initial
    for token in [b"", *path]:
        if token:
            state = step(state, token)
            assert matcher.accept(small.vocabulary.token_bytes.index(token)) == (state is not None)
        if state is None:
            return
        expected = np.array(
            [bool(t) and step(state, t) is not None for t in small.vocabulary.token_bytes]
        )
        expected[-1] = state in machine.finals
        assert (mask_of(matcher, small.vocabulary) == expected).all()
        assert matcher.is_complete == (state in machine.finals)


def byte_vocabulary_of(letters: str, more: list[bytes]) -> Vocabulary:
    tokens = [letter.encode() for letter in letters] + more + [b""]
    return Vocabulary(tokens, {len(tokens) - 1})


@given(asserting, st.lists(texts, max_size=3))
@settings(deadline=None, max_examples=60)
def test_the_mask_is_the_brute_force_mask(pattern: str, listed: list[str]) -> None:
    grammar = compile_or_none(pattern)
    if grammar is None:
        return
    for text in listed:
        matcher = grammar.matcher()
        for byte in text.encode():
            if not matcher.accept(byte):
                break
            assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()


def matches(store: TermStore, term: Term, text: bytes) -> bool:
    for byte in text:
        for bits, after in store.parts(term):
            if bits >> byte & 1:
                term = after
                break
        else:
            return False
    return term.nullable


def test_utf8_is_exactly_what_python_decodes() -> None:
    store = TermStore(Limits())
    term = Utf8(store).one_of(ANY)
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1]
    edges += [0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    candidates = [bytes([a]) for a in range(256)] + [
        bytes([a, b]) for a in range(256) for b in edges
    ]
    candidates += [bytes([a, b, c]) for a in edges for b in edges for c in edges]
    candidates += [
        bytes([a, b, c, d]) for a in edges[16:] for b in edges for c in edges for d in edges
    ]
    for text in candidates:
        try:
            expected = len(text.decode()) == 1
        except UnicodeDecodeError:
            expected = False
        assert matches(store, term, text) == expected, text


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 300)), max_size=5), st.data())
@settings(deadline=None, max_examples=60)
def test_a_set_of_characters_is_spelled_in_all_ways_and_no_other_character_is(
    ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    characters = CodePoints.of((low, min(low + size, 0x10FFFF)) for low, size in ranges)
    members = st.sampled_from([low for low, _ in ranges] or [0])
    code_point = data.draw(st.integers(0, 0x10FFFF) | members)
    if 0xD800 <= code_point <= 0xDFFF:
        return
    character = chr(code_point)
    units = character.encode("utf-16-be").hex()
    escape = "".join("\\u" + units[i : i + 4] for i in range(0, len(units), 4))
    store = TermStore(Limits())
    json_term, plain_term = JsonString(store).one_of(characters), Utf8(store).one_of(characters)
    expected = code_point in characters
    assert matches(store, plain_term, character.encode()) == expected
    for written in (
        escape,
        escape.replace("\\U", "\\u"),
        "\\u" + escape[2:].upper().replace("U", "u"),
    ):
        assert matches(store, json_term, written.encode()) == expected
    needs_escape = code_point < 0x20 or character in '"\\'
    assert matches(store, json_term, character.encode()) == (expected and not needs_escape)
    if character in '"\\/\b\f\n\r\t':
        short = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}.get(character, character)
        assert matches(store, json_term, b"\\" + short.encode()) == expected


code_point_sets = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=5,
).map(CodePoints.of)


@given(code_point_sets, code_point_sets)
@settings(deadline=None)
def test_sets_of_code_points_obey_the_laws_of_sets(one: CodePoints, other: CodePoints) -> None:
    def members(characters: CodePoints) -> set[int]:
        return {c for c in range(60) if c in characters}

    assert members(one | other) == members(one) | members(other)
    assert members(one & other) == members(one) & members(other)
    assert members(one - other) == members(one) - members(other)
    assert ~~one == one
    assert (one | ~one) == ANY


def test_general_categories_are_those_of_this_python() -> None:
    upper = general_category("Lu")
    assert upper is not None
    for code_point in [*range(0x300), 0x400, 0x1E900, 0x10FFFF]:
        assert (code_point in upper) == (unicodedata.category(chr(code_point)) == "Lu")
    assert general_category("nonsense") is None
    assert ord("\u00a0") in SPACE


HOSTILE = [
    "(a|a)*b",
    "(((a*)*)*)*b",
    "(" * 60 + "a" + "+)" * 60 + "b",
    "a{0,100000}",
    "((a{0,1000}){0,1000}){0,1000}",
    "(.{0,100000}x){3}",
    "(a?){500}a{500}",
    ".*a.{40}",
    "(x+x+)+y",
    "((((x{1,5}){1,5}){1,5}){1,5}){1,5}y",
    r"(?:\b\w+\b\W?)*",
    "|".join(f"w{i:05d}" for i in range(10_000)),
    "".join(f"(?!(?:a{{{n}}})*$)" for n in (2, 3, 5, 7, 11, 13)) + "a+$",
]


@pytest.mark.parametrize("pattern", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_pattern_ends_in_masks(pattern: str) -> None:
    grammar = compiler.compile_regex(pattern)
    matcher = grammar.matcher()
    for byte in b"aaaawxa":
        assert mask_of(matcher, vocabulary).any()
        matcher.accept(byte)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?:a(?=.{0,100000}b)|b)*", "more than 20000 places"),
        ("(?:^a|b){0,100000}", "more than 20000 places"),
        ("(?:.(?<=a.{12}))*", "more than 5000 states"),
        (".*(?<=a.{30})b", "more than 5000 states"),
        (
            "(?=(?:a{31})*$)(?=(?:a{37})*$)(?=(?:a{41})*$)(?=(?:a{43})*$)b*a+",
            "more than 100000 terms",
        ),
    ],
)
def test_a_pattern_beyond_the_limits_is_refused_with_the_limit(pattern: str, message: str) -> None:
    patient = GrammarCompiler(vocabulary, limits=Limits(compile_seconds=60.0))
    with pytest.raises(GrammarTooComplex, match=message):
        patient.compile_regex(pattern)


def test_a_pattern_whose_assertions_take_long_to_follow_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pattern = "(?:(?=.*a.{5})(?!.*b.{4}a)[ab])*"
    GrammarCompiler(vocabulary).compile_regex(pattern)
    monkeypatch.setattr("palmette.grammar.regex.machine._MAX_STEPS", 500)
    with pytest.raises(GrammarTooComplex, match="takes more than 500 steps to follow"):
        GrammarCompiler(vocabulary).compile_regex(pattern)


def test_a_pattern_has_the_same_language_with_and_without_its_escapes() -> None:
    letters = "abc_01"
    plain = compiler.compile_regex(f"(?:{letters}|b{letters}|x)y")
    spelled = "".join(f"\\x{ord(letter):02x}" for letter in letters)
    escaped = compiler.compile_regex(f"(?:{spelled}|b{spelled}|\\x78)y")
    for text in (f"{letters}y", f"b{letters}y", "xy", letters, "by", ""):
        assert (
            accepts(plain, text) == accepts(escaped, text) == (text.endswith("y") and text != "by")
        )
