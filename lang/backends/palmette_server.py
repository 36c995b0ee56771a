"""A Palmette server: requests and events cross as they are, so a program cannot tell it from an
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from palmette.errors import EngineStopped, InvalidRequest, PalmetteError, RemoteError
from palmette.lang.backends.http import HttpServer, StatusError
from palmette.lang.backends.server import (
    Server,
    check_event,
    check_scores,
    check_usage,
    needs_tokenizer,
    refusal,
)
from palmette.protocol import (
    Outlook,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
)
from palmette.wire import Malformed, error_from_data, from_data, to_data

_ID = frozenset({"request_id"})
_MAX_TOKENIZER = 512 << 20  # bytes; the largest in use have some 35 MB
_KEPT_TOKENIZERS = 4

# News of programs is sent so often at most: each time costs what a short request does, and requests
# bring what is newest themselves.
_NEWS_SECONDS = 0.05

# Beside what each token takes, log-probabilities of a hundred others included.
_EVENT_BYTES, _TOKEN_BYTES = 16 << 20, 16 << 10


class PalmetteServer(Server):
    """Asked through ``/backend``. News of programs go there too, if it schedules whole programs."""

    kind = "palmette"
    explains_prompts = True

    def __init__(self, http: HttpServer, info: Mapping[str, Any]) -> None:
        try:
            sampling = from_data(SamplingParams, info["default_sampling"])
            name, max_context = info["model_name"], info["max_context"]
            self._digest, listens = info["tokenizer"], info["listens"]
            self.heals = info["heals"]
            if not (
                isinstance(name, str)
                and type(max_context) is int
                and max_context > 0
                and isinstance(self._digest, str | None)
                and type(listens) is bool
                and type(self.heals) is bool
            ):
                raise Malformed("", "fields of other types")
        except (LookupError, Malformed, InvalidRequest) as error:
            raise RemoteError(f"/backend answered with what is not understood: {error}") from error
        super().__init__(http, model_name=name, max_context=max_context, default_sampling=sampling)
        self.listener = self._news = _News(http) if listens else None

    def tokenizer(self) -> Tokenizer:
        """Made as it is made there, so that it encodes alike."""
        if self._digest is None:
            raise needs_tokenizer("this server", self.model_name)
        return _TOKENIZERS.get(self._digest, self.http)

    async def generate(
        self, request: Request, tokenizer: Tokenizer
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of the request. Raises what an engine raises."""
        most = self._most_tokens(request)
        num_tokens = 0
        last: TokenEvent | None = None  # told when the stream is read to its end
        self._hear()
        try:
            async with aclosing(
                self.http.events(
                    "/backend/generate",
                    to_data(request, without=_ID),
                    most=most + 64,
                    most_bytes=_EVENT_BYTES + most * _TOKEN_BYTES,
                )
            ) as events:
                async for data in events:
                    event = _event(data, request.request_id)
                    check_event(event, tokenizer, "/backend/generate")
                    num_tokens += len(event.token_ids)
                    if last is not None or num_tokens > most:
                        raise RemoteError("/backend/generate went on beyond the end")
                    if event.finish_reason is None:
                        yield event
                    else:
                        last = event
        except StatusError as error:
            raise _raised_there(error) from error
        if last is None:
            raise RemoteError("/backend/generate ended without a last event")
        yield last

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """The result. Raises what an engine raises."""
        self._hear()
        try:
            data = await self.http.post("/backend/score", to_data(request, without=_ID))
        except StatusError as error:
            raise _raised_there(error) from error
        try:
            result = from_data(ScoreResult, data, request_id=request.request_id)
        except (Malformed, InvalidRequest) as error:
            raise RemoteError(f"/backend/score is not understood: {error}") from error
        check_scores(result.logprobs, request, "/backend/score")
        check_usage(result.usage, "/backend/score")
        return result

    def flush_cache(self) -> None:
        """Drop every cached prefix that no running request holds."""
        self.http.ask("POST", "/flush_cache", {})

    def info(self) -> dict[str, Any]:
        """``/get_server_info``."""
        info: dict[str, Any] = self.http.ask_json("GET", "/get_server_info")
        return info

    def _hear(self) -> None:
        if self._news is not None:
            self._news.loop = asyncio.get_running_loop()


