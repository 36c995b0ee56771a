"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from palmette.protocol import FinishReason, Request, TokenEvent
from palmette.runtime.server.answering import ChoicesAnswer, Job, new_id
from palmette.runtime.server.errors import ApiError, error_answer
from palmette.runtime.server.generation import UsageTotal
from palmette.runtime.server.logprobs import CompletionLogprobs, TokenNames
from palmette.runtime.server.sampling import (
    constraint,
    constraint_fields,
    num_choices,
    sampling_params,
    wants_stream,
    wants_usage,
)
from palmette.runtime.server.schemas import CompletionRequest
from palmette.runtime.server.scoring import ScoredPrompt, score_prompt
from palmette.runtime.server.service import Service, off_loop
from palmette.runtime.server.streaming import all_of

# What the API takes where max_tokens is absent.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown before its completion; `scored` if log-probabilities are wanted."""

    text: str
    token_ids: tuple[int, ...]
    scored: ScoredPrompt = field(default_factory=ScoredPrompt)


async def completion_job(body: CompletionRequest, service: Service) -> Job:
    """What to do for a completion request. Raises InvalidRequest or ApiError."""
    service.check_model(body.model)
    is_stream = wants_stream(body)
    count = num_choices(body, service, len(body.prompt))
    wanted = constraint(body)
    prompts = [await service.raw_prompt(prompt) for prompt in body.prompt]
    if body.echo and body.logprobs is not None:
        num_entries = count * sum(map(len, prompts)) * (1 + body.logprobs)
        service.check_num_logprobs(num_entries, "logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 0:
        raise ApiError(400, f"max_tokens must be at least 0, got {max_tokens}", param="max_tokens")
    answer_id = new_id("cmpl")
    requests = [
        Request(
            request_id=f"{answer_id}-{prompt_index * count + index}",
            token_ids=prompt,
            sampling=sampling_params(
                body,
                service,
                max_tokens=min(max_tokens, service.room_after(prompt)),
                logprobs=body.logprobs,
            ),
            constraint=wanted,
            # Of the choice alone, so that a prompt gets the same answer in a list as by itself.
            path=(index,),
            salt=body.cache_salt or "",
        )
        for prompt_index, prompt in enumerate(prompts)
        for index in range(count)
    ]
    with service.in_progress():
        echoes = await all_of(
            _echo(given, prompt, service, body)
            for given, prompt in zip(body.prompt, prompts, strict=True)
            if body.echo
        )
    choices = CompletionChoices(
        [echoes[i // count] if body.echo else None for i in range(len(requests))],
        TokenNames(service.backend.tokenizer),
        body.logprobs,
    )
    found_cached = {
        index: echo.scored.num_cached
        for index, echo in enumerate(echoes)
        if echo.scored.num_cached is not None
    }
    return Job(
        requests=requests,
        answer=ChoicesAnswer(
            service,
            answer_id,
            "text_completion",
            choices,
            UsageTotal(count, found_cached),
            streams_usage=wants_usage(body),
        ),
        is_stream=is_stream,
        tell=partial(error_answer, fields=constraint_fields(body)),
    )


async def _echo(
    given: str | tuple[int, ...],
    prompt: tuple[int, ...],
    service: Service,
    body: CompletionRequest,
) -> Echo:
    """How a prompt is shown, with log P(token | all before it) for all shown tokens but the first.

    A prefix that was put before a text is not part of it; one that the text spelled out is.
    """
    tokenizer = service.backend.tokenizer
    prefix = tokenizer.prefix_ids
    is_spelled = isinstance(given, str) and given.startswith(tokenizer.decode(prefix))
    num_hidden = 0 if is_spelled or not isinstance(given, str) else len(prefix)
    shown = prompt[num_hidden:]
    text = await off_loop(lambda: tokenizer.decode(shown), len(shown))
    if body.logprobs is None:
        return Echo(text, shown)
    salt = body.cache_salt or ""
    scored = await score_prompt(service, prompt, num_hidden, num_top=body.logprobs, salt=salt)
    return Echo(text, shown, scored)


class CompletionChoices:
    """The choices of a completion. `num_top` is None where no log-probabilities are wanted."""

    def __init__(self, echoes: list[Echo | None], names: TokenNames, num_top: int | None) -> None:
        self._echoes = echoes
        self._is_echoed = any(echo is not None for echo in echoes)
        self._wants_logprobs = num_top is not None
        self._logprobs = [CompletionLogprobs(names, num_top or 0) for _ in echoes]
        self._parts: list[list[dict[str, Any]]] = [[] for _ in echoes]
        self._finish_reasons: list[str | None] = [None] * len(echoes)

    def pieces(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The prompt, if it is echoed; new text; on the last event, the reason of the end."""
        pieces = self._texts(index, event)
        if event.finish_reason is not None:
            pieces.append(_piece(index, "", None, event.finish_reason))
        return pieces

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep an event's text and log-probabilities."""
        self._parts[index] += self._texts(index, event)
        if event.finish_reason is not None:
            self._finish_reasons[index] = event.finish_reason.value

    def whole(self) -> list[dict[str, Any]]:
        """Every choice with its text."""
        return [
            {
                "index": index,
                "text": "".join(part["text"] for part in parts),
                "logprobs": self._joined(parts),
                "finish_reason": reason,
            }
            for index, (parts, reason) in enumerate(
                zip(self._parts, self._finish_reasons, strict=True)
            )
        ]

    def _texts(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        pieces = []
        logprobs = self._logprobs[index]
        echo = self._echoes[index]
        if echo is not None:
            self._echoes[index] = None
            shown = (
                logprobs.part(echo.text, echo.token_ids, echo.scored.logprobs, echo.scored.top)
                if self._wants_logprobs
                else None
            )
            pieces.append(_piece(index, echo.text, shown))
        entries = list(event.logprobs)
        if self._is_echoed and event.stop_logprob is not None:
            # Who takes apart the lists of an echoed prompt and its completion counts tokens.
            entries.append(event.stop_logprob)
        if event.text or entries:
            shown = (
                logprobs.part(
                    event.text,
                    [entry.token_id for entry in entries],
                    [entry.logprob for entry in entries],
                    [entry.top for entry in entries],
                )
                if self._wants_logprobs
                else None
            )
            pieces.append(_piece(index, event.text, shown))
        return pieces

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, list[Any]] | None:
        if not self._wants_logprobs:
            return None
        joined: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for part in parts:
            for name, values in part["logprobs"].items():
                joined[name] += values
        return joined


def _piece(
    index: int, text: str, logprobs: Any, finish_reason: FinishReason | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish_reason is None else finish_reason.value,
    }
