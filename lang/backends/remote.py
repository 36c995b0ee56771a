"""What backends for models behind an API of texts share."""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from palmette.errors import EngineStopped, InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.conversation import Conversation, text_tokenizer
from palmette.lang.backends.scripted import ByteTokenizer, ChatMLTemplate
from palmette.lang.speculation import Speculating
from palmette.protocol import (
    ChatTemplate,
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Usage,
)

NEUTRAL = SamplingParams()
_AT_FAULT = (400, 404, 413, 422)  # the request itself is


class Client(Protocol):
    """What talks to the server, and belongs to the event loop that it was first used on."""

    async def close(self) -> None: ...


C = TypeVar("C", bound=Client)


class Lane(Generic[C]):
    """What one event loop uses: a client, and slots for so many requests."""

    def __init__(self, client: C, max_concurrency: int) -> None:
        self.client = client
        self.slots = asyncio.Semaphore(max_concurrency)
        self._closing: asyncio.Task[None] | None = None

    def close(self) -> asyncio.Task[None]:
        """Close the connections, once. On the loop."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.client.close())
        return self._closing


class Answer(ABC):
    """What has come of an answer so far, and how it ended; both in the terms of the API."""

    finish: str | None = None
    stop_reason: str | None = None
    # Prompt tokens that were cached and all of them, completion tokens.
    num_cached = num_prompt = num_completed = 0

    @abstractmethod
    def take(self, event: Any) -> str | None:
        """The text that an event of the stream brings, if it does."""

    def usage(self, *, queued: float, first: float, total: float) -> Usage:
        """As the server counts; the times are in seconds."""
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            prefilled_tokens=self.num_prompt - self.num_cached,
            completion_tokens=self.num_completed,
            decoded_tokens=self.num_completed,
            queued_seconds=queued,
            first_token_seconds=first,
            total_seconds=total,
        )


class RemoteBackend(ABC, Generic[C]):
    """A `TokenBackend` whose prompts are bytes, sent as text by the client of `package`."""

    explains_prompts: ClassVar[bool] = False
    package: ClassVar[str]
    finish_reasons: ClassVar[Mapping[str, FinishReason]]  # by what the API calls them

    def __init__(
        self, model: str, *, max_concurrency: int, max_context: int, client_options: dict[str, Any]
    ) -> None:
        if max_concurrency < 1:
            raise InvalidRequest("max_concurrency must be at least 1", param="max_concurrency")
        self._model = model
        self._max_concurrency = max_concurrency
        self._max_context = max_context
        self._options = client_options
        self._tokenizer = text_tokenizer()
        self._template = ChatMLTemplate()
        self._lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Lane[C]] = (
            weakref.WeakKeyDictionary()
        )
        self._is_closed = False

    @property
    def model_name(self) -> str:
        return self._model

    @property
    def tokenizer(self) -> ByteTokenizer:
        """Bytes: the model's own tokens are not known here."""
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._template

    @property
    def default_sampling(self) -> SamplingParams:
        return NEUTRAL

    @property
    def max_context(self) -> int:
        return self._max_context

    def flush_cache(self) -> None:
        """Refused: what the server keeps is its own affair."""
        raise UnsupportedFeature("flush_cache", f"{self._model} is behind an API")

    def close(self) -> None:
        """No more requests. Connections are closed soon, and what is still under way fails."""
        self._is_closed = True
        for loop, lane in list(self._lanes.items()):
            if loop.is_running():
                loop.call_soon_threadsafe(lane.close)

    async def aclose(self) -> None:
        """As `close`, and wait until the connections of this event loop are closed."""
        self.close()
        lane = self._lanes.get(asyncio.get_running_loop())
        if lane is not None:
            await lane.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    @abstractmethod
    def goes_on(self) -> bool:
        """Whether the model goes on with text of its own that is there already."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Text as it comes; closing the iterator early ends the request."""
        started = time.monotonic()
        parameters = self._parameters(request)
        lane = self._lane()
        answer = self._new_answer()
        first_seconds = 0.0
        async with lane.slots:
            sent = time.monotonic()
            with told(self.package):
                stream = await self._begin(lane.client, parameters)
            try:
                with told(self.package):
                    async for event in stream:
                        text = answer.take(event)
                        if text:
                            first_seconds = first_seconds or time.monotonic() - started
                            yield TokenEvent(
                                request_id=request.request_id,
                                token_ids=tuple(self._tokenizer.encode(text)),
                                text=text,
                            )
            finally:
                await stream.close()
        finish_reason = self.finish_reasons.get(answer.finish or "")
        if finish_reason is None:
            raise RemoteError(f"{self._model} ended its answer with {answer.finish!r}")
        total = time.monotonic() - started
        yield TokenEvent(
            request_id=request.request_id,
            finish_reason=finish_reason,
            stop_reason=answer.stop_reason,
            usage=answer.usage(queued=sent - started, first=first_seconds or total, total=total),
        )

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResult: ...

    def speculating(self, num_tokens: int) -> Speculating:
        """This backend for one run of a program whose `gen`s may share calls of so many tokens."""
        return Speculating(self, num_tokens)

    @abstractmethod
    def _new_client(self) -> C:
        """A client for one event loop."""

    @abstractmethod
    def _new_answer(self) -> Answer:
        """One of which nothing has come yet."""

    @abstractmethod
    def _parameters(self, request: Request) -> dict[str, Any]:
        """What is sent. Raises UnsupportedFeature for what the API does not have."""

    @abstractmethod
    async def _begin(self, client: C, parameters: dict[str, Any]) -> Any:
        """Send it; the stream of events that answers."""

    def _client_package(self) -> Any:
        """The package that talks to the server. Raises UnsupportedFeature where it is missing."""
        try:
            return import_module(self.package)
        except ImportError as error:
            raise UnsupportedFeature(
                f"the backend {type(self).__name__}",
                f"install it with: pip install 'palmette[{self.package}]'",
            ) from error

    def _lane(self) -> Lane[C]:
        """What the running event loop uses. Raises EngineStopped once closed."""
        if self._is_closed:
            raise EngineStopped(f"the backend for {self._model} was closed")
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            lane = self._lanes[loop] = Lane(self._new_client(), self._max_concurrency)
        return lane

    def _check_place(self, conversation: Conversation) -> None:
        """Raises UnsupportedFeature unless the prompt ends where an API of messages writes."""
        if conversation.role != "assistant":
            where = f"a message of {conversation.role}" if conversation.role else "no message"
            raise UnsupportedFeature(
                f"gen in {where}", "a chat API writes messages of the assistant only"
            )
        if conversation.text and not self.goes_on:
            raise UnsupportedFeature(
                "text of the assistant before gen",
                f"this API begins each message anew; it has {conversation.text[:40]!r} already",
            )

    def _refuse_all_but(self, honoured: Iterable[str], sampling: SamplingParams) -> None:
        """Raises UnsupportedFeature for what is set and not honoured."""
        for name in sorted(changed_in(sampling).difference(honoured)):
            raise UnsupportedFeature(name, f"the API of {self._model} has no such option")


