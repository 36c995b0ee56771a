"""Ways to reach a server from a test: in process, or over a real socket."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.protocol import TokenBackend
from palmette.runtime.server import create_app
from palmette.runtime.server.serve import Server, bind, url_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def pieces_backend(*pieces: str, **options: Any) -> ScriptedBackend:
    """A backend that says `pieces`, each of which is one token."""
    tokenizer = ByteTokenizer([p for p in dict.fromkeys(pieces) if len(p.encode()) > 1])
    return ScriptedBackend("".join(pieces), tokenizer=tokenizer, **options)


@asynccontextmanager
async def client(backend: TokenBackend, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an app over `backend`, without a socket."""
    transport = httpx.ASGITransport(create_app(backend, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


async def post(backend: TokenBackend, path: str, body: Any, **options: Any) -> httpx.Response:
    async with client(backend, **options) as http:
        return await http.post(path, json=body)


async def answer(backend: TokenBackend, path: str, /, **body: Any) -> dict[str, Any]:
    """The body of a good answer, read as strict JSON."""
    response = await post(backend, path, body)
    assert response.status_code == 200, response.text
    return strict_json(response.text)


async def chunks(backend: TokenBackend, path: str, /, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a good stream."""
    response = await post(backend, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return [strict_json(event.removeprefix("data: ")) for event in events]


def strict_json(text: str) -> Any:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have exactly the API's shape."""
    body = strict_json(response.text)
    assert list(body) == ["error"], response.text
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["message"]
    assert isinstance(error["message"], str)
    return dict(error)


def chat_text(events: list[dict[str, Any]], index: int = 0) -> str:
    """The joined content of one choice of a chat stream."""
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def finite(value: Any) -> bool:
    """Whether every number in a piece of JSON is finite."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@contextmanager
def live(backend: TokenBackend, **options: Any) -> Iterator[str]:
    """The URL of a server on a loopback port, with a thread of its own."""
    app: FastAPI = create_app(backend, **options)
    with served(app, app.state.service.stop.set) as url:
        yield url


@contextmanager
def served(app: FastAPI, end_running: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The same of any app."""
    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    server = Server(
        uvicorn.Config(app, log_level="warning", lifespan="off"),
        on_ready=ready.set,
        end_running=end_running,
        grace=0,
    )
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        assert ready.wait(20)
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_for(check: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns as soon as `check` holds."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)
