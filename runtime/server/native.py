"""The endpoints in the shape known from SGLang: ``/generate`` and what goes with it; ``/score``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from palmette.protocol import Request, ScoreRequest, TokenEvent, Usage
from palmette.runtime.metrics import EngineStats
from palmette.runtime.server.answering import Job, new_id, palmette_version
from palmette.runtime.server.errors import ApiError, error_answer
from palmette.runtime.server.logprobs import TokenNames, finite
from palmette.runtime.server.sampling import (
    constraint,
    constraint_fields,
    num_choices,
    sampling_params,
)
from palmette.runtime.server.schemas import (
    Batch,
    GenerateRequest,
    NativeSampling,
    PromptFields,
    ScoreOptionsRequest,
)
from palmette.runtime.server.scoring import ScoredPrompt, score, score_prompt
from palmette.runtime.server.service import Service
from palmette.runtime.server.streaming import all_of

# What SGLang takes where max_new_tokens is absent.
DEFAULT_MAX_TOKENS = 128

Entry = tuple[float | None, int, str | None]
"""A token's log-probability, its id, and its text if that is asked for."""


async def generate_job(body: GenerateRequest, service: Service) -> Job:
    """What to do for a body of ``/generate``. Raises InvalidRequest or ApiError."""
    batch = _batch(body)
    if body.incremental_streaming_output and not body.stream:
        raise ApiError(
            400,
            "incremental_streaming_output needs stream to be true",
            param="incremental_streaming_output",
        )
    prompts = [await service.raw_prompt(prompt) for prompt in batch.prompts]
    samplings = _samplings(body, len(prompts))
    counts = [num_choices(each, service, len(prompts)) for each in samplings]
    requests = [
        request
        for prompt, fields, count in zip(prompts, samplings, counts, strict=True)
        for request in _requests(body, prompt, fields, count, service)
    ]
    scored = await _scored(body, prompts, counts, service)
    shape = _LogprobShape(body, TokenNames(service.backend.tokenizer))
    name = body.rid if body.rid is not None else new_id("gen")
    is_list = batch.is_list or counts != [1]
    whose = [found for found, count in zip(scored, counts, strict=True) for _ in range(count)]
    outputs = [
        _Output(f"{name}-{index}" if is_list else name, request.token_ids, found, shape)
        for index, (request, found) in enumerate(zip(requests, whose, strict=True))
    ]
    is_incremental = bool(body.incremental_streaming_output)
    return Job(
        requests=requests,
        answer=_NativeAnswer(outputs, is_list=is_list, is_incremental=is_incremental),
        is_stream=bool(body.stream),
        tell=partial(error_answer, fields=error_fields(body)),
    )


def error_fields(body: GenerateRequest) -> dict[str, str]:
    """How a body of ``/generate`` calls what an engine complains of."""
    constraints = [name for each in _given_samplings(body) for name in constraint_fields(each)]
    within = [*NativeSampling.model_fields, *constraints]
    return {
        **dict.fromkeys(within, "sampling_params"),
        "logprobs": "top_logprobs_num",
        **prompt_fields(body),
    }


def prompt_fields(body: PromptFields) -> dict[str, str]:
    """The same for what every native endpoint takes."""
    return {"prompt": "text" if body.text is not None else "input_ids"}


async def score_answer(body: ScoreOptionsRequest, service: Service) -> dict[str, Any]:
    """The log-probabilities of every token of each option. Raises InvalidRequest or ApiError."""
    batch = _batch(body)
    if batch.is_list:
        raise ApiError(400, "one prompt is scored at a time", param=prompt_fields(body)["prompt"])
    prompt = await service.raw_prompt(batch.prompts[0])
    if len(body.options) > service.limits.max_choices:
        raise ApiError(
            400,
            f"options has {len(body.options)} entries, at most {service.limits.max_choices} are "
            "taken",
            param="options",
        )
    num_top = body.top_logprobs_num or 0
    service.check_num_logprobs(sum(map(len, body.options)) * (1 + num_top), "options")
    for option in body.options:
        service.check_token_ids(option, "options")
    request = ScoreRequest(
        request_id=new_id("score"),
        token_ids=prompt,
        continuations=body.options,
        path=body.path,
        salt=body.cache_salt or "",
        num_top=num_top,
    )
    with service.in_progress():
        result = await score(service, request)
    shape = _LogprobShape(body, TokenNames(service.backend.tokenizer))
    told: dict[str, Any] = {"logprobs": [list(map(finite, each)) for each in result.logprobs]}
    if num_top:
        told["top_logprobs"] = [[shape.top(top) for top in tops] for tops in result.top]
    return {**told, "meta_info": {"id": request.request_id, **_figures(result.usage)}}


