"""What backends for models behind an API of texts share."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

from palmette.errors import (
    InvalidRequest,
    PalmetteError,
    RemoteError,
    UnsupportedFeature,
)
from palmette.lang.backends.accounts import Accounts, Prices, RemoteStats
from palmette.lang.backends.conversation import Conversation, conversation_of, text_tokenizer
from palmette.lang.backends.envelope import Envelope, option_probabilities
from palmette.lang.backends.lanes import C, Lanes
from palmette.lang.backends.pace import Pace, retry_after
from palmette.lang.backends.scripted import ByteTokenizer, ChatMLTemplate
from palmette.lang.backends.spelling import Spelled, Spelling, Token
from palmette.lang.choices import Choice, ChoiceRequest, best_of, draw, normalize
from palmette.lang.speculation import Speculating, cut
from palmette.protocol import (
    ChatTemplate,
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    TokenLogprob,
    Usage,
)

NEUTRAL = SamplingParams()
_AT_FAULT = (400, 404, 413, 422)  # the request itself is
_PASSING = (408, 409, 429)  # and what is above 499
_LONGEST_PAUSE = 600.0  # seconds; who asks for more is not waited for
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 8.0  # seconds
_BYTES_PER_TOKEN = 4  # about, of a prompt that is not counted yet
# More text than so is no answer to what was asked: the longest tokens have some hundred bytes.
_MOST_BYTES_PER_TOKEN, _MOST_BYTES_BESIDES, _MOST_TOKENS_BESIDES = 512, 4096, 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """What every backend for an API takes, whatever client talks to it.

    At most `max_concurrency` requests are under way at once on an event loop, the others wait. One
    that fails for a passing reason (no connection, 408, 409, 429, 5xx) is sent again up to
    `max_retries` times, after a time that doubles; where the server says when, nothing is sent
    until then. `requests_per_minute` and `tokens_per_minute` (prompts and completions) are kept to
    by waiting.

    With `emulate`, what a chat API has no way to say is put as a structured output: going on with a
    message that has begun, and a `select`. Without, it is refused. `takes_temperature=False` is for
    models that have none. `prices` are those of a million tokens, for the cost in `usage`.

    Raises InvalidRequest for values that make no sense.
    """

    max_concurrency: int = 32
    max_retries: int = 3
    max_context: int = 1 << 30
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    emulate: bool = False
    takes_temperature: bool = True
    prices: Prices | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_concurrency", 1), ("max_retries", 0), ("max_context", 1)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be at least {least}", param=name)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[RemoteOptions, dict[str, Any]]:
        """Those of a backend, and the others."""
        known = {each.name for each in fields(cls)}
        own = {name: value for name, value in options.items() if name in known}
        return cls(**own), {n: value for n, value in options.items() if n not in known}


class Answer(ABC):
    """What has come of an answer so far, and how it ended; both in the terms of the API."""

    finish: str | None = None
    stop_reason: str | None = None
    refusal = ""  # what the model says in place of an answer
    # Prompt tokens that were cached and all of them, completion tokens.
    num_cached = num_prompt = num_completed = 0

    def __init__(self) -> None:
        self.tokens: list[Token] = []  # if their log-probabilities were asked for
        self.asked_at = self.sent_at = time.monotonic()
        self.first_at: float | None = None

    @abstractmethod
    def take(self, event: Any) -> str | None:
        """The text that an event of the stream brings, if it does."""

    def usage(self, prices: Prices | None) -> Usage:
        """As the server counts, up to now."""
        now = time.monotonic()
        usage = Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            prefilled_tokens=self.num_prompt - self.num_cached,
            completion_tokens=self.num_completed,
            decoded_tokens=self.num_completed,
            queued_seconds=self.sent_at - self.asked_at,
            first_token_seconds=(self.first_at or now) - self.asked_at,
            total_seconds=now - self.asked_at,
        )
        return usage if prices is None else prices.priced(usage)


class RemoteBackend(ABC, Generic[C]):
    """A `TokenBackend` whose prompts are bytes, sent as text by the client of `package`.

    Both clients that there are name their errors alike; those of `errors` are caught.
    """

    explains_prompts: ClassVar[bool] = False
    package: ClassVar[str]
    errors: ClassVar[str]
    finish_reasons: ClassVar[Mapping[str, FinishReason]]  # by what the API calls them
    # Whether a schema can be for the rest of a message that has begun.
    constrains_rest: ClassVar[bool] = True

    def __init__(
        self, model: str, *, options: RemoteOptions, client_options: dict[str, Any]
    ) -> None:
        self._model = model
        self._settings = options
        self._options = {**client_options, "max_retries": 0}  # of trying again we take care
        self._prices = Prices.of(options.prices)
        self._pace = Pace(
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
        self._accounts = Accounts()
        self._tokenizer = text_tokenizer()
        self._template = ChatMLTemplate()
        self._lanes = Lanes(model, self._new_client, options.max_concurrency)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_name!r})"

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
        return self._settings.max_context

    def stats(self) -> RemoteStats:
        """What it has asked for so far."""
        return self._accounts.stats

    def flush_cache(self) -> None:
        """Refused: what the server keeps is its own affair."""
        raise UnsupportedFeature("flush_cache", f"{self._model} is behind an API")

    def close(self) -> None:
        """No more requests. Connections are closed soon, and what is still under way fails."""
        self._lanes.close()

    async def aclose(self) -> None:
        """As `close`, and wait until the connections of this event loop are closed."""
        await self._lanes.aclose()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    @abstractmethod
    def goes_on(self) -> bool:
        """Whether the model goes on with text of its own that is there already."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Text as it comes; closing the iterator early ends the request. A structured output that
        stands in for something else comes in one piece.
        """
        if request.explain:
            raise UnsupportedFeature("explain", "an API does not say what it has cached")
        answer, envelope = self._new_answer(), self._envelope(request)
        events = self._plain(request, answer)
        if envelope is not None:
            events = self._unwrapped(request, envelope, answer)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _plain(self, request: Request, answer: Answer) -> AsyncGenerator[TokenEvent, None]:
        """Each piece of the answer is one of the text."""
        spelling = None
        if request.sampling.logprobs is not None:
            if request.sampling.logprobs > 0:
                raise UnsupportedFeature(
                    "top_logprobs_num", "the tokens of a model behind an API have no ids here"
                )
            spelling = Spelling(answer.tokens)
        texts = self._texts(self._parameters(request), request, answer)
        whole = []
        async with aclosing(texts):
            async for text in texts:
                whole.append(text)
                if spelling is None:
                    yield self._event(request, text)
                else:
                    yield _spelled_event(request, spelling.take(text))
        if spelling is not None:
            yield _spelled_event(request, spelling.rest())
        finish_reason = self._finish_reason(answer)
        if finish_reason is FinishReason.STOP and answer.stop_reason is None:
            self._check(request.constraint, "".join(whole))
        yield TokenEvent(
            request_id=request.request_id,
            finish_reason=finish_reason,
            stop_reason=answer.stop_reason,
            usage=answer.usage(self._prices),
        )

    async def _unwrapped(
        self, request: Request, envelope: Envelope, answer: Answer
    ) -> AsyncGenerator[TokenEvent, None]:
        """What an envelope holds. Stop strings are looked for here: they are of what is in it."""
        sampling = request.sampling
        if sampling.logprobs is not None:
            raise UnsupportedFeature(
                "logprobs", "the model writes JSON here, whose tokens are not those of the text"
            )
        wide = replace(sampling, stop=(), max_tokens=sampling.max_tokens + envelope.num_bytes)
        asked = replace(request, sampling=wide, constraint=None)
        text, is_whole = await self._whole(asked, envelope, answer)
        rest = envelope.read(text, is_whole=is_whole)
        if is_whole:
            self._check(request.constraint, rest)
        found = cut(rest.encode(), sampling.stop, is_whole=is_whole, is_fresh=True)
        assert found is not None
        yield self._event(request, found.text.decode())
        yield TokenEvent(
            request_id=request.request_id,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            usage=answer.usage(self._prices),
        )

    @property
    def chooses(self) -> bool:
        """Whether structured outputs stand in for what the API has no way to say."""
        return self._settings.emulate

    async def choose(self, request: ChoiceRequest) -> Choice:
        """The option that the model names, where it can name nothing else; or the likeliest, where
        the API tells how likely each was.
        """
        if request.temperature > 0 and self._num_top_for_choice == 0:
            raise _no_draw()
        conversation = conversation_of(request.token_ids, self._tokenizer)
        self._check_role(conversation, "select")
        envelope = Envelope(conversation.text, options=request.options)
        longest = max(len(json.dumps(option)) for option in request.options)
        sampling = SamplingParams(
            temperature=0.0 if self._settings.takes_temperature else NEUTRAL.temperature,
            max_tokens=envelope.num_bytes + longest,
        )
        answer = self._new_answer()
        asked = Request(
            request_id=request.request_id, token_ids=request.token_ids, sampling=sampling
        )
        text, is_whole = await self._whole(
            asked, envelope, answer, num_top=self._num_top_for_choice
        )
        index = request.options.index(envelope.read(text, is_whole=is_whole)) if is_whole else None
        if index is None:
            raise RemoteError(f"{self._model} did not name its choice to the end: {text[:80]!r}")
        start = envelope.find(text) or 0
        probabilities = None
        if b"".join(token.spelled for token in answer.tokens) == text.encode():
            place = len(text[:start].encode())
            probabilities = option_probabilities(answer.tokens, place, request.options)
        method = "structured_output"
        if probabilities is not None:
            method = "probability"
            logs = [math.log(value) if value > 0 else -math.inf for value in probabilities]
            index = best_of(logs)
            if request.temperature > 0:
                index = draw(normalize(logs, request.temperature), request.seed, request.key)
        elif request.temperature > 0:
            raise _no_draw()
        return Choice(
            index=index,
            method=method,
            usage=answer.usage(self._prices),
            probabilities=None if probabilities is None else tuple(probabilities),
        )

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResult: ...

    def speculating(self, num_tokens: int) -> Speculating:
        """This backend for one run of a program whose `gen`s may share calls of so many tokens."""
        return Speculating(self, num_tokens)

    # What the API has

    @abstractmethod
    def _new_client(self) -> C:
        """A client for one event loop."""

    @abstractmethod
    def _new_answer(self) -> Answer:
        """One of which nothing has come yet."""

    @abstractmethod
    def _parameters(
        self, request: Request, envelope: Envelope | None = None, num_top: int = 0
    ) -> dict[str, Any]:
        """What is sent; with an envelope, the message is that and has not begun, and `num_top` of
        the likeliest tokens are wanted. Raises UnsupportedFeature for what the API does not have.
        """

    @abstractmethod
    async def _begin(self, client: C, parameters: dict[str, Any]) -> Any:
        """Send it; the stream of events that answers."""

    @property
    def _num_top_for_choice(self) -> int:
        """How many of the likeliest tokens the API is asked for where it is to choose."""
        return 0

    def _is_conversation(self) -> bool:
        """Whether prompts are messages."""
        return True

    def _enforces(self, constraint: Constraint) -> bool:
        """Whether the API has this kind of constraint."""
        return constraint.kind == "json_schema"

    @abstractmethod
    def _schema(self, schema: Any) -> Any:
        """A schema that asks for no more than the given one, as the API takes it."""

    def _check(self, constraint: Constraint | None, text: str) -> None:
        """Raises RemoteError for a whole text that is not as its constraint has it, where the API
        was not asked for all of that.
        """

    # Asking

    def _envelope(self, request: Request) -> Envelope | None:
        """What stands in for a request that the API has no way to say; None if it has. Raises
        UnsupportedFeature where nothing is to stand in.
        """
        if not self._is_conversation():
            return None
        conversation = conversation_of(request.token_ids, self._tokenizer)
        self._check_role(conversation, "gen")
        text, constraint = conversation.text, request.constraint
        can_go_on = self.goes_on and (constraint is None or self.constrains_rest)
        is_enforced = constraint is None or self._enforces(constraint)
        if (not text or can_go_on) and is_enforced:
            return None
        kind = None if constraint is None else constraint.kind
        can_stand_in = kind in (None, "json_schema", "choices")
        if constraint is not None and not is_enforced and not (can_stand_in and self.chooses):
            raise self._not_enforced(constraint)
        if not (can_stand_in and self.chooses):
            instead = (
                "With emulate=True the whole message is asked for as a structured output"
                if can_stand_in
                else f"A {kind} cannot be put as a structured output"
            )
            raise UnsupportedFeature(
                "text of the assistant before gen",
                f"this API begins each message anew; it has {text[:40]!r} already. {instead}",
            )
        if constraint is None:
            return Envelope(text)
        plain(constraint)
        if kind == "choices":
            return Envelope(text, options=tuple(constraint.options))
        return Envelope(text, json_schema=self._schema(json.loads(constraint.source)))

    async def _whole(
        self, request: Request, envelope: Envelope, answer: Answer, num_top: int = 0
    ) -> tuple[str, bool]:
        """All of the text of an answer, and whether it came to its end."""
        parameters = self._parameters(request, envelope, num_top)
        pieces = [text async for text in self._texts(parameters, request, answer)]
        return "".join(pieces), self._finish_reason(answer) is FinishReason.STOP

    async def _texts(
        self, parameters: dict[str, Any], request: Request, answer: Answer
    ) -> AsyncGenerator[str, None]:
        """The pieces of an answer's text as they come."""
        max_tokens = request.sampling.max_tokens
        num_left = _MOST_BYTES_PER_TOKEN * max_tokens + _MOST_BYTES_BESIDES
        async with self._asking(answer, len(request.token_ids), max_tokens) as send:
            stream = await send(lambda client: self._begin(client, parameters))
            try:
                with told(self.errors, is_answer=True):
                    async for event in stream:
                        text = answer.take(event)
                        if not text:
                            continue
                        answer.first_at = answer.first_at or time.monotonic()
                        num_left -= len(text)
                        if num_left < 0 or len(answer.tokens) > max_tokens + _MOST_TOKENS_BESIDES:
                            raise RemoteError(f"{self._model} wrote more than {max_tokens} tokens")
                        yield text
            finally:
                await _closed(stream)
            if answer.finish is None:
                self._finish_reason(answer)

    @asynccontextmanager
    async def _asking(
        self, answer: Answer, num_prompt_bytes: int, max_tokens: int
    ) -> AsyncIterator[Callable[[Callable[[C], Awaitable[Any]]], Awaitable[Any]]]:
        """Sends a request, when it may be sent, and again where that helps. It has its place among
        those under way as long as the block runs, and is counted when that ends.
        """
        lane = self._lanes.current()
        reserved = num_prompt_bytes // _BYTES_PER_TOKEN + max_tokens

        async def send(ask: Callable[[C], Awaitable[Any]]) -> Any:
            since = answer.asked_at
            for num_failures in itertools.count(1):
                await self._pace.wait(reserved)
                answer.sent_at = time.monotonic()
                self._accounts.sent(answer.sent_at - since)
                try:
                    with told(self.errors):
                        return await ask(lane.client)
                except RemoteError as error:
                    self._pace.settle(reserved, 0)
                    if num_failures > self._settings.max_retries or not _may_pass(error.__cause__):
                        raise
                    since = time.monotonic()
                    await self._before_trying_again(error, num_failures)
            raise AssertionError("it counts on")

        self._accounts.begin()
        try:
            async with lane.slots:
                yield send
            usage = answer.usage(self._prices)
            self._accounts.answered(usage)
            if usage.prompt_tokens:
                self._pace.settle(reserved, usage.prompt_tokens + usage.completion_tokens)
        except Exception:
            self._accounts.failed()
            raise
        finally:
            self._accounts.end()

    async def _before_trying_again(self, error: RemoteError, num_failures: int) -> None:
        """Wait as the server asks for, with all other requests, or else for a time that doubles.
        Raises RemoteError if it asks for too long.
        """
        response = getattr(error.__cause__, "response", None)
        seconds = retry_after(getattr(response, "headers", None) or {})
        if seconds is None:
            longest = min(_FIRST_BACKOFF * 2 ** (num_failures - 1), _LONGEST_BACKOFF)
            await asyncio.sleep(longest * random.uniform(0.75, 1.0))
        elif seconds > _LONGEST_PAUSE:
            raise RemoteError(
                f"{error}; it asks to wait {seconds:.0f} s, and none waits longer than "
                f"{_LONGEST_PAUSE:.0f} s",
                status=error.status,
            ) from error.__cause__
        else:
            self._pace.pause(seconds)

    def _event(self, request: Request, text: str) -> TokenEvent:
        return TokenEvent(
            request_id=request.request_id,
            token_ids=tuple(self._tokenizer.encode(text)),
            text=text,
        )

    def _finish_reason(self, answer: Answer) -> FinishReason:
        if answer.refusal:
            raise RemoteError(f"{self._model} refuses to answer: {answer.refusal[:200]}")
        reason = self.finish_reasons.get(answer.finish or "")
        if reason is None:
            raise RemoteError(f"{self._model} ended its answer with {answer.finish!r}")
        return reason

    def _client_package(self) -> Any:
        """The package that talks to the server. Raises UnsupportedFeature where it is missing."""
        try:
            return import_module(self.package)
        except ImportError as error:
            raise UnsupportedFeature(
                f"the backend {type(self).__name__}",
                f"install it with: pip install 'palmette[{self.package}]'",
            ) from error

    # Refusing

    def _check_role(self, conversation: Conversation, what: str) -> None:
        """Raises UnsupportedFeature unless the prompt ends where an API of messages writes."""
        if conversation.role != "assistant":
            where = f"a message of {conversation.role}" if conversation.role else "no message"
            raise UnsupportedFeature(
                f"{what} in {where}", "a chat API writes messages of the assistant only"
            )

    def _not_enforced(self, constraint: Constraint) -> UnsupportedFeature:
        why = f"the API of {self._model} does not enforce it"
        if constraint.kind == "choices":
            why += "; with emulate=True it is put as a structured output"
        return UnsupportedFeature(f"a {constraint.kind} constraint", why)

    def _refuse_all_but(self, honoured: Iterable[str], sampling: SamplingParams) -> None:
        """Raises UnsupportedFeature for what is set and not honoured."""
        without = set() if self._settings.takes_temperature else {"temperature"}
        for name in sorted(changed_in(sampling).difference(set(honoured) - without)):
            raise UnsupportedFeature(name, f"the API of {self._model} has no such option")


