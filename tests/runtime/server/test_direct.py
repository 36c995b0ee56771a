"""``/backend/...``: the backend as it is, and the programs of clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palmette.errors import EngineError
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.protocol import Outlook
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.server import ServerLimits
from palmette.runtime.server.programs import ClientPrograms
from palmette.runtime.testing import tiny_engine
from tests.runtime.server.harness import client, events_of, post, strict_json

GENERATE, SCORE, PROGRAMS = "/backend/generate", "/backend/score", "/backend/programs"


async def refusal(path: str, body: Any, **options: Any) -> dict[str, Any]:
    response = await post(ScriptedBackend("ok"), path, body, **options)
    assert response.status_code in (400, 413, 429), response.text
    error: dict[str, Any] = strict_json(response.text)["error"]
    return {"status": response.status_code, **error}


async def test_a_request_is_answered_with_its_events() -> None:
    backend = ScriptedBackend(Reply(text="Hi you"))
    response = await post(backend, GENERATE, {"token_ids": [72], "sampling": {"max_tokens": 3}})
    events = events_of(response.text)
    assert "".join(event.get("text", "") for event in events) == "Hi "
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (GENERATE, {}, "token_ids", "token_ids is required"),
        (GENERATE, {"token_ids": []}, "prompt", "the prompt is empty"),
        (GENERATE, {"token_ids": [1], "path": [[1]]}, "path[0]", "must be an integer"),
        (GENERATE, {"token_ids": [1], "request_id": "r"}, "request_id", "not a field"),
        (GENERATE, {"token_ids": [1], "salt": "s" * 257}, "salt", "256 characters"),
        (
            GENERATE,
            {"token_ids": [1], "outlook": {"program_id": "p" * 65}},
            None,
            "program_id has more than 64",
        ),
        (
            GENERATE,
            {"token_ids": [1], "sampling": {"stop": ["a"] * 65}},
            "stop",
            "stop has 65 entries",
        ),
        (
            GENERATE,
            {"token_ids": [1], "constraint": {"kind": "choices", "source": "no"}},
            "constraint",
            "JSON array of strings",
        ),
        (SCORE, {"token_ids": [1], "continuations": [[]]}, "choices", "at least one token"),
        (SCORE, {"token_ids": [1], "continuations": [[1]] * 257}, "continuations", "257 entries"),
        (
            SCORE,
            {"token_ids": [1], "continuations": [[1] * 20_000], "num_top": 100},
            "continuations",
            "log-probabilities",
        ),
        (PROGRAMS, {"news": [{}]}, "news[0]", "news[0].outlook is required"),
        (PROGRAMS, {"over": [3]}, "over[0]", "must be a string"),
        (PROGRAMS, [], None, "must be an object"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_place(
    path: str, body: Any, param: str | None, message: str
) -> None:
    error = await refusal(path, body)
    assert error["status"] == 400
    assert message in error["message"]
    assert (error["param"] or "").partition("[")[0] == (param or "").partition("[")[0]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"token_ids": [' + "1" * 5000 + "]}"])
async def test_what_is_not_json_is_refused(text: str) -> None:
    async with client(ScriptedBackend("ok")) as http:
        headers = {"content-type": "application/json"}
        response = await http.post(GENERATE, content=text, headers=headers)
    assert response.status_code == 400
    assert strict_json(response.text)["error"]["code"] == "invalid_json"


async def test_too_many_at_once_are_told_when_to_come_back() -> None:
    limits = ServerLimits(max_requests=0)
    for path, body in (
        (GENERATE, {"token_ids": [1]}),
        (SCORE, {"token_ids": [1], "continuations": [[2]]}),
    ):
        response = await post(ScriptedBackend("ok"), path, body, limits=limits)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_a_fault_of_ours_is_told_without_its_inside() -> None:
    backend = ScriptedBackend(Reply(error=EngineError("internal error: secret")))
    response = await post(backend, GENERATE, {"token_ids": [1]})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "exception" not in strict_json(response.text)["error"]


async def test_the_endpoints_are_described() -> None:
    async with client(ScriptedBackend("ok")) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert (await http.get("/backend")).json()["tokenizer"] is None
        response = await http.get("/backend/tokenizer")
    content = paths[GENERATE]["post"]["requestBody"]["content"]["application/json"]
    properties = content["schema"]["properties"]
    assert {"token_ids", "sampling", "constraint", "outlook"} <= set(properties)
    assert "request_id" not in properties
    assert "$ref" not in json.dumps(content)
    assert response.status_code == 400
    assert strict_json(response.text)["error"]["code"] == "unsupported"


# Programs of clients


class Listener:
    def __init__(self) -> None:
        self.over: list[str] = []
        self.heard: list[str] = []

    def announce(self, outlook: Outlook, ended: Any = ()) -> None:
        self.heard.append(outlook.program_id)

    def end_program(self, program_id: str) -> None:
        self.over.append(program_id)


def outlook(program_id: str) -> Outlook:
    return Outlook(program_id=program_id)


def test_a_program_that_is_silent_for_long_is_ended_and_one_that_runs_is_not() -> None:
    now = 0.0
    listener = Listener()
    limits = ServerLimits(program_seconds=10)
    programs = ClientPrograms(listener, limits, clock=lambda: now)
    with programs.asking(outlook("runs")):
        programs.announce(outlook("silent"), ())
        now = 9.0
        programs.announce(outlook("speaks"), ())
        now = 11.0
        programs.announce(outlook("new"), ())
        assert listener.over == ["silent"]
    now = 20.5
    programs.announce(outlook("new"), ())
    assert listener.over == ["silent", "speaks"]
    programs.end("runs")
    programs.end("runs")
    programs.end("never heard of")
    assert listener.over == ["silent", "speaks", "runs"]
    assert len(programs) == 1


def test_of_too_many_programs_the_ones_silent_for_longest_are_ended() -> None:
    listener = Listener()
    programs = ClientPrograms(listener, ServerLimits(max_programs=3))
    with programs.asking(outlook("0")):
        for index in range(1, 7):
            programs.announce(outlook(str(index)), ())
        assert listener.over == ["1", "2", "3", "4"]
        assert len(programs) == 3
        with programs.asking(outlook("5")), programs.asking(outlook("6")):
            programs.announce(outlook("7"), ())  # all others run
            assert len(listener.over) == 4


async def test_a_client_that_dies_between_two_requests_holds_nothing_for_ever() -> None:
    with AsyncEngine.over(lambda: tiny_engine(num_pages=64)) as engine:
        limits = ServerLimits(program_seconds=0)
        body = {"token_ids": [*range(40)], "goes_on": True, "sampling": {"max_tokens": 4}}
        async with client(engine, limits=limits) as http:
            for program_id, held in (("dead", True), ("alive", True)):
                told = {**body, "outlook": {"program_id": program_id, "generated_tokens": 9}}
                assert (await http.post(GENERATE, json=told)).status_code == 200
                assert (engine.stats().num_held_pages > 0) is held
            await http.post(PROGRAMS, json={"over": ["alive"]})
        assert engine.stats().num_held_pages == 0
