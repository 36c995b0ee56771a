"""The server over the real small model: what only a real engine can show."""

from __future__ import annotations

import json
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from palmette.runtime import AsyncEngine
from tests.runtime.server.harness import (
    CHAT,
    COMPLETIONS,
    HI,
    chat_text,
    error_of,
    events_of,
    finite,
    live,
    strict_json,
    wait_for,
)
from tests.runtime.server.test_live import hang_up, openai_client


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 512, "max_context": 1024}
    with AsyncEngine("smollm2-135m", **options) as engine, live(engine) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with openai_client(url) as client:
        yield client


def ask(url: str, path: str = CHAT, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def good(url: str, path: str = CHAT, **body: Any) -> dict[str, Any]:
    response = ask(url, path, **body)
    assert response.status_code == 200, response.text
    body = strict_json(response.text)
    assert finite(body)
    return body


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith(f"palmette_{name} "))
    return float(line.split()[1])


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "population", "is_capital"],
    "additionalProperties": False,
}


def test_the_openai_client_gets_an_answer_a_stream_and_json(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": CAPITAL,
        "temperature": 0,
        "max_tokens": 24,
    }
    plain = client.chat.completions.create(**asked)
    assert "Paris" in (plain.choices[0].message.content or "")
    assert plain.choices[0].finish_reason == "stop"

    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == plain.choices[0].message.content
    assert len([text for text in texts if text]) > 3
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens  # type: ignore[union-attr]

    for temperature in (0, 1):
        strict = client.chat.completions.create(
            model="smollm2-135m",
            messages=CAPITAL,
            temperature=temperature,
            max_tokens=80,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
            },
        )
        jsonschema.validate(json.loads(strict.choices[0].message.content or ""), SCHEMA)


def test_equal_seeds_give_equal_texts_alone_and_in_a_batch(url: str) -> None:
    prompts: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "uuid:"}),
        (CHAT, {"messages": [{"role": "user", "content": "uuid:"}]}),
    ]
    for path, prompt in prompts:
        jobs = [
            (path, {**prompt, "seed": seed, "temperature": 1, "max_tokens": 5})
            for seed in (0, 0, 1, 2)
        ]
        alone = [text(good(url, job_path, **body)) for job_path, body in jobs]
        assert alone[0] == alone[1]
        assert len(set(alone)) >= 2
        assert together(url, jobs) == alone


