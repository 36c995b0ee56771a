"""Log-probabilities of given tokens: those of prompts, and of the options of ``POST /score``."""

from __future__ import annotations

from dataclasses import dataclass

from palmette.errors import EngineStopped
from palmette.protocol import ScoreRequest, ScoreResult, TopLogprobs
from palmette.runtime.server.answering import new_id
from palmette.runtime.server.service import Service
from palmette.runtime.server.streaming import before


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of a prompt from some place on, the first of which has no log-probability.

    `top` has the likeliest tokens for each, or nothing at all where they are not wanted.
    """

    logprobs: tuple[float | None, ...] = ()
    top: tuple[TopLogprobs, ...] = ()
    num_cached: int | None = None  # of the prompt's tokens, if anything had to be computed


async def score(service: Service, request: ScoreRequest) -> ScoreResult:
    """The backend's result. Raises EngineStopped when the server ends before that."""
    stopped = EngineStopped("the server is shutting down")
    return await before(service.stop.wait(), service.backend.score(request), stopped)


async def score_prompt(
    service: Service, prompt: tuple[int, ...], start: int, *, num_top: int, salt: str
) -> ScoredPrompt:
    """log P(token | all before it) of the tokens behind the one at `start`."""
    first = start + 1
    if len(prompt) <= first:
        return ScoredPrompt((None,) * (len(prompt) - start), ((),) * (len(prompt) - start))
    result = await score(
        service,
        ScoreRequest(
            request_id=new_id("score"),
            token_ids=prompt[:first],
            continuations=(prompt[first:],),
            salt=salt,
            num_top=num_top,
        ),
    )
    top = ((), *result.top[0]) if result.top else ()
    return ScoredPrompt((None, *result.logprobs[0]), top, result.usage.cached_tokens)
