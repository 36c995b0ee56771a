from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.structural import (
    AnyText,
    ConstString,
    EbnfGrammar,
    Format,
    InTurn,
    JsonSchema,
    OneOf,
    Regex,
    Repeated,
    SeparatedTags,
    StructuralTag,
    Tag,
)
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of
from tests.grammar.context_free import texts

vocabulary = byte_vocabulary(
    [b"<f", b"=w", b"</f>", b"a<", b"hello", b">{", b"}</", b"ab", b"aab", b"\xc3\xa9<", b"\xa9"]
)
compiler = GrammarCompiler(vocabulary)

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = StructuralTag(
    tags=[Tag("<f=weather>", CITY, "</f>"), Tag("<f=n>", Regex("[0-9]+"), "</f>")],
    triggers=["<f="],
)
THINK = Tag("<think>", AnyText(), "</think>")

TABLE: list[tuple[Format, list[str], list[str]]] = [
    # Free text, a tag after a trigger, free text again.
    (
        CALLS,
        [
            "",
            "é a <f <<f f=",
            'Sure. <f=weather>{"city":"<f="}</f> and <f=n>12</f>',
            "<f=n>1</f><f=n>2</f>",
            "<<f=n>1</f>",
        ],
        ["<f=", "a <f=x", "<f=n>x</f>", "<f=n>1", "<f=n>1</f> <f=", '<f=weather>{"a":1}</f>'],
    ),
    (
        StructuralTag(CALLS.tags, ["<f=w", "<f=n"]),
        ["", "<f=", "<f=x <f=n>1</f>"],
        ["<f=n", "<f=w", "<f=n>1"],
    ),
    # The first trigger is one, also where another reading would put it later.
    (StructuralTag([Tag("aab", "!", "")], ["aab"]), ["aaab!", "aa", "aab!aab!"], ["aab", "aabaab"]),
    (StructuralTag([Tag("aa", "!", "")], ["aa"]), ["aa!", "abaa!", "a"], ["aaa!", "aa!aaa!"]),
    (
        StructuralTag([Tag("abc", "!", ""), Tag("bd", "?", "")], ["abc", "bd"]),
        ["abd?", "ababc!bd?ab"],
        ["abc", "bd!"],
    ),
    # How many tags, and where.
    (
        StructuralTag(CALLS.tags, ["<f="], at_least_one=True),
        ["<f=n>1</f>", "<f=n>1</f> and <f=n>2</f>."],
        ["", "x", "x<f=n>1</f>"],
    ),
    (
        StructuralTag(CALLS.tags, ["<f="], stop_after_first=True),
        ["", "x", "x<f=n>1</f>"],
        ["<f=n>1</f>.", "<f=n>1</f><f=n>1</f>"],
    ),
    (
        StructuralTag(CALLS.tags, ["<f="], at_least_one=True, stop_after_first=True),
        ["<f=n>1</f>"],
        ["", "x<f=n>1</f>", "<f=n>1</f>x"],
    ),
    (
        StructuralTag(CALLS.tags, ["<f="], excludes=["%", "<g"]),
        ["", "<", "x<f=n>1</f>"],
        ["%", "<g", "<f=n>1</f>%"],
    ),
    # Free text within a tag goes on to its first end.
    (THINK, ["<think></think>", "<think>a </t b</think>"], ["<think>", "<think></think></think>"]),
    (Tag("[", AnyText(), "aa"), ["[aa", "[baa"], ["[aaa", "[", "[aab"]),
    (Tag("[", AnyText(("b",)), ("]", ")")), ["[]", "[a)"], ["[b]", "[a)]", "[a"]),
    (Tag("[", AnyText(("<",)), "</a>"), ["[</a>", "[x</a>"], ["[<</a>", "[</a></a>"]),
    (Tag("[", AnyText(max_chars=2), "]"), ["[]", "[é東]"], ["[abc]"]),
    (Tag("[", AnyText(), ""), ["[", "[]"], ["", "]"]),
    (Tag("[", "x", ("]", "")), ["[x]", "[x"], ["[", "[x]]"]),
    (Tag("[", OneOf((AnyText(), ConstString("a]b"))), "]"), ["[x]", "[a]", "[a]b]"], ["[x]b]"]),
    (Tag("[", InTurn((Regex("[0-9]"), AnyText())), "]"), ["[1]", "[1a]"], ["[]", "[1]]"]),
    (
        Tag("[", StructuralTag([Tag("<", "x", ">")], ["<"]), "]"),
        ["[]", "[a<x>b]", "[<x><x>]"],
        ["[<]", "[a]b]", "[<x>"],
    ),
    # A section of thought, then a document.
    (
        InTurn((THINK, JsonSchema(CITY, whitespace="flexible"))),
        ['<think>{</think>{ "city": ""}'],
        ["<think></think>", '{"city":""}', '<think></think>{"city":""}.'],
    ),
    # Grammars, repetition, separated tags.
    (
        InTurn(
            (EbnfGrammar('root ::= "(" root ")" | "x"'), EbnfGrammar("start: A*\nA: /a/", "lark"))
        ),
        ["x", "((x))aa"],
        ["(x", "a"],
    ),
    (EbnfGrammar('root ::= "a"\nb ::= root "b"', start="b"), ["ab"], ["a"]),
    (Repeated(Tag("<", "x", ">"), 1, 2), ["<x>", "<x><x>"], ["", "<x><x><x>"]),
    (SeparatedTags([Tag("<", "x", ">")], ","), ["", "<x>", "<x>,<x>"], [",", "<x>,", "<x><x>"]),
    (SeparatedTags([Tag("<", "x", ">")], ",", at_least_one=True), ["<x>", "<x>,<x>"], [""]),
    (SeparatedTags([Tag("<", "x", ">")], ",", stop_after_first=True), ["", "<x>"], ["<x>,<x>"]),
]


