"""A backend that answers from a script, token-exact and deterministic, for tests and examples.

It stands in for an engine wherever a `TokenBackend` is wanted: it records what it is asked, counts
cached and prefilled tokens as an engine with an unbounded prefix cache would, and honours
`max_tokens`, stop strings, stop patterns, stop tokens, log-probabilities and abort. What it cannot
do is sample: `temperature` and its kin are recorded and change nothing, for the script has said
what comes out.
A constraint is not enforced but checked: a reply that breaks a regex, is not among the choices, or
is not JSON fails the request, as does one that ends before `min_tokens`. Grammars and structural
tags are recorded and not checked.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from palmette.errors import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    PalmetteError,
    PromptTooLong,
    UnsupportedFeature,
)
from palmette.protocol import (
    ChatTemplate,
    Constraint,
    FinishReason,
    Message,
    Piece,
    PromptStretch,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    TokenLogprob,
    TopLogprobs,
    Usage,
)

_CONTROL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, then come control tokens, then `tokens` of several bytes.

    Text is cut greedily into the longest known tokens from left to right, so `tokens` decides the
    split: with ``["Call", " >>>"]``, ``"Call >>>x"`` is three tokens. A token given as bytes may be
    part of a character.
    """

    def __init__(
        self,
        tokens: Sequence[str | bytes] = (),
        *,
        control_tokens: Sequence[str] = _CONTROL_TOKENS,
        stop_tokens: Sequence[str] = ("<|eos|>", "<|im_end|>"),
        prefix: str = "",
    ) -> None:
        self._bytes: list[bytes] = [bytes([value]) for value in range(256)]
        self._control: dict[str, int] = {}
        for text in control_tokens:
            self._control[text] = len(self._bytes)
            self._bytes.append(b"")
        for token in tokens:
            self._bytes.append(token.encode() if isinstance(token, str) else token)
        self._ids = {spelled: index for index, spelled in enumerate(self._bytes) if spelled}
        self._control_text = {index: text for text, index in self._control.items()}
        self._longest = max(len(spelled) for spelled in self._ids)
        by_length = sorted(control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._stop = frozenset(self._control[text] for text in stop_tokens)
        self._prefix = tuple(self.encode([Piece(prefix, special=True)]))

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self._prefix

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stop

    def encode(self, text: str | Sequence[Piece]) -> list[int]:
        """Ids of the joined text; only special pieces can hold control tokens."""
        pieces = [Piece(text)] if isinstance(text, str) else text
        ids: list[int] = []
        run: list[str] = []  # plain text since the last control token

        def flush() -> None:
            ids.extend(self._encode_bytes("".join(run).encode("utf-8", "replace")))
            run.clear()

        for piece in pieces:
            position = 0
            for match in self._control_pattern.finditer(piece.text) if piece.special else ():
                run.append(piece.text[position : match.start()])
                flush()
                ids.append(self._control[match.group()])
                position = match.end()
            run.append(piece.text[position:])
        flush()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, control tokens included; broken bytes become U+FFFD."""
        return b"".join(map(self._spelling, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for a control token."""
        return self._bytes[token_id]

    def control_id(self, text: str) -> int:
        """The id of the control token spelled `text`. Raises KeyError if there is none."""
        return self._control[text]

    def single_id(self, token: str | bytes | int) -> int:
        """The id of `token`, given as id or spelled out. Raises ValueError if it is not one."""
        if isinstance(token, int):
            return token
        if isinstance(token, str) and token in self._control:
            return self._control[token]
        spelled = token.encode() if isinstance(token, str) else token
        if spelled not in self._ids:
            raise ValueError(f"{token!r} is not one token of this tokenizer")
        return self._ids[spelled]

    def _spelling(self, token_id: int) -> bytes:
        control = self._control_text.get(token_id)
        return self._bytes[token_id] if control is None else control.encode()

    def _encode_bytes(self, data: bytes) -> list[int]:
        ids = []
        position = 0
        while position < len(data):
            for length in range(min(self._longest, len(data) - position), 0, -1):
                token_id = self._ids.get(data[position : position + length])
                if token_id is not None:
                    ids.append(token_id)
                    position += length
                    break
        return ids


class ChatMLTemplate:
    """``<|im_start|>role``, a newline, the content, ``<|im_end|>``, a newline."""

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        """The whole conversation."""
        pieces: list[Piece] = []
        for count, message in enumerate(messages, start=1):
            pieces += self.begin(messages[: count - 1], message["role"])
            pieces.append(Piece(message["content"]))
            pieces += self.end(messages[:count])
        return pieces + (self.begin(messages, "assistant") if add_generation_prompt else [])

    def begin(self, history: Sequence[Message], role: str) -> list[Piece]:
        """What opens a message of `role`."""
        return [Piece(f"<|im_start|>{role}\n", special=True)]

    def end(self, history: Sequence[Message]) -> list[Piece]:
        """What closes the last message."""
        return [Piece("<|im_end|>\n", special=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One scripted generation.

    The tokens are those of `text`, or of each of `pieces` encoded apart, or `token_ids`. After them
    comes the end-of-sequence token. `delay` seconds pass before the first token and `token_delay`
    before each. `error` is raised when the request starts, or, with `fails_after`, reported as an
    event after that many tokens. The first `num_forced` tokens count as forced by a grammar.
    """

    text: str = ""
    pieces: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    delay: float = 0.0
    token_delay: float = 0.0
    error: Exception | None = None
    fails_after: int | None = None
    num_forced: int = 0

    def __post_init__(self) -> None:
        if sum(map(bool, (self.text, self.pieces, self.token_ids))) > 1:
            raise ValueError("a reply has one of text, pieces and token_ids")

    def ids(self, tokenizer: ByteTokenizer, healed: str = "") -> list[int]:
        """The scripted tokens, without the one that ends the sequence. The first of `pieces`, or
        the text, is encoded together with the `healed` text before it.
        """
        if self.token_ids:
            return [*tokenizer.encode(healed), *self.token_ids]
        first, *more = self.pieces or (self.text,)
        return [token_id for part in (healed + first, *more) for token_id in tokenizer.encode(part)]


if TYPE_CHECKING:
    Answer = str | Reply
    Outputs = (
        Answer
        | Sequence[Answer]
        | Mapping[str, Answer]
        | Callable[[str, Request], Answer | Awaitable[Answer]]
    )
    Token = str | bytes | int
    Probabilities = (
        Mapping[str, Mapping[Token, float]] | Callable[[str], Mapping[Token, float] | None]
    )


class ScriptedBackend:
    """A `TokenBackend` that says what `outputs` says.

    `outputs` is one answer for every request; or a list, used up in the order in which requests
    arrive; or a dict from the end of the prompt's text to the answer (the longest key that fits
    wins); or a function, plain or async, of the prompt's text and the request. An answer is a
    string or a `Reply`. A request for which the script has nothing fails.

    `probabilities` maps the end of the text so far to the probabilities of the next token (the
    longest key that fits wins, a token not listed has probability 0); where no key fits, every
    token is equally likely. A function of the text so far does the same. Both `score` and
    log-probabilities of generated tokens come from it.

    `is_repeatable` is a promise that equal requests are answered alike, so that a batch may ask
    once for all of them; a list of outputs, for one, cannot make it.

    What came in is in `requests` and `score_requests`, in order; `aborted` holds the ids of
    requests closed before they finished, `max_running` the most that ran at once.
    """

    def __init__(
        self,
        outputs: Outputs = "ok",
        *,
        tokenizer: ByteTokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        has_chat_template: bool = True,
        probabilities: Probabilities | None = None,
        default_sampling: SamplingParams | None = None,
        max_context: int = 1 << 20,
        delay: float = 0.0,
        model_name: str = "scripted",
        is_repeatable: bool = False,
    ) -> None:
        self._outputs = outputs
        self._tokenizer = tokenizer or ByteTokenizer()
        self._template = chat_template or (ChatMLTemplate() if has_chat_template else None)
        self._probabilities = probabilities or {}
        self._default_sampling = default_sampling or SamplingParams()
        self._max_context = max_context
        self._delay = delay
        self._model_name = model_name
        self._is_repeatable = is_repeatable
        self._next_output = itertools.count()
        self._cache = _PrefixCache()
        self._lock = threading.Lock()
        self._closed = False
        self._num_running = 0
        self.requests: list[Request] = []
        self.score_requests: list[ScoreRequest] = []
        self.aborted: list[str] = []
        self.max_running = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_name!r})"

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def tokenizer(self) -> ByteTokenizer:
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise UnsupportedFeature(
                "a chat role", f"model {self._model_name} has no chat template"
            )
        return self._template

    @property
    def default_sampling(self) -> SamplingParams:
        return self._default_sampling

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def is_repeatable(self) -> bool:
        return self._is_repeatable

    @property
    def heals(self) -> bool:
        """True: see `protocol.Heals`."""
        return True

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return self._num_running

    @property
    def prompts(self) -> list[str]:
        """The text of every prompt of `requests`."""
        return [self._tokenizer.decode(request.token_ids) for request in self.requests]

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """The scripted tokens, one event each, held back where a stop string may begin."""
        started = time.monotonic()
        num_cached = self._admit(request)
        ended = False
        try:
            reply = await self._reply_to(request)
            await asyncio.sleep(self._delay + reply.delay)
            if reply.error is not None and reply.fails_after is None:
                raise reply.error
            output = _Output(
                self._tokenizer,
                request,
                self._next_probabilities,
                self._max_context,
                num_forced=reply.num_forced,
            )
            tokens = self._tokens_of(reply, request)
            first_token_seconds = 0.0
            event: TokenEvent | None
            while not output.is_finished:
                if reply.token_delay:
                    await asyncio.sleep(reply.token_delay)
                self._check_open()
                if reply.fails_after == output.num_tokens:
                    event = output.fail(reply.error)
                elif request.sampling.max_tokens == 0:
                    event = output.end_empty()
                else:
                    event = output.take(next(tokens))
                first_token_seconds = first_token_seconds or time.monotonic() - started
                if event is None:
                    continue
                if event.finish_reason is not None:
                    ended = True
                    self._cache.insert(request.salt, output.computed_ids)
                    event = output.last(
                        event,
                        num_cached=num_cached,
                        first_token_seconds=first_token_seconds,
                        total_seconds=time.monotonic() - started,
                    )
                    if request.explain:
                        event = replace(event, prompt=_stretches(request.token_ids, num_cached))
                yield event
        except Exception:
            ended = True
            raise
        finally:
            with self._lock:
                self._num_running -= 1
                if not ended:
                    self.aborted.append(request.request_id)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities from the script.

        The usage counts what an engine has to compute: the prompt and, once each, those tokens of
        the continuations which another token follows.
        """
        started = time.monotonic()
        self._check_open()
        self._check_length(
            len(request.token_ids) + max(len(ids) for ids in request.continuations) - 1
        )
        with self._lock:
            self.score_requests.append(request)
            num_cached = self._cache.insert(request.salt, request.token_ids)
            num_prompt = len(request.token_ids)
            num_cached = min(num_cached, num_prompt - 1)
            prompt = _stretches(request.token_ids, num_cached) if request.explain else ()
            inner = {ids[:end] for ids in request.continuations for end in range(1, len(ids))}
            for ids in sorted(inner, key=len):
                matched = self._cache.insert(request.salt, request.token_ids + ids)
                num_prompt += 1
                num_cached += matched == len(request.token_ids) + len(ids)
        await asyncio.sleep(self._delay)
        return ScoreResult(
            request_id=request.request_id,
            logprobs=tuple(
                tuple(
                    self._logprob(request.token_ids + ids[:position], token_id)
                    for position, token_id in enumerate(ids)
                )
                for ids in request.continuations
            ),
            top=tuple(
                tuple(
                    self._top(request.token_ids + ids[:position], request.num_top)
                    for position in range(len(ids))
                )
                for ids in request.continuations
                if request.num_top
            ),
            usage=Usage(
                prompt_tokens=num_prompt,
                cached_tokens=num_cached,
                prefilled_tokens=num_prompt - num_cached,
                total_seconds=time.monotonic() - started,
            ),
            prompt=prompt,
        )

    def flush_cache(self) -> None:
        """Forget every prefix."""
        with self._lock:
            self._cache = _PrefixCache()

    def close(self) -> None:
        """Stop: what still runs ends with EngineStopped at its next token."""
        self._closed = True

    def _admit(self, request: Request) -> int:
        """Record the request; the number of its tokens found in the cache, all but the last."""
        self._check_open()
        self._check_length(len(request.token_ids))
        with self._lock:
            self.requests.append(request)
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
            matched = self._cache.insert(request.salt, request.token_ids)
        return min(matched, len(request.token_ids) - 1)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the scripted backend was closed")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_context:
            raise PromptTooLong(num_tokens, self._max_context)

    async def _reply_to(self, request: Request) -> Reply:
        prompt = self._tokenizer.decode(request.token_ids)
        outputs = self._outputs
        answer: Answer | Awaitable[Answer] | None
        if callable(outputs):
            answer = outputs(prompt, request)
            if inspect.isawaitable(answer):
                answer = await answer
        elif isinstance(outputs, Mapping):
            fitting = [end for end in outputs if prompt.endswith(end)]
            answer = outputs[max(fitting, key=len)] if fitting else None
        elif isinstance(outputs, (str, Reply)):
            answer = outputs
        else:
            index = next(self._next_output)
            answer = outputs[index] if index < len(outputs) else None
        if isinstance(answer, str):
            return Reply(text=answer)
        if isinstance(answer, Reply):
            return answer
        raise EngineError(f"the script has no output for a prompt that ends in {prompt[-40:]!r}")

    def _tokens_of(self, reply: Reply, request: Request) -> Iterator[int]:
        """The reply's tokens, then end-of-sequence; over and over if that is to be ignored."""
        ids = reply.ids(self._tokenizer, request.healed)
        sampling = request.sampling
        if request.constraint is not None:
            text = self._tokenizer.decode(ids)[len(request.healed) :]
            _check_allowed(request.constraint, text, sampling.stop)
        if len(ids) < sampling.min_tokens and not sampling.ignore_eos:
            raise InvalidRequest(
                f"the scripted output has {len(ids)} tokens, min_tokens asks for "
                f"{sampling.min_tokens}",
                param="min_tokens",
            )
        end = sorted(self._tokenizer.stop_token_ids)[:1]
        return itertools.cycle(ids) if sampling.ignore_eos and ids else iter([*ids, *end])

    def _logprob(self, context: tuple[int, ...], token_id: int) -> float:
        return _log(self._next_probabilities(context).get(token_id, 0.0))

    def _top(self, context: tuple[int, ...], count: int) -> TopLogprobs:
        return _likeliest(self._next_probabilities(context), count)

    def _next_probabilities(self, context: tuple[int, ...]) -> Mapping[int, float]:
        text = self._tokenizer.decode(context)
        scripted = self._probabilities
        found: Mapping[Token, float] | None
        if callable(scripted):
            found = scripted(text)
        else:
            fitting = [end for end in scripted if text.endswith(end)]
            found = scripted[max(fitting, key=len)] if fitting else None
        if found is None:
            return _Uniform(self._tokenizer.vocab_size)
        return {self._tokenizer.single_id(token): value for token, value in found.items()}


class _Uniform(Mapping[int, float]):
    """Every token has the same probability."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __getitem__(self, token_id: int) -> float:
        return 1 / self._vocab_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._vocab_size))

    def __len__(self) -> int:
        return self._vocab_size


class _PrefixCache:
    """Which prefixes were computed: an unbounded trie of token ids for each salt."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}

    def insert(self, salt: str, token_ids: Sequence[int]) -> int:
        """Keep `token_ids`; the number of them, from the first on, that were there already."""
        node = self._roots.setdefault(salt, {})
        matched = 0
        for position, token_id in enumerate(token_ids, start=1):
            below = node.get(token_id)
            if below is None:
                below = node[token_id] = {}
            else:
                matched = position
            node = below
        return matched


_Node = dict[int, "_Node"]


class _Output:
    """The output of one request as it grows: what was produced, reported and held back."""

    def __init__(
        self,
        tokenizer: ByteTokenizer,
        request: Request,
        probabilities: Callable[[tuple[int, ...]], Mapping[int, float]],
        max_context: int,
        *,
        num_forced: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_forced = num_forced
        self._num_reported = 0
        self._request = request
        self._sampling = request.sampling
        self._probabilities = probabilities
        self._limit = min(request.sampling.max_tokens, max_context - len(request.token_ids))
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._stop_ids |= tokenizer.stop_token_ids
        self._produced: list[int] = []  # every token, the one that ended it included
        self._held: list[int] = []  # produced, not yet reported
        self._held_logprobs: list[TokenLogprob] = []
        self._num_healed = len(request.healed)  # characters at the beginning of what is held
        self.is_finished = False

    @property
    def num_tokens(self) -> int:
        return len(self._produced)

    @property
    def computed_ids(self) -> tuple[int, ...]:
        """Prompt and output as far as an engine has computed it: the last token is never fed."""
        return self._request.token_ids + tuple(self._produced[:-1])

    def take(self, token_id: int) -> TokenEvent | None:
        """What there is to report after one more token, if anything."""
        if token_id in self._stop_ids and len(self._produced) >= self._sampling.min_tokens:
            logprobs = self._logprobs_of(token_id)
            self._produced.append(token_id)
            event = self._finish(FinishReason.STOP, token_id)
            is_asked = self._sampling.logprobs is not None
            return replace(event, stop_logprob=logprobs[0] if is_asked else None)
        self._held_logprobs += self._logprobs_of(token_id)
        self._produced.append(token_id)
        self._held.append(token_id)
        text = self._tokenizer.decode(self._held)
        found = self._first_stop(text, len(self._tokenizer.token_bytes(token_id)))
        if found is not None and len(self._produced) >= self._sampling.min_tokens:
            position, stop = found
            self._cut(text[:position])
            return self._finish(FinishReason.STOP, stop)
        if len(self._produced) >= self._limit:
            return self._finish(FinishReason.LENGTH, None)
        count = self._num_reportable(text)
        return self._report(count) if count else None

    def end_empty(self) -> TokenEvent:
        """The event of a request that wants no tokens."""
        return self._finish(FinishReason.LENGTH, None)

    def fail(self, error: Exception | None) -> TokenEvent:
        """The event that reports a failure."""
        self.is_finished = True
        if not isinstance(error, PalmetteError):
            error = EngineError(f"scripted failure: {error}")
        return TokenEvent(
            request_id=self._request.request_id, finish_reason=FinishReason.ERROR, error=error
        )

    def last(
        self,
        event: TokenEvent,
        *,
        num_cached: int,
        first_token_seconds: float,
        total_seconds: float,
    ) -> TokenEvent:
        """The last event with the figures of the whole request."""
        num_prompt = len(self._request.token_ids)
        num_forced = min(self._num_forced, self.num_tokens)
        usage = Usage(
            prompt_tokens=num_prompt,
            cached_tokens=num_cached,
            prefilled_tokens=num_prompt - num_cached,
            completion_tokens=len(self._produced),
            decoded_tokens=len(self._produced) - num_forced,
            forced_tokens=num_forced,
            first_token_seconds=first_token_seconds,
            total_seconds=total_seconds,
        )
        return replace(event, usage=usage)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> TokenEvent:
        self.is_finished = True
        event = self._report(len(self._held))
        return replace(event, finish_reason=reason, stop_reason=stop_reason)

    def _report(self, count: int) -> TokenEvent:
        ids = tuple(self._held[:count])
        logprobs = tuple(self._held_logprobs[:count])
        del self._held[:count], self._held_logprobs[:count]
        text = self._tokenizer.decode(ids)
        num_healed = min(self._num_healed, len(text))
        self._num_healed -= num_healed
        places = range(self._num_reported, self._num_reported + len(ids))
        forced = tuple(place < self._num_forced for place in places)
        self._num_reported += len(ids)
        return TokenEvent(
            request_id=self._request.request_id,
            token_ids=ids,
            text=text[num_healed:],
            logprobs=logprobs,
            forced=forced if any(forced) else (),
        )

    def _first_stop(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Where the first stop string or match begins, and what it is; at most `num_new` characters
        of `text` are new.
        """
        first = self._num_healed
        found = [
            (text.find(stop, first), stop)
            for stop in self._sampling.stop
            if text.find(stop, first) >= 0
        ]
        ends = range(max(0, len(text) - num_new), len(text) + 1)
        for pattern in map(re.compile, self._sampling.stop_regex):
            places = ((start, end) for end in ends for start in range(first, end))
            match = next((at for at in places if pattern.fullmatch(text, *at)), None)
            if match is not None:
                found.append((match[0], pattern.pattern))
        return min(found, key=lambda match: match[0], default=None)

    def _num_reportable(self, text: str) -> int:
        """How many held tokens are whole characters that cannot begin a stop string.

        With a stop pattern none are, since `re` does not say what may still become a match.
        """
        if self._sampling.stop_regex:
            return 0
        num_safe = len(text) - max(
            (
                length
                for stop in self._sampling.stop
                for length in range(1, len(stop))
                if text[self._num_healed :].endswith(stop[:length])
            ),
            default=0,
        )
        for count in range(len(self._held), 0, -1):
            spelled = b"".join(map(self._tokenizer.token_bytes, self._held[:count]))
            try:
                part = spelled.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    continue
                part = spelled.decode("utf-8", "replace")
            if len(part) <= num_safe:
                return count
        return 0

    def _cut(self, kept: str) -> None:
        """Hold only `kept`: whole tokens as they are, the part of a cut one encoded again."""
        remaining = len(kept.encode())
        for count, token_id in enumerate(self._held):
            length = len(self._tokenizer.token_bytes(token_id))
            if length > remaining:
                rest = kept.encode()[len(kept.encode()) - remaining :]
                again = self._tokenizer.encode(rest.decode()) if rest else []
                self._held[count:] = again
                self._held_logprobs[count:] = [
                    TokenLogprob(token, math.nan) for token in again if self._held_logprobs
                ]
                return
            remaining -= length

    def _logprobs_of(self, token_id: int) -> list[TokenLogprob]:
        num_top = self._sampling.logprobs
        if num_top is None:
            num_top = self._request.trace_top
            if num_top is None:
                return []
            if len(self._produced) < self._num_forced:  # it was not drawn
                return [TokenLogprob(token_id, math.nan)]
        known = self._probabilities(self._request.token_ids + tuple(self._produced))
        top = _likeliest(known, num_top)
        return [TokenLogprob(token_id, _log(known.get(token_id, 0.0)), top)]


def _likeliest(known: Mapping[int, float], count: int) -> TopLogprobs:
    likeliest = sorted(known, key=lambda token_id: (-known[token_id], token_id))
    return tuple((token_id, _log(known[token_id])) for token_id in likeliest[:count])


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _check_allowed(constraint: Constraint, text: str, stop: Sequence[str]) -> None:
    """Raise unless the constraint allows `text` up to the first stop string, with it or without."""
    matches = [(text.index(each), each) for each in stop if each in text]
    position, found = min(matches, default=(len(text), ""))
    candidates = (text[: position + len(found)], text[:position])
    if not any(_allows(constraint, candidate) for candidate in candidates):
        raise EngineError(
            f"the scripted output {candidates[0]!r} breaks {constraint.kind} {constraint.source}"
        )


def _allows(constraint: Constraint, text: str) -> bool:
    if constraint.kind == "regex":
        return re.fullmatch(constraint.source, text) is not None
    if constraint.kind == "choices":
        return text in json.loads(constraint.source)
    if constraint.kind in ("grammar", "structural_tag"):
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _stretches(prompt: tuple[int, ...], num_cached: int) -> tuple[PromptStretch, ...]:
    """Nothing is ever evicted here: what is not cached was never seen."""
    stretches = (
        PromptStretch(0, num_cached, "cached"),
        PromptStretch(num_cached, len(prompt), "never seen"),
    )
    return tuple(stretch for stretch in stretches if stretch.end > stretch.start)
