"""Programs through LiteLLM: a module of the package's shape, whose answers are made here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, RemoteError, UnsupportedFeature
from tests.lang.test_remote_backends import chunk


class Package(ModuleType):
    """Each request is given the next of the answers; an exception is raised."""

    def __init__(self, *answers: str | Exception) -> None:
        super().__init__("litellm")
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def acompletion(self, **parameters: Any) -> AsyncIterator[Any]:
        self.asked.append(parameters)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer

        async def chunks() -> AsyncIterator[Any]:
            for delta, finish in (({"content": answer}, None), ({}, "stop")):
                choice = {"index": 0, "delta": delta, "finish_reason": finish}
                found = ChatCompletionChunk.model_validate(chunk([choice]))
                del found.usage  # as there, where a chunk has none
                yield found

        return chunks()


@pm.function
def greeting(s: pm.State) -> None:
    s += pm.system("Be brief.") + pm.user("Hi") + pm.assistant(pm.gen("x", stop=list("abcdef")))


def failed(status: int) -> Exception:
    """As LiteLLM's are: of the kinds that OpenAI's client has."""
    request = httpx.Request("POST", "http://provider/v1")
    kinds = {429: openai.RateLimitError, 400: openai.BadRequestError}
    response = httpx.Response(status, request=request, headers={"retry-after-ms": "1"})
    return kinds[status]("not now", response=response, body=None)


def test_arguments_go_where_they_go_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("Hello")
    monkeypatch.setitem(sys.modules, "litellm", package)
    with pm.LiteLLM(
        "mistral/small",
        api_key="k",
        organization="o",
        base_url="http://provider",
        timeout=5,
        default_headers={"x-team": "a"},
        api_version="2026",
    ) as backend:
        state = greeting.run(backend=backend, max_tokens=9)
    assert state["x"] == "Hello"
    (asked,) = package.asked
    assert asked.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert asked == {
        "model": "mistral/small",
        "api_key": "k",
        "organization": "o",
        "base_url": "http://provider",
        "timeout": 5,
        "extra_headers": {"x-team": "a"},
        "api_version": "2026",
        "max_retries": 0,
        "num_retries": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "stop": list("abcdef"),
    }
    assert package.suppress_debug_info is True


def test_failures_are_tried_again_and_told_as_those_of_other_apis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = Package(failed(429), "Hello", failed(400), failed(429), failed(429))
    monkeypatch.setitem(sys.modules, "litellm", package)
    with pm.LiteLLM("mistral/small", max_retries=1) as backend:
        assert greeting.run(backend=backend)["x"] == "Hello"
        for error in (InvalidRequest, RemoteError):
            with pytest.raises(PrimitiveFailed, match="not now") as caught:
                greeting.run(backend=backend)
            assert isinstance(caught.value.__cause__, error)
    assert package.answers == []
    assert backend.stats().num_tries == 5


def test_a_template_and_a_missing_package_are_told_of_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedFeature, match="chat_template"):
        pm.LiteLLM("mistral/small", chat_template="chatml")
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(UnsupportedFeature, match=r"pip install 'palmette\[litellm\]'"):
        pm.LiteLLM("mistral/small")