@contextmanager
def told(package: str) -> Iterator[None]:
    """Turns what the client of `package` raises into our errors. Both clients name theirs alike."""
    errors = import_module(package)
    try:
        yield
    except errors.APIStatusError as error:
        status = error.status_code
        if status in _AT_FAULT:
            raise InvalidRequest(f"the API refused it ({status}): {error.message}") from error
        raise RemoteError(f"the API answered {status}: {error.message}", status=status) from error
    except errors.APIError as error:
        raise RemoteError(f"the API cannot be used: {error}") from error


def plain(constraint: Constraint) -> Constraint:
    """The constraint, if nothing about it is left to an engine. Raises UnsupportedFeature."""
    options = (constraint.whitespace, constraint.order, constraint.undeclared)
    if options != ("compact", "declared", "allowed") or constraint.backend != "palmette":
        raise UnsupportedFeature(
            "an option of a constraint", "how the API enforces it is not ours to choose"
        )
    return constraint


AnyRemoteBackend = RemoteBackend[Any]


def changed_in(sampling: SamplingParams) -> set[str]:
    """The names of what is not as it is where nobody says."""
    return {
        each.name
        for each in fields(sampling)
        if getattr(sampling, each.name) != getattr(NEUTRAL, each.name)
    }


def seed_at(seed: int, path: tuple[int, ...]) -> int:
    """Branches of one seed differ, as they do in an engine; that of the root is the seed itself."""
    if not path:
        return seed
    digest = hashlib.blake2b(repr((seed, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