def model_info(service: Service) -> dict[str, Any]:
    """What is served, for ``/get_model_info``."""
    backend = service.backend
    return {
        "model_path": service.model_name,
        "tokenizer_path": service.model_name,
        "is_generation": True,
        "max_context": backend.max_context,
        "vocab_size": backend.tokenizer.vocab_size,
        "prefix_ids": list(backend.tokenizer.prefix_ids),
        "stop_token_ids": sorted(backend.tokenizer.stop_token_ids),
        "default_sampling": asdict(backend.default_sampling),
    }


def server_info(service: Service, stats: EngineStats | None) -> dict[str, Any]:
    """The server's limits and, where the backend counts, its figures: ``/get_server_info``."""
    return {
        "version": palmette_version(),
        "model_path": service.model_name,
        "started": service.started,
        "num_requests": service.num_requests,
        "limits": asdict(service.limits),
        **({} if stats is None else {"stats": asdict(stats)}),
    }


def _batch(body: PromptFields) -> Batch[str] | Batch[tuple[int, ...]]:
    batch = body.input_ids if body.text is None else body.text
    if batch is None or (body.text is not None and body.input_ids is not None):
        raise ApiError(400, "give either text or input_ids", param="text")
    return batch


def _given_samplings(body: GenerateRequest) -> Sequence[NativeSampling]:
    given = body.sampling_params
    return given if isinstance(given, list) else [given or NativeSampling()]


def _samplings(body: GenerateRequest, num_prompts: int) -> Sequence[NativeSampling]:
    """Those of each prompt."""
    given = _given_samplings(body)
    if not isinstance(body.sampling_params, list):
        return [*given] * num_prompts
    if len(given) != num_prompts:
        raise ApiError(
            400,
            f"sampling_params is a list of {len(given)}, there are {num_prompts} prompts",
            param="sampling_params",
        )
    return given


def _requests(
    body: GenerateRequest,
    prompt: tuple[int, ...],
    fields: NativeSampling,
    count: int,
    service: Service,
) -> list[Request]:
    """What to generate behind one prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = Request(
        request_id=new_id("gen"),
        token_ids=prompt,
        sampling=sampling_params(
            fields,
            service,
            max_tokens=min(max_tokens, service.room_after(prompt)),
            logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
        ),
        constraint=constraint(fields),
        path=body.path,
        salt=body.cache_salt or "",
    )
    if count == 1:
        return [request]
    return [
        replace(request, request_id=f"{request.request_id}-{index}", path=(*body.path, index))
        for index in range(count)
    ]


async def _scored(
    body: GenerateRequest, prompts: list[tuple[int, ...]], counts: list[int], service: Service
) -> list[ScoredPrompt | None]:
    """Each prompt's own log-probabilities from `logprob_start_len` on, if they are asked for."""
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    num_top = body.top_logprobs_num or 0
    if not body.return_logprob:
        for name, is_asked in (("logprob_start_len", start >= 0), ("top_logprobs_num", num_top)):
            if is_asked:
                raise ApiError(400, f"{name} needs return_logprob to be true", param=name)
        return [None for _ in prompts]
    # The last token always is among them, if only to say where the output begins.
    starts = [len(prompt) - 1 if start < 0 else min(start, len(prompt) - 1) for prompt in prompts]
    num_shown = [
        count * (len(prompt) - first)
        for prompt, count, first in zip(prompts, counts, starts, strict=True)
    ]
    service.check_num_logprobs(sum(num_shown) * (1 + num_top), "logprob_start_len")
    salt = body.cache_salt or ""
    with service.in_progress():
        found = await all_of(
            score_prompt(service, prompt, first, num_top=num_top, salt=salt)
            for prompt, first in zip(prompts, starts, strict=True)
        )
    return list(found)


class _LogprobShape:
    """Tokens and their log-probabilities as these endpoints show them."""

    def __init__(self, body: PromptFields, names: TokenNames) -> None:
        self.num_top = body.top_logprobs_num or 0
        self._names = names if body.return_text_in_logprobs else None

    def entry(self, token_id: int, logprob: float | None) -> Entry:
        """A log-probability that is not known is null, and so is a text nobody asked for."""
        text = None if self._names is None else self._names.name(token_id)
        if logprob is None or math.isnan(logprob):
            return None, token_id, text
        return finite(logprob), token_id, text

    def top(self, top: Sequence[tuple[int, float]]) -> list[Entry]:
        """The likeliest tokens, best first."""
        return [self.entry(token_id, logprob) for token_id, logprob in top[: self.num_top]]


