"""Models behind an API that speaks as OpenAI's does: chat, or plain completions.

What a server cannot honour is refused by name, before anything is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.conversation import (
    Conversation,
    check_spells_no_control,
    conversation_of,
    plain_prompt,
)
from palmette.lang.backends.envelope import Envelope, closed
from palmette.lang.backends.remote import (
    Answer,
    RemoteBackend,
    RemoteOptions,
    changed_in,
    plain,
    seed_at,
    told,
)
from palmette.lang.backends.spelling import Token
from palmette.protocol import (
    ChatTemplate,
    Constraint,
    FinishReason,
    Request,
    ScoreRequest,
    ScoreResult,
)

if TYPE_CHECKING:
    import openai

Api = Literal["chat", "completions"]
Dialect = Literal["openai", "palmette", "sglang", "vllm"]

# Sampling that every server takes, by its name there, and what the servers that run open models
# take besides.
_COMMON = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_FURTHER = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
_MAX_STOPS = 4  # of OpenAI's own
_MOST_TOP_LOGPROBS = 20
_MOST_OF_A_REFUSAL = 1000  # characters
_BYTE = re.compile(rb"\\x([0-9a-fA-F]{2})")


class OpenAI(RemoteBackend["openai.AsyncOpenAI"]):
    """A backend for programs: `model` at an OpenAI-compatible `base_url`.

    `api` is "chat" or "completions": the first takes messages, and a `gen` there begins an
    assistant's message; the second takes plain text, and has log-probabilities for `select`.
    `dialect` says what the server takes beyond OpenAI's own parameters: top-k and its kin, regexes
    and grammars, and going on with a message that has begun. With `chat_template="chatml"` roles
    are written out for completions, for models that were trained on that template.

    Where a `select` is emulated, the API is asked for the `top_logprobs` likeliest tokens, and
    tells how likely the options are if these are among them; 0 is for models that have none.
    `timeout` is in seconds, of one try. For the other options see `RemoteOptions`.

    Prompts are sent as text, so `token_ids` are bytes here, and nothing is known of what the server
    has cached but what it says. Raises InvalidRequest for options that make no sense, and
    RemoteError for what the server answers.
    """

    package = errors = "openai"
    finish_reasons: ClassVar[Mapping[str, FinishReason]] = {
        "stop": FinishReason.STOP,
        "length": FinishReason.LENGTH,
    }

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api: Api = "chat",
        dialect: Dialect = "openai",
        chat_template: Literal["chatml"] | None = None,
        top_logprobs: int = _MOST_TOP_LOGPROBS,
        timeout: float | None = 120.0,
        **options: Any,
    ) -> None:
        """`options` are those of `RemoteOptions`, and others go to the client."""
        for name, value, known in (("api", api, Api), ("dialect", dialect, Dialect)):
            if value not in get_args(known):
                raise InvalidRequest(
                    f"{name} must be one of {', '.join(get_args(known))}, got {value!r}", param=name
                )
        if not 0 <= top_logprobs <= _MOST_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be from 0 to {_MOST_TOP_LOGPROBS}, got {top_logprobs}",
                param="top_logprobs",
            )
        if chat_template not in (None, "chatml") or (chat_template and api == "chat"):
            raise InvalidRequest(
                'chat_template is "chatml" for api="completions"; in a chat the server has its own',
                param="chat_template",
            )
        own, client_options = RemoteOptions.split(options)
        client_options |= {"base_url": base_url, "api_key": api_key, "timeout": timeout}
        super().__init__(model, options=own, client_options=client_options)
        if own.emulate and api != "chat":
            raise InvalidRequest('emulate is for api="chat"', param="emulate")
        self._api: Api = api
        self._dialect: Dialect = dialect
        self._writes_roles = api == "chat" or chat_template is not None
        self._top_logprobs = top_logprobs
        self._new_client()  # so that a key that is missing is told of here

    @property
    def chat_template(self) -> ChatTemplate:
        if not self._writes_roles:
            raise UnsupportedFeature(
                "a chat role",
                'api="completions" takes plain text: write the prompt by hand, or give it '
                "chat_template",
            )
        return self._template

    @property
    def goes_on(self) -> bool:
        return self._api == "completions" or self._dialect in ("sglang", "vllm")

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities of each continuation, from one request that has them echoed.

        A token's stands at its first byte, and 0 at its others. Raises UnsupportedFeature where the
        server has none, and where one continuation begins another: whether the model would go on
        into it is not known of bytes.
        """
        if self._api != "completions":
            raise UnsupportedFeature(
                "select",
                'log-probabilities of given texts need api="completions"; with emulate=True the '
                "choice is asked for as a structured output",
            )
        options = request.continuations
        for one in options:
            if any(len(one) < len(other) and other[: len(one)] == one for other in options):
                text = self._tokenizer.decode(one)
                raise UnsupportedFeature(
                    "select", f"option {text!r} begins another one, which only an engine can score"
                )
        prompt = self._prompt(request.token_ids)
        texts = [prompt + self._tokenizer.decode(option) for option in options]
        answer = self._new_answer()
        num_bytes = len(request.token_ids) * len(options) + sum(map(len, options))
        async with self._asking(answer, num_bytes, 0) as send:
            scored = await send(
                lambda client: client.completions.create(
                    model=self._model, prompt=texts, max_tokens=0, echo=True, logprobs=1
                )
            )
            with told(self.errors, is_answer=True):
                found = {choice.index: choice.logprobs for choice in scored.choices}
                logprobs = tuple(
                    _logprobs_behind(found.get(index), len(prompt), text)
                    for index, text in enumerate(texts)
                )
                if scored.usage:
                    answer.count(scored.usage)
        return ScoreResult(
            request_id=request.request_id, logprobs=logprobs, usage=answer.usage(self._prices)
        )

    @property
    def chooses(self) -> bool:
        return self._api == "chat" and super().chooses

    def __enter__(self) -> OpenAI:
        return self

    def _new_client(self) -> openai.AsyncOpenAI:
        package = self._client_package()
        try:
            client: openai.AsyncOpenAI = package.AsyncOpenAI(**self._options)
        except package.OpenAIError as error:
            raise InvalidRequest(str(error), param="api_key") from error
        return client

    def _new_answer(self) -> OpenAIAnswer:
        return OpenAIAnswer()

    async def _begin(self, client: Any, parameters: dict[str, Any]) -> Any:
        api: Any = client.chat.completions if self._api == "chat" else client.completions
        return await api.create(**parameters)

    # What is sent

    @property
    def _num_top_for_choice(self) -> int:
        return self._top_logprobs

    def _is_conversation(self) -> bool:
        return self._api == "chat"

    def _enforces(self, constraint: Constraint) -> bool:
        is_chat_schema = constraint.kind == "json_schema" and self._api == "chat"
        is_known = constraint.kind in _STRUCTURED.get(self._dialect, {})
        return is_chat_schema or (is_known and constraint.syntax is None)

    def _schema(self, schema: Any) -> Any:
        return closed(schema, all_required=True) if self._dialect == "openai" else schema

    def _parameters(
        self, request: Request, envelope: Envelope | None = None, num_top: int = 0
    ) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        parameters: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling(request, extra),
        }
        if self._api == "chat":
            conversation = conversation_of(request.token_ids, self._tokenizer)
            begun = "" if envelope is not None else conversation.text
            parameters["messages"] = self._messages(conversation, begun, extra)
        else:
            parameters["prompt"] = self._prompt(request.token_ids)
        if envelope is not None:
            parameters.update(_response_format(envelope.schema()))
        if num_top:
            parameters.update(logprobs=True, top_logprobs=num_top)
        if request.constraint is not None:
            parameters.update(self._constraint(request.constraint, extra))
        if extra:
            parameters["extra_body"] = extra
        return parameters

    def _prompt(self, token_ids: Sequence[int]) -> str:
        if self._writes_roles:
            check_spells_no_control(token_ids, self._tokenizer)
        return plain_prompt(token_ids, self._tokenizer)

    def _messages(self, conversation: Conversation, begun: str, extra: dict[str, Any]) -> list[Any]:
        messages: list[Any] = [dict(message) for message in conversation.messages]
        if begun:
            messages.append({"role": "assistant", "content": begun})
            extra["continue_final_message"] = True
            extra["add_generation_prompt"] = False
        return messages

    def _sampling(self, request: Request, extra: dict[str, Any]) -> dict[str, Any]:
        sampling = request.sampling
        changed = changed_in(sampling)
        parameters = {name: getattr(sampling, name) for name in _COMMON if name in changed}
        is_own = self._dialect == "openai"
        parameters[self._name_of_limit] = sampling.max_tokens
        if sampling.stop:
            most = self._most_stops
            if most is not None and len(sampling.stop) > most:
                raise UnsupportedFeature("stop", f"the API takes {most} stop strings at most")
            parameters["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            parameters["seed"] = seed_at(sampling.seed, request.path)
        if sampling.logprobs is not None:
            # Some servers take 0 for none.
            parameters["logprobs"] = True if self._api == "chat" else 1
        honoured = {*_COMMON, "max_tokens", "stop", "seed", "logprobs", "jump_forward"}
        if not is_own:
            extra.update({name: getattr(sampling, name) for name in _FURTHER if name in changed})
            honoured.update(_FURTHER)
        self._refuse_all_but(honoured, sampling)
        return parameters

    @property
    def _most_stops(self) -> int | None:
        return _MAX_STOPS if self._dialect == "openai" else None

    @property
    def _name_of_limit(self) -> str:
        is_own = self._dialect == "openai" and self._api == "chat"
        return "max_completion_tokens" if is_own else "max_tokens"

    def _constraint(self, constraint: Constraint, extra: dict[str, Any]) -> dict[str, Any]:
        plain(constraint)
        if not self._enforces(constraint):
            raise self._not_enforced(constraint)
        if constraint.kind == "json_schema" and self._api == "chat":
            return _response_format(self._schema(json.loads(constraint.source)))
        name = _STRUCTURED[self._dialect][constraint.kind]
        value = constraint.options if constraint.kind == "choices" else constraint.source
        if constraint.kind == "json_schema":
            value = json.loads(constraint.source)
        if self._dialect == "sglang":
            extra[name] = value
        else:
            extra["structured_outputs"] = {name: value}
        return {}


def _response_format(schema: Any) -> dict[str, Any]:
    wanted = {"name": "output", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


# What each kind of constraint is called by servers that run open models.
_STRUCTURED: Mapping[str, Mapping[str, str]] = {
    "palmette": {
        "regex": "regex",
        "choices": "choice",
        "grammar": "grammar",
        "json_schema": "json",
    },
    "vllm": {"regex": "regex", "choices": "choice", "grammar": "grammar", "json_schema": "json"},
    "sglang": {"regex": "regex", "grammar": "ebnf"},
}


class OpenAIAnswer(Answer):
    """Chunks of either API, whose choices have a delta or a text."""

    def take(self, event: Any) -> str | None:
        if getattr(event, "usage", None):  # not every client has it in every chunk
            self.count(event.usage)
        if not event.choices:
            return None
        choice = event.choices[0]
        self.finish = choice.finish_reason or self.finish
        logprobs = getattr(choice, "logprobs", None)
        if not hasattr(choice, "delta"):
            if logprobs:
                self._take_named(logprobs)
            text: str | None = choice.text
            return text
        for each in (logprobs and logprobs.content) or ():
            top = (each.top_logprobs or ())[:_MOST_TOP_LOGPROBS]
            known = tuple((_spelled(other), other.logprob) for other in top)
            self.tokens.append(Token(_spelled(each), each.logprob, known))
        refusal = getattr(choice.delta, "refusal", None)
        if refusal and len(self.refusal) < _MOST_OF_A_REFUSAL:
            self.refusal += refusal
        content: str | None = choice.delta.content
        return content

    def _take_named(self, logprobs: Any) -> None:
        """Tokens of a completion, which have names: their text, or their bytes spelled out."""
        for name, value in zip(logprobs.tokens or (), logprobs.token_logprobs or (), strict=True):
            spelled = name.encode("utf-8", "replace")
            if name.startswith("bytes:"):
                spelled = _BYTE.sub(lambda found: bytes([int(found[1], 16)]), spelled[6:])
            self.tokens.append(Token(spelled, value))

    def count(self, usage: Any) -> None:
        """Take over the counts."""
        details = getattr(usage, "prompt_tokens_details", None)
        self.num_prompt = usage.prompt_tokens
        self.num_cached = min(self.num_prompt, (details.cached_tokens or 0) if details else 0)
        self.num_completed = usage.completion_tokens or 0


def _spelled(token: Any) -> bytes:
    return token.token.encode("utf-8", "replace") if token.bytes is None else bytes(token.bytes)


def _logprobs_behind(found: Any, start: int, text: str) -> tuple[float, ...]:
    """Of each byte of `text` from character `start` on."""
    if found is None or found.token_logprobs is None or found.text_offset is None:
        raise RemoteError("the API did not say how likely the given text is")
    values = [0.0] * len(text[start:].encode())
    if not values:
        return ()
    spans = list(zip(found.text_offset, found.token_logprobs, strict=True))
    ends = [*(offset for offset, _ in spans[1:]), len(text)]
    for (offset, logprob), end in zip(spans, ends, strict=True):
        if end > start and logprob is not None:
            # A token that begins before the options counts where they begin.
            values[len(text[start : max(start, offset)].encode())] += logprob
    return tuple(values)
