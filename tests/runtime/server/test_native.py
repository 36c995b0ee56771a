"""``/generate`` in SGLang's shape, and what goes with it; ``/score``."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import Constraint, Request, SamplingParams, ScoreRequest
from palmette.runtime import AsyncEngine
from palmette.runtime.server import ServerLimits
from palmette.runtime.testing import tiny_engine
from tests.runtime.server.harness import (
    answer,
    chunks,
    client,
    error_of,
    finite,
    live,
    pieces_backend,
    post,
    strict_json,
    wait_for,
)
from tests.runtime.server.test_completions import sky
from tests.runtime.server.test_live import hang_up

GENERATE, SCORE = "/generate", "/score"


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine.over(lambda: tiny_engine(page_size=4)) as engine:
        yield engine


async def test_an_answer_has_text_ids_and_figures() -> None:
    backend = pieces_backend("Hello", " you")
    body = await answer(
        backend, GENERATE, text="Say", sampling_params={"max_new_tokens": 8, "temperature": 0}
    )
    assert sorted(body) == ["meta_info", "output_ids", "text"]
    assert body["text"] == "Hello you"
    end = backend.tokenizer.control_id("<|eos|>")
    assert body["output_ids"] == [*backend.tokenizer.encode("Hello you"), end]
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": end}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 0)
    assert meta["e2e_latency"] == meta["total_seconds"] >= 0
    assert "input_token_logprobs" not in meta
    (request,) = backend.requests
    assert (request.path, request.sampling.max_tokens) == ((), 8)


async def test_ends_are_told_with_what_ended_them() -> None:
    asked = {"text": "q", "sampling_params": {"max_new_tokens": 2}}
    cut = await answer(ScriptedBackend("abcdef"), GENERATE, **asked)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    asked = {"text": "q", "sampling_params": {"stop": ["cd"]}, "rid": "mine"}
    stopped = await answer(ScriptedBackend("abcdef"), GENERATE, **asked)
    assert stopped["text"] == "ab"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cd"}
    assert stopped["meta_info"]["id"] == "mine"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ({"text": "a"}, ["A"]),
        ({"text": ["a"]}, ["A"]),
        ({"text": ["a", "b"]}, ["A", "B"]),
        ({"input_ids": [97]}, ["A"]),
        ({"input_ids": [[97], [98]]}, ["A", "B"]),
    ],
)
async def test_a_list_of_prompts_gets_a_list_of_answers(
    prompt: dict[str, Any], texts: list[str]
) -> None:
    backend = ScriptedBackend({"a": "A", "b": "B"})
    body = await answer(backend, GENERATE, **prompt)
    is_list = isinstance(next(iter(prompt.values()))[0], list) or prompt.get("text") in (
        ["a"],
        ["a", "b"],
    )
    assert isinstance(body, list) == is_list
    assert [each["text"] for each in (body if is_list else [body])] == texts


async def test_each_prompt_may_have_parameters_of_its_own() -> None:
    backend = ScriptedBackend("abc")
    body = await answer(
        backend,
        GENERATE,
        text=["p", "q"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
    )
    assert [each["text"] for each in body] == ["a", "ab", "ab"]
    assert sorted(request.path for request in backend.requests) == [(), (0,), (1,)]
    response = await post(backend, GENERATE, {"text": ["p", "q"], "sampling_params": [{}]})
    assert response.status_code == 400
    assert error_of(response)["message"] == "sampling_params is a list of 1, there are 2 prompts"


async def test_parameters_have_the_names_of_sglang_or_our_own() -> None:
    backend = ScriptedBackend("12345")
    await answer(
        backend,
        GENERATE,
        text="p",
        path=[3, 1],
        cache_salt="s",
        sampling_params={
            "max_new_tokens": 5,
            "min_new_tokens": 2,
            "sampling_seed": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "frequency_penalty": 0.25,
            "presence_penalty": 0.5,
            "ignore_eos": False,
            "stop": [],
            "stop_token_ids": [9],
            "stop_regex": [],
            "n": 1,
            "regex": "[0-9]+",
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
        },
    )
    (request,) = backend.requests
    assert request.sampling == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        stop_token_ids=(9,),
    )
    assert request.constraint == Constraint.regex("[0-9]+")
    assert (request.path, request.salt) == ((3, 1), "s")
    ours = {"max_tokens": 5, "min_tokens": 2, "seed": 7, "choices": ["12345"]}
    await answer(backend, GENERATE, text="p", sampling_params=ours)
    assert backend.requests[1].sampling == SamplingParams(max_tokens=5, min_tokens=2, seed=7)


async def test_log_probabilities_of_prompt_and_output() -> None:
    asked = {
        "text": "The sky is blue",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "logprob_start_len": 1,
        "sampling_params": {"max_new_tokens": 4},
    }
    backend = sky()
    for num_cached in (0, 2):  # of four, as echoed prompts of /v1/completions have them
        meta = (await answer(backend, GENERATE, **asked))["meta_info"]
        assert meta["cached_tokens"] == num_cached
        assert meta["prefilled_tokens"] == 4 - num_cached
        tokens = [text for _, _, text in meta["input_token_logprobs"]]
        assert tokens == [" sky", " is", " blue"]
        values = [value for value, _, _ in meta["input_token_logprobs"]]
        assert values[0] is None
        assert values[1:] == pytest.approx([math.log(0.25), math.log(0.125)])
        top = [each and each[0][2] for each in meta["input_top_logprobs"]]
        assert top == [None, " sky", " is"]
        assert [text for _, _, text in meta["output_token_logprobs"]] == [" today", "<|eos|>"]
        assert meta["output_top_logprobs"][0][0][2] == " today"
    without = {"text": "The sky is blue", "return_logprob": True}
    meta = (await answer(backend, GENERATE, **without))["meta_info"]
    (blue,) = backend.tokenizer.encode(" blue")
    assert meta["input_token_logprobs"] == [[None, blue, None]]
    assert "input_top_logprobs" not in meta


@pytest.mark.parametrize("name", ["top_logprobs_num", "logprob_start_len"])
async def test_options_of_log_probabilities_need_them(name: str) -> None:
    response = await post(sky(), GENERATE, {"text": "The", name: 1})
    assert response.status_code == 400
    assert error_of(response)["message"] == f"{name} needs return_logprob to be true"


async def test_a_prompt_is_cached_by_a_request_for_no_tokens(engine: AsyncEngine) -> None:
    text = "a prefix of some length"
    first = await answer(engine, GENERATE, text=text, sampling_params={"max_new_tokens": 0})
    assert (first["text"], first["output_ids"]) == ("", [])
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    more = await answer(engine, GENERATE, text=text + "!", sampling_params={"max_new_tokens": 1})
    assert more["meta_info"]["cached_tokens"] >= len(text) - 1


async def test_the_same_draws_as_in_process(engine: AsyncEngine) -> None:
    sampling = SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    prompt = tuple(b"Once")
    token_ids: list[int] = []
    async for event in engine.generate(
        Request(request_id="r", token_ids=prompt, sampling=sampling, path=(2, 5))
    ):
        token_ids += event.token_ids
    body = await answer(
        engine,
        GENERATE,
        input_ids=list(prompt),
        path=[2, 5],
        sampling_params={"max_new_tokens": 12, "seed": 3, "temperature": 1.0},
    )
    assert body["output_ids"][: len(token_ids)] == token_ids


async def test_every_chunk_of_a_stream_has_all_that_was_said() -> None:
    backend = pieces_backend("Hello", " you")
    events = await chunks(backend, GENERATE, text="Say", return_logprob=True)
    assert [event["text"] for event in events] == ["Hello", "Hello you", "Hello you"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons[:2] == [None, None]
    assert reasons[2]["type"] == "stop"
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3]
    whole = await answer(pieces_backend("Hello", " you"), GENERATE, text="Say")
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


async def test_a_chunk_has_only_what_is_new_if_that_is_asked_for() -> None:
    asked = {
        "text": "The sky is blue",
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 1,
    }
    whole = await answer(sky(), GENERATE, **asked)
    events = await chunks(sky(), GENERATE, **asked, incremental_streaming_output=True)
    assert [event["text"] for event in events] == [" today", ""]
    assert [len(event["output_ids"]) for event in events] == [1, 1]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2]
    for name in ("input_token_logprobs", "input_top_logprobs"):
        assert [event["meta_info"][name] for event in events] == [whole["meta_info"][name], []]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        parts = [entry for event in events for entry in event["meta_info"][name]]
        assert parts == whole["meta_info"][name]
    response = await post(sky(), GENERATE, {**asked, "incremental_streaming_output": True})
    assert error_of(response)["param"] == "incremental_streaming_output"


async def test_chunks_of_a_list_say_which_output_they_are_of() -> None:
    events = await chunks(ScriptedBackend({"a": "AB", "b": "C"}), GENERATE, text=["a", "b"])
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "AB", 1: "C"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image_data": "x.png"}, "image_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"session_params": {"id": "1"}}, "session_params"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"unknown": 1}, "unknown"),
    ({"sampling_params": {"skip_special_tokens": False}}, "sampling_params"),
    ({"sampling_params": {"no_stop_trim": True}}, "sampling_params"),
    ({"sampling_params": {"stop_regex": ["a+"]}}, "sampling_params"),
    ({"sampling_params": {"stream": True}}, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": 1, "max_tokens": 2}}, "sampling_params"),
    ({"sampling_params": {"regex": "a", "choices": ["a"]}}, "sampling_params"),
    ({"sampling_params": {"regex": "(a"}}, "sampling_params"),
    ({"sampling_params": {"n": 500}}, "sampling_params"),
    ({"logprob_start_len": -2}, "logprob_start_len"),
    ({"path": [-1]}, "path"),
    ({"text": "", "return_logprob": True}, "text"),
    ({"input_ids": [1]}, "text"),
    ({"text": None}, "text"),
    ({"text": None, "input_ids": [999999]}, "input_ids"),
    ({"text": []}, "text"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_not_honoured_is_refused_by_name(
    engine: AsyncEngine, change: dict[str, Any], param: str, is_stream: bool
) -> None:
    response = await post(engine, GENERATE, {"text": "x", "stream": is_stream, **change})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


async def test_the_requests_of_a_select_in_sglang_weigh_its_choices(engine: AsyncEngine) -> None:
    """It caches the prompt, then asks for the log-probabilities of all texts behind it."""
    prompt, options = "two and two make", [" four", " five", " a few"]
    nothing = {"max_new_tokens": 0, "temperature": 0}
    cached = await answer(engine, GENERATE, text=prompt, sampling_params={"max_new_tokens": 0})
    num_prompt = cached["meta_info"]["prompt_tokens"]
    told: Any = await answer(
        engine,
        GENERATE,
        text=[prompt + option for option in options],
        sampling_params=nothing,
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=num_prompt - 2,
    )
    result = await engine.score(
        ScoreRequest(
            request_id="r",
            token_ids=tuple(prompt.encode()),
            continuations=tuple(tuple(option.encode()) for option in options),
        )
    )
    for option, each, expected in zip(options, told, result.logprobs, strict=True):
        entries = each["meta_info"]["input_token_logprobs"]
        assert "".join(text for _, _, text in entries) == prompt[-2:] + option
        assert [value for value, _, _ in entries[2:]] == pytest.approx(expected, abs=1e-4)
        assert entries[0][0] is None
        assert each["meta_info"]["output_token_logprobs"] == []
        assert each["meta_info"]["cached_tokens"] > 0


MESSAGES: list[tuple[Any, str]] = [
    ({"top_k": "x"}, "sampling_params.top_k should be a valid integer, got 'x'"),
    ([{"top_k": "x"}], "sampling_params[0].top_k should be a valid integer, got 'x'"),
    (
        {"stop_regex": "a"},
        "sampling_params.stop_regex is not supported: stop takes plain strings",
    ),
    ({"max_new": 1}, "sampling_params.max_new is not a field this server knows, so it is refused"),
]


@pytest.mark.parametrize(("sampling", "message"), MESSAGES)
async def test_what_is_wrong_with_sampling_params_is_told_by_its_place(
    sampling: Any, message: str
) -> None:
    response = await post(sky(), GENERATE, {"text": "x", "sampling_params": sampling})
    assert response.status_code == 400
    assert error_of(response)["message"] == message


async def test_a_remote_select_is_one_call(engine: AsyncEngine) -> None:
    prompt, options = tuple(b"two and two make "), (tuple(b"four"), tuple(b"five"), tuple(b"fi"))
    local = await engine.score(
        ScoreRequest(request_id="r", token_ids=prompt, continuations=options)
    )
    engine.flush_cache()
    asked = {"input_ids": list(prompt), "options": [list(option) for option in options]}
    told = await answer(engine, SCORE, **asked)
    for found, expected in zip(told["logprobs"], local.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert sorted(told) == ["logprobs", "meta_info"]
    meta = told["meta_info"]
    assert meta["cached_tokens"] == 0
    assert meta["prompt_tokens"] == local.usage.prompt_tokens
    again = (await answer(engine, SCORE, **asked, top_logprobs_num=2))["top_logprobs"]
    assert [len(tops) for tops in again] == [4, 4, 2]
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for tops in again for top in tops)
    warm = (await answer(engine, SCORE, **asked))["meta_info"]
    assert warm["cached_tokens"] >= len(prompt) - 1


async def test_a_score_may_have_a_text_for_a_prompt_and_a_salt() -> None:
    backend = ScriptedBackend(
        tokenizer=ByteTokenizer(["yes", "no"]), probabilities={"": {"yes": 0.75, "no": 0.25}}
    )
    yes, no = backend.tokenizer.single_id("yes"), backend.tokenizer.single_id("no")
    told = await answer(
        backend,
        SCORE,
        text="Well?",
        options=[[yes], [no], [7]],
        cache_salt="s",
        path=[1],
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    assert finite(told)
    assert [values[0] for values in told["logprobs"]] == [
        pytest.approx(math.log(0.75)),
        pytest.approx(math.log(0.25)),
        -9999.0,
    ]
    assert told["top_logprobs"][0] == [[[pytest.approx(math.log(0.75)), yes, "yes"]]]
    (request,) = backend.score_requests
    assert (request.salt, request.path) == ("s", (1,))
    assert request.token_ids == tuple(b"Well?")


def test_the_program_of_the_documentation_runs(
    engine: AsyncEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "/score" in each)
    with live(engine) as url:
        exec(block.replace("http://127.0.0.1:8000", url), {})
    totals = json.loads(capsys.readouterr().out)
    assert len(totals) == 3
    assert all(total < 0 for total in totals)


SCORES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": []}, "options"),
    ({"options": [[]]}, "options"),
    ({"options": ["four"]}, "options"),
    ({"options": [[999999]]}, "options"),
    ({"options": [[1]] * 4}, "options"),
    ({"options": [[1] * 40]}, "options"),
    ({"text": ["a", "b"]}, "text"),
    ({"sampling_params": {}}, "sampling_params"),
    ({"text": "a" * 3000}, "text"),
]


@pytest.mark.parametrize(("change", "param"), SCORES_REFUSED)
async def test_a_score_that_cannot_be_given_is_refused_by_name(
    engine: AsyncEngine, change: dict[str, Any], param: str
) -> None:
    limits = ServerLimits(max_choices=3, max_prompt_logprobs=30)
    body = {"text": "x", "options": [[1], [2]], **change}
    response = await post(engine, SCORE, body, limits=limits)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


async def test_too_many_log_probabilities_of_a_prompt_are_refused() -> None:
    body = {"text": "x" * 40, "return_logprob": True, "logprob_start_len": 0}
    response = await post(sky(), GENERATE, body, limits=ServerLimits(max_prompt_logprobs=30))
    assert response.status_code == 400
    assert error_of(response)["param"] == "logprob_start_len"


async def test_what_is_served_and_how_it_does(engine: AsyncEngine) -> None:
    async with client(engine, model_name="small") as http:
        info = strict_json((await http.get("/get_model_info")).text)
        assert (info["model_path"], info["is_generation"]) == ("small", True)
        assert info["max_context"] == engine.max_context
        assert info["vocab_size"] == engine.tokenizer.vocab_size
        await http.post(GENERATE, json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
        told = strict_json((await http.get("/get_server_info")).text)
        assert told["stats"]["requests_finished"] == 1
        assert told["limits"]["max_choices"] == 256
        for body in (None, {"empty_cache": True}):
            assert (
                await http.post("/flush_cache", json=body)
                if body
                else await http.post("/flush_cache")
            ).status_code == 200
        assert (await http.post("/flush_cache", json={"what": 1})).status_code == 400
    scripted = ScriptedBackend("ok")
    async with client(scripted) as http:
        assert "stats" not in (await http.get("/get_server_info")).json()


async def test_requests_over_the_limit_come_back_later() -> None:
    backend = ScriptedBackend(Reply(text="ab", token_delay=0.05))
    async with client(backend, limits=ServerLimits(max_requests=1)) as http:
        first = asyncio.create_task(http.post(GENERATE, json={"text": "x"}))
        while not backend.num_running:
            await asyncio.sleep(0.001)
        for path, body in ((GENERATE, {}), (SCORE, {"options": [[1]]})):
            response = await http.post(path, json={"text": "x", **body})
            assert response.status_code == 429
        assert (await first).status_code == 200
        assert (await http.post(SCORE, json={"text": "x", "options": [[1]]})).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(is_stream: bool) -> None:
    backend = ScriptedBackend(Reply(text="x" * 1000, token_delay=0.01))
    with live(backend) as url:
        body = {"text": "x", "stream": is_stream, "sampling_params": {"max_new_tokens": 1000}}
        hang_up(url, GENERATE, body, when=lambda: backend.num_running == 1)
        wait_for(lambda: len(backend.aborted) == 1)
        assert backend.num_running == 0


async def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    backend = ScriptedBackend(Reply(text="abc", fails_after=2))
    response = await post(backend, GENERATE, {"text": "x", "stream": True})
    *_, error, done, rest = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert (done, rest) == ("data: [DONE]", "")
