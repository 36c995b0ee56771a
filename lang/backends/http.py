"""HTTP as backends use it: JSON both ways, streams of events, bounded answers, retries.

Nothing of an answer is trusted: its size is bounded, and what is not what it should be is a
RemoteError that names the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from palmette.errors import InvalidRequest, RemoteError
from palmette.lang.backends.lanes import Lane, Lanes

if TYPE_CHECKING:
    import httpx

MAX_JSON = 64 << 20  # bytes of an answer
MAX_EVENT = 8 << 20  # bytes of an event; a long prompt explained has a few hundred kilobytes
_MAX_ERROR = 1 << 20  # bytes of it that are read
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 60.0  # seconds between tries
_CONNECT = 10.0  # seconds that a connection may take
_KEPT = 4.0  # seconds that an idle connection is kept: less than servers do, 5 by default


class StatusError(RemoteError):
    """The server answered with an error; `body` is what it says, JSON data if it is such, and
    `wait` the seconds after which it wants to be asked again, if it says so.
    """

    def __init__(self, path: str, status: int, body: Any, wait: float | None = None) -> None:
        super().__init__(f"{path} answered {status}: {_message_in(body)}", status=status)
        self.body = body
        self.wait = wait


class NotBegun(RemoteError):
    """The connection failed before any of an answer came: asking again does nothing twice, since
    the server stops at a connection that is gone.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where a server is and how it is asked. `timeout` is the longest silence, in seconds."""

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    max_retries: int = 3
    max_concurrency: int = 256
    verify: bool | str = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(
                f"base_url must be such as http://127.0.0.1:8000, got {self.base_url!r}",
                param="base_url",
            )
        if parts.query or parts.fragment:
            raise InvalidRequest("base_url must end with a path", param="base_url")
        for name, low in (("max_retries", 0), ("max_concurrency", 1)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be at least {low}", param=name)
        if not self.timeout > 0:
            raise InvalidRequest("timeout must be above 0 seconds", param="timeout")
        for each in (*self.headers, *self.headers.values()):
            # Not shown: it may be a key.
            if not isinstance(each, str) or not each.isascii() or not each.isprintable():
                raise InvalidRequest(
                    "headers and the key must be printable text in ASCII", param="headers"
                )


class _Connections:
    """The connections of one event loop, each with a client of its own: those of one client look at
    all others with each request, which is slow where there are hundreds.
    """

    def __init__(self, new_client: Callable[[], httpx.AsyncClient]) -> None:
        self._new_client = new_client
        self._idle: deque[tuple[httpx.AsyncClient, float]] = deque()  # since when
        self._is_closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """The one that was used last, or a new one."""
        client = self._idle.pop()[0] if self._idle else self._new_client()
        try:
            yield client
        finally:
            now = time.monotonic()
            self._idle.append((client, now))
            # The server has closed what was idle for long.
            while self._idle and (self._is_closed or now - self._idle[0][1] > _KEPT):
                await self._idle.popleft()[0].aclose()

    async def close(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.popleft()[0].aclose()


class HttpServer:
    """A server, asked from any event loop, or from plain code."""

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self._verify = _verification(options)
        self._lanes = Lanes(
            options.base_url, lambda: _Connections(self._new_client), options.max_concurrency
        )

    # From plain code

    def ask(self, method: str, path: str, body: Any = None, *, limit: int = MAX_JSON) -> bytes:
        """The content of the answer. Raises RemoteError; StatusError unless the status is 200."""
        import httpx  # takes long to load

        waits = _waits(self.options.max_retries)
        with httpx.Client(**self._client_options()) as client:
            while True:
                try:
                    return self._ask_once(client, method, path, body, limit)
                except RemoteError as error:
                    time.sleep(_pause(error, waits))

    def ask_json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer as JSON data. Raises RemoteError."""
        return _data(path, self.ask(method, path, body))

    def _ask_once(
        self, client: httpx.Client, method: str, path: str, body: Any, limit: int
    ) -> bytes:
        content = bytearray()
        with (
            self._told(path, NotBegun),
            client.stream(method, self._url(path), json=body) as answer,
        ):
            is_good = answer.status_code == 200
            for part in answer.iter_raw():
                content += part
                if len(content) > (limit if is_good else _MAX_ERROR):
                    raise _too_long(path, limit)
        if not is_good:
            raise _status_error(path, answer, content)
        return bytes(content)

    # From an event loop

    async def post(self, path: str, body: Any) -> Any:
        """The answer to `body` as JSON data. Raises RemoteError."""
        async with self._answer(path, body) as answer:
            with self._told(path):
                content = await _content(path, answer, MAX_JSON)
        return _data(path, content)

    async def events(
        self, path: str, body: Any, *, most: int, most_bytes: int
    ) -> AsyncGenerator[Any, None]:
        """The events of the stream that answers `body`, as JSON data; so many and so many bytes of
        them at most.

        Closing it closes the connection. Raises RemoteError, also where the stream ends without
        saying that this is its end.
        """
        is_done = False
        num_lines = 0
        async with (
            self._answer(path, body) as answer,
            aclosing(self._lines(path, answer, most_bytes)) as lines,
        ):
            if answer.headers.get("content-type", "").partition(";")[0] != "text/event-stream":
                raise RemoteError(f"{path} did not answer with a stream of events")
            async for line in lines:
                num_lines += 1  # a comment is one too: a stream of those alone must end
                if num_lines > most:
                    raise _too_many(path)
                if not line.startswith(b"data:") or is_done:
                    continue
                payload = line[len(b"data:") :].strip()
                # Read on to the end: a connection is used again if nothing is left to read.
                is_done = payload == b"[DONE]"
                if not is_done:
                    yield _data(path, payload)
        if not is_done:
            raise RemoteError(f"{path} ended its stream in the middle")

    async def send_news(self, path: str, body: Any) -> None:
        """Send what may be lost: beside the slots, once, and whatever the answer."""
        async with self.lane().client.one() as client:
            with contextlib.suppress(RemoteError), self._told(path):
                answer = await self._send(client, path, body)
                try:
                    await _content(path, answer, _MAX_ERROR)
                finally:
                    await answer.aclose()

    def lane(self) -> Lane[_Connections]:
        """What the running event loop uses. Raises EngineStopped once closed."""
        return self._lanes.current()

    def close(self) -> None:
        """No more requests; what is under way fails soon."""
        self._lanes.close()

    async def aclose(self) -> None:
        """As `close`, and wait until the connections of this event loop are closed."""
        await self._lanes.aclose()

    @asynccontextmanager
    async def _answer(self, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """An answer of status 200 of whose content nothing has been read."""
        lane = self.lane()
        waits = _waits(self.options.max_retries)
        async with lane.slots, lane.client.one() as client:
            while True:
                try:
                    answer = await self._send(client, path, body)
                    break
                except RemoteError as error:
                    await asyncio.sleep(_pause(error, waits))
            try:
                yield answer
            finally:
                await answer.aclose()

    async def _send(self, http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
        """An answer of status 200. Raises StatusError, NotBegun or RemoteError."""
        with self._told(path, NotBegun):
            answer = await http.send(
                http.build_request("POST", self._url(path), json=body), stream=True
            )
            if answer.status_code == 200:
                return answer
            try:
                content = await _content(path, answer, _MAX_ERROR)
            finally:
                await answer.aclose()
        raise _status_error(path, answer, content)

    async def _lines(
        self, path: str, answer: httpx.Response, most_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a stream that are not empty; empty ones are counted too."""
        rest = bytearray()
        num_bytes = 0
        with self._told(path):
            async for part in answer.aiter_raw():
                num_bytes += len(part)
                if num_bytes > most_bytes:
                    raise _too_many(path)
                *lines, last = part.split(b"\n")
                for line in lines:
                    rest += line
                    if rest.strip():
                        yield bytes(rest)
                    rest.clear()
                rest += last
                if len(rest) > MAX_EVENT:
                    raise RemoteError(f"{path} sent an event of more than {MAX_EVENT} bytes")

    # Settings

    def _url(self, path: str) -> str:
        return self.options.base_url + path

    def _client_options(self) -> dict[str, Any]:
        import httpx

        options = self.options
        return {
            # As it is: an answer that is packed could unpack to any size.
            "headers": {"accept-encoding": "identity", **options.headers},
            "timeout": httpx.Timeout(options.timeout, connect=min(options.timeout, _CONNECT)),
            "verify": self._verify,
        }

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        limits = httpx.Limits(max_keepalive_connections=1, keepalive_expiry=_KEPT)
        return httpx.AsyncClient(limits=limits, **self._client_options())

    @contextmanager
    def _told(self, path: str, kind: type[RemoteError] = RemoteError) -> Iterator[None]:
        """Turns what httpx raises into our errors; `kind` is for a connection that failed."""
        import httpx

        where = f"{self.options.base_url}{path}"
        try:
            yield
        except httpx.TimeoutException as error:
            is_connecting = isinstance(error, httpx.ConnectTimeout)
            seconds = min(self.options.timeout, _CONNECT) if is_connecting else self.options.timeout
            what = "no connection" if is_connecting else "no answer"
            raise (kind if is_connecting else RemoteError)(
                f"{where}: {what} within {seconds:g} s"
            ) from error
        except httpx.TransportError as error:
            raise kind(f"{where} cannot be reached: {error or type(error).__name__}") from error
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{where} is no URL: {error}", param="base_url") from error


async def _content(path: str, answer: httpx.Response, limit: int) -> bytearray:
    """All of an answer. Raises RemoteError if it has more bytes than that."""
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > limit:
            raise _too_long(path, limit)
    return content


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def _verification(options: HttpOptions) -> bool | ssl.SSLContext:
    """Whom to trust. Loading certificates takes a while, which plain HTTP need not wait for."""
    if not options.base_url.startswith("https:"):
        return False
    if isinstance(options.verify, bool):
        return options.verify
    try:
        return ssl.create_default_context(cafile=options.verify)
    except OSError as error:
        raise InvalidRequest(
            f"verify={options.verify!r} is no file of certificates: {error}", param="verify"
        ) from error


def _waits(max_retries: int) -> Iterator[float]:
    """Seconds before each further try, doubling."""
    for index in range(max_retries):
        yield min(_FIRST_WAIT * 2**index, _LONGEST_WAIT)


def _pause(error: RemoteError, waits: Iterator[float]) -> float:
    """How long to wait before another try. Raises `error` if there is to be none."""
    wait = error.wait if isinstance(error, StatusError) else None
    is_passing = isinstance(error, NotBegun) or error.status == 429 or wait is not None
    pause = next(waits, None) if is_passing else None
    if pause is None:
        raise error
    return pause if wait is None else min(wait, _LONGEST_WAIT)


def _status_error(path: str, answer: httpx.Response, content: bytearray) -> StatusError:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = bytes(content).decode("utf-8", "replace")
    wait = None
    if answer.status_code in (429, 503):
        with contextlib.suppress(ValueError):
            found = float(answer.headers.get("retry-after", "").strip())
            wait = found if found >= 0 else None
    return StatusError(path, answer.status_code, body, wait)


def _too_many(path: str) -> RemoteError:
    return RemoteError(f"{path} sent more events than were asked for")


def _too_long(path: str, limit: int) -> RemoteError:
    return RemoteError(f"{path} answered with more than {limit} bytes")


def _data(path: str, content: bytes | bytearray) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"{path} answered with what is not JSON: {error}") from error


def _message_in(body: Any) -> str:
    """What an error says, whatever the shape that a server gives it."""
    found = body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    try:
        text = found if isinstance(found, str) else json.dumps(found)
    except RecursionError:  # read it could be, just so
        text = "what is nested too deep to be shown"
    return text if len(text) <= 1000 else text[:1000] + "…"
