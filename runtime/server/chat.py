"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any

from palmette.protocol import FinishReason, Request, TokenEvent, TokenLogprob
from palmette.runtime.server.answering import ChoicesAnswer, Job, new_id
from palmette.runtime.server.errors import ApiError, error_answer
from palmette.runtime.server.generation import UsageTotal
from palmette.runtime.server.logprobs import TokenNames, chat_logprobs
from palmette.runtime.server.sampling import (
    constraint,
    constraint_fields,
    num_choices,
    sampling_params,
    wants_stream,
    wants_usage,
)
from palmette.runtime.server.schemas import ChatRequest
from palmette.runtime.server.service import Service


async def chat_job(body: ChatRequest, service: Service) -> Job:
    """What to do for a chat request. Raises InvalidRequest or ApiError."""
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    is_stream = wants_stream(body)
    count = num_choices(body, service)
    wanted = constraint(body)
    prompt = await service.chat_prompt(body.messages)
    sampling = sampling_params(
        body,
        service,
        max_tokens=_max_tokens(body, service.room_after(prompt)),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    answer_id = new_id("chatcmpl")
    requests = [
        Request(
            request_id=f"{answer_id}-{index}",
            token_ids=prompt,
            sampling=sampling,
            constraint=wanted,
            path=(index,),
            salt=body.cache_salt or "",
        )
        for index in range(count)
    ]
    return Job(
        requests=requests,
        answer=ChoicesAnswer(
            service,
            answer_id,
            "chat.completion.chunk" if is_stream else "chat.completion",
            ChatChoices(count, TokenNames(service.backend.tokenizer), sampling.logprobs),
            UsageTotal(count, {}),
            streams_usage=wants_usage(body),
        ),
        is_stream=is_stream,
        tell=partial(error_answer, fields=error_fields(body)),
    )


def error_fields(body: ChatRequest) -> dict[str, str]:
    """How a chat request calls what an engine complains of."""
    fields = {"prompt": "messages", **constraint_fields(body)}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields


def _max_tokens(body: ChatRequest, room: int) -> int:
    """The newer name wins; it is an upper bound, so the room left in the context caps it."""
    for name in ("max_completion_tokens", "max_tokens"):
        wanted = getattr(body, name)
        if wanted is not None:
            if wanted < 0:
                raise ApiError(400, f"{name} must be at least 0, got {wanted}", param=name)
            return min(int(wanted), room)
    return room


class ChatChoices:
    """The choices of a chat answer. `num_top` is None where no log-probabilities are wanted."""

    def __init__(self, count: int, names: TokenNames, num_top: int | None) -> None:
        self._names = names
        self._num_top = num_top
        self._has_role = [False] * count
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._finish_reasons: list[str | None] = [None] * count

    def pieces(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """New text, if there is some; then, on the last event, the reason of the end."""
        pieces = []
        if event.text or (event.logprobs and self._num_top is not None):
            pieces.append(self._piece(index, event.text, None, event.logprobs))
        if event.finish_reason is not None:
            text = None if self._has_role[index] else ""
            pieces.append(self._piece(index, text, event.finish_reason))
        return pieces

    def _piece(
        self,
        index: int,
        text: str | None,
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if not self._has_role[index]:
            self._has_role[index] = True
            delta["role"] = "assistant"
        if text is not None:
            delta["content"] = text
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._shape(logprobs) if logprobs else None,
            "finish_reason": None if finish_reason is None else finish_reason.value,
        }

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep an event's text and log-probabilities."""
        self._texts[index].append(event.text)
        self._logprobs[index].extend(event.logprobs)
        if event.finish_reason is not None:
            self._finish_reasons[index] = event.finish_reason.value

    def whole(self) -> list[dict[str, Any]]:
        """Every choice with its message."""
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts), "refusal": None},
                "logprobs": self._shape(logprobs),
                "finish_reason": reason,
            }
            for index, (texts, logprobs, reason) in enumerate(
                zip(self._texts, self._logprobs, self._finish_reasons, strict=True)
            )
        ]

    def _shape(self, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> Any:
        if self._num_top is None:
            return None
        return {"content": chat_logprobs(logprobs, self._names, self._num_top), "refusal": None}
