from __future__ import annotations

import lark
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.ebnf.common import COMMON
from palmette.grammar.testing import accepts, byte_vocabulary
from tests.grammar.context_free import Node, as_lark, derives, grammars, texts
from tests.grammar.samples import ARITHMETIC, SQL_LIKE, Sample

compiler = GrammarCompiler(byte_vocabulary())


def compile_lark(source: str):
    return compiler.compile_grammar(source, syntax="lark")


def oracle(source: str) -> lark.Lark:
    """Lark's own parser, which deals out characters to terminals in every way."""
    return lark.Lark(source, parser="earley", lexer="dynamic_complete", ambiguity="forest")


def parses(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.UnexpectedInput:
        return False
    except RuntimeError as error:
        # It gives up on a text that it has parsed, in more ways than it expects.
        if "multiple start symbol items" not in str(error):
            raise
    return True


TABLE: list[tuple[str, list[str], list[str]]] = [
    # Literals, ranges and patterns.
    (r'start: "a\"\\\n\x41\u00e9\U0001F600\q"', ['a"\\\nAé😀\\q'], ["a", 'a"\\\nAé😀q']),
    ('start: "Straße9"i', ["STRAßE9", "straße9", "Straẞe9"], ["STRASSE9", "straße8"]),
    ('start: "a".."c" ("x" .. "z")~2', ["axz", "cyy"], ["dxx", "ax"]),
    (r"start: /[ab]+\/\d/ /x.z/s", ["ab/1x\nz", "a/٣xyz"], ["/1xyz", "a/1xz"]),
    (r"start: /ab+/i /c d  # remark\/x/x", ["aBbcd", "ABcd"], ["abc d", "acd"]),
    ("start: /x\n  y/x", ["xy"], ["x\n  y"]),
    # The shape of rules: modifiers, priorities, aliases, continued lines, comments.
    (
        '?start: other  // one\n  | "b" -> letter\n# two\n\n  | _more\n'
        '!other.-2: "a"\n_more : A\nA.3: "c"',
        ["a", "b", "c"],
        ["", "ab"],
    ),
    ('start: ("a"\n  | "b"\n  ) "c"', ["ac", "bc"], ["a", "abc"]),
    ('start: "a" \\\n "b"', ["ab"], ["a"]),
    ('start: ["a" | "b"] "c"+ "d"* "e"?', ["c", "acd", "bcce"], ["ab", "abc", "e"]),
    ('start: "a" ~ 2 "b"~1..3 ("c" "d") ~ 0..1', ["aab", "aabbbcd"], ["ab", "aabbbb", "aabc"]),
    ("start: a*\na: | b\nb: A\nA: /x|y/", ["", "xy"], ["z"]),
    # Terminals of terminals.
    ('start: A+\nA: B "-" B | B~3\nB: ("x" | C)\nC: /[0-9]/+', ["x-12", "x1x", "1-1xxx"], ["x-"]),
    # Left recursion, and recursion behind what may be empty.
    ('start: start "+" n | n\nn: /[0-9]/', ["1", "1+2+3"], ["", "+1", "1+"]),
    ('start: [start] start "b" | "a"', ["a", "ab", "aab"], ["b", "aa"]),
    # What is ignored stands before, between and after terminals, but not in them.
    ('start: "ab" C\nC: "c" "d"\n%ignore " "', ["abcd", " ab  cd ", "ab cd"], ["a b cd", "abc d"]),
    ('start: a*\na: "x"\n%ignore /[ \\n]/\n%ignore "#" /[^\\n]/*', ["", " #x", "x#x\n x"], ["xy"]),
    ("start: \n%ignore /-+/", ["", "---"], ["a"]),
    # A lazy repetition ends where it first can, also as a part of a larger terminal.
    ('start: /".*?"/ A?\nA: "x"', ['"a"', '""x'], ['"a"b"', '"a']),
    ('start: C+\nC: "/*" B "*/"\nB: /(.|\\n)*?/', ["/**/", "/* a\n*//***/"], ["/* */ */", "/*/"]),
    ('start: "a"\n%ignore /<.*?>/', ["<>a<b>"], ["<a>>a", "a<"]),
    (r"start: /[*?]?\??[?]+/", ["??", "*?", "???"], ["*", "x"]),
    ("start: /a}?(?#.*?)b*/", ["a", "a}", "abb", "a}b"], ["}", "a}}"]),
    # Looking back inside of a terminal.
    (
        r'start: /".*?(?<!\\)(\\\\)*?"/',
        ['""', r'"a\"b"', r'"\\"'],
        [r'"\"', '"a"b"'],
    ),
    # Templates.
    (
        'start: list{NAME, ","} "." list{pair{NAME, "="}, ";"}\nlist{x, sep}: x (sep x)*\n'
        "pair{a, by}: a by a | list{a, by}\nNAME: /[a-z]/",
        ["a.b=c", "a,b.a=b;c;d=e=f"],
        ["a.", "a;b.c", "a.b,c"],
    ),
    ('start: deep{"a"}\ndeep{x}: x | "(" deep{x} ")"', ["a", "((a))"], ["(a", "()"]),
    # Directives.
    (
        "%import common.INT\n%import common.WORD -> LETTERS\n%import common (WS, CNAME)\n"
        "start: INT LETTERS WS CNAME",
        ["12ab _x1", "1a\n\tb"],
        ["12ab", "1a 1"],
    ),
    ('A: "a"\nstart: A\n%extend A: "b"\n%override start: A A', ["ab", "ba"], ["a", "c"]),
]


@pytest.mark.parametrize(("source", "accepted", "rejected"), TABLE)
def test_a_grammar_accepts_its_texts_and_no_others(
    source: str, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compile_lark(source)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


# Lark builds no parser for a comment in a verbose pattern or a line that ends inside brackets.
COMPARED = [each for each in TABLE if "remark" not in each[0] and "\n  ) " not in each[0]]


@pytest.mark.parametrize(("source", "accepted", "rejected"), COMPARED)
def test_the_same_texts_are_accepted_by_lark_itself(
    source: str, accepted: list[str], rejected: list[str]
) -> None:
    parser = oracle(source)
    assert [text for text in accepted if not parses(parser, text)] == []
    assert [text for text in rejected if parses(parser, text)] == []


@pytest.mark.parametrize("sample", [ARITHMETIC, SQL_LIKE], ids=["arithmetic", "sql"])
def test_the_samples_are_what_lark_itself_takes_them_for(sample: Sample) -> None:
    parser = oracle(sample.source)
    assert [text for text in sample.accepted if not parses(parser, text)] == []
    assert [text for text in sample.rejected if parses(parser, text)] == []


LIBRARY: dict[str, tuple[list[str], list[str]]] = {
    "DIGIT": (["0"], ["a", "00"]),
    "HEXDIGIT": (["9", "a", "F"], ["g"]),
    "INT": (["007"], ["-1", ""]),
    "SIGNED_INT": (["-1", "+12", "3"], ["--1"]),
    "DECIMAL": (["1.", ".5", "1.5"], ["1", "."]),
    "_EXP": (["e5", "E-3"], ["e"]),
    "FLOAT": (["1e5", "1.5", ".5E+1"], ["1"]),
    "SIGNED_FLOAT": (["-1.5", "1e5"], ["-1"]),
    "NUMBER": (["1", "1.5", "1e5"], ["-1", "e5"]),
    "SIGNED_NUMBER": (["-1", "+1.5", "1"], ["+"]),
    "_STRING_INNER": (['a"b', "x"], ["a\nb"]),
    "_STRING_ESC_INNER": (['a\\"b', "\\\\"], ["a\nb"]),
    "ESCAPED_STRING": (['""', '"a\\"b"', '"\\\\"'], ['"', '"\\"', '"a\nb"', '"a"b"']),
    "LCASE_LETTER": (["a"], ["A", "é"]),
    "UCASE_LETTER": (["A"], ["a"]),
    "LETTER": (["a", "Z"], ["1"]),
    "WORD": (["abC"], ["a1"]),
    "CNAME": (["_a1", "A"], ["1a"]),
    "WS_INLINE": ([" \t"], ["\n", ""]),
    "WS": ([" \t\f\r\n"], ["", "a"]),
    "CR": (["\r"], ["\n"]),
    "LF": (["\n"], ["\r"]),
    "NEWLINE": (["\n\r\n"], ["\r", ""]),
    "SH_COMMENT": (["# a", "#"], ["#\n", "a"]),
    "CPP_COMMENT": (["// a"], ["/", "//\n"]),
    "C_COMMENT": (["/**/", "/* a * / \n**/"], ["/*", "/*/", "/* a */ */"]),
    "SQL_COMMENT": (["-- a"], ["-", "--\n"]),
}


@pytest.mark.parametrize("name", COMMON)
def test_a_terminal_of_the_library_is_what_lark_takes_it_for(name: str) -> None:
    accepted, rejected = LIBRARY[name]
    source = f"start: {name}\n%import common.{name}"
    grammar = compile_lark(source)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []
    if "STRING_" in name:
        return  # Lark has no parser for it alone: it may be empty
    parser = oracle(source)
    assert [text for text in accepted if not parses(parser, text)] == []
    assert [text for text in rejected if parses(parser, text)] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('begin: "a"', "there is no rule 'start' to begin with"),
        ("start: a", "line 1, column 8: the rule 'a' is not defined"),
        ("start: b\nb: A", "line 2, column 4: the terminal 'A' is not defined"),
        ('start: "a', "line 1, column 8: missing '\"'"),
        ("start: /a", "line 1, column 8: missing '/'"),
        ("start: /[/", r"line 1, column 8: position 0: missing '\]'"),
        ('start: "a"\nstart: "b"', "line 2, column 1: 'start' is defined twice"),
        ('start: ("a"', r"line 1, column 8: missing '\)'"),
        ('start: "a")', r"line 1, column 11: unexpected '\)'"),
        ('start "a"', "line 1, column 7: expected ':' after 'start'"),
        ("start: /a/z", "line 1, column 11: unknown flag 'z'"),
        ('start: "b".."a"', "a range that ends before it starts"),
        ('start: "ab".."c"', "a range is between two single characters"),
        ('start: "a"..b', "expected a string after '..'"),
        ('start: "a" ~ 3..2', "the count ends below its start"),
        ('start: "a" ~ x', "expected a number, got 'x'"),
        (r'start: "\xZZ"', "an escape that is no character"),
        (r'start: "\ud800"', "an escape that is no character"),
        ('start: A\nA: B\nB: A "x"', "the terminal '[AB]' refers to itself"),
        ("start: A\nA: start", "line 2, column 4: the rule 'start' cannot be part of a terminal"),
        ('start: _A\n!_A: "a"', r"a terminal takes no '\?' or '!'"),
        ('start: A\nA: "a" -> x', "a terminal has no aliases"),
        ('start: x{"a"}', "the template 'x' is not defined"),
        ('start: x{"a"}\nx{a, b}: a b', "the template 'x' has 2 parameters, here are 1"),
        ("start: x\nx{a}: a", "the template 'x' needs arguments"),
        ("start{a}: a", "the template 'start' cannot be where a text begins"),
        ("start: A\n%import common.B -> A", "there is no 'B' in 'common'"),
        ('start: A\nA: "a"\n%import common.INT -> A', "'A' is defined twice"),
        ('start: "a"\n%extend b: "c"', "'%extend' of 'b', which is not defined before"),
        ("start: %unknown", "line 1, column 8: unexpected|a directive inside"),
        ("%unknown", "unknown directive '%unknown'"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_place(source: str, message: str) -> None:
    with pytest.raises((InvalidGrammar, UnsupportedGrammar), match=message):
        compile_lark(source)


@pytest.mark.parametrize(
    ("source", "feature"),
    [
        ("%declare A\nstart: A", "%declare"),
        ("%import .other.A\nstart: A", "importing from a file"),
        ("%import python.NAME\nstart: NAME", "importing from 'python'"),
        ("start: /a(?=b)/", "looking around"),
        (r"start: /a\b/", "looking around"),
        (r"start: /(?<!a)b/", "looking around"),
        (r"start: /a?(?<!a)b/", "looking around"),
        ("start: /^a/", "anchor"),
        (r"start: /(a)\1/", "back-reference"),
        ("start: /a/l", "locale"),
        ("start: <|end|>", "token"),
        ('start[max_tokens=3]: "a"', "attribute"),
        ("start: %json {}", "directive inside a rule"),
        ('start: A{"x"}\nA{x}: x', "template"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(source: str, feature: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=feature) as caught:
        compile_lark(source)
    assert feature in caught.value.feature


def test_templates_inside_templates_without_end_are_refused() -> None:
    with pytest.raises(GrammarTooComplex, match="templates inside templates without end"):
        compile_lark('start: a{"x"}\na{x}: a{b{x}}\nb{y}: y')


def test_a_grammar_without_any_text_is_refused() -> None:
    with pytest.raises(UnsatisfiableGrammar, match="no text satisfies the rule 'start"):
        compile_lark('start: "a" start\n%ignore " "')


@settings(max_examples=150, deadline=None)
@given(grammars)
def test_random_grammars_are_as_a_recogniser_by_spans_has_them(grammar: dict[str, Node]) -> None:
    expected = {text for text in texts(4) if derives(grammar, text)}
    try:
        compiled = compile_lark(as_lark(grammar))
    except UnsatisfiableGrammar:
        assert not expected
        return
    assert {text for text in texts(4) if accepts(compiled, text)} == expected


IGNORED = ["", '\n%ignore "-"', '\n%ignore /b-?/ \n%ignore "-"', '\n%ignore "-"+']


@settings(max_examples=150, deadline=None)
@given(grammars, st.sampled_from(IGNORED), st.lists(st.text("ab-", max_size=5), max_size=12))
def test_random_grammars_are_what_lark_takes_them_for(
    grammar: dict[str, Node], ignored: str, more: list[str]
) -> None:
    source = as_lark(grammar) + ignored
    try:
        parser = oracle(source)
    except lark.exceptions.GrammarError:
        assume(False)  # such as an alternative that is there twice
    tried = [*texts(3), *more]
    expected = {text for text in tried if parses(parser, text)}
    try:
        compiled = compile_lark(source)
    except UnsatisfiableGrammar:
        assert not expected
        return
    assert {text for text in tried if accepts(compiled, text)} == expected