@contextmanager
def told(errors: str, *, is_answer: bool = False) -> Iterator[None]:
    """Turns what a client raises into our errors; `errors` is the package in which its own are.
    Whatever else goes wrong while an answer is read is the answer's fault.
    """
    package = import_module(errors)
    try:
        yield
    except package.APIStatusError as error:
        status = error.status_code
        if status in _AT_FAULT:
            raise InvalidRequest(f"the API refused it ({status}): {error.message}") from error
        raise RemoteError(f"the API answered {status}: {error.message}", status=status) from error
    except package.APIError as error:
        why = f" ({error.__cause__})" if str(error.__cause__ or "") else ""
        raise RemoteError(f"the API cannot be used: {error}{why}") from error
    except PalmetteError:
        raise
    except Exception as error:
        if not is_answer:
            raise
        what = f"{type(error).__name__}: {error}"
        raise RemoteError(f"the API's answer broke off or cannot be read: {what[:200]}") from error


def _may_pass(error: BaseException | None) -> bool:
    """Whether what a client raised may be otherwise the next time."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None)
    if response is None or status is None:
        return True  # no answer came
    advice = (getattr(response, "headers", None) or {}).get("x-should-retry")
    if advice in ("true", "false"):
        return bool(advice == "true")
    return status in _PASSING or status >= 500


async def _closed(stream: Any) -> None:
    """Let go of a stream, by whichever name it has that."""
    close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
    if close is not None:
        await close()


def _no_draw() -> UnsupportedFeature:
    return UnsupportedFeature(
        "select with a temperature",
        "the API did not tell how likely each option is, so none can be drawn",
        param="temperature",
    )


def _spelled_event(request: Request, spelled: Spelled) -> TokenEvent:
    text, values = spelled
    ids = tuple(text.encode())
    return TokenEvent(
        request_id=request.request_id,
        token_ids=ids,
        text=text,
        logprobs=tuple(map(TokenLogprob, ids, values)),
    )


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
