"""The last requests of a server, looked at as a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from palmette import Reply, ScriptedBackend, Trace
from palmette.errors import InvalidRequest
from palmette.lang.tracing.recording import Status
from palmette.lang.tracing.requests import RequestTraces
from palmette.protocol import Heals, Outlook, ProgramListener, Request
from tests.runtime.server.harness import COMPLETIONS, client, error_of

PATHS = ("/trace", "/trace.json")


@pytest.mark.parametrize("path", PATHS)
async def test_without_traces_there_is_nothing_and_the_answer_says_why(path: str) -> None:
    async with client(ScriptedBackend()) as http:
        response = await http.get(path)
    assert response.status_code == 404
    assert "--trace N" in error_of(response)["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_traces_want_the_key_as_all_else_does(path: str) -> None:
    async with client(ScriptedBackend(), api_key="k", traces=RequestTraces(3)) as http:
        assert (await http.get(path)).status_code == 401
        good = await http.get(path, headers={"authorization": "Bearer k"})
    assert good.status_code == 200


async def test_the_last_requests_are_kept_as_runs_of_one_primitive() -> None:
    traces = RequestTraces(2)
    backend = ScriptedBackend(lambda *_: Reply(text="</script>", num_forced=1))
    async with client(backend, traces=traces) as http:
        answers = [
            (await http.post(COMPLETIONS, json={"prompt": f"<b>{i}", "max_tokens": 9})).json()
            for i in range(3)
        ]
        told = (await http.get("/trace.json")).text
        page = await http.get("/trace")
    trace = Trace.from_json(told)
    assert len(trace.runs) == 2
    for number, run in enumerate(trace.runs, start=1):
        (gen,) = run.branches[0].events
        assert run.status is gen.status is Status.OK
        assert gen.text == answers[number]["choices"][0]["text"] == "</script>"
        assert gen.usage == run.usage
        assert gen.usage.prompt_tokens == answers[number]["usage"]["prompt_tokens"]
        assert gen.prompt.stretches[0].reason == "cached"
        assert gen.tokens.forced == (0,)
        assert gen.tokens.logprobs[1] is not None
        assert gen.sampling["max_tokens"] == 9
    assert trace.prefixes.nodes[0].text == "<b>"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.text.count("</script>") == traces.html().count("</script>")


async def ask(traces: RequestTraces | None, **body: Any) -> Any:
    backend = ScriptedBackend("ok", probabilities={"": {"o": 0.5, "k": 0.5}})
    options: dict[str, Any] = {} if traces is None else {"traces": traces}
    async with client(backend, **options) as http:
        answer = (await http.post(COMPLETIONS, json={"prompt": "a", **body})).json()
    return {name: answer[name] for name in ("choices", "usage")}


@pytest.mark.parametrize("body", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 2}, {"n": 2}])
async def test_an_answer_is_the_same_whether_it_is_traced_or_not(body: dict[str, Any]) -> None:
    assert await ask(RequestTraces(5), **body) == await ask(None, **body)


async def test_a_request_that_fails_is_kept_with_its_error() -> None:
    traces = RequestTraces(2)
    backend = ScriptedBackend(lambda *_: Reply(text="abc", error=OSError("disk"), fails_after=1))
    async with client(backend, traces=traces) as http:
        assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 500
    (run,) = traces.trace().runs
    assert run.status is Status.FAILED
    assert "disk" in run.error
    assert run.branches[0].events[0].text == "a"


async def test_what_is_kept_is_bounded_in_bytes() -> None:
    traces = RequestTraces(100, max_bytes=100_000)
    async with client(ScriptedBackend("ok"), traces=traces) as http:
        for _ in range(10):
            await http.post(COMPLETIONS, json={"prompt": "x" * 10_000})
    assert len(traces.trace().runs) == 2


def test_at_least_one_request_must_be_kept() -> None:
    make: Callable[[], object] = lambda: RequestTraces(0)  # noqa: E731
    with pytest.raises(InvalidRequest, match="at least 1 request, got 0"):
        make()


async def test_scores_are_kept_too() -> None:
    traces = RequestTraces(2)
    async with client(ScriptedBackend("ok"), traces=traces) as http:
        body = {"input_ids": [97], "options": [[98], [99, 100]]}
        response = await http.post("/score", json=body)
        assert response.status_code == 200, response.text
        assert json.loads((await http.get("/trace.json")).text)["runs"][0]["program"] == "score"
    (run,) = traces.trace().runs
    assert run.usage.prompt_tokens > 0


class Listener(ScriptedBackend):
    """Hears of programs."""

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        self.heard = outlook

    def end_program(self, program_id: str) -> None:
        self.over = program_id


def test_a_backend_that_is_watched_listens_and_heals_as_it_does_without() -> None:
    assert not isinstance(RequestTraces(1).watching(ScriptedBackend("ok")), ProgramListener)
    listener = Listener("ok")
    watched = RequestTraces(1).watching(listener)
    assert isinstance(watched, ProgramListener)
    watched.announce(Outlook(program_id="p"))
    watched.end_program("p")
    assert (listener.heard.program_id, listener.over) == ("p", "p")
    assert isinstance(watched, Heals)
    assert watched.heals


async def test_who_asks_for_a_trace_gets_it_also_where_requests_are_kept() -> None:
    watched = RequestTraces(1).watching(ScriptedBackend("ok"))
    request = Request(request_id="r", token_ids=(97,), trace_top=2)
    events = [event async for event in watched.generate(request)]
    assert sum(len(event.logprobs) for event in events) == 2
    events = [event async for event in watched.generate(replace(request, trace_top=None))]
    assert not any(event.logprobs for event in events)
