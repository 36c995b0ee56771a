"""What every endpoint works with: the backend, its name, and the texts that become tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from palmette.errors import InvalidRequest, PromptTooLong
from palmette.protocol import Message, Piece, TokenBackend
from palmette.runtime.server import schemas
from palmette.runtime.server.errors import ApiError
from palmette.runtime.server.limits import ServerLimits

T = TypeVar("T")

# Below this many characters, encoding takes less than handing it to a thread and back.
_INLINE_CHARACTERS = 2000


class RequestTraces(Protocol):
    """What keeps the last requests, so that one can look at them."""

    def watching(self, backend: TokenBackend) -> TokenBackend:
        """The backend, each of whose requests is kept."""
        ...

    def to_json(self) -> str:
        """What is kept, as a trace."""
        ...

    def html(self) -> str:
        """A page that shows it."""
        ...


@dataclass(slots=True, kw_only=True)
class Service:
    """A backend as the endpoints see it."""

    backend: TokenBackend
    model_name: str
    limits: ServerLimits = field(default_factory=ServerLimits)
    started: int = field(default_factory=lambda: int(time.time()))
    num_requests: int = 0  # generations in progress
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set: end them all

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """One more request is worked at. Raises ApiError 429 if there are too many already."""
        if self.num_requests >= self.limits.max_requests:
            raise ApiError(
                429,
                f"{self.num_requests} requests are in progress, the most this server takes; "
                "come back later",
                code="overloaded",
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def check_num_logprobs(self, count: int, param: str) -> None:
        """Raises InvalidRequest if an answer would have too many log-probabilities."""
        if count > self.limits.max_prompt_logprobs:
            raise InvalidRequest(
                f"{param} asks for {count} log-probabilities of prompts, at most "
                f"{self.limits.max_prompt_logprobs} are given",
                param=param,
            )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is the model served here; None means whatever is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server has "
                f"{self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def chat_prompt(self, messages: Sequence[schemas.Message]) -> tuple[int, ...]:
        """The ids of a conversation up to the beginning of the answer."""
        conversation = [_message(message) for message in messages]
        num_characters = sum(len(message["content"]) for message in conversation)

        def encode() -> tuple[int, ...]:
            pieces = self.backend.chat_template.render(conversation)
            return tuple(self.backend.tokenizer.encode(pieces))

        return await off_loop(encode, num_characters)

    async def raw_prompt(
        self, prompt: str | tuple[int, ...], *, has_prefix: bool = True
    ) -> tuple[int, ...]:
        """The ids of a raw prompt: control tokens spelled out become those tokens.

        Text gets the tokenizer's prefix in front unless it begins with it, or unless `has_prefix`
        is False; ids are taken as they are.
        """
        tokenizer = self.backend.tokenizer
        if not isinstance(prompt, str):
            self.check_token_ids(prompt, "prompt")
            return prompt

        def encode() -> tuple[int, ...]:
            ids = tuple(tokenizer.encode([Piece(prompt, special=True)]))
            prefix = tokenizer.prefix_ids if has_prefix else ()
            return ids if ids[: len(prefix)] == prefix else prefix + ids

        return await off_loop(encode, len(prompt))

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest if one of the ids is no token."""
        vocab_size = self.backend.tokenizer.vocab_size
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise InvalidRequest(
                f"{param} names token {highest}, the vocabulary has {vocab_size} tokens",
                param=param,
            )

    def room_after(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt. Raises PromptTooLong if none."""
        room = self.backend.max_context - len(prompt)
        if room < 1:
            raise PromptTooLong(len(prompt), self.backend.max_context)
        return room


async def off_loop(work: Callable[[], T], num_characters: int) -> T:
    """The result of `work`, computed on a thread if it may take long enough to hold others up."""
    return work() if num_characters < _INLINE_CHARACTERS else await asyncio.to_thread(work)


def _message(message: schemas.Message) -> Message:
    role = "system" if message.role == "developer" else message.role
    return Message(role=role, content=message.content)
