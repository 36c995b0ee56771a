"""Claude, behind Anthropic's Messages API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.conversation import Conversation, conversation_of
from palmette.lang.backends.remote import RemoteBackend, changed_in, plain, told
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Usage,
)

if TYPE_CHECKING:
    import anthropic

_SAME_NAME = ("temperature", "top_p", "top_k")
_FINISHED = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
}


class Anthropic(RemoteBackend["anthropic.AsyncAnthropic"]):
    """A backend for programs: a Claude model.

    The API takes messages, and a `gen` begins one of the assistant. `prefill` says that the model
    goes on with one that has begun, which later ones refuse. There are no seeds, no penalties, no
    log-probabilities and so no `select`, and of constraints JSON schemas only. `max_concurrency`,
    `max_retries` and `timeout` are as those of `OpenAI`. Raises InvalidRequest for options that
    make no sense, and RemoteError for what the server answers.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        prefill: bool = False,
        max_concurrency: int = 32,
        max_retries: int = 3,
        timeout: float = 120.0,
        max_context: int = 1 << 30,
        **client_options: Any,
    ) -> None:
        """`client_options` go to `anthropic.AsyncAnthropic`."""
        super().__init__(model, max_concurrency=max_concurrency, max_context=max_context)
        self._prefill = prefill
        self._options = {
            "base_url": base_url,
            "api_key": api_key,
            "max_retries": max_retries,
            "timeout": timeout,
            **client_options,
        }
        if self._new_client().api_key is None:
            raise InvalidRequest(
                "there is no api_key, nor ANTHROPIC_API_KEY in the environment", param="api_key"
            )

    @property
    def goes_on(self) -> bool:
        return self._prefill

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Text as it comes; closing the iterator early ends the request."""
        started = time.monotonic()
        parameters = self._parameters(request)
        lane = self._lane()
        first_seconds = 0.0
        counts: dict[str, int] = {}
        ended: Any = None
        async with lane.slots:
            sent = time.monotonic()
            with told("anthropic"):
                stream: Any = await lane.client.messages.create(**parameters)
            try:
                with told("anthropic"):
                    async for event in stream:
                        if event.type == "message_start":
                            counts = _counted(event.message.usage)
                        elif event.type == "message_delta":
                            ended = event.delta
                            counts.update(_counted(event.usage))
                        elif (
                            event.type == "content_block_delta" and event.delta.type == "text_delta"
                        ):
                            first_seconds = first_seconds or time.monotonic() - started
                            text = event.delta.text
                            yield TokenEvent(
                                request_id=request.request_id,
                                token_ids=tuple(self._tokenizer.encode(text)),
                                text=text,
                            )
            finally:
                await stream.close()
        reason = None if ended is None else ended.stop_reason
        if reason not in _FINISHED:
            raise RemoteError(f"{self._model} ended its answer with {reason!r}")
        total = time.monotonic() - started
        cached = counts.get("cache_read_input_tokens", 0)
        computed = counts.get("input_tokens", 0) + counts.get("cache_creation_input_tokens", 0)
        completion = counts.get("output_tokens", 0)
        yield TokenEvent(
            request_id=request.request_id,
            finish_reason=_FINISHED[reason],
            stop_reason=ended.stop_sequence,
            usage=Usage(
                prompt_tokens=cached + computed,
                cached_tokens=cached,
                prefilled_tokens=computed,
                completion_tokens=completion,
                decoded_tokens=completion,
                queued_seconds=sent - started,
                first_token_seconds=first_seconds or total,
                total_seconds=total,
            ),
        )

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: the API has no log-probabilities."""
        raise UnsupportedFeature("select", f"the API of {self._model} has no log-probabilities")

    def __enter__(self) -> Anthropic:
        return self

    def _new_client(self) -> anthropic.AsyncAnthropic:
        try:
            import anthropic
        except ImportError as error:
            raise UnsupportedFeature(
                "an Anthropic backend", "install it with: pip install 'palmette[anthropic]'"
            ) from error
        return anthropic.AsyncAnthropic(**self._options)

    # What is sent

    def _parameters(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        if sampling.max_tokens < 1:
            raise UnsupportedFeature("max_tokens=0", "the API writes one token at least")
        if request.explain:
            raise UnsupportedFeature("explain", "an API does not say what it has cached")
        honoured = {*_SAME_NAME, "max_tokens", "stop", "jump_forward"}
        self._refuse_all_but(honoured, sampling)
        changed = changed_in(sampling)
        parameters: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "max_tokens": sampling.max_tokens,
            **self._messages(conversation_of(request.token_ids, self._tokenizer)),
        }
        if changed.intersection(_SAME_NAME):  # of which later clients know nothing
            extra = {name: getattr(sampling, name) for name in _SAME_NAME if name in changed}
            parameters["extra_body"] = extra
        if sampling.stop:
            parameters["stop_sequences"] = list(sampling.stop)
        if request.constraint is not None:
            wanted = {"type": "json_schema", "schema": _schema_of(request.constraint, self._model)}
            parameters["output_config"] = {"format": wanted}
        return parameters

    def _messages(self, conversation: Conversation) -> dict[str, Any]:
        self._check_place(conversation)
        messages: list[Any] = [dict(message) for message in conversation.messages]
        found: dict[str, Any] = {}
        if messages and messages[0]["role"] == "system":
            found["system"] = messages.pop(0)["content"]
        if any(message["role"] == "system" for message in messages):
            raise UnsupportedFeature(
                "a system message further down", "the API has one, before all others"
            )
        if conversation.text:
            messages.append({"role": "assistant", "content": conversation.text})
        return {"messages": messages, **found}


def _counted(usage: Any) -> dict[str, int]:
    """The counts that are there."""
    names = (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    )
    found = {name: getattr(usage, name, None) for name in names}
    return {name: count for name, count in found.items() if count is not None}


def _schema_of(constraint: Constraint, model: str) -> Any:
    if constraint.kind != "json_schema":
        raise UnsupportedFeature(
            f"a {constraint.kind} constraint", f"the API of {model} does not enforce it"
        )
    return json.loads(plain(constraint).source)
