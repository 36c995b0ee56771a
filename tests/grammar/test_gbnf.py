from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    Limits,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of
from tests.grammar.context_free import Node, as_gbnf, derives, grammars, texts
from tests.grammar.samples import SAMPLES, Sample

vocabulary = byte_vocabulary([b"ab", b"ba", b"aab", b"bb", b"1+", b")*", b'":', b"\xc3\xa9a"])
compiler = GrammarCompiler(vocabulary)

TABLE: list[tuple[str, list[str], list[str]]] = [
    # Literals and classes.
    (r'root ::= "a\"\\\n\x41\u00e9\U0001F600\t"', ['a"\\\nAé😀\t'], ['a"\\\nAé😀', "a"]),
    (r"root ::= [a-c\]\-\x41-\x42]+", ["abc]-AB"], ["d", "C", ""]),
    (r"root ::= [^a\n] [-z] [x-] [\^^]", ["é-x^", "bz-^"], ["a-x^", "\n-x^", "b-y^"]),
    ("root ::= [à-ÿ]{2} .", ["éÿ\n", "éÿ😀"], ["éÿ", "ea ", "éÿab"]),
    # The shape of rules.
    ('root ::= a | "b" |\n  "c"\n  | "d"\na ::= "x" # "y"\n  "z"', ["xz", "b", "d"], ["x", "y"]),
    ('root ::= (\n  "a"\n  # a remark\n  | "b" )', ["a", "b"], ["", "ab"]),
    ('a-1_B ::= "x"\nroot ::= a-1_B a-1_B', ["xx"], ["x"]),
    ("root ::= | a\na ::= [a]", ["", "a"], ["aa"]),
    ('root ::= () "a"', ["a"], [""]),
    ('root::="a"b\nb::="c"', ["ac"], ["a"]),
    # Repetition.
    ('root ::= "ab"* "c"?', ["", "ababc", "c"], ["abb", "acc"]),
    ('root ::= "a"{2} ("b" | "c"){1,2} [d]{2,} "e"{0,1}', ["aabdd", "aabcddde"], ["aabd", "abdd"]),
    ('root ::= "a"{0} "b"{ 1 , 2 } ("c"+){2}', ["bcc", "bbccc"], ["abcc", "bc", "bbbcc"]),
    ('root ::= "a"+? "b"{1000,2000}', ["b" * 1000, "aa" + "b" * 2000], ["b" * 999, "b" * 2001]),
    # A branch under a star that may be empty adds nothing.
    ('root ::= "a" ( "" | "b" )* "c"', ["ac", "abc", "abbc"], ["ab", "", "bc", "acc"]),
    # In a class, a backslash and n are the line feed, and a doubled backslash is the backslash.
    (
        r"""root ::= "'" ( [^'\\\n] | "\\" ['\\n] )* "'" """,
        ["''", "'nn'", "'a\\'b'", "'x\\\\'", "'l1\\nl2'"],
        ["'a", "'a\nb'", "'a\\qb'", "'a'b'"],
    ),
    # Left recursion: direct, mutual, hidden behind what may be empty, and ambiguous.
    (
        'root ::= expr\nexpr ::= expr "+" num | num\nnum ::= [0-9]+',
        ["1", "1+2", "10+20+3"],
        ["+1", "1+", "1++2", ""],
    ),
    (
        'root ::= a\na ::= b "x" | "1"\nb ::= a "y" | c\nc ::= b "z" | "2"',
        ["1", "2x", "1yx", "2zx", "1yzzxyx"],
        ["2", "1y", "", "1z", "2xz"],
    ),
    ('root ::= opt root "b" | "a"\nopt ::= "c"?', ["a", "abb", "cab", "ccabb"], ["cccabb", "b"]),
    ('root ::= root? root "b" | "a"', ["a", "ab", "aab", "aabb"], ["b", "aa", "ba"]),
    ('root ::= root root | "a" | ""', ["", "a", "aaaa"], ["b"]),
    ('root ::= root | x | "a"\nx ::= root', ["a"], ["", "aa"]),
    ('root ::= (root ",")* "a"', ["a", "a,a", "a,a,a"], ["", "a,", ",a"]),
    ('root ::= x{2} "c"\nx ::= x "a" | ""', ["c", "aac"], ["a", "b"]),
    # Other recursion.
    ('root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", ")("]),
    ('root ::= "a" root "a" | "b" root "b" | ""', ["", "abba", "aa"], ["ab", "aba"]),
    ('root ::= ws "a" ws\nws ::= ([ \\n] ws)?', ["a", "  \na ", "a"], ["", " ", "a a"]),
    ('root ::= "a" (root "b")? | root2\nroot2 ::= "c" root2 | "d"', ["aab", "ccd"], ["ab", "c"]),
    # What derives nothing is left out.
    ('root ::= x | "b"\nx ::= x "a"\ny ::= y', ["b"], ["a", ""]),
    ('root ::= x* "b" x{0}\nx ::= "a" x', ["b"], ["ab"]),
]


@pytest.mark.parametrize(("source", "accepted", "rejected"), TABLE)
def test_a_grammar_accepts_its_texts_and_no_others(
    source: str, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compiler.compile_grammar(source)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


def check_masks(grammar: CompiledGrammar, text: str) -> None:
    matcher = grammar.matcher()
    for byte in text.encode():
        assert np.array_equal(mask_of(matcher, vocabulary), brute_force_mask(matcher, vocabulary))
        assert matcher.accept(byte)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_larger_grammar_is_what_it_says(sample: Sample) -> None:
    grammar = compiler.compile_grammar(sample.source, syntax=sample.syntax)
    assert [text for text in sample.accepted if not accepts(grammar, text)] == []
    assert [text for text in sample.rejected if accepts(grammar, text)] == []
    check_masks(grammar, sample.accepted[1][:40])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "there is no rule 'root' to begin with"),
        ('start ::= "a"', "there is no rule 'root' to begin with"),
        ('root ::= "a" b', "line 1, column 14: the rule 'b' is not defined"),
        ('root ::= "a"\nb ::= c', "line 2, column 7: the rule 'c' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        ('root ::= "a" b ::= "c"', "line 1, column 16: unexpected '::= "),
        ("root", "line 1, column 1: expected 'name ::='"),
        ('root = "a"', "line 1, column 1: expected 'name ::='"),
        ('root ::= "a', "line 1, column 10: missing '\"'"),
        ("root ::= [a", r"line 1, column 10: missing '\]'"),
        ("root ::= [a-", r"line 1, column 10: missing '\]'"),
        ("root ::= []", "line 1, column 10: an empty class"),
        ("root ::= [b-a]", "line 1, column 11: a range that ends before it starts"),
        ('root ::= ("a"', r"line 1, column 10: missing '\)'"),
        ('root ::= "a")', r"line 1, column 13: unexpected '\)'"),
        ('root ::= * "a"', r"line 1, column 10: unexpected '\*"),
        ('root ::= "a"{3,2}', "line 1, column 13: the count ends below its start"),
        ('root ::= "a"{x}', "line 1, column 13: expected a count"),
        ('root ::= "a"{1' + "0" * 30 + "}", "a count beyond all measure"),
        (r'root ::= "\q"', "line 1, column 11: unknown escape"),
        (r'root ::= "\u12"', "line 1, column 11: the escape needs 4 hexadecimal digits"),
        (r'root ::= "\U00110000"', r"a code point beyond U\+10FFFF"),
        ('root ::= "a\\', "line 1, column 12: a backslash at the end"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_place(source: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compiler.compile_grammar(source)


@pytest.mark.parametrize(
    ("source", "feature"),
    [
        ("root ::= <think> [a]", "token"),
        ("root ::= !<[12]> [a]", "token"),
        ('root ::= (= "a") [a]', "lookahead"),
        (r'root ::= "\ud800"', "lone surrogate"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(source: str, feature: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=feature) as caught:
        compiler.compile_grammar(source)
    assert feature in caught.value.feature


def test_a_grammar_without_any_text_is_refused_with_the_name_of_the_rule() -> None:
    with pytest.raises(UnsatisfiableGrammar, match="no text satisfies the rule 'root'"):
        compiler.compile_grammar('root ::= "a" root')


def test_a_rule_without_any_text_is_remarked_on() -> None:
    grammar = compiler.compile_grammar('root ::= "a" | x\nx ::= "b" x')
    assert grammar.notes == ("the rule 'x' derives no text",)


def test_another_rule_can_be_where_the_text_begins() -> None:
    source = 'root ::= "a" other\nother ::= "b"'
    assert accepts(compiler.compile_grammar(source, start="other"), "b")
    with pytest.raises(InvalidGrammar, match="no rule 'more' to begin with"):
        compiler.compile_grammar(source, start="more")


def test_an_unknown_syntax_is_refused() -> None:
    with pytest.raises(ValueError, match="'gbnf' or 'lark', got 'bnf'"):
        compiler.compile_grammar('root ::= "a"', syntax="bnf")


def test_a_grammar_must_be_text() -> None:
    with pytest.raises(InvalidGrammar, match="must be a string, got dict"):
        compiler.compile_grammar({"root": "a"})


@settings(max_examples=250, deadline=None)
@given(grammars)
def test_random_grammars_are_as_a_recogniser_by_spans_has_them(grammar: dict[str, Node]) -> None:
    expected = {text for text in texts(5) if derives(grammar, text)}
    try:
        compiled = compiler.compile_grammar(as_gbnf(grammar), start="start")
    except UnsatisfiableGrammar:
        assert not expected
        return
    assert {text for text in texts(5) if accepts(compiled, text)} == expected
    if expected:
        assert compiled.shortest_length <= min(map(len, expected))


@settings(max_examples=120, deadline=None)
@given(grammars)
def test_every_mask_of_a_random_grammar_is_the_brute_force_mask(grammar: dict[str, Node]) -> None:
    try:
        compiled = compiler.compile_grammar(as_gbnf(grammar), start="start")
    except UnsatisfiableGrammar:
        return
    matcher = compiled.matcher()
    for step in range(6):
        mask = mask_of(matcher, vocabulary)
        assert np.array_equal(mask, brute_force_mask(matcher, vocabulary))
        token_ids = [t for t in np.flatnonzero(mask) if t not in vocabulary.stop_token_ids]
        if not token_ids:
            break
        assert matcher.accept(int(token_ids[step * 7 % len(token_ids)]))
        ending = matcher.copy()  # and from everywhere the text can be completed
        for _ in range(200):
            if ending.is_complete:
                break
            assert ending.accept(int(np.flatnonzero(mask_of(ending, vocabulary, budget=1))[0]))
        assert ending.is_complete


@settings(max_examples=100, deadline=None)
@given(grammars)
def test_within_the_shortest_length_a_random_grammar_is_completed(grammar: dict[str, Node]) -> None:
    try:
        compiled = compiler.compile_grammar(as_gbnf(grammar), start="start")
    except UnsatisfiableGrammar:
        return
    matcher = compiled.matcher()
    for left in range(compiled.shortest_length, 0, -1):
        if matcher.is_complete:
            break
        allowed = np.flatnonzero(mask_of(matcher, vocabulary, budget=left))
        assert matcher.accept(int(allowed[-1]))
    assert matcher.is_complete


# Limits


def test_an_ambiguous_grammar_has_few_states() -> None:
    source = 'root ::= root op root | root "?" root ":" root | [a]\nop ::= [+*] | ""'
    matcher = compiler.compile_grammar(source).matcher()
    for byte in b"a?aa+a:" * 12 + b"aaaaaaaaaa?":
        assert matcher.accept(byte)
        assert mask_of(matcher, vocabulary).any()


HOSTILE = [
    # Each rule is the one before it twice: a text of 2**60 letters, if it were written out.
    "root ::= r60\nr0 ::= [ab]\n" + "\n".join(f"r{i} ::= r{i - 1} r{i - 1}" for i in range(1, 61)),
    'root ::= ((("a"*)*)*)* "b"',
    'root ::= (("a"{0,1000}){0,1000}){0,1000} "b"',
    'root ::= "a"{0,100000000}',
    "root ::= " + "(" * 90 + '"a"' + ")*" * 90,
    "root ::= " + " | ".join(f'"word{i}"' for i in range(10_000)),
    "root ::= " + " ".join('"a"?' for _ in range(500)),
    # Eight rules that all begin with each other.
    "root ::= r0\n"
    + "\n".join(
        f"r{i} ::= " + " | ".join(f'r{j} "{i % 7}"' for j in range(8)) + ' | "a"' for i in range(8)
    ),
    # A thousand rules in a row, none beginning with the next.
    "root ::= r1000\nr0 ::= [ab]\n"
    + "\n".join(f'r{i} ::= "a" r{i - 1} | "b"' for i in range(1, 1001)),
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_grammar_that_explodes_elsewhere_gives_masks_here(source: str) -> None:
    matcher = compiler.compile_grammar(source).matcher()
    for _ in range(4):
        mask = mask_of(matcher, vocabulary)
        token_ids = [t for t in np.flatnonzero(mask) if t not in vocabulary.stop_token_ids]
        assert token_ids
        assert matcher.accept(int(token_ids[0]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "more than 100 groups inside each other"),
        ('root ::= "a"' + "?" * 200, "100 repetitions of each other"),
        (
            "root ::= r300\nr0 ::= root [a]\n"
            + "\n".join(f'r{i} ::= r{i - 1} "a" root | "b"' for i in range(1, 301)),
            "begin with each other in a row|of work|nested too deeply",
        ),
        (
            "root ::= r0\n"
            + "\n".join(
                f"r{i} ::= " + " | ".join(f'r{j} "{i % 7}"' for j in range(300)) + ' | "a"'
                for i in range(300)
            ),
            "s of work",
        ),
        ('root ::= "' + "a" * 2_000_000 + '"', "has 2000011 characters, the limit is 1000000"),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused(source: str, message: str) -> None:
    small = GrammarCompiler(vocabulary, limits=Limits(max_source=1_000_000, compile_seconds=0.3))
    with pytest.raises(GrammarTooComplex, match=message):
        small.compile_grammar(source)


def test_rules_that_begin_with_each_other_in_a_row_are_followed_to_the_limit() -> None:
    def chain(length: int) -> str:
        rules = "\n".join(f'r{i} ::= r{i - 1} "+" root | r{i - 1}' for i in range(1, length))
        return f'root ::= r{length - 1}\nr0 ::= "(" root ")" | "a"\n{rules}'

    grammar = compiler.compile_grammar(chain(60))
    assert accepts(grammar, "((a)+a)")
    with pytest.raises(GrammarTooComplex, match="more than 64 rules begin with each other"):
        compiler.compile_grammar(chain(70))
