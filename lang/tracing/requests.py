"""The last requests of a server, kept so that they can be looked at as a trace."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from palmette.errors import InvalidRequest
from palmette.lang.tracing.recording import NUM_TOP, AskRecord, RunRecord
from palmette.lang.tracing.taking import trace_of
from palmette.lang.tracing.trace import Trace
from palmette.lang.wrapping import Listening, Wrapping
from palmette.protocol import (
    FinishReason,
    ProgramListener,
    Request,
    ScoreRequest,
    ScoreResult,
    TokenBackend,
    TokenEvent,
    Usage,
)

_MAX_BYTES = 256 << 20  # of all that is kept, about
_BYTES_PER_REQUEST = 4096
_BYTES_PER_TOKEN = 4  # of a prompt
_BYTES_PER_OUTPUT_TOKEN = 120  # with text, log-probability and the likeliest tokens


@dataclass(slots=True, eq=False)
class _Kept:
    """One request as a run of one primitive."""

    run_id: str
    backend: TokenBackend
    record: RunRecord
    ask: AskRecord
    lock: threading.RLock
    usage: Usage = field(default_factory=Usage)

    @property
    def num_bytes(self) -> int:
        tokens = self.ask.num_output * _BYTES_PER_OUTPUT_TOKEN
        return _BYTES_PER_REQUEST + (self.ask.num_prompt or 0) * _BYTES_PER_TOKEN + tokens


class RequestTraces:
    """Keeps the last `count` requests of a backend, as long as they take no more than `max_bytes`,
    about. Those that still go on are among them.
    """

    def __init__(self, count: int, *, max_bytes: int = _MAX_BYTES) -> None:
        if count < 1:
            raise InvalidRequest(f"trace must keep at least 1 request, got {count}", param="trace")
        self._count = count
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._kept: deque[_Kept] = deque()

    def watching(self, backend: TokenBackend) -> TokenBackend:
        """The backend, each of whose requests is kept from now on."""
        listens = isinstance(backend, ProgramListener)
        return (_ListeningWatched if listens else _Watched)(backend, self)

    def trace(self) -> Trace:
        """What is kept, the oldest first."""
        with self._lock:
            self._make_room(0)
            kept = list(self._kept)
        return trace_of(kept)  # takes a while, and requests have to go on

    def to_json(self) -> str:
        """The trace as JSON."""
        return self.trace().to_json()

    def html(self) -> str:
        """The page that shows the trace."""
        return self.trace().html()

    def begin(self, kind: str, request: Request | ScoreRequest, backend: TokenBackend) -> _Kept:
        """Keep a request, which begins now, in place of the oldest if there are enough."""
        run = RunRecord(is_detailed=True)
        run.of_call(kind, {"request_id": request.request_id})
        branch = run.new_branch()
        ask = AskRecord(kind, kind, "")
        branch.events.append(ask)
        branch.prompt_of(ask, request.token_ids)
        run.begin()
        ask.asked = run.start
        ask.begin()
        kept = _Kept(request.request_id, backend, run, ask, self._lock)
        with self._lock:
            self._make_room(1)
            self._kept.append(kept)
        return kept

    def end(self, kept: _Kept, error: BaseException | None = None) -> None:
        """It is over."""
        with self._lock:
            kept.ask.finish(error)
            kept.record.finish(error)
            self._make_room(0)

    def _make_room(self, num_more: int) -> None:
        """Drop the oldest, down to the bounds. Lock held."""
        while len(self._kept) + num_more > self._count:
            self._kept.popleft()
        num_bytes = sum(kept.num_bytes for kept in self._kept)
        while len(self._kept) > 1 and num_bytes > self._max_bytes:
            num_bytes -= self._kept.popleft().num_bytes


class _Watched(Wrapping[TokenBackend]):
    """A backend whose requests are kept; to who asks, they are as without."""

    def __init__(self, backend: TokenBackend, traces: RequestTraces) -> None:
        super().__init__(backend)
        self._traces = traces

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        kept = self._traces.begin("gen", request, self._backend)
        ask, (branch,) = kept.ask, kept.record.branches
        ask.sampling, ask.constraint = request.sampling, request.constraint
        is_asked = request.sampling.logprobs is not None or request.trace_top is not None
        error: BaseException | None = None
        try:
            traced = replace(request, explain=True, trace_top=request.trace_top or NUM_TOP)
            events = self._backend.generate(traced)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    ask.take(event)
                    branch.output_of(ask, event.token_ids)
                    ask.chunks.append(event.text)
                    if event.usage is not None:
                        kept.usage = ask.main_usage = event.usage
                        ask.add_usage(event.usage)
                    if event.finish_reason is not None:
                        ask.prompt, ask.stop_reason = event.prompt, event.stop_reason
                        ask.finish_reason = event.finish_reason.value
                        error = event.error
                    yield self._as_asked(event, request, has_logprobs=is_asked)
        except GeneratorExit:
            ask.finish_reason = ask.finish_reason or FinishReason.ABORT.value
            raise
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._traces.end(kept, error)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        kept = self._traces.begin("score", request, self._backend)
        error: BaseException | None = None
        try:
            result = await self._backend.score(replace(request, explain=True))
            kept.usage = kept.ask.main_usage = result.usage
            kept.ask.add_usage(result.usage)
            kept.ask.prompt = result.prompt
            return result if request.explain else replace(result, prompt=())
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._traces.end(kept, error)

    @staticmethod
    def _as_asked(event: TokenEvent, request: Request, *, has_logprobs: bool) -> TokenEvent:
        """Without what was not asked for."""
        if not has_logprobs and event.logprobs:
            event = replace(event, logprobs=())
        return replace(event, prompt=()) if event.prompt and not request.explain else event


class _ListeningWatched(_Watched, Listening[TokenBackend]):
    """For a backend that listens to programs."""
