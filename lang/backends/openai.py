"""Models behind an API that speaks as OpenAI's does: chat, or plain completions.

What a server cannot honour is refused by name, before anything is sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.conversation import Conversation, conversation_of, plain_prompt
from palmette.lang.backends.remote import Answer, RemoteBackend, changed_in, plain, seed_at, told
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


class OpenAI(RemoteBackend["openai.AsyncOpenAI"]):
    """A backend for programs: `model` at an OpenAI-compatible `base_url`.

    `api` is "chat" or "completions": the first takes messages, and a `gen` there begins an
    assistant's message; the second takes plain text, and has log-probabilities for `select`.
    `dialect` says what the server takes beyond OpenAI's own parameters: top-k and its kin, regexes
    and grammars, and going on with a message that has begun. `max_concurrency` requests are under
    way at once, the others wait. A request that fails for a passing reason (no connection, 408,
    409, 429, 5xx) is sent again up to `max_retries` times, after the time that the server asks for
    or one that doubles. `timeout` is in seconds, of one try.

    Prompts are sent as text, so `token_ids` are bytes here, and nothing is known of what the server
    has cached but what it says. Raises InvalidRequest for options that make no sense, and
    RemoteError for what the server answers.
    """

    package = "openai"
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
        max_concurrency: int = 32,
        max_retries: int = 3,
        timeout: float = 120.0,
        max_context: int = 1 << 30,
        **client_options: Any,
    ) -> None:
        """`client_options` go to `openai.AsyncOpenAI`."""
        for name, value, known in (("api", api, Api), ("dialect", dialect, Dialect)):
            if value not in get_args(known):
                raise InvalidRequest(
                    f"{name} must be one of {', '.join(get_args(known))}, got {value!r}", param=name
                )
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
        self._api: Api = api
        self._dialect: Dialect = dialect
        self._new_client()  # so that a key that is missing is told of here

    @property
    def chat_template(self) -> ChatTemplate:
        if self._api != "chat":
            raise UnsupportedFeature(
                "a chat role", 'api="completions" takes plain text: write the prompt by hand'
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
                "select", 'log-probabilities of given texts need api="completions"'
            )
        options = request.continuations
        for one in options:
            if any(len(one) < len(other) and other[: len(one)] == one for other in options):
                text = self._tokenizer.decode(one)
                raise UnsupportedFeature(
                    "select", f"option {text!r} begins another one, which only an engine can score"
                )
        started = time.monotonic()
        prompt = plain_prompt(request.token_ids, self._tokenizer)
        texts = [prompt + self._tokenizer.decode(option) for option in options]
        lane = self._lane()
        async with lane.slots:
            sent = time.monotonic()
            with told(self.package):
                answer: Any = await lane.client.completions.create(
                    model=self._model, prompt=texts, max_tokens=0, echo=True, logprobs=1
                )
        found = {choice.index: choice.logprobs for choice in answer.choices}
        logprobs = tuple(
            _logprobs_behind(found.get(index), len(prompt), text)
            for index, text in enumerate(texts)
        )
        total = time.monotonic() - started
        counted = self._new_answer()
        if answer.usage:
            counted.count(answer.usage)
        usage = counted.usage(queued=sent - started, first=total, total=total)
        return ScoreResult(request_id=request.request_id, logprobs=logprobs, usage=usage)

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

    async def _begin(self, client: openai.AsyncOpenAI, parameters: dict[str, Any]) -> Any:
        api: Any = client.chat.completions if self._api == "chat" else client.completions
        return await api.create(**parameters)

    # What is sent

    def _parameters(self, request: Request) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        parameters: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling(request, extra),
        }
        if self._api == "chat":
            conversation = conversation_of(request.token_ids, self._tokenizer)
            parameters["messages"] = self._messages(conversation, extra)
        else:
            parameters["prompt"] = plain_prompt(request.token_ids, self._tokenizer)
        if request.constraint is not None:
            parameters.update(self._constraint(request.constraint, extra))
        if request.explain:
            raise UnsupportedFeature("explain", "an API does not say what it has cached")
        if extra:
            parameters["extra_body"] = extra
        return parameters

    def _messages(self, conversation: Conversation, extra: dict[str, Any]) -> list[Any]:
        self._check_place(conversation)
        messages: list[Any] = [dict(message) for message in conversation.messages]
        if conversation.text:
            messages.append({"role": "assistant", "content": conversation.text})
            extra["continue_final_message"] = True
            extra["add_generation_prompt"] = False
        return messages

    def _sampling(self, request: Request, extra: dict[str, Any]) -> dict[str, Any]:
        sampling = request.sampling
        changed = changed_in(sampling)
        parameters = {name: getattr(sampling, name) for name in _COMMON if name in changed}
        is_own = self._dialect == "openai"
        limit = "max_completion_tokens" if is_own and self._api == "chat" else "max_tokens"
        parameters[limit] = sampling.max_tokens
        if sampling.stop:
            if is_own and len(sampling.stop) > _MAX_STOPS:
                raise UnsupportedFeature("stop", f"the API takes {_MAX_STOPS} stop strings at most")
            parameters["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            parameters["seed"] = seed_at(sampling.seed, request.path)
        honoured = {*_COMMON, "max_tokens", "stop", "seed", "jump_forward"}
        if not is_own:
            extra.update({name: getattr(sampling, name) for name in _FURTHER if name in changed})
            honoured.update(_FURTHER)
        self._refuse_all_but(honoured, sampling)
        return parameters

    def _constraint(self, constraint: Constraint, extra: dict[str, Any]) -> dict[str, Any]:
        plain(constraint)
        if constraint.kind == "json_schema" and self._api == "chat":
            schema = json.loads(constraint.source)
            wanted = {"name": "output", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": wanted}}
        known = _STRUCTURED.get(self._dialect, {})
        if constraint.kind not in known or constraint.syntax is not None:
            raise UnsupportedFeature(
                f"a {constraint.kind} constraint", f"the API of {self._model} does not enforce it"
            )
        value = constraint.options if constraint.kind == "choices" else constraint.source
        if constraint.kind == "json_schema":
            value = json.loads(constraint.source)
        if self._dialect == "sglang":
            extra[known[constraint.kind]] = value
        else:
            extra["structured_outputs"] = {known[constraint.kind]: value}
        return {}


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
        if event.usage:
            self.count(event.usage)
        if not event.choices:
            return None
        choice = event.choices[0]
        self.finish = choice.finish_reason or self.finish
        text: str | None = choice.delta.content if hasattr(choice, "delta") else choice.text
        return text

    def count(self, usage: Any) -> None:
        """Take over the counts."""
        details = getattr(usage, "prompt_tokens_details", None)
        self.num_prompt = usage.prompt_tokens
        self.num_cached = min(self.num_prompt, (details.cached_tokens or 0) if details else 0)
        self.num_completed = usage.completion_tokens or 0


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
