"""From events to an answer, whole or streamed; what the endpoints share."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from palmette.protocol import Request, TokenEvent
from palmette.runtime.server.generation import Events, UsageTotal, generate_all
from palmette.runtime.server.service import Service
from palmette.runtime.server.streaming import (
    Chunks,
    EventStream,
    JsonAnswer,
    TellError,
    unless_gone,
)


class Choices(Protocol):
    """The choices of one answer as they grow, in the shape of an endpoint."""

    def pieces(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """What a stream says of choice `index` on `event`; maybe nothing."""
        ...

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep what `event` brings for the whole answer."""
        ...

    def whole(self) -> list[dict[str, Any]]:
        """Every choice, once all have ended."""
        ...


class Answer(Protocol):
    """An answer as it grows, whole or streamed, in the shape of an endpoint."""

    def chunks(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """What a stream says on an event of request `index`; maybe nothing."""
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """What it says at the end."""
        ...

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep what `event` brings for the whole answer."""
        ...

    def whole(self) -> Any:
        """All of it, once all requests have ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an endpoint wants done.

    `tell` says of a failure in terms of the endpoint: under which name the body had what an engine
    calls `prompt` and so on. `held` is held while the requests run.
    """

    requests: list[Request]
    answer: Answer
    is_stream: bool
    tell: TellError
    held: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)


class ChoicesAnswer:
    """An answer of the OpenAI API. Its choice `i` is the output of request `i`."""

    def __init__(
        self,
        service: Service,
        answer_id: str,
        kind: str,  # of the whole answer, or of a chunk if it is streamed
        choices: Choices,
        usage: UsageTotal,
        *,
        streams_usage: bool,
    ) -> None:
        self._service = service
        self._answer_id = answer_id
        self._kind = kind
        self._choices = choices
        self._usage = usage
        self._streams_usage = streams_usage
        self._created = int(time.time())

    def chunks(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """One chunk for each piece of the choice."""
        self._count(index, event)
        no_usage = {"usage": None} if self._streams_usage else {}
        pieces = self._choices.pieces(index, event)
        return [{**self._header(), "choices": [piece], **no_usage} for piece in pieces]

    def last_chunks(self) -> list[dict[str, Any]]:
        """The token counts, if they are asked for."""
        if not self._streams_usage:
            return []
        return [{**self._header(), "choices": [], "usage": self._usage.as_json()}]

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep an event for its choice, and its token counts."""
        self._count(index, event)
        self._choices.add(index, event)

    def whole(self) -> dict[str, Any]:
        """All choices and the token counts."""
        return {
            **self._header(),
            "choices": self._choices.whole(),
            "usage": self._usage.as_json(),
        }

    def _count(self, index: int, event: TokenEvent) -> None:
        if event.usage is not None:
            self._usage.add(index, event.usage)

    def _header(self) -> dict[str, Any]:
        return {
            "id": self._answer_id,
            "object": self._kind,
            "created": self._created,
            "model": self._service.model_name,
            "system_fingerprint": f"palmette-{palmette_version()}",
        }


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def answer(http: HttpRequest, service: Service, job: Job) -> Response:
    """Run a job. A request that cannot be served raises before anything is sent."""
    if not job.is_stream:
        return JsonAnswer(await unless_gone(http, _whole(service, job)))
    chunks = _chunks(service, job)

    async def first_chunk() -> dict[str, Any]:
        return await chunks.__anext__()

    try:
        first = await unless_gone(http, first_chunk())
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, job.tell)


async def _whole(service: Service, job: Job) -> Any:
    async with _running(service, job) as events:
        async for index, event in events:
            job.answer.add(index, event)
    return job.answer.whole()


async def _chunks(service: Service, job: Job) -> Chunks:
    async with _running(service, job) as events:
        async for index, event in events:
            for chunk in job.answer.chunks(index, event):
                yield chunk
    for chunk in job.answer.last_chunks():
        yield chunk


@contextlib.asynccontextmanager
async def _running(service: Service, job: Job) -> AsyncIterator[Events]:
    """The events of a job, counted among those in progress and closed at the end."""
    with service.in_progress(), job.held:
        events: Events = generate_all(service.backend, job.requests, service.stop)
        async with contextlib.aclosing(events):
            yield events


def palmette_version() -> str:
    """That of the package that runs."""
    try:
        return version("palmette")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "dev"