class _Output:
    """What became of one request so far, or since it was last shown."""

    def __init__(
        self,
        name: str,
        prompt: tuple[int, ...],
        scored: ScoredPrompt | None,
        shape: _LogprobShape,
    ) -> None:
        self._name = name
        self._num_prompt_tokens = len(prompt)
        self._num_cached = None if scored is None else scored.num_cached
        self._shape = shape
        self._text = ""
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._end: TokenEvent | None = None
        self._logprobs = {} if scored is None else self._first_logprobs(prompt, scored)

    def add(self, event: TokenEvent) -> None:
        """A stop token that ends the text is one of its tokens here, if not of its text."""
        token_ids = [*event.token_ids]
        logprobs = [*event.logprobs]
        if event.finish_reason is not None:
            self._end = event
            if isinstance(event.stop_reason, int):
                token_ids.append(event.stop_reason)
            if event.stop_logprob is not None:
                logprobs.append(event.stop_logprob)
        self._text += event.text
        self._token_ids += token_ids
        self._num_tokens += len(token_ids)
        for name, listed in self._logprobs.items():
            if name == "output_token_logprobs":
                listed += [self._shape.entry(each.token_id, each.logprob) for each in logprobs]
            elif name == "output_top_logprobs":
                listed += [self._shape.top(each.top) or None for each in logprobs]

    def as_json(self) -> dict[str, Any]:
        """All that is known by now."""
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": None if self._end is None else self._finish_reason(self._end),
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
        }
        if self._end is not None and self._end.usage is not None:
            meta |= _figures(self._usage(self._end.usage))
        meta |= {name: list(listed) for name, listed in self._logprobs.items()}
        return {"text": self._text, "output_ids": list(self._token_ids), "meta_info": meta}

    def forget(self) -> None:
        """What was shown is not shown again."""
        self._text = ""
        self._token_ids.clear()
        for listed in self._logprobs.values():
            listed.clear()

    def _first_logprobs(
        self, prompt: tuple[int, ...], scored: ScoredPrompt
    ) -> dict[str, list[Any]]:
        shape = self._shape
        start = len(prompt) - len(scored.logprobs)
        lists: dict[str, list[Any]] = {
            "input_token_logprobs": list(map(shape.entry, prompt[start:], scored.logprobs)),
            "output_token_logprobs": [],
        }
        if shape.num_top:
            lists["input_top_logprobs"] = [shape.top(top) or None for top in scored.top]
            lists["output_top_logprobs"] = []
        return lists

    def _usage(self, usage: Usage) -> Usage:
        """What scoring the prompt put into the cache was not cached when the request came."""
        found = self._num_cached
        if found is None or found >= usage.cached_tokens:
            return usage
        return replace(usage, cached_tokens=found, prefilled_tokens=usage.prompt_tokens - found)

    def _finish_reason(self, end: TokenEvent) -> dict[str, Any]:
        assert end.finish_reason is not None
        reason = end.finish_reason.value
        if reason == "length":
            return {"type": reason, "length": self._num_tokens}
        return {"type": reason, "matched": end.stop_reason}


class _NativeAnswer:
    """The outputs of a body's requests: one, or a list of them."""

    def __init__(self, outputs: list[_Output], *, is_list: bool, is_incremental: bool) -> None:
        self._outputs = outputs
        self._is_list = is_list
        self._is_incremental = is_incremental

    def chunks(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The output as far as it is known, or what is new of it."""
        output = self._outputs[index]
        output.add(event)
        shown = output.as_json()
        if self._is_incremental:
            output.forget()
        return [{"index": index, **shown} if self._is_list else shown]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Nothing: the last chunk of each output has said everything."""
        return []

    def add(self, index: int, event: TokenEvent) -> None:
        """Keep what an event brings for its output."""
        self._outputs[index].add(event)

    def whole(self) -> Any:
        """Every output."""
        shown = [output.as_json() for output in self._outputs]
        return shown if self._is_list else shown[0]


def _figures(usage: Usage) -> Mapping[str, Any]:
    return {**asdict(usage), "e2e_latency": usage.total_seconds}
