"""vLLM's server, through ``/v1/completions`` with token ids both ways."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.http import HttpServer, StatusError
from palmette.lang.backends.output import Output, check_request, score_result, top_of, unenforced
from palmette.lang.backends.remote import plain, seed_at
from palmette.lang.backends.server import Server, check_scores, local_tokenizer, refusal
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
    TopLogprobs,
)

_PATH = "/v1/completions"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
)
_EVENT_BYTES, _TOKEN_BYTES = 16 << 20, 16 << 10
_ID_MARK = "token_id:"
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


class VllmServer(Server):
    """Every parameter is sent, so that none of the server's own defaults counts."""

    kind = "vllm"

    def __init__(self, http: HttpServer, listed: Mapping[str, Any], model: str | None) -> None:
        models = _models(listed)
        names = [str(each["id"]) for each in models]
        if model is not None and model not in names:
            raise InvalidRequest(
                f"the server has no model {model!r}, it has {', '.join(names)}", param="model"
            )
        chosen = models[0 if model is None else names.index(model)]
        length = chosen.get("max_model_len")
        self._root = chosen.get("root")
        super().__init__(
            http,
            model_name=str(chosen["id"]),
            max_context=length if type(length) is int and length > 0 else 1 << 30,
            default_sampling=SamplingParams(),
        )

    def tokenizer(self) -> Tokenizer:
        """From the server's own folder, if that is on this machine."""
        return local_tokenizer(self.kind, self.model_name, self._root)

    async def generate(
        self, request: Request, tokenizer: Tokenizer
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of the request; stop patterns are found here."""
        body = self._body(request)
        most = self._most_tokens(request)
        num_top = request.sampling.logprobs
        output = Output(request, tokenizer)
        reason: FinishReason | None = None
        stopped_at: str | int | None = None
        counts: Mapping[str, Any] = {}
        try:
            events = self.http.events(
                _PATH, body, most=most + 64, most_bytes=_EVENT_BYTES + most * _TOKEN_BYTES
            )
            async with aclosing(events):
                async for data in events:
                    choice, counts = _chunk(data, counts)
                    if choice is None or not request.sampling.max_tokens:
                        continue
                    token_ids = _ids_of(choice)
                    event = output.add(token_ids, _logprobs(choice, token_ids, num_top))
                    if event is not None:
                        yield event
                    if output.is_to_be_left:
                        break
                    if choice.get("finish_reason") is not None:
                        reason, stopped_at = _end_of(choice)
        except StatusError as error:
            raise refusal(error) from error
        if not request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None and not output.is_stopped:
            raise RemoteError(f"{_PATH} ended without a reason")
        usage = output.usage(num_prompt=len(request.token_ids), num_cached=_num_cached(counts))
        yield output.end(reason or FinishReason.STOP, stopped_at, usage)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """From one request, as the prompts' own log-probabilities."""
        if request.explain:
            raise UnsupportedFeature("explain", "vLLM does not say what it has cached, or why")
        started = time.monotonic()
        body = {
            "model": self.model_name,
            "prompt": [[*request.token_ids, *each] for each in request.continuations],
            "max_tokens": 1,  # the least that it takes
            "temperature": 0,
            "prompt_logprobs": request.num_top,
            **_salted(request),
        }
        try:
            answer = await self.http.post(_PATH, body)
        except StatusError as error:
            raise refusal(error) from error
        choices = answer.get("choices") if isinstance(answer, dict) else None
        try:
            by_index = {each["index"]: each["prompt_logprobs"] for each in choices or []}
            found = [
                _told(by_index[index], option, request.num_top)
                for index, option in enumerate(request.continuations)
            ]
        except _MALFORMED as error:
            raise RemoteError(f"{_PATH} answered with malformed prompt_logprobs") from error
        logprobs = [each for each, _ in found]
        check_scores(logprobs, request, _PATH)
        counts = answer.get("usage")
        counts = counts if isinstance(counts, dict) else {}
        num_prompt = counts.get("prompt_tokens")
        return score_result(
            request,
            logprobs,
            [each for _, each in found],
            started=started,
            num_prompt=num_prompt if type(num_prompt) is int and num_prompt > 0 else 0,
            num_cached=_num_cached(counts),
        )

    def flush_cache(self) -> None:
        """``/reset_prefix_cache``, which it has in its development mode only."""
        try:
            self.http.ask("POST", "/reset_prefix_cache", {})
        except StatusError as error:
            if error.status not in (404, 405):
                raise
            raise UnsupportedFeature(
                "flush_cache", "vLLM has it only where VLLM_SERVER_DEV_MODE=1 is set"
            ) from error

    def info(self) -> dict[str, Any]:
        """``/version`` and ``/v1/models``."""
        return {
            "version": self.http.ask_json("GET", "/version"),
            "models": self.http.ask_json("GET", "/v1/models"),
        }

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model_name,
            "prompt": list(request.token_ids),
            **{name: getattr(sampling, name) for name in _SAME},
            # To have a prompt computed and nothing written, one token is drawn and dropped.
            "max_tokens": max(1, check_request(request, "vLLM", self.max_context)),
            "top_k": max(0, sampling.top_k),
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **_salted(request),
        }
        if sampling.seed is not None:
            body["seed"] = seed_at(sampling.seed, request.path)
        if sampling.logit_bias:
            body["logit_bias"] = {str(each): bias for each, bias in sampling.logit_bias}
        if sampling.logprobs is not None:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if request.constraint is not None:
            body["structured_outputs"] = _constraint(request.constraint)
        return body


