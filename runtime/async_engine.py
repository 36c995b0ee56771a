"""An engine on a thread of its own, for any number of event loops and threads."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Unpack

from palmette.errors import EngineError, EngineStopped, PalmetteError
from palmette.grammar.patience import Patience, patient
from palmette.protocol import (
    ChatTemplate,
    Outlook,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
)
from palmette.runtime.config import DtypeName, EngineConfig, EngineOptions
from palmette.runtime.engine import Engine, EngineTokenizer, Event, ScoreEvent, request_for_prefix
from palmette.runtime.kv.frozen import check_writable, read_frozen, write_frozen
from palmette.runtime.memory import keep_pauses_short
from palmette.runtime.metrics import EngineStats

if TYPE_CHECKING:
    from palmette.radix_cache import Explanation
    from palmette.runtime.constraints import CompiledConstraint

T = TypeVar("T")

# The longest a wait may be: the operating system knows no endless ones, and waking up is no harm.
_MAX_WAIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _Submit:
    """Queue a request; its events go to `inbox` on `loop`."""

    request: Request | ScoreRequest
    compiled: CompiledConstraint | None
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Event]


@dataclass(frozen=True, slots=True)
class _Abort:
    """The client that waited at `inbox` has gone: end its request, but no other's of that id."""

    request_id: str
    inbox: asyncio.Queue[Event]


@dataclass(frozen=True, slots=True)
class _Announce:
    """What a program says of itself; `outlook` is None when it is over."""

    program_id: str
    outlook: Outlook | None
    ended: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Call:
    """Run something between two steps."""

    function: Callable[[Engine], Any]
    future: Future[Any]


class _Close:
    """End the thread."""


_Command = _Submit | _Abort | _Announce | _Call | _Close


