"""A server from start to end: bind, load, answer, leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from typing_extensions import Unpack

from palmette.errors import InvalidRequest
from palmette.protocol import TokenBackend
from palmette.runtime.config import EngineOptions
from palmette.runtime.server.app import create_app
from palmette.runtime.server.limits import ServerLimits
from palmette.runtime.server.service import RequestTraces, Service

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

# How long running requests may go on after the first signal. Longer keeps more answers whole,
# shorter ends before a supervisor's kill, which usually comes after ten seconds.
DEFAULT_GRACE = 5.0

Say = Callable[[str], None]


def say_aloud(line: str) -> None:
    """Print a line so that whoever waits for it in a pipe gets it."""
    print(line, flush=True)


def serve(
    model: str | Path,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    limits: ServerLimits | None = None,
    grace: float = DEFAULT_GRACE,
    access_log: bool = False,
    thaw: Sequence[str | Path] = (),
    traces: RequestTraces | None = None,
    say: Say = say_aloud,
    **options: Unpack[EngineOptions],
) -> None:
    """Load a model and answer requests until SIGINT or SIGTERM.

    The address is taken before the model is loaded, so that a port in use is known at once; who
    connects meanwhile waits. Port 0 takes a free one. `say` gets a line when loading begins and one
    when the server is ready. `thaw` names files with frozen prefixes, which are cached and pinned
    before that. `traces` keeps the last requests, for ``/trace``. Raises InvalidRequest if the
    address cannot be had, ModelError if the model or a frozen prefix cannot be loaded, CacheFull if
    there is no room for one.
    """
    from palmette.runtime.async_engine import AsyncEngine

    with bind(host, port) as listener:
        say(f"Loading {model} ...")
        started = time.monotonic()
        with AsyncEngine(model, **options) as engine:
            say(
                f"Loaded {engine.model_name} in {time.monotonic() - started:.1f} s: "
                f"{engine.dtype_name}, {engine.max_context} tokens of context"
            )
            for path in thaw:
                say(f"Thawed {engine.thaw(path)} tokens from {path}")
            # What was loaded stays as long as the process: the garbage collector need not walk over
            # it in the middle of a step.
            gc.collect()
            gc.freeze()
            serve_backend(
                engine,
                listener,
                model_name=model_name,
                api_key=api_key,
                cors_origins=cors_origins,
                limits=limits,
                grace=grace,
                access_log=access_log,
                traces=traces,
                say=say,
            )


def serve_backend(
    backend: TokenBackend,
    listener: socket.socket,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    limits: ServerLimits | None = None,
    grace: float = DEFAULT_GRACE,
    access_log: bool = False,
    traces: RequestTraces | None = None,
    say: Say = say_aloud,
) -> None:
    """Answer requests from a bound socket until SIGINT or SIGTERM.

    After the first signal no request is taken, and those that run have `grace` seconds to finish
    before they are told that the server is shutting down; a second signal tells them at once, a
    third waits for nothing.
    """
    app = create_app(
        backend,
        model_name=model_name,
        api_key=api_key,
        cors_origins=cors_origins,
        limits=limits,
        traces=traces,
    )
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        lifespan="off",
        server_header=False,
    )
    service: Service = app.state.service
    server = Server(
        config,
        on_ready=lambda: say(f"Palmette is ready at {url_of(listener)}/v1"),
        end_running=service.stop.set,
        grace=grace,
    )
    asyncio.run(server.serve(sockets=[listener]))


class Server(uvicorn.Server):
    """uvicorn, told apart in two things: it says when it is ready, and a signal is a clean end."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_ready: Callable[[], None],
        end_running: Callable[[], None],
        grace: float,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._end_running = end_running
        self._grace = grace
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to listen; end what runs when the grace is over or patience is."""
        ending = asyncio.create_task(self._end_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_in_time(self) -> None:
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and self._num_signals < 2:
            await asyncio.sleep(0.05)
        self._end_running()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask for the end. uvicorn would raise them again and so die of them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._leave) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self.should_exit = True
        self.force_exit = self._num_signals > 2


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InvalidRequest in one sentence if it cannot be had."""
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"port must be from 0 to 65535, got {port}", param="port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what uses it, or choose another port"
            raise InvalidRequest(message, param="port") from error
        reason = error.strerror or str(error)
        message = f"cannot listen on {host} port {port}: {reason}"
        raise InvalidRequest(message, param="host") from error
    # Connections inherit it. Without it the body of an answer waits until the client has confirmed
    # the headers, 40 ms on a connection that is kept; asyncio sets it for its own listeners only.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
