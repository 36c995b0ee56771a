"""The quickstart as it is, and speculation, on every backend for APIs; official clients talk to
local servers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from fastapi.responses import Response

import palmette as pm
from palmette.errors import PrimitiveFailed
from palmette.lang.backends.scripted import ScriptedBackend
from palmette.protocol import Request
from tests.lang.test_anthropic_backend import answering, stream_of
from tests.runtime.server.harness import live

quickstart: Any = importlib.import_module("examples.quickstart")

# What the model writes behind a text that ends so.
WRITES = {
    "Team: ": "billing",
    "Record: ": '{"subject":"Wrong invoice","priority":"high","days":2}',
    "\nThe customer wants": " a refund. Soon.",
    "\nThe cause may be": ' a "typo" 🐈. Or not.',
    "\nNext, we should": " look.",
}


def written_behind(text: str) -> str:
    (found,) = (written for end, written in WRITES.items() if text.endswith(end))
    return found


def enveloped(schema: Any) -> str:
    """What a model writes that is held to the schema of an envelope."""
    (begun,) = schema["properties"]["text_so_far"]["enum"]
    rest = schema["properties"]["continuation"]
    found = written_behind(begun)
    assert "enum" not in rest or found in rest["enum"]
    value = json.loads(found) if rest["type"] == "object" else found
    filled = {"text_so_far": begun, "continuation": value}
    return json.dumps(filled, separators=(",", ":"))


def say(prompt: str, request: Request) -> str:
    if not request.sampling.max_tokens:  # it is to be scored
        return ""
    constraint = request.constraint
    schema = {} if constraint is None else json.loads(constraint.source)
    is_envelope = "text_so_far" in schema.get("properties", {})
    return enveloped(schema) if is_envelope else written_behind(prompt)


def likely(text: str) -> dict[Any, float] | None:
    """The next letter of a team; of all else, nothing."""
    _, _, begun = text.rpartition("Team: ")
    if text.endswith("Team: "):
        return {"b": 0.7, "n": 0.2, "a": 0.1}
    for team in quickstart.TEAMS:
        if begun and team.startswith(begun) and team != begun:
            return {team[len(begun)]: 1.0}
    return None


def scripted() -> ScriptedBackend:
    return ScriptedBackend(say, probabilities=likely)


class FakeLiteLLM(ModuleType):
    """The shape of the package: one function, whose answers are chunks of OpenAI's kind."""

    def __init__(self) -> None:
        super().__init__("litellm")
        self.asked: list[dict[str, Any]] = []
        self.suppress_debug_info = False

    async def acompletion(
        self,
        *,
        model: str,
        messages: list[Any],
        api_key: str,
        base_url: str,
        timeout: float,
        max_retries: int,
        num_retries: int,
        **parameters: Any,
    ) -> Any:
        import openai

        assert (max_retries, num_retries) == (0, 0)
        assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
        self.asked.append(parameters)
        client = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0)
        _, _, name = model.partition("/")
        stream = await client.chat.completions.create(model=name, messages=messages, **parameters)

        async def chunks() -> AsyncIterator[Any]:
            async with client, stream:
                async for chunk in stream:
                    yield chunk

        return chunks()


@contextmanager
def on_api(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A backend of this name with its local server, and the options that the quickstart needs."""
    if name == "anthropic":

        def answer(body: Any) -> Response:
            return stream_of(enveloped(body["output_config"]["format"]["schema"]))

        with answering(to=answer, emulate=True) as (backend, _):
            yield backend
        return
    with live(scripted()) as url:
        options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused"}
        if name == "litellm":
            monkeypatch.setitem(sys.modules, "litellm", FakeLiteLLM())
        if "litellm" in name:
            with pm.LiteLLM("openai/scripted", **options, emulate=True) as backend:
                yield backend
            return
        options |= {
            "chat": {"emulate": True},
            "completions": {
                "api": "completions",
                "dialect": "palmette",
                "chat_template": "chatml",
            },
        }[name]
        with pm.OpenAI("scripted", **options) as backend:
            yield backend


@pytest.mark.parametrize("name", ["chat", "completions", "anthropic", "litellm"])
def test_the_quickstart_runs_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = quickstart.run(scripted(), "My invoice is wrong.")
    capsys.readouterr()
    with on_api(name, monkeypatch) as backend:
        state = quickstart.run(backend, "My invoice is wrong.")
        assert backend.stats().num_running == 0
    assert state.text() == expected.text()
    assert state.messages() == expected.messages()
    assert state["team"] == "billing"
    assert state["record"] == quickstart.Record(subject="Wrong invoice", priority="high", days=2)
    assert state["note"] == [" a refund", ' a "typo" 🐈', " look"]
    assert [meta["stop_reason"] for meta in state.meta("note")] in ([None] * 3, ["."] * 3)
    shown = capsys.readouterr().out
    assert "Team:    billing" in shown
    if name == "completions":
        assert state.meta("team")["probabilities"] == expected.meta("team")["probabilities"]
        assert "billing 70%" in shown
    else:
        assert state.meta("team")["method"] == "structured_output"
        assert state.meta("team")["probabilities"] is None


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
def test_the_quickstart_runs_through_litellm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_api("litellm itself", monkeypatch) as backend:
        state = quickstart.run(backend, "My invoice is wrong.")
    assert (state["team"], state["note"][2]) == ("billing", " look")


@pytest.mark.parametrize("name", ["chat", "anthropic"])
def test_nothing_is_emulated_where_nobody_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_api(name, monkeypatch) as backend:
        plain = type(backend)("m", api_key="k", base_url="http://127.0.0.1:9")
    with plain, pytest.raises(PrimitiveFailed, match=r"select.*emulate=True"):
        quickstart.triage.run(ticket="x", backend=plain)


# Three fields


@pm.function
def card(s: pm.State) -> None:
    s += pm.system("You know people. " * 20) + pm.user("Ada Lovelace?")
    with s.assistant():
        s += "Name: " + pm.gen("name", stop="\n")
        s += "\nBorn: " + pm.gen("born", stop="\n")
        s += "\nWork: " + pm.gen("work", stop="\n")


CARD = "Name: Ada Lovelace\nBorn: 1815\nWork: engines"


def test_speculation_sends_half_of_the_prompt_tokens_at_most() -> None:
    def answer(body: Any) -> Response:
        """Counts a token for each character."""
        count = len(body["system"]) + sum(len(each["content"]) for each in body["messages"])
        if "output_config" not in body:
            return stream_of(CARD, input_tokens=count)
        schema = body["output_config"]["format"]["schema"]
        (begun,) = schema["properties"]["text_so_far"]["enum"]
        rest = CARD[len(begun) :]
        filled = json.dumps({"text_so_far": begun, "continuation": rest})
        return stream_of(filled, input_tokens=count)

    told = pm.function(num_api_spec_tokens=60)(card.func)
    with answering(to=answer, emulate=True) as (backend, asked):
        once = told.run(backend=backend)
        num_once = len(asked)
        thrice = card.run(backend=backend)
    assert once.text() == thrice.text()
    assert (once["name"], once["born"], once["work"]) == ("Ada Lovelace", "1815", "engines")
    assert (num_once, len(asked) - num_once) == (1, 3)
    assert 2 * once.usage().prompt_tokens <= thrice.usage().prompt_tokens
