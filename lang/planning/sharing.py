"""One answer for requests of a batch that are the same.

Programs run as ever; what is shared is what they ask. Of requests with equal prompts, options and
constraints, the first one is asked of the backend, and the others are answered with what it gives,
while that comes or later. Only what gives the same answer every time is shared: greedy generations,
and scores.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

from palmette.errors import RequestAborted
from palmette.lang.wrapping import Listening, Wrapping
from palmette.protocol import (
    Outlook,
    ProgramListener,
    Repeatable,
    Request,
    ScoreRequest,
    ScoreResult,
    TokenBackend,
    TokenEvent,
    Usage,
)

# Answers that are over are kept for requests to come, as long as they have no more tokens together,
# those that only have their log-probabilities there included. A token takes some 250 bytes, and an
# answer without any as much as so many.
_MAX_KEPT_TOKENS = 1 << 19
_TOKENS_PER_ANSWER = 16


def sharing_on(backend: TokenBackend) -> SharingBackend | None:
    """The backend for the programs of one batch; None if it does not promise to repeat itself."""
    if not (isinstance(backend, Repeatable) and backend.is_repeatable):
        return None
    return (
        _ListeningSharing(backend)
        if isinstance(backend, ProgramListener)
        else SharingBackend(backend)
    )


class SharingBackend(Wrapping[TokenBackend]):
    """`backend`, asked once for what several programs ask alike.

    What was computed counts in the usage of one of those that got the answer; in that of the others
    the prompt counts as cached and the output as shared. A request that is closed early does not
    disturb the others; the backend's is aborted with the last of them. An error reaches all that
    wait, and whoever asks later asks anew. Used on one event loop.
    """

    def __init__(self, backend: TokenBackend) -> None:
        super().__init__(backend)
        self._answers = _Answers()

    @property
    def num_answers(self) -> int:
        """That may be read by requests to come."""
        return len(self._answers.by_key)

    def flush_cache(self) -> None:
        """Drop every cached prefix, and the answers."""
        self._backend.flush_cache()
        self.forget()

    def forget(self) -> None:
        """Requests to come are asked anew; those that wait for an answer still get it. From any
        thread.
        """
        self._answers = _Answers()  # the loop may be at work on the others

    def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events in the backend's pieces, whoever asked first."""
        if request.explain or request.sampling.temperature != 0:
            return self._backend.generate(request)
        return self._generate_shared(request)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        if request.explain:
            return await self._backend.score(request)
        started = time.monotonic()
        key = (
            "score",
            _digest(request.token_ids),
            request.continuations,
            request.num_top,
            request.salt,
        )
        async with aclosing(
            self._read(key, request.outlook, lambda answer: self._ask_score(answer, request))
        ) as news:
            result: ScoreResult
            is_own: bool
            result, is_own = await anext(news)
            usage = result.usage
            if not is_own:
                usage = _shared_usage(usage, time.monotonic() - started, 0.0)
            return replace(result, request_id=request.request_id, usage=usage)

    async def _generate_shared(self, request: Request) -> AsyncIterator[TokenEvent]:
        started = time.monotonic()
        first_token_seconds = 0.0
        key = (
            "generate",
            _digest(request.token_ids),
            replace(request.sampling, seed=None),
            request.constraint,
            request.healed,
            request.salt,
        )
        async with aclosing(
            self._read(key, request.outlook, lambda answer: self._ask(answer, request))
        ) as news:
            async for event, is_own in news:
                seconds = time.monotonic() - started
                first_token_seconds = first_token_seconds or seconds
                if event.usage is None or is_own:
                    yield replace(event, request_id=request.request_id)
                else:
                    usage = _shared_usage(event.usage, seconds, first_token_seconds)
                    yield replace(event, request_id=request.request_id, usage=usage)

    async def _read(
        self,
        key: Hashable,
        outlook: Outlook | None,
        ask: Callable[[_Answer], Coroutine[Any, Any, None]],
    ) -> Any:
        """Each piece of the answer, and whether the reader is who counts what it cost."""
        answers = self._answers
        answer = answers.by_key.get(key)
        if answer is None:
            answer = answers.by_key[key] = _Answer()
            answer.task = asyncio.ensure_future(self._fill(answers, key, answer, ask))
            self._begin(outlook)
            answer.task.add_done_callback(lambda _: self._end(outlook))
        answers.by_key.move_to_end(key)
        answer.num_readers += 1
        position = 0
        try:
            while True:
                while position < len(answer.pieces):
                    piece = answer.pieces[position]
                    position += 1
                    yield piece, answer.counts_for_reader(position)
                if answer.error is not None:
                    raise answer.error
                if answer.is_over:
                    return
                await answer.wait()
        finally:
            answer.num_readers -= 1
            if not answer.num_readers and not answer.is_over:
                answers.drop(key, answer)
                assert answer.task is not None
                answer.task.cancel()
                await asyncio.wait([answer.task])

    async def _fill(
        self,
        answers: _Answers,
        key: Hashable,
        answer: _Answer,
        ask: Callable[[_Answer], Coroutine[Any, Any, None]],
    ) -> None:
        try:
            await ask(answer)
        except asyncio.CancelledError as error:
            if not answer.num_readers:
                raise
            answer.error = RequestAborted("the backend cancelled the request")
            answer.error.__cause__ = error
        except BaseException as error:
            answer.error = error
        finally:
            answer.is_over = True
            answer.wake()
        if answer.error is not None or answer.has_failed():
            answers.drop(key, answer)
        else:
            answers.keep(answer)

    async def _ask(self, answer: _Answer, request: Request) -> None:
        events = cast(Any, self._backend.generate(request))
        async with aclosing(events):
            async for event in events:
                answer.add(event, len(event.token_ids) * (1 + (request.sampling.logprobs or 0)))

    async def _ask_score(self, answer: _Answer, request: ScoreRequest) -> None:
        result = await self._backend.score(request)
        answer.add(result, sum(map(len, result.logprobs)) * (1 + request.num_top))

    def _begin(self, outlook: Outlook | None) -> None:
        """A request of the program is on its way to the backend."""

    def _end(self, outlook: Outlook | None) -> None:
        """It is over."""


