"""A backend that stands before another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from palmette.lang.backend import explains_prompts
from palmette.protocol import (
    ChatTemplate,
    Heals,
    Outlook,
    ProgramListener,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenBackend,
    Tokenizer,
)

B = TypeVar("B", bound=TokenBackend)


class Wrapping(Generic[B]):
    """Is what `backend` is, and hands on what it is asked but for generations."""

    def __init__(self, backend: B) -> None:
        self._backend = backend

    @property
    def model_name(self) -> str:
        return self._backend.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._backend.chat_template

    @property
    def default_sampling(self) -> SamplingParams:
        return self._backend.default_sampling

    @property
    def max_context(self) -> int:
        return self._backend.max_context

    @property
    def explains_prompts(self) -> bool:
        return explains_prompts(self._backend)

    @property
    def heals(self) -> bool:
        backend: TokenBackend = self._backend
        return isinstance(backend, Heals) and backend.heals

    async def score(self, request: ScoreRequest) -> ScoreResult:
        return await self._backend.score(request)

    def flush_cache(self) -> None:
        self._backend.flush_cache()

    def close(self) -> None:
        self._backend.close()


class Listening(Wrapping[B]):
    """For a backend that is a `ProgramListener`."""

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        cast(ProgramListener, self._backend).announce(outlook, ended)

    def end_program(self, program_id: str) -> None:
        cast(ProgramListener, self._backend).end_program(program_id)


def innermost(backend: TokenBackend) -> TokenBackend:
    """The backend itself, whatever stands before it."""
    while isinstance(backend, Wrapping):
        wrapped: Wrapping[Any] = backend
        backend = wrapped._backend
    return backend