def text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def together(url: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The texts of requests that run at the same time."""
    texts = [""] * len(jobs)

    def run(index: int) -> None:
        path, body = jobs[index]
        texts[index] = text(good(url, path, **body))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_without_a_seed_texts_differ(url: str) -> None:
    body = good(url, COMPLETIONS, prompt="Once", temperature=1, max_tokens=16, n=10)
    assert len({choice["text"] for choice in body["choices"]}) >= 8


def test_a_biased_token_comes_and_a_banned_one_never(url: str) -> None:
    forced = good(
        url, messages=HI, logit_bias={"5": 100}, max_tokens=2, temperature=0, logprobs=True
    )
    entries = forced["choices"][0]["logprobs"]["content"]
    detokenized = good(url, "/detokenize", tokens=[5])["prompt"]
    assert [entry["token"] for entry in entries] == [detokenized] * 2


def test_logprobs_under_a_mask_are_finite(url: str) -> None:
    body = good(
        url,
        messages=HI,
        logprobs=True,
        top_logprobs=5,
        max_tokens=8,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}},
        },
    )
    choice = body["choices"][0]
    assert json.loads(choice["message"]["content"]) in ("yes", "no")
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 5 for entry in entries)


@pytest.mark.parametrize("num_generated", [0, 1])
def test_echoed_logprobs_are_the_same_on_a_warm_cache(url: str, num_generated: int) -> None:
    httpx.post(f"{url}/flush_cache")
    asked: dict[str, Any] = {
        "prompt": "The sky is blue",
        "echo": True,
        "logprobs": 0,
        "max_tokens": num_generated,
        "temperature": 0,
    }
    cold, warm = (good(url, COMPLETIONS, **asked)["choices"][0] for _ in range(2))
    lists = cold["logprobs"]
    assert cold["text"].startswith("The sky is blue")
    assert "".join(lists["tokens"]) == cold["text"]
    assert lists["token_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert {len(values) for values in lists.values()} == {4 + num_generated}
    assert lists["token_logprobs"][1:] == pytest.approx(warm["logprobs"]["token_logprobs"][1:])


@pytest.mark.parametrize("constraint", [{}, {"json_schema": json.dumps(SCHEMA)}])
def test_the_native_endpoint_tells_every_token_with_its_log_probability(
    url: str, constraint: dict[str, Any]
) -> None:
    body = good(
        url,
        "/generate",
        text="The capital of France is",
        sampling_params={"max_new_tokens": 60, "temperature": 0, **constraint},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = body["meta_info"]
    output = meta["output_token_logprobs"]
    assert [token_id for _, token_id, _ in output] == body["output_ids"]
    assert len(output) == meta["completion_tokens"] == len(meta["output_top_logprobs"])
    stops = {meta["finish_reason"].get("matched")}
    assert "".join(text for _, token_id, text in output if token_id not in stops) == body["text"]
    assert (
        "".join(text for _, _, text in meta["input_token_logprobs"]) == "The capital of France is"
    )
    if constraint:
        jsonschema.validate(json.loads(body["text"]), SCHEMA)


BAD_PATTERN = {"type": "string", "pattern": "^(unclosed$"}
BACKREFERENCE = {"type": "string", "pattern": r"(a|b)\1"}
DISJOINT = {
    "allOf": [
        {
            "type": "object",
            "properties": {name: {"type": "string"}},
            "required": [name],
            "additionalProperties": False,
        }
        for name in ("a", "b")
    ]
}


@pytest.mark.parametrize(
    "schema", [BAD_PATTERN, BACKREFERENCE, DISJOINT], ids=["bad", "back", "empty"]
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_schema_that_cannot_be_enforced_gives_no_text(
    url: str, schema: dict[str, Any], is_stream: bool
) -> None:
    response = ask(
        url,
        messages=HI,
        stream=is_stream,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "response_format"
    assert error["code"] == "invalid_constraint"


@pytest.mark.parametrize(
    ("pattern", "params"),
    [("[a-", ["regex"]), ("a{2000000000,2147483647}", ["regex", "max_tokens"])],
)
def test_a_malformed_or_huge_regex_is_refused_at_once(
    url: str, pattern: str, params: list[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    response = ask(url, COMPLETIONS, prompt="x", regex=pattern, max_tokens=2000)
    assert response.status_code == 400
    assert error_of(response)["param"] in params
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_others_go_on_while_a_hostile_regex_is_at_work(url: str) -> None:
    pattern = "(?:a?){60}a{60}b" * 32
    body = {"prompt": "x", "regex": pattern, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=60) as response:
        response.read() if response.status_code == 400 else next(response.iter_lines())
        assert response.status_code in (200, 400)
        good(url, COMPLETIONS, prompt="The", max_tokens=1)
    wait_for(lambda: metric(url, "num_running") == 0)


UNUSUAL = [
    [{"role": "assistant", "content": "Hello"}],
    [{"role": "system", "content": "Be brief"}],
    [*HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
]


@pytest.mark.parametrize("messages", UNUSUAL)
def test_unusual_conversations_get_an_answer(url: str, messages: list[dict[str, Any]]) -> None:
    good(url, messages=messages, max_tokens=1)


def test_a_prompt_longer_than_the_context_is_refused_and_others_go_on(url: str) -> None:
    response = ask(url, messages=[{"role": "user", "content": "word " * 2000}])
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == "messages"
    assert error["code"] == "context_length_exceeded"
    assert re.search(r"prompt has 20\d\d tokens, the model takes at most 1024", error["message"])
    good(url, messages=HI, max_tokens=1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_frees_what_its_request_held(url: str, is_stream: bool) -> None:
    pages = metric(url, "num_pages")
    body = {"messages": HI, "stream": is_stream, "max_tokens": 900, "ignore_eos": True}
    hang_up(url, CHAT, body, when=lambda: metric(url, "num_running") == 1)
    wait_for(lambda: metric(url, "num_running") == 0)
    assert metric(url, "num_available_pages") == pages
    assert metric(url, "num_waiting") == 0
    decoded = metric(url, "decoded_tokens_total")
    good(url, messages=HI, max_tokens=1)
    assert metric(url, "decoded_tokens_total") == decoded + 1


def test_a_stream_is_the_text_of_the_plain_answer(url: str) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Écris « été 🐈 世界 » deux fois."}],
        "temperature": 0,
        "max_tokens": 20,
        "stop": ["zzz"],
    }
    plain = good(url, **asked)
    response = ask(url, **asked, stream=True)
    events = events_of(response.text)
    assert chat_text(events) == plain["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert "\ufffd" not in response.text