class _ListeningSharing(SharingBackend, Listening[TokenBackend]):
    """For a backend that listens to programs. One that has ended is told of once nothing that was
    asked in its name is under way any more: others may read the answer, and what a backend hears of
    a program after its end it would keep.
    """

    def __init__(self, backend: TokenBackend) -> None:
        super().__init__(backend)
        self._lock = threading.RLock()  # as in Run
        self._num_asking: Counter[str] = Counter()
        self._ended: set[str] = set()

    def end_program(self, program_id: str) -> None:
        with self._lock:
            if self._num_asking[program_id]:
                self._ended.add(program_id)
                return
            del self._num_asking[program_id]
        super().end_program(program_id)

    def _begin(self, outlook: Outlook | None) -> None:
        if outlook is not None:
            with self._lock:
                self._num_asking[outlook.program_id] += 1

    def _end(self, outlook: Outlook | None) -> None:
        if outlook is None:
            return
        program_id = outlook.program_id
        with self._lock:
            self._num_asking[program_id] -= 1
            if not self._num_asking[program_id] and program_id in self._ended:
                self._ended.remove(program_id)
                self.end_program(program_id)


@dataclass(slots=True, eq=False)
class _Answers:
    """Those that requests find, by what was asked; who was asked for last comes last."""

    by_key: OrderedDict[Hashable, _Answer] = field(default_factory=OrderedDict)
    num_tokens: int = 0  # of those that are over

    def keep(self, answer: _Answer) -> None:
        """It is over. The oldest that are make room for it."""
        self.num_tokens += answer.num_tokens
        while self.num_tokens > _MAX_KEPT_TOKENS:
            oldest = next((key for key, kept in self.by_key.items() if kept.is_over), None)
            if oldest is None:
                return
            self.num_tokens -= self.by_key.pop(oldest).num_tokens

    def drop(self, key: Hashable, answer: _Answer) -> None:
        """It is of no use to requests to come."""
        if self.by_key.get(key) is answer:
            del self.by_key[key]


class _Answer:
    """What the backend has given so far, and who reads it."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.num_tokens = _TOKENS_PER_ANSWER
        self.error: BaseException | None = None
        self.is_over = False
        self.num_readers = 0
        self.task: asyncio.Task[None] | None = None
        self._is_counted = False
        self._news = asyncio.Event()

    def add(self, piece: Any, num_tokens: int) -> None:
        self.pieces.append(piece)
        self.num_tokens += num_tokens
        self.wake()

    def wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait(self) -> None:
        await self._news.wait()

    def has_failed(self) -> bool:
        """Whether it ended with an error of the backend's own telling."""
        return bool(self.pieces) and getattr(self.pieces[-1], "error", None) is not None

    def counts_for_reader(self, position: int) -> bool:
        """Whether the piece before `position` tells what it all cost, and nobody was told yet."""
        if self._is_counted or getattr(self.pieces[position - 1], "usage", None) is None:
            return False
        self._is_counted = True
        return True


def _digest(token_ids: Sequence[int]) -> bytes:
    """In place of the ids, of which there may be many."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def _shared_usage(usage: Usage, seconds: float, first_token_seconds: float) -> Usage:
    """That of a request which was answered with another one's answer."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        shared_tokens=usage.completion_tokens,
        first_token_seconds=first_token_seconds,
        total_seconds=seconds,
    )