def _event(data: Any, request_id: str) -> TokenEvent:
    """An event, unless it is that the request failed, which is raised."""
    if isinstance(data, dict) and "error" in data:
        raise _raised_there(StatusError("/backend/generate", 500, data))
    try:
        return from_data(TokenEvent, data, request_id=request_id, error=None)
    except (Malformed, InvalidRequest) as error:
        raise RemoteError(f"an event is not understood: {error}") from error


def _raised_there(error: StatusError) -> PalmetteError:
    """The error that the server raised, if a client can act on it."""
    told = error.body.get("error") if isinstance(error.body, dict) else None
    if isinstance(told, dict) and "exception" in told:
        try:
            return error_from_data(told["exception"])
        except Malformed as malformed:
            return RemoteError(f"an error is not understood: {malformed}", status=error.status)
    return refusal(error)


@dataclass(slots=True)
class _ProgramNews:
    outlook: Outlook | None = None
    ended: list[tuple[int, ...]] = field(default_factory=list)
    is_over: bool = False


class _News:
    """News of programs on their way to the server: what comes while some is sent goes together.

    Taken from any thread, also from within the garbage collector, and sent from the event loop that
    asked last. What cannot be sent is lost: it is advice.
    """

    def __init__(self, http: HttpServer) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._http = http
        self._inbox: queue.SimpleQueue[tuple[Outlook, Any] | str] = queue.SimpleQueue()
        self._sending: asyncio.Task[None] | None = None

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """What a program knows by now; the branches at the paths in `ended` ask no more."""
        self._put((outlook, tuple(ended)))

    def end_program(self, program_id: str) -> None:
        """The program asks no more."""
        self._put(program_id)

    def _put(self, item: tuple[Outlook, Any] | str) -> None:
        self._inbox.put(item)
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        sending = self._sending
        if sending is None or sending.done() or sending.get_loop().is_closed():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        while body := self._take():
            with contextlib.suppress(EngineStopped):
                await self._http.send_news("/backend/programs", body)
            await asyncio.sleep(_NEWS_SECONDS)

    def _take(self) -> dict[str, Any]:
        """All there is, in the shape of one body; empty if there is nothing."""
        by_id: dict[str, _ProgramNews] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, str):
                    by_id.setdefault(item, _ProgramNews()).is_over = True
                    continue
                outlook, ended = item
                news = by_id.setdefault(outlook.program_id, _ProgramNews())
                if news.outlook is None or outlook.version > news.outlook.version:
                    news.outlook = outlook
                news.ended += ended
        told = {
            "news": [
                {"outlook": to_data(news.outlook), "ended": to_data(news.ended)}
                for news in by_id.values()
                if not news.is_over
            ],
            "over": [program_id for program_id, news in by_id.items() if news.is_over],
        }
        return {name: listed for name, listed in told.items() if listed}


class _Tokenizers:
    """Those that were fetched last, by their digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Tokenizer] = OrderedDict()

    def get(self, digest: str, http: HttpServer) -> Tokenizer:
        """Fetched once. Raises RemoteError if it is not what its digest says, or no tokenizer."""
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                found = self._kept[digest] = _fetched(digest, http)
            self._kept.move_to_end(digest)
            while len(self._kept) > _KEPT_TOKENIZERS:
                self._kept.popitem(last=False)
            return found


def _fetched(digest: str, http: HttpServer) -> Tokenizer:
    from palmette.runtime.tokenization.portable import from_portable  # loads tokenizers, no torch

    path = "/backend/tokenizer"
    content = http.ask("GET", path, limit=_MAX_TOKENIZER)
    if hashlib.sha256(content).hexdigest() != digest:
        raise RemoteError(f"{path} did not answer with the tokenizer that /backend names")
    try:
        return from_portable(content.decode("utf-8", "surrogatepass"))
    except (InvalidRequest, ValueError) as error:
        raise RemoteError(f"{path}: {error}") from error


_TOKENIZERS = _Tokenizers()
