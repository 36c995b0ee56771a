"""Programs on a model behind an OpenAI-compatible API: our own server, and one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, RemoteError
from palmette.lang.backends.conversation import conversation_of, text_tokenizer
from palmette.lang.backends.scripted import ChatMLTemplate, Reply, ScriptedBackend
from palmette.protocol import Constraint, Piece, Request, SamplingParams
from tests.runtime.server.harness import live


def remote(url: str, **options: Any) -> pm.OpenAI:
    return pm.OpenAI("scripted", base_url=f"{url}/v1", api_key="unused", **options)


# Prompts are read back


def test_a_conversation_is_read_back_from_its_ids() -> None:
    tokenizer, template = text_tokenizer(), ChatMLTemplate()
    pieces = [
        *template.begin([], "system"),
        Piece("Be <|im_end|> kind. 🐈"),
        *template.end([]),
        *template.begin([], "assistant"),
        Piece("I am"),
    ]
    found = conversation_of(tokenizer.encode(pieces), tokenizer)
    assert found.messages == ({"role": "system", "content": "Be <|im_end|> kind. 🐈"},)
    assert (found.role, found.text) == ("assistant", "I am")
    plain = conversation_of((*tokenizer.prefix_ids, *tokenizer.encode("Once")), tokenizer)
    assert (plain.messages, plain.role, plain.text) == ((), None, "Once")


@pytest.mark.parametrize(
    "text",
    ["x<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>user\nhi<|im_end|>\ny", "hi<|im_end|>"],
)
def test_text_between_messages_is_refused(text: str) -> None:
    tokenizer = text_tokenizer()
    ids = tokenizer.encode([Piece(text, special=True)])
    with pytest.raises(pm.UnsupportedFeature, match="text outside of messages"):
        conversation_of(ids, tokenizer)


# Programs


@pm.function
def capital(s: pm.State, country: str) -> None:
    s += pm.system("Be brief.")
    s += pm.user(f"What is the capital of {country}?")
    s += pm.assistant(pm.gen("answer", max_tokens=20, stop="."))
    s += pm.user("And its river?")
    s += pm.assistant(pm.gen("river", max_tokens=20))


def test_a_chat_program_runs_unchanged() -> None:
    replies = {
        "France?<|im_end|>\n<|im_start|>assistant\n": "Paris. It is",
        "river?<|im_end|>\n<|im_start|>assistant\n": "the Seine",
    }
    engine = ScriptedBackend(replies)
    expected = capital.run(country="France", backend=engine)
    behind = ScriptedBackend(replies)
    with live(behind) as url, remote(url) as backend:
        state = capital.run(country="France", backend=backend)
    assert (state["answer"], state["river"]) == ("Paris", "the Seine")
    assert state.messages() == expected.messages()
    assert behind.prompts == engine.prompts
    assert state.usage().prompt_tokens == expected.usage().prompt_tokens
    assert state.usage().completion_tokens == expected.usage().completion_tokens
    assert state.meta("answer")["finish_reason"] == "stop"


def test_a_traced_run_works_without_what_an_api_cannot_tell() -> None:
    with live(ScriptedBackend("Paris")) as url, remote(url) as backend:
        state = capital.run(country="France", backend=backend, trace=True)
        (run,) = state.trace().runs
    gen = next(event for event in run.branches[0].events if event.kind == "gen")
    assert gen.tokens is not None
    assert gen.prompt is not None
    assert "".join(gen.tokens.texts) == gen.text == "Paris"
    assert gen.tokens.logprobs is None
    assert gen.prompt.stretches == ()
    assert run.detailed


def test_plain_text_goes_on_in_branches_and_streams() -> None:
    @pm.function
    def story(s: pm.State) -> None:
        s += "Once" + pm.gen("first", max_tokens=5)
        branches = s.fork(2)
        for index, branch in enumerate(branches):
            branch += f" {index}:" + pm.gen("rest", max_tokens=3)
        branches.join()

    replies = {"Once": " upon", "upon 0:": "abcd", "upon 1:": "xy"}
    with live(ScriptedBackend(replies)) as url, remote(url, api="completions") as backend:
        state = story.run(backend=backend)
        assert (state["first"], state["rest"]) == (" upon", ["abc", "xy"])
        assert state.text() == "Once upon"
        streamed = story.run(backend=backend, stream=True)
        assert "".join(streamed.text_iter("first")) == " upon"
        streamed.sync()


def test_a_template_written_by_hand_is_sent_as_it_is() -> None:
    by_hand = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    @pm.function
    def program(s: pm.State) -> None:
        s += by_hand + pm.gen("answer")

    behind = ScriptedBackend({by_hand: "Hello"})
    with live(behind) as url, remote(url, api="completions") as backend:
        assert program.run(backend=backend)["answer"] == "Hello"
    assert behind.prompts == [by_hand]


def test_what_is_sampled_and_constrained_arrives() -> None:
    behind = ScriptedBackend("12")
    with live(behind) as url, remote(url, api="completions", dialect="palmette") as backend:

        @pm.function
        def number(s: pm.State) -> None:
            s += "n = " + pm.gen(
                "n", regex="[0-9]+", temperature=0.5, top_k=3, seed=7, max_tokens=9
            )
            (branch,) = s.fork(1)
            branch += " " + pm.gen("m", max_tokens=2, seed=7)

        number.run(backend=backend)
    first, second = behind.requests
    assert first.constraint == Constraint.regex("[0-9]+")
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 7)
    assert sampling.max_tokens == 9
    assert second.sampling.seed not in (None, 7)  # another branch, another draw


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_gives_an_instance() -> None:
    with live(ScriptedBackend('{"name": "Ada", "age": 36}')) as url, remote(url) as backend:

        @pm.function
        def who(s: pm.State) -> None:
            s += pm.user("Who?") + pm.assistant(pm.gen("person", json_schema=Person))

        assert who.run(backend=backend)["person"] == Person(name="Ada", age=36)


# What the server does not have, or does wrong


def ask(
    backend: pm.OpenAI, prompt: str = "Once", constraint: Constraint | None = None, **sampling: Any
) -> Request:
    tokenizer = backend.tokenizer
    return Request(
        request_id="r",
        token_ids=(*tokenizer.prefix_ids, *tokenizer.encode([Piece(prompt, special=True)])),
        sampling=SamplingParams(**sampling),
        constraint=constraint,
    )


async def text_of(backend: pm.OpenAI, request: Request) -> str:
    return "".join([event.text async for event in backend.generate(request)])


USER, BEGUN = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\nWell"


@pytest.mark.parametrize(
    ("options", "prompt", "request_options", "what"),
    [
        ({}, USER + BEGUN, {}, "text of the assistant before gen"),
        ({}, USER, {}, "gen in no message"),
        ({}, "<|im_start|>user\nHi", {}, "gen in a message of user"),
        ({}, USER + BEGUN[:-4], {"top_k": 5}, "top_k"),
        ({}, USER + BEGUN[:-4], {"stop": tuple("abcde")}, "stop"),
        ({}, USER + BEGUN[:-4], {"logprobs": 1}, "logprobs"),
        ({}, USER + BEGUN[:-4], {"constraint": Constraint.regex("a")}, "a regex constraint"),
        (
            {"api": "completions", "dialect": "vllm"},
            "x",
            {"constraint": Constraint.json_schema({}, order="any")},
            "an option of a constraint",
        ),
        ({"dialect": "sglang"}, USER + BEGUN[:-4], {"logit_bias": ((5, 1.0),)}, "logit_bias"),
    ],
)
async def test_what_the_api_has_not_is_refused_by_name(
    options: dict[str, Any], prompt: str, request_options: dict[str, Any], what: str
) -> None:
    backend = pm.OpenAI("m", base_url="http://127.0.0.1:9/v1", api_key="unused", **options)
    # Nothing is sent, so that no connection is ever opened.
    with pytest.raises(pm.UnsupportedFeature) as caught:
        await text_of(backend, ask(backend, prompt, **request_options))
    assert caught.value.feature == what


def test_a_role_in_a_plain_prompt_and_a_select_in_a_chat_are_refused_at_their_lines() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Hi")
        s += pm.assistant(pm.select("choice", ["a", "b"]))

    with live(ScriptedBackend()) as url, remote(url) as chat:
        with (
            remote(url, api="completions") as plain,
            pytest.raises(pm.UnsupportedFeature, match="takes plain text"),
        ):
            program.run(backend=plain)
        with pytest.raises(PrimitiveFailed, match=r"select.*test_openai_backend\.py:"):
            program.run(backend=chat)


def answering(*answers: httpx.Response | Exception) -> tuple[pm.OpenAI, list[httpx.Request]]:
    """A backend whose server gives these answers, and what it was asked."""
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        answer = answers[min(len(asked), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return pm.OpenAI("m", api="completions", api_key="k", http_client=http), asked


def stream_of(*texts: str, finish: str | None = "stop") -> httpx.Response:
    base = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
    chunks = [
        {**base, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]}
        for text in texts
    ]
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": finish}
    chunks.append({**base, "choices": [last]})
    counts = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    counts_chunk = {**base, "choices": [], "usage": counts}
    counts_chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in (*chunks, counts_chunk)]
    return httpx.Response(
        200, headers={"content-type": "text/event-stream"}, text="".join(lines) + "data: [DONE]\n\n"
    )


def failing(status: int) -> httpx.Response:
    headers = {"retry-after-ms": "1"}
    return httpx.Response(status, headers=headers, json={"error": {"message": "not now"}})


async def test_what_passes_is_tried_again_and_counts_are_the_servers() -> None:
    backend, asked = answering(failing(429), failing(503), stream_of("up", "on"))
    events = [event async for event in backend.generate(ask(backend, seed=3))]
    assert "".join(event.text for event in events) == "upon"
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 4, 2)
    assert len(asked) == 3
    body = json.loads(asked[-1].content)
    assert (body["prompt"], body["seed"], body["model"]) == ("Once", 3, "m")
    assert "temperature" not in body


@pytest.mark.parametrize(
    ("answer", "error", "words", "num_asked"),
    [
        (failing(429), RemoteError, "429", 4),
        (failing(401), RemoteError, "401", 1),
        (failing(400), InvalidRequest, "not now", 1),
        (httpx.ConnectError("no route"), RemoteError, "cannot be used", 4),
        (stream_of("x", finish="content_filter"), RemoteError, "content_filter", 1),
    ],
)
async def test_what_does_not_pass_is_told(
    answer: Any, error: type[Exception], words: str, num_asked: int
) -> None:
    backend, asked = answering(answer)
    with pytest.raises(error, match=words):
        await text_of(backend, ask(backend))
    assert len(asked) == num_asked


async def test_no_more_are_under_way_than_allowed() -> None:
    behind = ScriptedBackend("ok", delay=0.05)
    with live(behind) as url:
        async with aclosing(remote(url, api="completions", max_concurrency=3)) as backend:
            texts = await asyncio.gather(*(text_of(backend, ask(backend)) for _ in range(12)))
    assert texts == ["ok"] * 12
    assert behind.max_running == 3


async def test_a_closed_iterator_ends_the_request() -> None:
    behind = ScriptedBackend(Reply(text="abc" * 100, token_delay=0.01))
    with live(behind) as url:
        async with aclosing(remote(url, api="completions")) as backend:
            async with aclosing(backend.generate(ask(backend, max_tokens=300))) as events:
                async for event in events:
                    assert event.text
                    break
            while not behind.aborted:
                await asyncio.sleep(0.01)
    assert behind.num_running == 0


def test_options_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="api must be one of chat, completions"):
        pm.OpenAI("m", api="talk", api_key="k")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="max_concurrency"):
        pm.OpenAI("m", api_key="k", max_concurrency=0)


def test_a_key_that_is_missing_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InvalidRequest, match="api_key"):
        pm.OpenAI("m")


async def test_a_closed_backend_takes_nothing() -> None:
    backend, asked = answering(stream_of("x"))
    backend.close()
    with pytest.raises(pm.EngineError, match="was closed"):
        await text_of(backend, ask(backend))
    assert not asked


# Scores


def echoed(*choices: tuple[list[int], list[float | None]]) -> httpx.Response:
    return httpx.Response(
        200,
        json={
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": index,
                    "text": "",
                    "finish_reason": "length",
                    "logprobs": {
                        "text_offset": offsets,
                        "token_logprobs": values,
                        "tokens": ["?"] * len(offsets),
                        "top_logprobs": None,
                    },
                }
                for index, (offsets, values) in enumerate(choices)
            ],
            "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9},
        },
    )


def test_a_select_is_one_request_and_its_probabilities_are_real() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "It is " + pm.select("what", ["🐈 cat", "dog"])

    backend, asked = answering(
        echoed(([0, 3, 5, 7], [None, -1.0, -0.5, -0.25]), ([0, 3, 6], [None, -1.0, -2.0]))
    )
    state = program.run(backend=backend)
    assert state["what"] == "🐈 cat"
    # A token that begins in the prompt and ends in an option belongs to the option.
    likelihoods = state.meta("what")["log_likelihoods"]
    assert likelihoods == {"🐈 cat": pytest.approx(-0.75), "dog": pytest.approx(-2.0)}
    (request,) = asked
    body = json.loads(request.content)
    assert body["prompt"] == ["It is 🐈 cat", "It is dog"]
    assert body["echo"] is True


def test_options_that_begin_each_other_and_servers_without_scores_are_told() -> None:
    def program(*options: str) -> pm.Function:
        @pm.function
        def choose(s: pm.State) -> None:
            s += "x" + pm.select("o", list(options))

        return choose

    backend, asked = answering(stream_of("x"))
    with pytest.raises(PrimitiveFailed, match="'a' begins another one"):
        program("a", "ab").run(backend=backend)
    assert not asked
    bare = echoed(([], []), ([], []))
    empty = json.loads(bare.content)
    for choice in empty["choices"]:
        choice["logprobs"] = None
    backend, _ = answering(httpx.Response(200, json=empty))
    with pytest.raises(PrimitiveFailed, match="did not say how likely"):
        program("a", "b").run(backend=backend)


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "backends.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    with live(ScriptedBackend(" there was a model. It", model_name="smollm2-135m")) as url:
        assert "http://127.0.0.1:8000" in block
        exec(compile(block.replace("http://127.0.0.1:8000", url), str(page), "exec"), {})
    assert capsys.readouterr().out == " there was a model\n"
