"""What the server refuses, and how it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    RequestAborted,
    RequestTooLarge,
    UnsatisfiableConstraint,
    UnsupportedConstraint,
)
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.protocol import Request
from palmette.runtime.server import ServerLimits
from tests.runtime.server.harness import (
    CHAT,
    COMPLETIONS,
    HI,
    chat_text,
    client,
    error_of,
    events_of,
    post,
)

# What is refused of a chat request, the field that is named, and words of the sentence.
CHAT_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"frobnicate": 1}, "frobnicate", "frobnicate is not a field this server knows"),
    ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    ({"tool_choice": "auto"}, "tool_choice", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "not supported"),
    ({"audio": {"voice": "alloy"}}, "audio", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"prediction": {"type": "content"}}, "prediction", "not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    ({"verbosity": "low"}, "verbosity", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"service_tier": "flex"}, "service_tier", "must be one of auto, default"),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": None}, "messages", "messages"),
    ({"messages": "Hi"}, "messages", "messages"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role is required"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
    ({"messages": [*HI, {"role": "user", "content": "x", "name": "n"}]}, "messages", "[1].name"),
    ({"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages", "messages[0].x"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages",
        "messages[0].tool_calls is not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "a part of type 'image_url' at [0], which is not supported",
    ),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages", "without a type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages", "without a type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages",
        "text part",
    ),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
        "response_format.json_schema.name is required",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
    ({"response_format": "json"}, "response_format", "response_format should be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "response_format.json_schema.schema is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
        "response_format",
        "must be a JSON schema",
    ),
    ({"logprobs": 5}, "logprobs", "logprobs should be a valid boolean, got 5"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 0"),
    ({"echo": True}, "echo", "not a field"),
    ({"prompt": "x"}, "prompt", "not a field"),
    ({"metadata": {"a": 1}}, "metadata", "metadata.a"),
]

# What both endpoints refuse alike.
COMMON_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"logit_bias": {"999999999": 5}}, "logit_bias", "the vocabulary has 260 tokens"),
    ({"logit_bias": {"-1": 5}}, "logit_bias", "'-1', which is not a token id"),
    ({"logit_bias": {"abc": 5}}, "logit_bias", "'abc', which is not a token id"),
    ({"logit_bias": {"٣": 5}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"5": 250}}, "logit_bias", "not a number from -100 to 100"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "not a number from -100 to 100"),
    ({"logit_bias": {"5": True}}, "logit_bias", "not a number from -100 to 100"),
    ({"logit_bias": [5]}, "logit_bias", "object"),
    ({"logit_bias": {str(i): 0 for i in range(6)}}, "logit_bias", "at most 5 are taken"),
    ({"temperature": "hot"}, "temperature", "temperature should be a valid number, got 'hot'"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"seed": 2**64}, "seed", "seed"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "at least 0, got -1"),
    ({"max_tokens": "many"}, "max_tokens", "valid integer"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most 3"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 9}, "n", "at most 8"),
    ({"n": 10**30}, "n", "n"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": ["x"] * 5}, "stop", "at most 4 are taken"),
    ({"stop": "x" * 101}, "stop", "at most 100 are taken"),
    ({"stop_token_ids": [260]}, "stop_token_ids", "the vocabulary has 260 tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
    ({"stop_token_ids": [1.0]}, "stop_token_ids", "token ids"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
        "not supported",
    ),
    ({"choices": []}, "choices", "choices must not be empty"),
    ({"choices": [1]}, "choices", "valid string"),
    ({"regex": 5}, "regex", "valid string"),
    ({"json_schema": 5}, "json_schema", "must be a JSON schema"),
    ({"structural_tag": []}, "structural_tag", "must be a structural tag"),
    ({"ebnf": 5}, "ebnf", "valid string"),
    ({"guided_json": {}, "regex": "a"}, "guided_json", "cannot be combined"),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs",
        "cannot be combined",
    ),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "xml"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs",
        "use whitespace",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": False}},
        "structured_outputs",
        "disable_any_whitespace needs a constraint",
    ),
    (
        {"structured_outputs": {"disable_any_whitespace": True}, "json_schema": {}},
        "structured_outputs",
        "disable_any_whitespace needs a constraint",
    ),
    (
        {
            "structured_outputs": {"json": {}, "disable_any_whitespace": True},
            "whitespace": "flexible",
        },
        "whitespace",
        "cannot be combined",
    ),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "use grammar_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "use whitespace"),
    ({"whitespace": "flexible"}, "whitespace", "needs a constraint that has it"),
    ({"regex": "a", "property_order": "any"}, "property_order", "needs a constraint that has it"),
    ({"regex": "a", "undeclared_properties": "allowed"}, "undeclared_properties", "needs a con"),
    ({"json_schema": {}, "undeclared_properties": "no"}, "undeclared_properties", "'allowed' or"),
    ({"ebnf": "a", "grammar_syntax": "lark"}, "grammar_syntax", "needs a constraint that has it"),
    ({"regex": "a", "regex_syntax": "posix"}, "regex_syntax", "'ecma' or 'python'"),
    ({"regex": "a", "jump_forward": "far"}, "jump_forward", "'token' or 'canonical'"),
    ({"jump_forward": "token"}, "jump_forward", "needs a constraint that has it"),
    ({"cache_salt": "x" * 257}, "cache_salt", "256"),
]

COMPLETION_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": [[]]}, "prompt", "prompt"),
    ({"prompt": None}, "prompt", "prompt"),
    ({"prompt": 5}, "prompt", "prompt"),
    ({"prompt": ["a", 5]}, "prompt", "prompt"),
    ({"prompt": [True]}, "prompt", "prompt"),
    ({"prompt": [-1]}, "prompt", "prompt"),
    ({"prompt": [260]}, "prompt", "the vocabulary has 260 tokens"),
    ({"prompt": ["a"] * 9}, "prompt", "prompt"),
    ({"prompt": ["a"] * 3, "n": 3}, "n", "make 9 choices, at most 8 are taken"),
    ({"best_of": 2}, "best_of", "best_of is not supported"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"messages": HI}, "messages", "not a field"),
    ({"response_format": {"type": "text"}}, "response_format", "not a field"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "not a field"),
    ({"tools": []}, "tools", "not a field"),
]

LIMITS = ServerLimits(max_choices=8, max_stop_strings=4, max_stop_characters=100, max_logit_bias=5)


async def check_refusal(path: str, body: dict[str, Any], param: str, words: str) -> None:
    backend = ScriptedBackend("ok")
    response = await post(backend, path, body, limits=LIMITS)
    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_REFUSALS + COMMON_REFUSALS)
async def test_a_chat_request_is_refused_by_the_name_of_the_field(
    fields: dict[str, Any], param: str, words: str
) -> None:
    await check_refusal(CHAT, {"messages": HI, **fields}, param, words)


@pytest.mark.parametrize(("fields", "param", "words"), COMPLETION_REFUSALS + COMMON_REFUSALS)
async def test_a_completion_request_is_refused_by_the_name_of_the_field(
    fields: dict[str, Any], param: str, words: str
) -> None:
    await check_refusal(COMPLETIONS, {"prompt": "x", **fields}, param, words)


BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"{'messages': 1}", "not valid JSON"),
    (b'{"messages": [] } trailing', "not valid JSON"),
    (b'\xff\xfe{"messages": 1}', "not valid JSON"),
    (b'{"user": "\xff"}', "not valid JSON"),
    (b'{"user": "\\ud800"}', "not valid JSON"),
    (b"[]", "the body should be an object"),
    (b'"text"', "the body should be an object"),
    (b"null", "the body should be an object"),
    (b'{"json_schema":' + b'{"not":' * 100_000 + b"{}" + b"}" * 100_001, "recursion"),
    (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    (b'{"seed": 1' + b"0" * 100_000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
async def test_a_malformed_body_is_refused(body: bytes, words: str) -> None:
    async with client(ScriptedBackend()) as http:
        for path in (CHAT, COMPLETIONS):
            headers = {"content-type": "application/json"}
            response = await http.post(path, content=body, headers=headers)
            assert response.status_code == 400
            assert words in error_of(response)["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(literal: str) -> None:
    async with client(ScriptedBackend()) as http:
        headers = {"content-type": "application/json"}
        for field in ("temperature", "logit_bias", "json_schema"):
            value = {
                "temperature": literal,
                "logit_bias": f'{{"5": {literal}}}',
                "json_schema": f'{{"maximum": {literal}}}',
            }[field]
            content = f'{{"prompt": "x", "{field}": {value}}}'
            response = await http.post(COMPLETIONS, content=content, headers=headers)
            assert response.status_code == 400
            assert error_of(response)["param"] == field


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "n", "stop", "logit_bias", "response_format", "seed", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
async def test_whatever_the_body_the_answer_is_good_or_an_error_of_the_client(
    body: dict[str, Any],
) -> None:
    content = json.dumps({"messages": HI, **body}).encode()
    async with client(ScriptedBackend("ok")) as http:
        headers = {"content-type": "application/json"}
        response = await http.post(CHAT, content=content, headers=headers)
    if response.status_code != 200:
        assert response.status_code == 400
        error_of(response)


async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    limits = ServerLimits(max_body_bytes=1000)
    async with client(ScriptedBackend("ok"), limits=limits) as http:
        fits = {"prompt": "x" * 900}
        assert (await http.post(COMPLETIONS, json=fits)).status_code == 200
        response = await http.post(COMPLETIONS, json={"prompt": "x" * 1000})
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"

        async def without_length() -> Any:
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        response = await http.post(COMPLETIONS, content=without_length(), headers=headers)
        assert response.status_code == 413


async def test_a_body_whose_rest_does_not_come_is_given_up() -> None:
    import asyncio

    async with client(ScriptedBackend(), limits=ServerLimits(body_seconds=0.05)) as http:

        async def stalled() -> Any:
            yield b'{"prompt"'
            await asyncio.sleep(30)

        headers = {"content-type": "application/json"}
        response = await http.post(COMPLETIONS, content=stalled(), headers=headers)
        assert response.status_code == 408
        error_of(response)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_only_json_is_read(kind: str | None) -> None:
    async with client(ScriptedBackend()) as http:
        headers = {} if kind is None else {"content-type": kind}
        response = await http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]


async def test_an_unknown_model_is_not_found() -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
        response = await post(ScriptedBackend(), path, {**body, "model": "gpt-4o"})
        error = error_of(response)
        assert response.status_code == 404
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "'gpt-4o'" in error["message"]
        assert "'scripted'" in error["message"]


async def test_an_unknown_path_and_method_are_told_in_the_same_shape() -> None:
    async with client(ScriptedBackend()) as http:
        response = await http.get("/v1/nothing")
        assert response.status_code == 404
        assert "/v1/nothing" in error_of(response)["message"]
        response = await http.get(CHAT)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert "GET" in error_of(response)["message"]


RAISED: list[tuple[Exception, int, str | None, str]] = [
    (InvalidRequest("no such thing", param="prompt"), 400, "messages", "no such thing"),
    (RequestTooLarge(9, 4, 16), 400, "messages", "9 pages"),
    (
        UnsupportedConstraint("patternProperties", param="json_schema", pointer="/a/b"),
        400,
        "response_format",
        "(at /a/b)",
    ),
    (UnsatisfiableConstraint("nothing matches"), 400, "response_format", "nothing matches"),
    (InvalidRequest("too short", param="max_tokens"), 400, "max_tokens", "too short"),
    (EngineStopped("the engine was closed"), 503, None, "stopped"),
    (RequestAborted("gone"), 503, None, "aborted"),
    (EngineError("secret /etc/path"), 500, None, "the engine failed"),
    (RuntimeError("secret"), 500, None, "the engine failed"),
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("raised", "status", "param", "words"), RAISED)
async def test_what_the_engine_raises_becomes_an_answer(
    raised: Exception, status: int, param: str | None, words: str, is_stream: bool
) -> None:
    def fail(prompt: str, request: Request) -> Reply:
        raise raised

    body = {"messages": HI, "stream": is_stream, "response_format": FORMAT}
    response = await post(ScriptedBackend(fail), CHAT, body)
    error = error_of(response)
    assert response.status_code == status
    assert error["param"] == param
    assert words in error["message"]
    assert "secret" not in response.text


async def test_a_failure_in_the_middle_of_a_stream_is_an_event_before_done() -> None:
    backend = ScriptedBackend(Reply(text="abc", fails_after=2, error=EngineError("secret")))
    response = await post(backend, CHAT, {"messages": HI, "stream": True})
    assert response.status_code == 200
    *texts, last = events_of(response.text)
    assert chat_text(texts) == "ab"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_a_failure_after_some_text_is_an_error_of_a_plain_answer() -> None:
    backend = ScriptedBackend(Reply(text="abc", fails_after=2, error=EngineError("x")))
    response = await post(backend, CHAT, {"messages": HI})
    assert response.status_code == 500
    error_of(response)


async def test_when_one_choice_fails_the_others_are_ended() -> None:
    backend = ScriptedBackend(
        [
            Reply(text="x" * 1000, token_delay=1.0),
            Reply(text="abc", fails_after=2, error=EngineError("x")),
        ]
    )
    response = await post(backend, CHAT, {"messages": HI, "n": 2})
    assert response.status_code == 500
    assert backend.num_running == 0
    assert len(backend.aborted) == 1


async def test_a_closed_engine_is_told_as_such() -> None:
    backend = ScriptedBackend()
    backend.close()
    response = await post(backend, CHAT, {"messages": HI})
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_stopped"


async def test_more_requests_than_the_limit_are_sent_away() -> None:
    import asyncio

    backend = ScriptedBackend(Reply(text="ok", delay=0.2))
    async with client(backend, limits=ServerLimits(max_requests=2)) as http:
        responses = await asyncio.gather(
            *(http.post(COMPLETIONS, json={"prompt": "x"}) for _ in range(5))
        )
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429, 429]
        refused = next(response for response in responses if response.status_code == 429)
        assert error_of(refused)["type"] == "rate_limit_error"
        assert (await http.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
