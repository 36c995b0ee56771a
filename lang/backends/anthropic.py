"""Claude, behind Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.bounds import breach_of, without_bounds
from palmette.lang.backends.conversation import Conversation, conversation_of
from palmette.lang.backends.envelope import Envelope, closed
from palmette.lang.backends.remote import (
    Answer,
    RemoteBackend,
    RemoteOptions,
    changed_in,
    plain,
)
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
    goes on with one that has begun, which later ones refuse. There are no seeds, no penalties and
    no log-probabilities, and of constraints JSON schemas only; a `select` has to be emulated. With
    `emulate`, bounds of lengths and numbers in schemas, which the API does not take, are looked at
    when the answer is there.
    `timeout` is in seconds, of one try. For the other options see `RemoteOptions`. Raises
    InvalidRequest for options that make no sense, and RemoteError for what the server answers.
    """

    package = errors = "anthropic"
    constrains_rest = False
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
        timeout: float = 120.0,
        **options: Any,
    ) -> None:
        """`options` are those of `RemoteOptions`, and others go to the client."""
        own, client_options = RemoteOptions.split(options)
        client_options |= {"base_url": base_url, "api_key": api_key, "timeout": timeout}
        super().__init__(model, options=own, client_options=client_options)
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
        raise UnsupportedFeature(
            "select",
            f"the API of {self._model} has no log-probabilities; with emulate=True the choice is "
            "asked for as a structured output",
        )

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

    def _schema(self, schema: Any) -> Any:
        return without_bounds(closed(schema)) if self.chooses else closed(schema)

    def _check(self, constraint: Constraint | None, text: str) -> None:
        if constraint is None or constraint.kind != "json_schema" or not self.chooses:
            return
        try:
            breach = breach_of(json.loads(constraint.source), text)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"the API's answer is no JSON: {text[:80]!r}") from error
        if breach is not None:
            raise RemoteError(f"the API's answer is not as the schema has it: {breach}")

    def _parameters(
        self, request: Request, envelope: Envelope | None = None, num_top: int = 0
    ) -> dict[str, Any]:
        sampling = request.sampling
        if sampling.max_tokens < 1:
            raise UnsupportedFeature("max_tokens=0", "the API writes one token at least")
        honoured = {*_SAME_NAME, "max_tokens", "stop", "jump_forward"}
        self._refuse_all_but(honoured, sampling)
        changed = changed_in(sampling)
        conversation = conversation_of(request.token_ids, self._tokenizer)
        begun = "" if envelope is not None else conversation.text
        parameters: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "max_tokens": sampling.max_tokens,
            **_messages(conversation, begun),
        }
        if changed.intersection(_SAME_NAME):  # of which later clients know nothing
            extra = {name: getattr(sampling, name) for name in _SAME_NAME if name in changed}
            parameters["extra_body"] = extra
        if sampling.stop:
            parameters["stop_sequences"] = list(sampling.stop)
        schema = None if envelope is None else envelope.schema()
        if request.constraint is not None:
            if not self._enforces(request.constraint):
                raise self._not_enforced(request.constraint)
            schema = self._schema(json.loads(plain(request.constraint).source))
        if schema is not None:
            parameters["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return parameters


def _messages(conversation: Conversation, begun: str) -> dict[str, Any]:
    """Raises UnsupportedFeature for a system message that is not the first."""
    messages: list[Any] = [dict(message) for message in conversation.messages]
    found: dict[str, Any] = {}
    if messages and messages[0]["role"] == "system":
        found["system"] = messages.pop(0)["content"]
    if any(message["role"] == "system" for message in messages):
        raise UnsupportedFeature(
            "a system message further down", "the API has one, before all others"
        )
    if begun:
        messages.append({"role": "assistant", "content": begun})
    return {"messages": messages, **found}


class AnthropicAnswer(Answer):
    """Events of a message; counts come at its beginning, and what changed again at its end."""

    def __init__(self) -> None:
        super().__init__()
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
