"""The small endpoints, keys and origins."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from palmette.errors import EngineStopped, InvalidRequest
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.runtime.metrics import EngineStats
from palmette.runtime.server import create_app
from palmette.runtime.server.errors import ApiError
from palmette.runtime.server.metrics import StatsReader
from palmette.runtime.server.schemas import (
    ChatRequest,
    CompletionRequest,
    FlushRequest,
    GenerateRequest,
    Message,
    NativeSampling,
    ScoreOptionsRequest,
    TokenizeRequest,
)
from tests.runtime.server.harness import CHAT, COMPLETIONS, HI, client, error_of


async def test_the_model_is_listed_under_the_name_it_is_served_by() -> None:
    async with client(ScriptedBackend(max_context=99), model_name="org/name") as http:
        body = (await http.get("/v1/models")).json()
        assert body["object"] == "list"
        (model,) = body["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("org/name", "model", 99)
        assert (await http.get("/v1/models/org/name")).json() == model
        missing = await http.get("/v1/models/other")
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "model_not_found"
        answer = await http.post(CHAT, json={"messages": HI, "model": "org/name"})
        assert answer.json()["model"] == "org/name"


async def test_health_answers_and_ready_names_the_model() -> None:
    async with client(ScriptedBackend()) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).json()["model"] == "scripted"


class Counting(ScriptedBackend):
    """A backend with figures."""

    def stats(self) -> EngineStats:
        self._check_open()
        return EngineStats(steps=3, cached_tokens=5, num_running=2, num_free_pages=7)


async def test_an_engine_that_has_stopped_is_not_ready_but_the_process_is_healthy() -> None:
    backend = Counting()
    async with client(backend) as http:
        assert (await http.get("/ready")).status_code == 200
        backend.close()
        response = await http.get("/ready")
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_stopped"
        assert (await http.get("/health")).status_code == 200
    with pytest.raises(EngineStopped):
        backend.stats()


async def test_an_engine_that_hangs_is_not_ready_and_holds_one_thread() -> None:
    class Hanging(Counting):
        num_readings = 0
        go_on = threading.Event()

        def stats(self) -> EngineStats:
            self.num_readings += 1
            self.go_on.wait(20)
            return super().stats()

    backend = Hanging()
    reader = StatsReader(backend, seconds=0.05)
    for _ in range(3):
        with pytest.raises(ApiError, match="has not answered"):
            await reader.read()
    assert backend.num_readings == 1
    backend.go_on.set()
    assert (await reader.read()).steps == 3


async def test_metrics_are_the_figures_of_the_engine() -> None:
    async with client(Counting()) as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        "palmette_steps_total 3.0",
        "palmette_cached_tokens_total 5.0",
        "palmette_num_running 2.0",
        "palmette_num_free_pages 7.0",
        "palmette_http_generations 0.0",
    ):
        assert line in lines
    assert "# TYPE palmette_steps_total counter" in lines
    assert "# TYPE palmette_num_running gauge" in lines


async def test_there_are_no_metrics_of_a_backend_that_counts_nothing() -> None:
    async with client(ScriptedBackend()) as http:
        assert (await http.get("/metrics")).status_code == 404


async def test_flushing_forgets_every_prefix() -> None:
    backend = ScriptedBackend("ok")
    async with client(backend) as http:
        for expected in (0, 20):
            usage = (await http.post(CHAT, json={"messages": HI})).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
        assert (await http.post("/flush_cache")).json() == {"flushed": True}
        usage = (await http.post(CHAT, json={"messages": HI})).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tokenize_gives_what_a_generation_would_get() -> None:
    backend = ScriptedBackend("ok", tokenizer=ByteTokenizer(prefix="<|bos|>"))
    async with client(backend) as http:
        raw = (await http.post("/tokenize", json={"prompt": "a<|im_end|>"})).json()
        chat = (await http.post("/tokenize", json={"messages": HI})).json()
        await http.post(COMPLETIONS, json={"prompt": "a<|im_end|>"})
        await http.post(CHAT, json={"messages": HI})
        assert [raw["tokens"], chat["tokens"]] == [list(r.token_ids) for r in backend.requests]
        assert raw["count"] == 3
        text = (await http.post("/detokenize", json={"tokens": raw["tokens"]})).json()["prompt"]
        assert text == "<|bos|>a<|im_end|>"


async def test_a_client_can_tokenize_here_without_the_prefix() -> None:
    """As lm-eval does: it asks for the spelling of control tokens, and for pieces of a prompt."""
    tokenizer = ByteTokenizer(prefix="<|bos|>")
    async with client(ScriptedBackend(tokenizer=tokenizer)) as http:
        told = (await http.get("/tokenizer_info")).json()
        assert told == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": None}
        for text, ids in (("<|eos|>", [tokenizer.control_id("<|eos|>")]), ("ab", [97, 98])):
            asked = {"prompt": text, "add_special_tokens": False}
            assert (await http.post("/tokenize", json=asked)).json()["tokens"] == ids
    async with client(ScriptedBackend(tokenizer=ByteTokenizer(stop_tokens=()))) as http:
        told = (await http.get("/tokenizer_info")).json()
        assert (told["bos_token"], told["eos_token"]) == (None, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HI}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": HI, "add_special_tokens": False}),
        ("/detokenize", {"tokens": [260]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ],
)
async def test_malformed_token_requests_are_refused(path: str, body: dict[str, object]) -> None:
    async with client(ScriptedBackend()) as http:
        response = await http.post(path, json=body)
        assert response.status_code == 400
        error_of(response)


async def test_without_the_key_only_the_health_checks_answer() -> None:
    async with client(ScriptedBackend("ok"), api_key="sésame") as http:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            response = await http.get(path)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer wrong", "sésame", "Basic sésame", ""):
            headers = {"authorization": given.encode()}
            response = await http.post(CHAT, json={"messages": HI}, headers=headers)
            assert response.status_code == 401
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        headers = {"authorization": "Bearer sésame".encode()}
        assert (await http.post(CHAT, json={"messages": HI}, headers=headers)).status_code == 200


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="API key is empty"):
        create_app(ScriptedBackend(), api_key="")


async def test_pages_of_other_origins_may_call_only_if_named() -> None:
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    async with client(ScriptedBackend()) as http:
        assert (
            "access-control-allow-origin" not in (await http.options(CHAT, headers=asked)).headers
        )
    async with client(ScriptedBackend(), cors_origins=["http://page"], api_key="k") as http:
        response = await http.options(CHAT, headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        response = await http.options(CHAT, headers={**asked, "origin": "http://other"})
        assert "access-control-allow-origin" not in response.headers


async def test_the_api_description_names_every_field_of_a_request() -> None:
    async with client(ScriptedBackend()) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    content = paths[CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "temperature", "response_format"} <= set(content["schema"]["properties"])
    assert "$ref" not in str(paths)


def test_every_field_of_a_request_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    bodies = (
        ChatRequest,
        CompletionRequest,
        Message,
        GenerateRequest,
        NativeSampling,
        ScoreOptionsRequest,
        TokenizeRequest,
        FlushRequest,
    )
    fields = {name for body in bodies for name in body.model_fields}
    assert [name for name in fields if f"`{name}`" not in page] == []