@pytest.mark.parametrize(("tag", "accepted", "rejected"), TABLE)
def test_a_tag_accepts_its_texts_and_no_others(
    tag: Format, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compiler.compile_structural_tag(tag)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []
    check_masks(grammar, accepted[-1])


def check_masks(grammar: CompiledGrammar, text: str) -> None:
    matcher = grammar.matcher()
    for byte in text.encode():
        assert np.array_equal(mask_of(matcher, vocabulary), brute_force_mask(matcher, vocabulary))
        assert matcher.accept(byte)
    assert matcher.is_complete


def test_a_trigger_that_has_begun_goes_on_to_one_of_the_tags() -> None:
    matcher = compiler.compile_structural_tag(CALLS).matcher()
    for byte in b"a <f=":
        assert matcher.accept(byte)
    allowed = {vocabulary.token_bytes[t] for t in np.flatnonzero(mask_of(matcher, vocabulary))}
    assert allowed == {b"w", b"n"}


def test_free_text_is_whole_characters() -> None:
    grammar = compiler.compile_structural_tag(CALLS)
    assert accepts(grammar, "é".encode())
    assert not accepts(grammar, b"\xc3")
    assert not accepts(grammar, b"\xa9")


def test_free_text_shares_its_masks_between_grammars() -> None:
    fresh = GrammarCompiler(vocabulary, machine="python")
    for name in ("a", "b", "c"):
        tag = StructuralTag([Tag(f"<f={name}>", name, "")], ["<f="])
        assert mask_of(fresh.compile_structural_tag(tag).matcher(), vocabulary).any()
        if name == "a":
            num_bodies = fresh._machine.num_bodies
    assert fresh._machine.num_bodies == num_bodies


def test_the_budget_closes_a_tag_that_was_opened() -> None:
    matcher = compiler.compile_structural_tag(CALLS).matcher()
    for byte in b"<f=w":
        assert matcher.accept(byte)
    for left in range(40, 0, -1):
        if matcher.is_complete:
            break
        allowed = np.flatnonzero(mask_of(matcher, vocabulary, budget=left))
        assert matcher.accept(int(allowed[left % len(allowed)]))
    assert matcher.is_complete


def test_options_of_a_schema_come_from_the_tag_or_else_from_the_compile() -> None:
    schema = {
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
        "type": "object",
        "additionalProperties": False,
    }
    tag = Tag("<", schema, ">")
    assert not accepts(compiler.compile_structural_tag(tag), '<{"b":2,"a":1}>')
    loose = compiler.compile_structural_tag(tag, whitespace="flexible", order="any")
    assert accepts(loose, '<{"b": 2, "a":1}>')
    strict = Tag("<", JsonSchema(schema, "compact", "declared"), ">")
    chosen = compiler.compile_structural_tag(strict, whitespace="flexible", order="any")
    assert not accepts(chosen, '<{"b": 2, "a":1}>')
    assert accepts(chosen, '<{"a":1,"b":2}>')
    with pytest.raises(ValueError, match="order is 'declared' or 'any', got 'sorted'"):
        compiler.compile_structural_tag(tag, order="sorted")


# A scanner: go on to the first trigger, take the tag, and so on.

WORDS = st.text("ab", min_size=1, max_size=3)


def scanned(tag: StructuralTag, text: str) -> bool:
    for end in range(len(text) + 1):
        found = [each for each in tag.triggers if text.endswith(each, 0, end)]
        if not found:
            continue
        start = end - len(found[0])  # free text is before it
        if any(0 <= text.find(each, 0, end) < start for each in tag.excludes):
            return False
        wholes = [each.begin + str(each.content) + str(each.end) for each in tag.tags]
        rests = [text[start + len(w) :] for w in wholes if text.startswith(w, start)]
        return any((not r if tag.stop_after_first else scanned(tag, r)) for r in rests)
    return not any(each in text for each in tag.excludes)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(WORDS, st.text("ab", max_size=2), WORDS), min_size=1, max_size=3),
    st.lists(WORDS, max_size=2),
    st.booleans(),
)
def test_random_tags_are_what_a_scanner_takes_them_for(
    parts: list[tuple[str, str, str]], excludes: list[str], stops: bool
) -> None:
    tags = [Tag(trigger + more, content, "") for trigger, more, content in parts]
    triggers = tuple(dict.fromkeys(trigger for trigger, _, _ in parts))
    tag = StructuralTag(tags, triggers, stop_after_first=stops, excludes=tuple(excludes))
    if any(a != b and a in b for a in triggers for b in triggers) or {*excludes} & {*triggers}:
        with pytest.raises(InvalidGrammar):
            compiler.compile_structural_tag(tag)
        return
    grammar = compiler.compile_structural_tag(tag)
    for text in texts(7):
        assert accepts(grammar, text) == scanned(tag, text), text


