"""What a chat API has no way to say, put as a structured output and read back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from palmette.errors import RemoteError
from palmette.lang.backends.envelope import Envelope, closed, option_probabilities
from palmette.lang.backends.spelling import Spelling, Token

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
FEW = settings(max_examples=30, deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def filled(envelope: Envelope, rest: Any, **style: Any) -> str:
    """An answer as the schema has it."""
    value = {"text_so_far": envelope.begun} if envelope.begun else {}
    answer = {**value, "continuation": rest}
    Draft202012Validator(envelope.schema()).validate(answer)
    return json.dumps(answer, **style)


@FEW
@given(TEXT, TEXT, st.booleans(), st.sampled_from([None, 2]))
def test_a_text_is_read_back_whole_and_in_part(
    begun: str, rest: str, ascii_only: bool, indent: int | None
) -> None:
    envelope = Envelope(begun)
    answer = filled(envelope, rest, ensure_ascii=ascii_only, indent=indent)
    assert envelope.read(answer, is_whole=True) == rest
    for length in range(len(answer)):
        part = envelope.read(answer[:length], is_whole=False)
        assert rest.startswith(part)
        part.encode()  # no half of a character


@given(TEXT, JSON)
def test_json_is_read_back_as_it_was_written(begun: str, value: Any) -> None:
    envelope = Envelope(begun, json_schema=True)
    text = envelope.read(filled(envelope, value), is_whole=True)
    assert text == json.dumps(value)


def test_an_option_is_one_of_those_there_are() -> None:
    envelope = Envelope("Team: ", options=("net\nwork", "bil"))
    assert envelope.read(filled(envelope, "bil"), is_whole=True) == "bil"
    other = '{"text_so_far": "Team: ", "continuation": "bill"}'
    with pytest.raises(RemoteError, match="did not put its answer as the schema"):
        envelope.read(other, is_whole=True)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Sure!",
        "[]",
        '{"text_so_far": "Team", "continuation": "x"}',
        '{"continuation": "x"}',
        '{"continuation": "x", "text_so_far": "Team: "}',
        '{"text_so_far": "Team: "}',
        '{"text_so_far": "Team: ", "continuation": 5}',
        '{"text_so_far": "Team: ", "continuation": "x", "more": 1}',
        '{"text_so_far": "Team: ", "continuation": "x"} and so on',
        '{"text_so_far": "Team: ", "continuation": ' + "[" * 100_000,
        '{"text_so_far": "Team: ", "continuation": ' + "9" * 100_000 + "}",
        '{"text_so_far": "Team: ", "continuation": "x',
    ],
)
def test_what_is_not_of_the_schema_is_told(answer: str) -> None:
    with pytest.raises(RemoteError):
        Envelope("Team: ").read(answer, is_whole=True)


def test_references_lead_to_the_same_schemas_as_before() -> None:
    inner = {
        "$defs": {"name": {"type": "string", "maxLength": 3}},
        "type": "object",
        "properties": {
            "name": {"$ref": "#/$defs/name"},
            "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "other": {"$ref": "#/properties/name"},
        },
        "required": ["name"],
    }
    envelope = Envelope("x", json_schema=inner)
    check = Draft202012Validator(envelope.schema())
    of = Draft202012Validator(inner)
    for value in (
        {"name": "Ada", "child": {"name": "Bo", "child": None}},
        {"name": "Ada", "child": {"name": "Boris"}},
        {"name": "Ada", "other": "Boris"},
        {},
    ):
        whole = {"text_so_far": "x", "continuation": value}
        assert check.is_valid(whole) == of.is_valid(value)


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "properties": {}}},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
    {"anyOf": [{"properties": {"a": {"const": {"properties": {}}}}}, {"type": "integer"}]},
    {"type": "array", "items": {"properties": {"a": {}, "b": {}}, "required": ["a"]}},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {"type": "integer"}}}]},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS)
@FEW
@given(value=JSON | st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), all_required=...)
def test_a_closed_schema_allows_nothing_that_the_given_one_does_not(
    schema: Any, value: Any, all_required: bool
) -> None:
    tight = closed(schema, all_required=all_required)
    if Draft202012Validator(tight).is_valid(value):
        assert Draft202012Validator(schema).is_valid(value)
    if isinstance(schema, dict) and "type" in schema and "additionalProperties" not in schema:
        assert "additionalProperties" in json.dumps(tight)


# How likely options were


def tokens(*found: tuple[str, float, dict[str, float]]) -> list[Token]:
    return [
        Token(
            text.encode(),
            math.log(value),
            tuple((other.encode(), math.log(likely)) for other, likely in top.items()),
        )
        for text, value, top in found
    ]


TEAMS = ("billing", "network", "accounts")


def test_first_tokens_that_tell_the_options_apart_give_their_probabilities() -> None:
    found = option_probabilities(
        tokens(
            ('{"continuation":', 0.9, {}),
            ('"', 1.0, {'"': 1.0}),
            ("bill", 0.4, {"bill": 0.4, "net": 0.2, "b": 0.05, "ac": 0.1, "acc": 0.05, "the": 0.2}),
            ("ing", 1.0, {}),
            ('"}', 1.0, {}),
        ),
        16,
        TEAMS,
    )
    assert found == pytest.approx([0.45 / 0.8, 0.2 / 0.8, 0.15 / 0.8])


def test_a_token_may_begin_before_the_option_and_options_may_begin_one_another() -> None:
    found = option_probabilities(
        tokens(
            ('{"continuation":"', 1.0, {'{"continuation":"': 1.0}),
            ("acc", 0.8, {"acc": 0.8, "b": 0.2}),
            ("ount", 1.0, {"ount": 1.0}),
            ('"}', 0.25, {'"}': 0.25, "s": 0.5, 's"': 0.25}),
        ),
        16,
        ("account", "accounts", "billing"),
    )
    assert found == pytest.approx([0.2, 0.6, 0.2])


@pytest.mark.parametrize(
    ("top", "why"),
    [
        ({"bill": 0.5, "net": 0.5}, "accounts is not among the likeliest"),
        ({"bill": 0.5, '"': 0.1, "net": 0.2, "acc": 0.2}, None),
    ],
)
def test_options_of_which_nothing_is_told_have_no_probability(
    top: dict[str, float], why: str | None
) -> None:
    found = option_probabilities(tokens(('"', 1.0, {}), ("bill", 0.5, top)), 0, TEAMS)
    assert (found is None) == (why is not None)


def test_a_likely_token_that_leads_into_two_options_tells_nothing() -> None:
    top = {"bill": 0.5, "acc": 0.3}
    found = option_probabilities(
        tokens(('"', 1.0, {}), ("bill", 0.5, top)), 0, ("billing", "accounts", "access")
    )
    assert found is None


@FEW
@given(st.data())
def test_probabilities_sum_to_one_and_are_those_of_the_walk(data: st.DataObject) -> None:
    """Letters are tokens, so that each option is one walk."""
    options = data.draw(
        st.lists(st.text("ab", min_size=1, max_size=3), min_size=2, max_size=4, unique=True)
    )
    taken = data.draw(st.sampled_from(options))
    rests = [f'"{option}"' for option in options]
    walk, expected = [], dict.fromkeys(options, 0.0)
    alive, reach = list(range(len(options))), 1.0
    is_told = True
    for position, letter in enumerate(f'"{taken}"'):
        letters = sorted({rests[option][position] for option in alive})
        weights = {each: data.draw(st.floats(0.05, 1)) for each in letters}
        total = sum(weights.values())
        walk.append((letter, weights[letter] / total, {e: w / total for e, w in weights.items()}))
        if len(alive) == 1:
            continue
        for each in letters:
            into = [option for option in alive if rests[option][position] == each]
            if each != letter and len(into) > 1:
                is_told = False
            elif each != letter:
                expected[options[into[0]]] = reach * weights[each] / total
        reach *= weights[letter] / total
        alive = [option for option in alive if rests[option][position] == letter]
    expected[taken] = reach
    found = option_probabilities(tokens(*walk), 0, options)
    if not is_told:
        assert found is None
        return
    assert found == pytest.approx([expected[option] for option in options])
    assert found is not None
    assert sum(found) == pytest.approx(1)


# Tokens and text


@given(TEXT, st.lists(st.integers(1, 5)), st.lists(st.integers(1, 7)), st.booleans())
def test_text_and_tokens_are_joined_however_they_come(
    text: str, sizes: list[int], cuts: list[int], tokens_first: bool
) -> None:
    data, made = text.encode(), []
    while data:
        size = sizes.pop() if sizes else len(data)
        made.append(Token(data[:size], -float(len(made) + 1)))
        data = data[size:]
    arriving: list[Token] = list(made) if tokens_first else []
    spelling = Spelling(arriving)
    out, values, rest = "", [], text
    while rest:
        size = cuts.pop() if cuts else len(rest)
        piece, found = spelling.take(rest[:size])
        rest = rest[size:]
        out += piece
        values += found
        if not tokens_first and made:
            arriving.append(made.pop(0))
    arriving += made if not tokens_first else []
    piece, found = spelling.take("")
    more, last = spelling.rest()
    assert out + piece + more == text
    values += [*found, *last]
    assert len(values) == len(text.encode())
    total = sum(token.logprob for token in arriving)
    assert sum(values) == pytest.approx(total)


def test_a_cut_token_has_no_log_probability_and_others_have_to_fit() -> None:
    spelling = Spelling([Token(b"ab", -1.0), Token(b"c.\n", -2.0)])
    assert spelling.take("abc") == ("ab", (-1.0, 0.0))
    text, values = spelling.rest()
    assert text == "c"
    assert math.isnan(values[0])
    with pytest.raises(RemoteError, match="do not spell"):
        Spelling([Token(b"x", -1.0)]).take("ab")
    behind = Spelling([])
    assert behind.take("ab") == ("", ())
    with pytest.raises(RemoteError, match="did not say how likely"):
        behind.rest()
