"""One server for all stubs of a module, each below a path of its own, since starting is slow."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tests.runtime.server.harness import served

Answer = Callable[[str, HttpRequest], Awaitable[Response]]
"""From the path below the stub's own, and the request."""


class Stubs:
    """What answers below which path of the server at `url`."""

    def __init__(self) -> None:
        self.url = ""
        self._answers: dict[str, Answer] = {}
        self._names = map(str, itertools.count())

    @contextmanager
    def at(self, answer: Answer) -> Iterator[str]:
        """The URL at which `answer` is asked."""
        name = next(self._names)
        self._answers[name] = answer
        try:
            yield f"{self.url}/{name}"
        finally:
            del self._answers[name]

    async def respond(self, http: HttpRequest) -> Response:
        name, _, path = http.url.path.removeprefix("/").partition("/")
        answer = self._answers.get(name)
        if answer is None:
            return JSONResponse({"detail": "gone"}, 410)
        return await answer(f"/{path}", http)


@contextmanager
def stub_server() -> Iterator[Stubs]:
    stubs = Stubs()
    app = FastAPI()
    app.add_api_route("/{path:path}", stubs.respond, methods=["GET", "POST"])
    with served(app) as stubs.url:
        yield stubs
