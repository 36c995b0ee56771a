"""From events to an answer, whole or streamed; what both endpoints share."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from palmette.protocol import Request, TokenEvent
from palmette.runtime.server.generation import Events, UsageTotal, generate_all
from palmette.runtime.server.service import Service
from palmette.runtime.server.streaming import Chunks, EventStream, JsonAnswer, unless_gone


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an endpoint wants done. Choice `i` of the answer is the output of `requests[i]`.

    `fields` says under which name the body had what an engine calls `prompt` and so on.
    """

    answer_id: str
    kind: str  # of the whole answer: chat.completion or text_completion
    chunk_kind: str  # of a chunk of a stream
    requests: list[Request]
    choices: Choices
    choices_per_prompt: int
    found_cached: Mapping[int, int]  # as for UsageTotal
    is_stream: bool
    streams_usage: bool
    fields: Mapping[str, str]


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
    return EventStream(first, chunks, job.fields)


def _header(service: Service, job: Job, kind: str) -> dict[str, Any]:
    return {
        "id": job.answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": service.model_name,
        "system_fingerprint": f"palmette-{_version()}",
    }


async def _whole(service: Service, job: Job) -> dict[str, Any]:
    usage = UsageTotal(job.choices_per_prompt, job.found_cached)
    async with _running(service, job) as events:
        async for index, event in events:
            job.choices.add(index, event)
            if event.usage is not None:
                usage.add(index, event.usage)
    return {
        **_header(service, job, job.kind),
        "choices": job.choices.whole(),
        "usage": usage.as_json(),
    }


async def _chunks(service: Service, job: Job) -> Chunks:
    header = _header(service, job, job.chunk_kind)
    usage = UsageTotal(job.choices_per_prompt, job.found_cached)
    no_usage = {"usage": None} if job.streams_usage else {}
    async with _running(service, job) as events:
        async for index, event in events:
            for piece in job.choices.pieces(index, event):
                yield {**header, "choices": [piece], **no_usage}
            if event.usage is not None:
                usage.add(index, event.usage)
    if job.streams_usage:
        yield {**header, "choices": [], "usage": usage.as_json()}


@contextlib.asynccontextmanager
async def _running(service: Service, job: Job) -> AsyncIterator[Events]:
    """The events of a job, counted among those in progress and closed at the end."""
    with service.in_progress():
        events: Events = generate_all(service.backend, job.requests, service.stop)
        async with contextlib.aclosing(events):
            yield events


def _version() -> str:
    try:
        return version("palmette")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "dev"