def _models(listed: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    models = listed["data"]
    if (
        not isinstance(models, list)
        or not models
        or not all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in models)
    ):
        raise RemoteError("/v1/models lists no models")
    return models


def _salted(request: Request | ScoreRequest) -> dict[str, str]:
    return {"cache_salt": request.salt} if request.salt else {}


def _constraint(constraint: Constraint) -> dict[str, Any]:
    plain(constraint)
    kind, source = constraint.kind, constraint.source
    if kind == "grammar" and constraint.syntax in (None, "lark"):
        return {"grammar": source}  # it takes both notations
    if constraint.syntax is not None:
        raise unenforced(constraint, "vLLM")
    if kind == "choices":
        return {"choice": constraint.options}
    if kind == "json_schema":
        return {"json": json.loads(source)}
    return {kind: source}


def _chunk(
    data: Any, counts: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """The choice of a chunk, if it has one, and the counts, if it brings them."""
    if isinstance(data, dict) and "error" in data:
        raise refusal(StatusError(_PATH, 400, data))
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise RemoteError(f"{_PATH} sent a chunk without choices")
    usage = data.get("usage")
    return (choices[0] if choices else None), usage if isinstance(usage, dict) else counts


def _ids_of(choice: Mapping[str, Any]) -> list[int]:
    token_ids = choice.get("token_ids")
    if token_ids is None and not choice.get("text"):
        return []
    if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
        raise RemoteError(f"{_PATH} sent text without token_ids: this server is too old")
    return token_ids


def _end_of(choice: Mapping[str, Any]) -> tuple[FinishReason, str | int | None]:
    reason = _REASONS.get(str(choice["finish_reason"]))
    if reason is None:
        raise RemoteError(f"{_PATH} ended the request: {choice['finish_reason']!r}")
    stopped_at = choice.get("stop_reason")
    return reason, stopped_at if isinstance(stopped_at, (str, int)) else None


def _logprobs(
    choice: Mapping[str, Any], token_ids: Sequence[int], num_top: int | None
) -> Sequence[TokenLogprob]:
    if num_top is None or not token_ids:
        return ()
    try:
        lists = choice["logprobs"]
        values, tops = lists["token_logprobs"], lists["top_logprobs"]
        return [
            TokenLogprob(token_id, float(values[index]), _top(tops[index], num_top))
            for index, token_id in enumerate(token_ids)
        ]
    except _MALFORMED as error:
        raise RemoteError(f"{_PATH} sent malformed logprobs") from error


def _top(found: Mapping[str, Any] | None, num_top: int) -> TopLogprobs:
    pairs = ((int(name.removeprefix(_ID_MARK)), float(p)) for name, p in (found or {}).items())
    return top_of(pairs, num_top)


def _told(
    entries: Sequence[Any], option: Sequence[int], num_top: int
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """Of the last tokens of a prompt, which are those of an option."""
    last = entries[len(entries) - len(option) :]
    logprobs = tuple(
        float(entry[str(token_id)]["logprob"]) for entry, token_id in zip(last, option, strict=True)
    )
    tops = tuple(
        top_of(((int(name), float(each["logprob"])) for name, each in entry.items()), num_top)
        for entry in last
    )
    return logprobs, tops


def _num_cached(counts: Mapping[str, Any]) -> int:
    details = counts.get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else 0
    return value if type(value) is int and value >= 0 else 0