class AsyncEngine:
    """Serves requests from any thread or event loop; one thread of its own computes.

    All computation, loading included, happens on that one thread, so that a process has one pool
    of OpenMP threads and not one for each caller. Constraints are compiled on another thread, so
    that a hard one delays its own request only. Takes what `Engine` takes. A context manager;
    `close` ends it.
    """

    def __init__(self, model: str | Path, **options: Unpack[EngineOptions]) -> None:
        self._start(lambda: Engine(model, **options))

    @classmethod
    def over(cls, make: Callable[[], Engine]) -> AsyncEngine:
        """An async engine over what `make` returns; `make` runs on the engine's thread."""
        engine = cls.__new__(cls)
        engine._start(make)
        return engine

    def _start(self, make: Callable[[], Engine]) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped: EngineStopped | None = None
        started: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=_serve, args=(make, self._commands, started), name="palmette-engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine = started.result()
        except BaseException:
            # Ctrl-C while a model loads: the thread ends when loading has. A process that exits
            # before waits for it, since an interpreter that goes away takes the thread with it in
            # the middle of a kernel, and that aborts the process.
            self._commands.put(_Close())
            atexit.register(self._thread.join)
            raise
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="palmette-grammar")
        # At exit the thread must not be in the middle of a step while the interpreter goes away.
        reference = weakref.ref(self)

        def close_at_exit() -> None:
            engine = reference()
            if engine is not None:
                engine.close()

        self._at_exit = close_at_exit
        atexit.register(close_at_exit)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_name!r}, dtype={self._engine.dtype_name})"

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def dtype_name(self) -> DtypeName:
        """What the model computes with: float32 or bfloat16."""
        return self._engine.dtype_name

    @property
    def tokenizer(self) -> EngineTokenizer:
        return self._engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises UnsupportedFeature if the model has none."""
        return self._engine.tokenizer.chat_template

    @property
    def default_sampling(self) -> SamplingParams:
        return self._engine.default_sampling

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    def stats(self) -> EngineStats:
        """Counters and what is held, between two steps."""
        return self._call(lambda engine: engine.stats())

    def explain(self, token_ids: Sequence[int], *, salt: str = "") -> Explanation:
        """Which of a prompt's tokens are cached now, and why the others are not.

        For whoever runs the engine: it may name other salts.
        """
        return self._call(lambda engine: engine.explain(token_ids, salt=salt))

    def freeze(self, token_ids: Sequence[int], path: str | Path) -> None:
        """Save the keys and values of a prefix to a file; see `Engine.freeze`.

        Blocks until the file is there; the engine serves others meanwhile.
        """
        check_writable(path)
        identity = self._engine.identity
        # As any other request, on a loop of its own: the caller's may wait for this very call.
        with ThreadPoolExecutor(1, thread_name_prefix="palmette-freeze") as thread:
            thread.submit(asyncio.run, self._compute(token_ids)).result()
        prefix = self._call(lambda engine: engine.copy_prefix(token_ids))
        write_frozen(path, prefix, identity)

    def thaw(self, path: str | Path, *, pin: bool = True) -> int:
        """Cache the prefix in a file that `freeze` made; how many tokens it has. See `Engine.thaw`.

        Blocks until it is cached; the file is verified on the calling thread.
        """
        prefix = read_frozen(path, self._engine.identity)
        self._call(lambda engine: engine.add_prefix(prefix, pin=pin))
        return len(prefix.token_ids)

    def unpin_prefixes(self) -> None:
        """Let every thawed prefix be evicted from now on, as any other."""
        self._call(lambda engine: engine.unpin_prefixes())

    def flush_cache(self) -> None:
        """Drop every cached prefix that no running request holds."""
        self._call(lambda engine: engine.flush_cache())

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """The events of a request. Closing the iterator early aborts it.

        Raises InvalidRequest from the first `__anext__` if it cannot be served.
        """
        self._engine.validate(request)
        compiled = await self._compile(request)
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._post(_Submit(request, compiled, asyncio.get_running_loop(), inbox))
        finished = False
        try:
            while not finished:
                event = await inbox.get()
                if isinstance(event, ScoreEvent):  # it was refused
                    finished = True
                    raise event.error or EngineError("the request was refused")
                finished = event.finish_reason is not None
                yield event
        finally:
            if not finished:
                self._abort(request.request_id, inbox)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities of the continuations. Cancelling the call aborts the request."""
        self._engine.validate(request)
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._post(_Submit(request, None, asyncio.get_running_loop(), inbox))
        event: Event | None = None
        try:
            event = await inbox.get()
        finally:
            if event is None:
                self._abort(request.request_id, inbox)
        assert isinstance(event, ScoreEvent)
        if event.result is None:
            raise event.error or EngineError("the request failed")
        return event.result

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """What a program knows by now; see `protocol.ProgramListener`."""
        with contextlib.suppress(EngineStopped):
            self._post(_Announce(outlook.program_id, outlook, tuple(ended)))

    def end_program(self, program_id: str) -> None:
        """The program asks no more: what was held for it may be evicted."""
        with contextlib.suppress(EngineStopped):
            self._post(_Announce(program_id, None, ()))

    def close(self) -> None:
        """Stop after the current step; what still runs ends with EngineStopped."""
        with self._lock:
            if self._stopped is None:
                self._stopped = EngineStopped("the engine was closed")
                self._commands.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self._at_exit)

    async def _compile(self, request: Request) -> CompiledConstraint | None:
        """The request's constraint. Cancelling the call ends the compile soon."""
        constraint = request.constraint
        if constraint is None:
            return None
        patience = Patience(rests=True)

        def compile_it() -> CompiledConstraint:
            with patient(patience):
                compiled = self._engine.constraints.compile(constraint)
                compiled.shortest_length  # noqa: B018  # so that the engine's thread need not look
            return compiled

        try:
            return await asyncio.get_running_loop().run_in_executor(self._compilers, compile_it)
        finally:
            patience.cancel()  # without effect if it has ended

    def _post(self, command: _Command) -> None:
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if not self._thread.is_alive():
                raise EngineStopped("the engine's thread has ended")
            self._commands.put(command)

    async def _compute(self, token_ids: Sequence[int]) -> None:
        """Have the tokens cached, if there is room."""
        async for event in self.generate(request_for_prefix(token_ids)):
            if event.error is not None:
                raise event.error

    def _abort(self, request_id: str, inbox: asyncio.Queue[Event]) -> None:
        with contextlib.suppress(EngineStopped):  # and so the request has ended too
            self._post(_Abort(request_id, inbox))

    def _call(self, function: Callable[[Engine], T]) -> T:
        future: Future[T] = Future()
        self._post(_Call(function, future))
        return future.result()


def _serve(
    make: Callable[[], Engine],
    commands: queue.SimpleQueue[_Command],
    started: Future[Engine],
) -> None:
    """The engine's thread: commands between steps, events to whoever asked."""
    keep_pauses_short()
    try:
        engine = make()
    except BaseException as error:
        started.set_exception(error)
        return
    loop = _EngineLoop(engine, commands)
    started.set_result(engine)
    loop.run()


