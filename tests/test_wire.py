"""The contracts survive the way to a server and back, and nothing else is taken for them."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette import errors
from palmette.errors import InvalidRequest, PalmetteError
from palmette.protocol import (
    Constraint,
    FinishReason,
    Outlook,
    PromptStretch,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from palmette.wire import Malformed, error_from_data, error_to_data, from_data, to_data

ids = st.integers(0, 1 << 40)
id_tuples = st.lists(ids, max_size=5).map(tuple)
some_ids = st.lists(ids, min_size=1, max_size=5).map(tuple)
texts = st.text(max_size=9)
numbers = st.floats()
counts = st.integers(0, 1 << 60)
tops = st.lists(st.tuples(ids, numbers), max_size=3).map(tuple)
logprobs = st.builds(TokenLogprob, ids, numbers, tops)
usages = st.builds(Usage, prompt_tokens=counts, decoded_tokens=counts, queued_seconds=numbers)
stretches = st.builds(PromptStretch, counts, counts, texts, texts)
outlooks = st.builds(
    Outlook, program_id=texts, version=counts, constant_tokens=counts, generated_tokens=counts
)
constraints = st.one_of(
    st.builds(Constraint.regex, texts, syntax=st.sampled_from(["ecma", "python"])),
    st.builds(Constraint.choices, st.lists(texts, min_size=1)),
    st.builds(Constraint.json_schema, st.just({"a": 1}), whitespace=st.just("flexible")),
    st.builds(Constraint.grammar, texts, backend=st.just("xgrammar")),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 9),
    top_k=st.integers(-1, 99),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=counts,
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 100),
    jump_forward=st.sampled_from([None, "token", "canonical"]),
)
shared = {
    "request_id": st.just("r"),
    "token_ids": some_ids,
    "path": id_tuples,
    "salt": texts,
    "outlook": st.none() | outlooks,
    "goes_on": st.booleans(),
    "explain": st.booleans(),
}
requests = st.builds(Request, sampling=samplings, constraint=st.none() | constraints, **shared)
score_requests = st.builds(
    ScoreRequest,
    continuations=st.lists(some_ids, min_size=1, max_size=3).map(tuple),
    num_top=st.integers(0, 100),
    **shared,
)
events = st.builds(
    TokenEvent,
    request_id=st.just("r"),
    token_ids=id_tuples,
    text=texts,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | texts | ids,
    stop_logprob=st.none() | logprobs,
    usage=st.none() | usages,
    prompt=st.lists(stretches, max_size=3).map(tuple),
)
results = st.builds(
    ScoreResult,
    request_id=st.just("r"),
    logprobs=st.lists(st.lists(numbers, max_size=3).map(tuple), max_size=3).map(tuple),
    usage=usages,
    top=st.lists(st.lists(tops, max_size=2).map(tuple), max_size=2).map(tuple),
)

LEFT_OUT = frozenset({"request_id", "error"})


def given_of(kind: type) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {"request_id": "r"} | ({"error": None} if "error" in names else {})


@given(st.one_of(requests, score_requests, events, results))
def test_what_is_read_is_what_was_written(value: Any) -> None:
    text = json.dumps(to_data(value, without=LEFT_OUT), allow_nan=False)
    found = from_data(type(value), json.loads(text), **given_of(type(value)))
    assert repr(found) == repr(value)  # NaN is not equal to itself


def test_what_is_as_by_default_does_not_travel() -> None:
    request = Request(request_id="r", token_ids=(1, 2), sampling=SamplingParams(top_p=0.5))
    assert to_data(request, without=LEFT_OUT) == {"token_ids": [1, 2], "sampling": {"top_p": 0.5}}
    assert to_data(TokenLogprob(3, -math.inf)) == {"token_id": 3, "logprob": "-inf"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    sorted({each.name for kind in (Request, TokenEvent) for each in fields(kind)})
)


@given(st.sampled_from([Request, TokenEvent]), st.dictionaries(names, json_values), json_values)
def test_any_other_data_is_malformed(kind: type, data: dict[str, Any], other: Any) -> None:
    for each in (data, {"token_ids": [1], **data}, other):
        try:
            found = from_data(kind, each, **given_of(kind))
        except (Malformed, InvalidRequest):
            continue
        assert isinstance(found, kind)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        ({}, "token_ids is required"),
        ({"token_ids": [1], "request_id": "x"}, "request_id is not a field"),
        ({"token_ids": [1], "x" * 999: 1}, "x… is not a field"),
        ({"token_ids": [1.0]}, "token_ids[0] must be an integer"),
        ({"token_ids": [True]}, "token_ids[0] must be an integer"),
        ({"token_ids": "1"}, "token_ids must be a list"),
        ({"token_ids": [1], "sampling": {"top_p": "1"}}, "sampling.top_p must be a number"),
        ({"token_ids": [1], "sampling": {"top_p": 10**400}}, "sampling.top_p is too large"),
        ({"token_ids": [1], "sampling": {"jump_forward": "x"}}, "must be one of 'token'"),
        ({"token_ids": [1], "sampling": {"logit_bias": [[1]]}}, "must be a list of 2"),
        ({"token_ids": [1], "explain": 1}, "explain must be true or false"),
        ({"token_ids": [1], "outlook": {"version": 1}}, "outlook.program_id is required"),
        ({"token_ids": [1], "constraint": {"kind": "magic", "source": ""}}, "constraint.kind"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: Any, message: str) -> None:
    with pytest.raises(Malformed) as raised:
        from_data(Request, data, request_id="r")
    assert message in str(raised.value)


def test_what_a_contract_refuses_is_raised_as_it_is() -> None:
    with pytest.raises(InvalidRequest, match="top_p") as raised:
        from_data(Request, {"token_ids": [1], "sampling": {"top_p": 7}}, request_id="r")
    assert raised.value.param == "top_p"


ERRORS = [
    InvalidRequest("no", param="x"),
    errors.PromptTooLong(9, 5),
    errors.RequestTooLarge(9, 5, 16, num_pinned=1),
    errors.UnsupportedFeature("magic", "there is none", param="m"),
    errors.InvalidConstraint("bad", param="regex", pointer="#/a"),
    errors.UnsupportedConstraint("bad"),
    errors.UnsatisfiableConstraint("nothing matches"),
    errors.ConstraintTooComplex("slow"),
    errors.EngineStopped("gone"),
    errors.CacheFull("full", num_pages_needed=3, num_pages_left=1),
    errors.RequestAborted("left"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_raised_again_as_it_was(error: PalmetteError) -> None:
    found = error_from_data(json.loads(json.dumps(error_to_data(error))))
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_an_error_that_is_not_the_client_s_to_know_is_not_told() -> None:
    assert error_to_data(errors.EngineError("internal error: secret")) is None
    assert error_to_data(errors.ModelFileError("/path", "damaged")) is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"kind": "InvalidRequest"},
        {"kind": "KeyboardInterrupt", "message": "x"},
        {"kind": ["InvalidRequest"], "message": "x", "param": None},
        {"kind": "InvalidRequest", "message": "x"},
        {"kind": "InvalidRequest", "message": "x", "param": {}},
        {"kind": "EngineStopped", "message": "x", "__class__": "x"},
    ],
)
def test_what_is_no_error_is_malformed(data: Any) -> None:
    with pytest.raises(Malformed):
        error_from_data(data)
