"""The output of a server that tells every token as it is drawn: ids and text that agree, cut at
stop strings exactly as an engine cuts them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence

from palmette.errors import PromptTooLong, RemoteError, UnsupportedFeature
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
    TopLogprobs,
    Usage,
)


class Output:
    """What a request has produced so far. Stop strings and patterns are found here, whether or not
    the server knows them; a server that goes on beyond one is left.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        from palmette.runtime.tokenization import OutputBuffer  # loads tokenizers, no torch

        sampling = request.sampling
        self._request = request
        self._tokenizer = tokenizer
        self._buffer = OutputBuffer(tokenizer.token_bytes, sampling.stop, sampling.stop_regex)
        own = frozenset() if sampling.ignore_eos else tokenizer.stop_token_ids
        self._stop_ids = own | set(sampling.stop_token_ids)
        self._held: int | None = None  # a token that may turn out to end the output
        self._logprobs: deque[TokenLogprob] = deque()  # of tokens that are not told yet
        self._started = time.monotonic()
        self._first: float | None = None
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._buffer.matched is not None

    @property
    def is_to_be_left(self) -> bool:
        """Whether it is at its end, which the server does not know: it takes no stop patterns."""
        return self._buffer.matched in self._request.sampling.stop_regex

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> TokenEvent | None:
        """The event that these tokens make, if they make one. Raises RemoteError for others."""
        most = max(1, self._request.sampling.max_tokens)
        if self.num_tokens + len(token_ids) > most:
            raise RemoteError(f"the server drew more than the {most} tokens that were asked for")
        if self._request.sampling.logprobs is not None and len(logprobs) != len(token_ids):
            raise RemoteError("the server did not tell how likely each token was")
        if token_ids and self._first is None:
            self._first = time.monotonic() - self._started
        self.num_tokens += len(token_ids)
        if self.is_stopped:
            return None
        self._logprobs += logprobs
        for token_id in token_ids:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise RemoteError(
                    f"the server drew token {token_id}, which is not in the tokenizer"
                )
            held, self._held = self._held, None
            if held is not None and self._buffer.feed(held) is not None:
                break
            if token_id in self._stop_ids:
                self._held = token_id
            elif self._buffer.feed(token_id) is not None:
                break
        told, text = self._buffer.take()
        if not told:
            return None
        return TokenEvent(
            request_id=self._request.request_id,
            token_ids=tuple(told),
            text=text,
            logprobs=self._take_logprobs(len(told)),
        )

    def end(self, reason: FinishReason, stopped_at: str | int | None, usage: Usage) -> TokenEvent:
        """The last event, where the server says so much, or where a stop string was found."""
        stop_logprob = None
        if self.is_stopped:
            reason, stopped_at = FinishReason.STOP, self._buffer.matched
        elif self._held is not None:
            if reason is FinishReason.STOP:
                stopped_at = self._held  # no part of the text
                stop_logprob = self._logprobs.pop() if self._logprobs else None
            else:
                self._buffer.feed(self._held)
        token_ids, text = self._buffer.finish()
        logprobs = self._take_logprobs(len(token_ids))
        cut = self._buffer.cut_text
        if cut:
            kept = self._tokenizer.encode(cut)
            token_ids, text = [*token_ids, *kept], text + cut
            if self._request.sampling.logprobs is not None:
                logprobs += tuple(TokenLogprob(token_id, math.nan) for token_id in kept)
        return TokenEvent(
            request_id=self._request.request_id,
            token_ids=tuple(token_ids),
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stopped_at,
            stop_logprob=stop_logprob,
            usage=usage,
        )

    def usage(self, *, num_prompt: int, num_cached: int) -> Usage:
        """The server's counts, and the times as they are here."""
        total = time.monotonic() - self._started
        cached = min(num_cached, num_prompt)
        return Usage(
            prompt_tokens=num_prompt,
            cached_tokens=cached,
            prefilled_tokens=num_prompt - cached,
            completion_tokens=self.num_tokens,
            decoded_tokens=self.num_tokens,
            first_token_seconds=total if self._first is None else self._first,
            total_seconds=total,
        )

    def _take_logprobs(self, count: int) -> tuple[TokenLogprob, ...]:
        if self._request.sampling.logprobs is None:
            return ()
        return tuple(self._logprobs.popleft() for _ in range(count))


def top_of(pairs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest of some tokens, best first."""
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])


def score_result(
    request: ScoreRequest,
    logprobs: Sequence[tuple[float, ...]],
    top: Sequence[tuple[TopLogprobs, ...]],
    *,
    started: float,
    num_prompt: int,
    num_cached: int,
) -> ScoreResult:
    """The result of a score request that was sent at `started`, with the server's counts."""
    total = time.monotonic() - started
    cached = min(num_cached, num_prompt)
    return ScoreResult(
        request_id=request.request_id,
        logprobs=tuple(logprobs),
        usage=Usage(
            prompt_tokens=num_prompt,
            cached_tokens=cached,
            prefilled_tokens=num_prompt - cached,
            first_token_seconds=total,
            total_seconds=total,
        ),
        top=tuple(top) if request.num_top else (),
    )


def check_request(request: Request, what: str, max_context: int) -> int:
    """How many tokens to ask for at most. Raises PromptTooLong, and UnsupportedFeature for what
    only an engine of ours does.
    """
    if request.explain:
        raise UnsupportedFeature("explain", f"{what} does not say what it has cached, or why")
    if request.sampling.jump_forward is not None:
        raise UnsupportedFeature(
            "jump_forward", f"how forced text becomes tokens is {what}'s own affair"
        )
    room = max_context - len(request.token_ids)
    if room < 1:
        raise PromptTooLong(len(request.token_ids), max_context)
    return min(request.sampling.max_tokens, room)


def unenforced(constraint: Constraint, what: str) -> UnsupportedFeature:
    """What is raised for a constraint that a server does not have."""
    syntax = f" in the syntax {constraint.syntax!r}" if constraint.syntax else ""
    return UnsupportedFeature(
        f"a {constraint.kind} constraint{syntax}", f"{what} has none", param="constraint"
    )
