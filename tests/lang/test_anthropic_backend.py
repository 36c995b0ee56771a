"""Programs on a Claude model: Anthropic's own client talks to a server that speaks as theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, RemoteError
from tests.runtime.server.harness import served


@contextmanager
def answering(
    *answers: Response, to: Callable[[Any], Response] | None = None, **options: Any
) -> Iterator[tuple[pm.Anthropic, list[Any]]]:
    """A backend whose server gives these answers, or those of `to` to what it is asked; and the
    bodies of what it was asked.
    """
    asked: list[Any] = []
    app = FastAPI()

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        assert "k" in (
            request.headers.get("x-api-key"),
            request.headers.get("authorization", "")[7:],
        )
        asked.append(await request.json())
        if to is not None:
            return to(asked[-1])
        return answers[min(len(asked), len(answers)) - 1]

    with (
        served(app) as url,
        pm.Anthropic("claude", api_key="k", base_url=url, **options) as backend,
    ):
        yield backend, asked


def stream_of(
    *texts: str,
    reason: str | None = "end_turn",
    sequence: str | None = None,
    input_tokens: int = 5,
) -> Response:
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": input_tokens,
            "output_tokens": 1,
            "cache_creation_input_tokens": 2,
            "cache_read_input_tokens": 4,
        },
    }
    block = {"type": "text", "text": ""}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            }
            for text in texts
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    ]
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return Response("".join(lines), media_type="text/event-stream")


def failing(status: int) -> Response:
    body = {"type": "error", "error": {"type": "some_error", "message": "not now"}}
    return JSONResponse(body, status, headers={"retry-after-ms": "1"})


def test_a_chat_program_runs_unchanged() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.system("Be brief.")
        s += pm.user("Hi 🐈")
        s += pm.assistant(pm.gen("first", max_tokens=20, temperature=0, top_k=3, stop=["."]))
        s += pm.user("And?")
        s += pm.assistant(pm.gen("second", max_tokens=7))

    with answering(
        stream_of("Hel", "lo", reason="stop_sequence", sequence="."),
        stream_of("Bye", reason="max_tokens"),
    ) as (backend, asked):
        state = program.run(backend=backend)
    assert (state["first"], state["second"]) == ("Hello", "Bye")
    common = {"model": "claude", "stream": True, "system": "Be brief."}
    hi = {"role": "user", "content": "Hi 🐈"}
    assert asked[0] == {
        **common,
        "max_tokens": 20,
        "temperature": 0,
        "top_k": 3,
        "stop_sequences": ["."],
        "messages": [hi],
    }
    answer, more = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}
    assert asked[1] == {**common, "max_tokens": 7, "messages": [hi, answer, more]}
    meta = state.meta("first")
    assert (meta["finish_reason"], meta["stop_reason"]) == ("stop", ".")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (11, 4, 9)
    assert state.meta("second")["finish_reason"] == "length"


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_gives_an_instance_and_branches_go_their_ways() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Who?")
        for branch in s.fork(2):
            branch += pm.assistant(pm.gen("person", json_schema=Person))

    with answering(stream_of('{"name": "Ada", ', '"age": 36}')) as (backend, asked):
        program.run(backend=backend)
    assert len(asked) == 2
    wanted = asked[0]["output_config"]["format"]
    assert wanted["type"] == "json_schema"
    assert wanted["schema"]["required"] == ["name", "age"]


@pytest.mark.parametrize("prefill", [False, True])
def test_a_message_that_has_begun_goes_on_where_the_model_does_that(prefill: bool) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Team?") + pm.assistant("Team: " + pm.gen("team"))

    with answering(stream_of("billing"), prefill=prefill) as (backend, asked):
        if not prefill:
            with pytest.raises(PrimitiveFailed, match="text of the assistant before gen"):
                program.run(backend=backend)
            assert not asked
            return
        assert program.run(backend=backend)["team"] == "billing"
    assert asked[0]["messages"][-1] == {"role": "assistant", "content": "Team: "}


@pytest.mark.parametrize("emulate", [False, True])
def test_a_schema_for_the_rest_of_a_message_is_emulated_or_refused(emulate: bool) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Who?") + pm.assistant("It is " + pm.gen("who", json_schema=Person))

    filled = '{"text_so_far": "It is ", "continuation": {"name": "Ada", "age": 36}}'
    with answering(stream_of(filled), prefill=True, emulate=emulate) as (backend, asked):
        if not emulate:
            with pytest.raises(PrimitiveFailed, match="text of the assistant before gen"):
                program.run(backend=backend)
            assert not asked
            return
        assert program.run(backend=backend)["who"] == Person(name="Ada", age=36)
    schema = asked[0]["output_config"]["format"]["schema"]
    assert schema["properties"]["continuation"]["additionalProperties"] is False
    assert [message["role"] for message in asked[0]["messages"]] == ["user"]


class Short(BaseModel):
    name: str = Field(max_length=3)


@pytest.mark.parametrize("before", ["", "It is "])
def test_bounds_that_the_api_does_not_take_are_looked_at_afterwards(before: str) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Who?") + pm.assistant(before + pm.gen("who", json_schema=Short))

    def answer(name: str) -> Response:
        value = {"name": name}
        return stream_of(
            json.dumps({"text_so_far": before, "continuation": value} if before else value)
        )

    with answering(answer("Ada"), answer("Grace"), emulate=True) as (backend, asked):
        assert program.run(backend=backend)["who"] == Short(name="Ada")
        with pytest.raises(PrimitiveFailed, match="#/name: maxLength is 3"):
            program.run(backend=backend)
    schema = asked[0]["output_config"]["format"]["schema"]
    assert '"maxLength": 3' not in json.dumps(schema)
    assert "maxLength: 3" in json.dumps(schema)
    with answering(answer("Ada")) as (backend, asked):
        if not before:
            program.run(backend=backend)
            assert '"maxLength": 3' in json.dumps(asked)


def test_a_choice_is_a_structured_output_where_it_may_be() -> None:
    @pm.function
    def program(s: pm.State, temperature: float) -> None:
        s += pm.user("Which?")
        s += pm.assistant(pm.select("x", ["cat", "dog"], temperature=temperature))

    with answering(stream_of('{"continuation": "dog"}'), emulate=True) as (backend, asked):
        meta = program.run(temperature=0, backend=backend).meta("x")
        with pytest.raises(PrimitiveFailed, match="select with a temperature"):
            program.run(temperature=0.5, backend=backend)
    assert (meta["method"], meta["probabilities"]) == ("structured_output", None)
    assert len(asked) == 1
    assert asked[0]["temperature"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "seed is not supported"),
        ({"min_p": 0.1}, "min_p is not supported"),
        ({"return_logprob": True}, "logprobs is not supported"),
        ({"regex": "a+"}, "a regex constraint is not supported"),
        ({"json_schema": {}, "whitespace": "flexible"}, "an option of a constraint"),
        ({"max_tokens": 0}, "max_tokens=0 is not supported"),
    ],
)
def test_what_the_api_has_not_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Hi") + pm.assistant(pm.gen("x", **options))

    with (
        answering(stream_of("x")) as (backend, asked),
        pytest.raises(PrimitiveFailed, match=words),
    ):
        program.run(backend=backend)
    assert not asked


def test_a_late_system_message_and_a_select_are_refused() -> None:
    @pm.function
    def late(s: pm.State) -> None:
        s += pm.user("Hi") + pm.assistant("Ho") + pm.system("Be kind.")
        s += pm.assistant(pm.gen("x"))

    @pm.function
    def choose(s: pm.State) -> None:
        s += pm.user("Hi") + pm.assistant(pm.select("x", ["a", "b"]))

    with answering(stream_of("x")) as (backend, asked):
        with pytest.raises(PrimitiveFailed, match="a system message further down"):
            late.run(backend=backend)
        with pytest.raises(PrimitiveFailed, match="no log-probabilities"):
            choose.run(backend=backend)
    assert not asked


@pytest.mark.parametrize(
    ("answers", "error", "words", "num_asked"),
    [
        ([failing(529), stream_of("x")], None, "", 2),
        ([failing(429)], RemoteError, "429: .*not now", 4),
        ([failing(401)], RemoteError, "401", 1),
        ([failing(400)], InvalidRequest, "not now", 1),
        ([stream_of("x", reason="refusal")], RemoteError, "refusal", 1),
    ],
)
def test_what_passes_is_tried_again_and_the_rest_is_told(
    answers: list[Response], error: type[Exception] | None, words: str, num_asked: int
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Hi") + pm.assistant(pm.gen("x"))

    with answering(*answers) as (backend, asked):
        if error is None:
            assert program.run(backend=backend)["x"] == "x"
        else:
            with pytest.raises(PrimitiveFailed, match=words) as caught:
                program.run(backend=backend)
            assert isinstance(caught.value.__cause__, error)
    assert len(asked) == num_asked


def test_a_key_that_is_missing_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    with pytest.raises(InvalidRequest, match="api_key"):
        pm.Anthropic("claude")
