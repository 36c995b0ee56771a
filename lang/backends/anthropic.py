"""Claude, behind Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.backends.conversation import Conversation, conversation_of
from palmette.lang.backends.remote import Answer, RemoteBackend, changed_in, plain
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    ScoreRequest,
    ScoreResult,
)

if TYPE_CHECKING:
    import anthropic

_COUNTS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)
_SAME_NAME = ("temperature", "top_p", "top_k")


class Anthropic(RemoteBackend["anthropic.AsyncAnthropic"]):
    """A backend for programs: a Claude model.

    The API takes messages, and a `gen` begins one of the assistant. `prefill` says that the model
    goes on with one that has begun, which later ones refuse. There are no seeds, no penalties, no
    log-probabilities and so no `select`, and of constraints JSON schemas only. `max_concurrency`,
    `max_retries` and `timeout` are as those of `OpenAI`. Raises InvalidRequest for options that
    make no sense, and RemoteError for what the server answers.
    """

    package = "anthropic"
    finish_reasons: ClassVar[Mapping[str, FinishReason]] = {
        "end_turn": FinishReason.STOP,
        "stop_sequence": FinishReason.STOP,
        "max_tokens": FinishReason.LENGTH,
    }

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
        options = {
            "base_url": base_url,
            "api_key": api_key,
            "max_retries": max_retries,
            "timeout": timeout,
            **client_options,
        }
        super().__init__(
            model,
            max_concurrency=max_concurrency,
            max_context=max_context,
            client_options=options,
        )
        self._prefill = prefill
        if self._new_client().api_key is None:
            raise InvalidRequest(
                "there is no api_key, nor ANTHROPIC_API_KEY in the environment", param="api_key"
            )

    @property
    def goes_on(self) -> bool:
        return self._prefill

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: the API has no log-probabilities."""
        raise UnsupportedFeature("select", f"the API of {self._model} has no log-probabilities")

    def __enter__(self) -> Anthropic:
        return self

    def _new_client(self) -> anthropic.AsyncAnthropic:
        client: anthropic.AsyncAnthropic = self._client_package().AsyncAnthropic(**self._options)
        return client

    def _new_answer(self) -> AnthropicAnswer:
        return AnthropicAnswer()

    async def _begin(self, client: anthropic.AsyncAnthropic, parameters: dict[str, Any]) -> Any:
        return await client.messages.create(**parameters)

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


class AnthropicAnswer(Answer):
    """Events of a message; counts come at its beginning, and what changed again at its end."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, event: Any) -> str | None:
        if event.type == "message_start":
            self._count(event.message.usage)
        elif event.type == "message_delta":
            self.finish, self.stop_reason = event.delta.stop_reason, event.delta.stop_sequence
            self._count(event.usage)
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            text: str = event.delta.text
            return text
        return None

    def _count(self, usage: Any) -> None:
        found = {name: getattr(usage, name, None) for name in _COUNTS}
        self._counts |= {name: count for name, count in found.items() if count is not None}
        computed, written, cached, completed = (self._counts.get(name, 0) for name in _COUNTS)
        self.num_cached, self.num_completed = cached, completed
        self.num_prompt = computed + written + cached


def _schema_of(constraint: Constraint, model: str) -> Any:
    if constraint.kind != "json_schema":
        raise UnsupportedFeature(
            f"a {constraint.kind} constraint", f"the API of {model} does not enforce it"
        )
    return json.loads(plain(constraint).source)
