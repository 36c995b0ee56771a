"""Several `gen`s of a program from one call of an API: what SGLang calls speculative execution.

An API is asked to write on beyond the end of a `gen`. Where the program then goes on with the very
text that the model wrote, its next `gen` is answered from the rest, without another call. What was
written is kept for one run, and for the branch of it that asked, so that runs and branches stay
independent of each other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from palmette.errors import RemoteError
from palmette.lang.backends.conversation import without_begun_text
from palmette.lang.choices import Choice, ChoiceRequest
from palmette.lang.wrapping import Wrapping
from palmette.protocol import FinishReason, Request, TokenEvent, Usage

if TYPE_CHECKING:
    from palmette.lang.backends.accounts import RemoteStats
    from palmette.lang.backends.remote import AnyRemoteBackend

_KEPT = 8  # calls of a run; a program goes on with its latest
_TRIES = 3  # for an answer that begins as the program does


@dataclass(frozen=True, slots=True)
class Written:
    """What an API wrote behind a prompt, both as ids; `is_whole` if it came to an end by itself."""

    path: tuple[int, ...]
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    is_whole: bool

    def rest_behind(self, path: tuple[int, ...], prompt: Sequence[int]) -> bytes | None:
        """What is left of it where `prompt` ends, if that goes on as it does."""
        length = len(self.prompt)
        more = tuple(prompt[length:])
        is_same = path == self.path and tuple(prompt[:length]) == self.prompt
        if not is_same or self.ids[: len(more)] != more:
            return None
        return bytes(self.ids[len(more) :])


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of a `gen` as bytes, and why it ends."""

    text: bytes
    finish_reason: FinishReason
    stop_reason: str | None = None


def cut(rest: bytes, stops: Sequence[str], *, is_whole: bool, is_fresh: bool) -> Answer | None:
    """`rest` up to the first of the stop strings; None if more would have to be asked for.

    `is_fresh`: it is of the call that was just made, so that nothing more can be asked.
    """
    places = [(rest.find(stop.encode()), -len(stop), stop) for stop in stops]
    found = min((place for place in places if place[0] >= 0), default=None)
    if found is not None:
        return Answer(rest[: found[0]], FinishReason.STOP, found[2])
    if is_whole:
        return Answer(rest, FinishReason.STOP)
    return Answer(rest, FinishReason.LENGTH) if is_fresh else None


class Speculating(Wrapping["AnyRemoteBackend"]):
    """A backend for one run of a program: `backend`, asked for up to `num_tokens` in a call.

    It answers `gen`s that end at a stop string and have no constraint, nor log-probabilities; all
    others are asked of `backend` as they are. `max_tokens` of those it answers bounds nothing: how
    many tokens a part of a call had is not known. Where messages cannot be gone on with, the model
    writes all of one, and must begin it as the program does. Raises RemoteError if it does not.
    """

    def __init__(self, backend: AnyRemoteBackend, num_tokens: int) -> None:
        super().__init__(backend)
        self._num_tokens = num_tokens
        self._written: list[Written] = []

    @property
    def asked_by_itself(self) -> AnyRemoteBackend:
        """The backend that writes no more than each request asks for."""
        return self._backend

    @property
    def chooses(self) -> bool:
        return self._backend.chooses

    async def choose(self, request: ChoiceRequest) -> Choice:
        return await self._backend.choose(request)

    def stats(self) -> RemoteStats:
        return self._backend.stats()

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """In one piece, where it is answered here."""
        sampling = request.sampling
        if request.constraint is not None or not sampling.stop or sampling.logprobs is not None:
            async with aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    yield event
            return
        answer, usage = await self._answer(request)
        yield TokenEvent(
            request_id=request.request_id,
            token_ids=tuple(answer.text),
            text=answer.text.decode("utf-8", "replace"),
        )
        yield TokenEvent(
            request_id=request.request_id,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            usage=usage,
        )

    async def _answer(self, request: Request) -> tuple[Answer, Usage]:
        stops = request.sampling.stop
        for written in self._written:
            rest = written.rest_behind(request.path, request.token_ids)
            answer = rest and cut(rest, stops, is_whole=written.is_whole, is_fresh=False)
            if answer:
                return answer, Usage()
        usage = Usage()
        for _ in range(_TRIES):
            written, used = await self._ask(request)
            usage = usage.plus(used)
            rest = written.rest_behind(request.path, request.token_ids)
            if rest is not None:
                answer = cut(rest, stops, is_whole=written.is_whole, is_fresh=True)
                assert answer is not None
                self._written = [written, *self._written[: _KEPT - 1]]
                return answer, usage
        raise RemoteError(
            f"{self.model_name} does not begin its message as the program does, in {_TRIES} tries"
        )

    async def _ask(self, request: Request) -> tuple[Written, Usage]:
        prompt = request.token_ids
        if not self._backend.goes_on:
            prompt = without_begun_text(prompt, self._backend.tokenizer)
        sampling = replace(request.sampling, stop=(), max_tokens=self._num_tokens)
        asked = replace(request, token_ids=prompt, sampling=sampling)
        ids: list[int] = []
        async with aclosing(self._backend.generate(asked)) as events:
            async for event in events:
                ids += event.token_ids
                if event.finish_reason is not None:
                    is_whole = event.finish_reason is FinishReason.STOP
                    used = event.usage or Usage()
        return Written(request.path, prompt, tuple(ids), is_whole), used