# JSON

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ONE_TAG = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}

JSON_TABLE: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f="],
        },
        ["", "x<f=a>1</f>z"],
        ["<f=a>z", "<f="],
    ),
    (
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [ONE_TAG],
                "at_least_one": True,
                "stop_after_first": True,
            },
        },
        ["<f=a>1</f>"],
        ["", "x<f=a>1</f>", "<f=a>1</f>x"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "A: "},
                {"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "b+"}]},
                {"type": "optional", "content": {"type": "const_string", "value": "!"}},
                {"type": "star", "content": {"type": "const_string", "value": "s"}},
                {"type": "plus", "content": {"type": "const_string", "value": "p"}},
                {
                    "type": "repeat",
                    "min": 1,
                    "max": -1,
                    "content": {"type": "grammar", "grammar": 'root ::= "g" | "(" root ")"'},
                },
            ],
        },
        ["A: 12!ssppg(g)", "A: bbpg"],
        ["A: 12", "A: pg", "A: 1pp"],
    ),
    (
        {
            "type": "tag",
            "begin": "<think>",
            "content": {"type": "any_text", "excludes": ["%"], "max_tokens": None},
            "end": ["</think>", "."],
        },
        ["<think>a</think>", "<think>."],
        ["<think>%.", "<think>a", "<think>.."],
    ),
    (
        {"type": "tags_with_separator", "tags": [ONE_TAG], "separator": "\n", "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f>\n<f=a>2</f>"],
        ["", "\n"],
    ),
    (
        {
            "type": "dispatch",
            "rules": [["<a>", INTEGER], ["<b>", {"type": "const_string", "value": "!"}]],
            "loop": False,
            "excludes": ["%"],
        },
        ["", "x", "x<a>1", "<b>!"],
        ["<a>", "<a>1<b>!", "%", "<b>!."],
    ),
    (
        {
            "type": "json_schema",
            "json_schema": {
                "properties": {"a": {}, "b": {}},
                "required": ["a", "b"],
                "type": "object",
            },
            "any_order": True,
            "style": "json",
            "whitespace": "flexible",
        },
        ['{"b": 1, "a": 2}'],
        ['{"b":1}'],
    ),
]


