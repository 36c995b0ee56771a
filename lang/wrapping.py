"""A backend that stands before another one."""

from __future__ import annotations

from typing import Generic, TypeVar

from palmette.protocol import (
    ChatTemplate,
    Heals,
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
    def heals(self) -> bool:
        return isinstance(self._backend, Heals) and self._backend.heals

    async def score(self, request: ScoreRequest) -> ScoreResult:
        return await self._backend.score(request)

    def flush_cache(self) -> None:
        self._backend.flush_cache()

    def close(self) -> None:
        self._backend.close()
