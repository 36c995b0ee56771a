"""The backend as it is, over HTTP: ``/backend/...`` takes requests and gives events exactly as
`palmette.protocol` has them, for programs that run elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from palmette.errors import UnsupportedFeature
from palmette.protocol import (
    Constraint,
    Heals,
    Outlook,
    ProgramListener,
    Request,
    ScoreRequest,
    TokenEvent,
)
from palmette.runtime.server.answering import Job, new_id, palmette_version
from palmette.runtime.server.errors import ApiError, exact_error_answer
from palmette.runtime.server.programs import ClientPrograms
from palmette.runtime.server.sampling import check_counts
from palmette.runtime.server.scoring import score
from palmette.runtime.server.service import Service
from palmette.runtime.tokenization.portable import to_portable
from palmette.wire import from_data, to_data

WITHOUT = frozenset({"request_id", "error"})
"""Fields that do not travel: ids are each side's own, and an error ends a stream."""

_MAX_SALT = 256  # as for the other endpoints
_MAX_PROGRAM_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a program knows by now; the branches at the paths in `ended` ask no more."""

    outlook: Outlook
    ended: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcements:
    """The body of ``POST /backend/programs``: news of programs, ids of those that ended."""

    news: tuple[Announcement, ...] = ()
    over: tuple[str, ...] = ()


class DirectApi:
    """The endpoints below ``/backend``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        backend = service.backend
        self._programs = (
            ClientPrograms(backend, service.limits)
            if isinstance(backend, ProgramListener)
            else None
        )
        self._tokenizer = _HandedOut(service)

    async def info(self) -> dict[str, Any]:
        """What a client has to know before it asks."""
        backend = self._service.backend
        return {
            "palmette": palmette_version(),
            "model_name": self._service.model_name,
            "max_context": backend.max_context,
            "default_sampling": to_data(backend.default_sampling),
            "tokenizer": await self._tokenizer.digest(),
            "listens": self._programs is not None,
            "heals": isinstance(backend, Heals) and backend.heals,
        }

    async def tokenizer(self) -> bytes:
        """The tokenizer and the chat template. Raises UnsupportedFeature if it has neither."""
        return await self._tokenizer.content()

    def generate(self, data: Any) -> Job:
        """What to do for a request. Raises InvalidRequest or ApiError."""
        request = from_data(Request, data, request_id=new_id("direct"))
        check_counts(request.sampling, self._service.limits)
        if request.constraint is not None:
            _check_choices(request.constraint)
        return Job(
            requests=[request],
            answer=_Events(),
            is_stream=True,
            tell=exact_error_answer,
            held=self._asking(request),
        )

    async def score(self, data: Any) -> dict[str, Any]:
        """The result of a score request. Raises InvalidRequest, ApiError, or what it fails with."""
        service = self._service
        request = from_data(ScoreRequest, data, request_id=new_id("direct"))
        if len(request.continuations) > service.limits.max_choices:
            raise ApiError(
                400,
                f"continuations has {len(request.continuations)} entries, at most "
                f"{service.limits.max_choices} are taken",
                param="continuations",
            )
        num_tokens = sum(map(len, request.continuations))
        service.check_num_logprobs(num_tokens * (1 + request.num_top), "continuations")
        with service.in_progress(), self._asking(request):
            result = await score(service, request)
        told: dict[str, Any] = to_data(result, without=WITHOUT)
        return told

    def programs(self, data: Any) -> None:
        """Tell the backend of programs. Raises ApiError."""
        told = from_data(Announcements, data)
        for each in told.news:
            _check_program_id(each.outlook.program_id)
            if self._programs is not None:
                self._programs.announce(each.outlook, each.ended)
        for program_id in told.over:
            if self._programs is not None:
                self._programs.end(program_id)

    def _asking(self, request: Request | ScoreRequest) -> AbstractContextManager[None]:
        if len(request.salt) > _MAX_SALT:
            raise ApiError(400, f"salt has more than {_MAX_SALT} characters", param="salt")
        if request.outlook is None:
            return nullcontext()
        _check_program_id(request.outlook.program_id)
        return nullcontext() if self._programs is None else self._programs.asking(request.outlook)


def _check_program_id(program_id: str) -> None:
    if len(program_id) > _MAX_PROGRAM_ID:
        raise ApiError(400, f"program_id has more than {_MAX_PROGRAM_ID} characters")


def _check_choices(constraint: Constraint) -> None:
    """Raises ApiError if the source of choices is no JSON array of strings, as all of ours are."""
    if constraint.kind != "choices":
        return
    try:
        options = json.loads(constraint.source)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ApiError(400, "choices must be a JSON array of strings", param="constraint")


class _Events:
    """The events, as they come or all of them."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def chunks(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The event."""
        return [to_data(event, without=WITHOUT)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Nothing: the last event has said everything."""
        return []

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep the event."""
        self._events += self.chunks(index, event)

    def whole(self) -> Any:
        """All of them."""
        return self._events


@dataclass(slots=True)
class _HandedOut:
    """The backend's tokenizer as bytes, written when it is first asked for."""

    service: Service
    _content: bytes | None = None
    _digest: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def content(self) -> bytes:
        """Raises UnsupportedFeature for a tokenizer that is no model's own."""
        async with self._lock:
            if self._content is None:
                self._content = await asyncio.to_thread(self._write)
                self._digest = hashlib.sha256(self._content).hexdigest()
            return self._content

    async def digest(self) -> str | None:
        """SHA-256 of the content, by which a client knows it again; None if there is none."""
        try:
            await self.content()
        except UnsupportedFeature:
            return None
        return self._digest

    def _write(self) -> bytes:
        return to_portable(self.service.backend.tokenizer).encode("utf-8", "surrogatepass")


def schema_of(kind: type) -> dict[str, Any]:
    """The shape of a body, for the description of the API."""
    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    schema.get("properties", {}).pop("request_id", None)
    if "required" in schema:
        schema["required"] = [name for name in schema["required"] if name != "request_id"]
    return schema
