"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from palmette.runtime.server.errors import ErrorAnswer

T = TypeVar("T")

Chunks = AsyncGenerator[dict[str, Any], None]

TellError = Callable[[Exception], ErrorAnswer]
"""What to tell a client about an error."""

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody waits for the answer."""


def to_json(value: Any) -> bytes:
    """Compact strict JSON; infinities are an error of ours."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def data(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class JsonAnswer(Response):
    """A JSON body."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200) -> None:
        super().__init__(to_json(content), status_code=status)


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client goes away first, `work` is cancelled at once.

    The body must have been read. Raises ClientGone.
    """
    return await before(_disconnect(http.receive), work, ClientGone())


async def before(
    end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], otherwise: Exception
) -> T:
    """The result of `work`. If `end` returns first, `work` is cancelled and `otherwise` raised."""
    task, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise otherwise
        return task.result()
    finally:
        await _cancel(task, ending)


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure is raised once all others were cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(*tasks)


class EventStream(Response):
    """A stream of chunks as server-sent events, then ``[DONE]``.

    `first` was taken from `chunks` already, so that what is refused never begins a stream. `chunks`
    is closed when the client goes away, as soon as that is known. An error from it becomes an event
    of its own before ``[DONE]``, which `tell` says.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Any, chunks: Chunks, tell: TellError) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._chunks = chunks
        self._tell = tell
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client is gone."""
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                # A connection that breaks under a write is a client that went away.
                with contextlib.suppress(OSError):
                    sending.result()
        finally:
            await _cancel(sending, gone)
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield data(self._first)
        try:
            async for chunk in self._chunks:
                yield data(chunk)
        except Exception as error:
            yield data(self._tell(error).body)
        yield DONE


async def _disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait, so that nothing of the tasks is left when this returns."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