class _EngineLoop:
    """What runs on the engine's thread."""

    def __init__(self, engine: Engine, commands: queue.SimpleQueue[_Command]) -> None:
        self._engine = engine
        self._commands = commands
        self._clients: dict[str, _Submit] = {}
        self._of_loops: dict[asyncio.AbstractEventLoop, set[str]] = {}  # ids of its clients
        self._closing = False

    def run(self) -> None:
        try:
            while not self._closing:
                self._take_commands()
                self._give_up_dead()
                if self._engine.has_work and not self._closing:
                    self._step()
        finally:
            self._end_all(EngineStopped("the engine was closed"))

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:
            # A fault of ours, not of a request. Nothing it left half done is trusted.
            failure = EngineError(f"internal error: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._engine.fail_all(failure)
            events = self._engine.step()
        self._deliver(events)

    def _take_commands(self) -> None:
        """Carry out what was asked for; wait only if there is nothing else to do."""
        block = not self._engine.has_work or self._engine.idle_seconds > 0
        # None: for ever, or not at all.
        timeout = None
        if self._engine.has_work and block:
            timeout = min(self._engine.idle_seconds, _MAX_WAIT_SECONDS)
        while True:
            try:
                command = self._commands.get(block=block, timeout=timeout)
            except queue.Empty:
                return
            block, timeout = False, None
            self._carry_out(command)

    def _carry_out(self, command: _Command) -> None:
        if isinstance(command, _Submit):
            self._submit(command)
        elif isinstance(command, _Abort):
            client = self._clients.get(command.request_id)
            if client is not None and client.inbox is command.inbox:
                self._give_up(command.request_id)
        elif isinstance(command, _Announce):
            if command.outlook is None:
                self._engine.end_program(command.program_id)
            else:
                self._engine.announce(command.outlook, command.ended)
        elif isinstance(command, _Call):
            try:
                command.future.set_result(command.function(self._engine))
            except Exception as error:
                command.future.set_exception(error)
        else:
            self._closing = True

    def _submit(self, command: _Submit) -> None:
        request = command.request
        try:
            self._engine.submit(request, compiled=command.compiled)
        except PalmetteError as error:
            self._send({command.loop: [(command.inbox, _refusal(request.request_id, error))]})
        else:
            self._clients[request.request_id] = command
            self._of_loops.setdefault(command.loop, set()).add(request.request_id)

    def _give_up(self, request_id: str) -> None:
        """Abort a request. Nobody listens any more, so its last event is dropped."""
        self._forget(request_id)
        self._engine.abort(request_id)

    def _give_up_dead(self) -> None:
        """Abort what was asked for from event loops that were closed meanwhile."""
        for loop in [loop for loop in self._of_loops if loop.is_closed()]:
            for request_id in list(self._of_loops[loop]):
                self._give_up(request_id)

    def _forget(self, request_id: str) -> None:
        client = self._clients.pop(request_id)
        names = self._of_loops[client.loop]
        names.discard(request_id)
        if not names:
            del self._of_loops[client.loop]

    def _deliver(self, events: list[Event]) -> None:
        """Hand over a step's events, with one wake-up for each event loop."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]] = {}
        for event in events:
            client = self._clients.get(event.request_id)
            if client is None:
                continue
            letters.setdefault(client.loop, []).append((client.inbox, event))
            if isinstance(event, ScoreEvent) or event.finish_reason is not None:
                self._forget(event.request_id)
        self._send(letters)

    def _send(
        self,
        letters: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]],
    ) -> None:
        for loop, batch in letters.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:
                continue  # the loop is closed: what else it asked for is given up before a step

    def _end_all(self, error: EngineStopped) -> None:
        self._engine.fail_all(error)
        self._deliver(self._engine.take_events())
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                return
            if isinstance(command, _Submit):
                refusal = _refusal(command.request.request_id, error)
                self._send({command.loop: [(command.inbox, refusal)]})
            elif isinstance(command, _Call):
                command.future.set_exception(error)


def _refusal(request_id: str, error: PalmetteError) -> ScoreEvent:
    return ScoreEvent(request_id=request_id, error=error)


def _put_all(batch: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for inbox, event in batch:
        inbox.put_nowait(event)