@pytest.mark.parametrize(("tag", "accepted", "rejected"), JSON_TABLE)
def test_a_tag_is_read_from_json(
    tag: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    grammar = compiler.compile_structural_tag(tag)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"type": "structural_tag"}, "#: needs the field 'structures'"),
        ({"type": "structural_tag", "format": []}, "#/format: expected an object, got list"),
        ({"type": "structural_tag", "format": {}}, "#/format: needs the field 'type'"),
        ({"type": "poem"}, "#: unknown format 'poem'"),
        ({"type": "const_string"}, "#: needs the field 'value'"),
        ({"type": "const_string", "value": 1}, "#/value: expected a string, got int"),
        ({"type": "const_string", "value": "a", "more": 1}, "#: unknown field 'more'"),
        ({"type": "or", "elements": []}, "#: needs at least one element"),
        ({"type": "sequence", "elements": {}}, "#/elements: expected a list, got dict"),
        ({"type": "repeat", "min": 2, "max": 1, "content": INTEGER}, "'max' is 1, below 'min', 2"),
        ({"type": "repeat", "min": True, "max": 1, "content": INTEGER}, "expected a number"),
        ({"type": "any_text", "max_chars": -1}, "#/max_chars: expected a number from 0 on"),
        ({"type": "json_schema", "json_schema": "{}"}, "#/json_schema: expected a schema, got str"),
        ({**INTEGER, "any_order": 1}, "#/any_order: expected true or false, got int"),
        ({**INTEGER, "order": "up"}, "#/order: expected .* got 'up'"),
        ({**INTEGER, "undeclared": "no"}, "#/undeclared: expected .* got 'no'"),
        (
            {"type": "triggered_tags", "tags": [INTEGER], "triggers": ["<"]},
            "#/tags/0: expected a tag",
        ),
        (
            {"type": "triggered_tags", "tags": [], "triggers": ["<"]},
            "at least one tag and one trigger",
        ),
        ({"type": "tags_with_separator", "tags": [], "separator": ""}, "needs at least one tag"),
        ({"type": "dispatch", "rules": [["a"]]}, "#/rules/0: expected a pattern and a format"),
        ({"type": "regex", "pattern": "("}, "#: position 0: missing"),
        ({"type": "grammar", "grammar": "root ::= x"}, "#: line 1, column 10: the rule 'x' is not"),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": "\ud800"}]},
            "#/elements/0: not valid Unicode",
        ),
    ],
)
def test_a_malformed_tag_is_refused_with_its_place(tag: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compiler.compile_structural_tag(tag)


@pytest.mark.parametrize(
    ("tag", "feature"),
    [
        ({"type": "token", "token": 1}, "token"),
        ({"type": "any_tokens"}, "any_tokens"),
        ({"type": "token_triggered_tags"}, "token_triggered_tags"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "qwen_xml_parameter"),
        ({**INTEGER, "style": "qwen_xml"}, "style"),
        ({"type": "any_text", "max_tokens": 3}, "max_tokens"),
        ({**ONE_TAG, "begin": {"type": "token", "token": 1}}, "token"),
        ({"type": "regex", "pattern": r"(a)\1"}, "back-reference"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(tag: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=feature) as caught:
        compiler.compile_structural_tag(tag)
    assert feature in caught.value.feature


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        (
            StructuralTag([Tag("<f>", "", "")], ["<g"]),
            "#/tags/0/begin: the tag '<f>' must begin with",
        ),
        (StructuralTag([Tag("<f>", "", "")], ["<", "<f"]), "with exactly one trigger"),
        (StructuralTag([Tag("<f>", "", "")], ["<", "g"]), "#/triggers/1: no tag begins with the"),
        (StructuralTag([Tag("<f>", "", "")], [""]), "must not be empty"),
        (Tag("[", StructuralTag([Tag("<f>", "", "")], ["<"]), "a<b"), "'<' is a part of 'a<b'"),
        (
            StructuralTag([Tag("<f>", "", "")], ["<"], excludes=["<"]),
            "#/excludes/0: '<' is a trigger too",
        ),
        (Tag("<", "x", ()), "a tag needs an end"),
    ],
)
def test_tags_that_contradict_each_other_are_refused(tag: Format, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compiler.compile_structural_tag(tag)


def test_a_schema_that_nothing_satisfies_is_refused_with_its_place() -> None:
    with pytest.raises(UnsatisfiableGrammar, match="#/tags/0/content: "):
        compiler.compile_structural_tag(StructuralTag([Tag("<f>", False, "")], ["<"]))


def test_a_remark_on_a_schema_says_in_which_tag_it_is() -> None:
    tag = Tag("<", {"type": "string", "format": "made-up"}, ">")
    (note,) = compiler.compile_structural_tag(tag).notes
    assert note.startswith("#/content: ")
    assert "made-up" in note


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EbnfGrammar("x", "peg"), "syntax is 'gbnf' or 'lark', got 'peg'"),
        (lambda: JsonSchema({}, "loose"), "whitespace is 'compact' or 'flexible', got"),
        (lambda: JsonSchema({}, order="sorted"), "order is 'declared' or 'any', got"),
        (lambda: Repeated(AnyText(), 3, 1), "high is 1, below low, 3"),
    ],
)
def test_a_format_with_an_unknown_option_is_not_made(
    make: Callable[[], Format], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_too_many_triggers_are_refused() -> None:
    triggers = [f"<{i:06}>" for i in range(2000)]
    with pytest.raises(GrammarTooComplex, match="more than 10000 characters"):
        compiler.compile_structural_tag(StructuralTag([Tag(t, "", "") for t in triggers], triggers))


def test_formats_nested_too_deeply_are_refused() -> None:
    tag: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(3000):
        tag = {"type": "optional", "content": tag}
    with pytest.raises(GrammarTooComplex, match="nested too deeply"):
        compiler.compile_structural_tag(tag)
