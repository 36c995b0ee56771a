"""SGLang's server, through its own ``/generate``, which takes and gives token ids."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from palmette.errors import RemoteError, UnsupportedFeature
from palmette.lang.backends.http import HttpServer, StatusError
from palmette.lang.backends.output import Output, check_request, score_result, unenforced
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

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
_EVENT_BYTES, _TOKEN_BYTES = 16 << 20, 256


class SglangServer(Server):
    """Every parameter is sent, so that none of the server's own defaults counts."""

    kind = "sglang"

    def __init__(self, http: HttpServer, info: Mapping[str, Any]) -> None:
        name = info["model_path"]
        if not isinstance(name, str):
            raise RemoteError("/get_model_info names no model")
        if info.get("is_generation") is False:
            raise UnsupportedFeature(f"generation with {name}", "it is a model of embeddings")
        self._tokenizer_path = info.get("tokenizer_path")
        super().__init__(
            http,
            model_name=name,
            max_context=_max_context(http),
            default_sampling=SamplingParams(),
        )

    def tokenizer(self) -> Tokenizer:
        """From the server's own folder, if that is on this machine."""
        return local_tokenizer(self.kind, self.model_name, self._tokenizer_path)

    async def generate(
        self, request: Request, tokenizer: Tokenizer
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of the request; stop patterns are found here."""
        body = self._body(request)
        most = self._most_tokens(request)
        output = Output(request, tokenizer)
        meta: dict[str, Any] = {}
        try:
            events = self.http.events(
                "/generate",
                body,
                most=most + 64,
                # Each event may have all that came before.
                most_bytes=_EVENT_BYTES + most * (most + 1) * _TOKEN_BYTES,
            )
            async with aclosing(events):
                async for data in events:
                    meta, token_ids = _checked(data)
                    num_new = _count(meta, "completion_tokens") - output.num_tokens
                    event = output.add(
                        token_ids[max(0, len(token_ids) - num_new) :],
                        _logprobs(meta, num_new, request.sampling.logprobs),
                    )
                    if event is not None:
                        yield event
                    if output.is_to_be_left:
                        break
        except StatusError as error:
            raise refusal(error) from error
        usage = output.usage(
            num_prompt=len(request.token_ids), num_cached=_count(meta, "cached_tokens")
        )
        reason, matched = _end_of(meta)
        if reason is None and not output.is_stopped:
            raise RemoteError("/generate ended without a reason")
        yield output.end(reason or FinishReason.STOP, matched, usage)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """From one request, as the prompts' own log-probabilities."""
        if request.explain:
            raise UnsupportedFeature("explain", "SGLang does not say what it has cached, or why")
        started = time.monotonic()
        body = {
            "input_ids": [[*request.token_ids, *each] for each in request.continuations],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": len(request.token_ids) - 1,
            "top_logprobs_num": request.num_top,
        }
        try:
            answer = await self.http.post("/generate", body)
        except StatusError as error:
            raise refusal(error) from error
        if not isinstance(answer, list) or len(answer) != len(request.continuations):
            raise RemoteError("/generate did not answer for each prompt")
        metas = [_checked(each, needs_ids=False)[0] for each in answer]
        logprobs, tops = [], []
        for meta, option in zip(metas, request.continuations, strict=True):
            entries = _pairs(meta.get("input_token_logprobs"))[-len(option) :]
            if [token_id for token_id, _ in entries] != list(option):
                raise RemoteError("/generate did not tell of the tokens that were asked for")
            logprobs.append(tuple(logprob for _, logprob in entries))
            tops.append(_tops(meta.get("input_top_logprobs"), len(option), request.num_top))
        check_scores(logprobs, request, "/generate")
        return score_result(
            request,
            logprobs,
            tops,
            started=started,
            num_prompt=sum(_count(meta, "prompt_tokens") for meta in metas),
            num_cached=sum(_count(meta, "cached_tokens") for meta in metas),
        )

    def flush_cache(self) -> None:
        """``/flush_cache``, which it refuses while requests run."""
        self.http.ask("POST", "/flush_cache", {})

    def info(self) -> dict[str, Any]:
        """``/get_server_info``."""
        info: dict[str, Any] = self.http.ask_json("GET", "/get_server_info")
        return info

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        if request.salt:
            raise UnsupportedFeature("salt", "not every SGLang server keeps prefixes apart by one")
        parameters = {
            **{name: getattr(sampling, name) for name in _SAME},
            "max_new_tokens": check_request(request, "SGLang", self.max_context),
            "min_new_tokens": sampling.min_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if not sampling.top_k:
            parameters["top_k"] = -1
        if sampling.seed is not None:
            parameters["sampling_seed"] = seed_at(sampling.seed, request.path)
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(each): bias for each, bias in sampling.logit_bias}
        if request.constraint is not None:
            parameters |= _constraint(request.constraint)
        body = {
            "input_ids": list(request.token_ids),
            "sampling_params": parameters,
            "stream": True,
        }
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
        return body


def _max_context(http: HttpServer) -> int:
    """As far as the server tells."""
    info = http.ask_json("GET", "/get_server_info")
    for name in ("context_length", "max_req_input_len"):
        value = info.get(name) if isinstance(info, dict) else None
        if type(value) is int and value > 0:
            return value
    return 1 << 30


def _constraint(constraint: Constraint) -> dict[str, str]:
    plain(constraint)
    if constraint.syntax is not None:
        raise unenforced(constraint, "SGLang")
    if constraint.kind == "choices":
        return {"regex": "(" + "|".join(map(re.escape, constraint.options)) + ")"}
    names = {"regex": "regex", "json_schema": "json_schema", "grammar": "ebnf"}
    return {names.get(constraint.kind, constraint.kind): constraint.source}


def _checked(data: Any, *, needs_ids: bool = True) -> tuple[dict[str, Any], list[int]]:
    """The meta data and the ids of an output."""
    if isinstance(data, dict) and "error" in data:
        raise refusal(StatusError("/generate", 400, data))
    meta = data.get("meta_info") if isinstance(data, dict) else None
    token_ids = data.get("output_ids") if isinstance(data, dict) else None
    if not isinstance(meta, dict):
        raise RemoteError("/generate answered without meta_info")
    if needs_ids and not (
        isinstance(token_ids, list) and all(type(each) is int for each in token_ids)
    ):
        raise RemoteError("/generate answered without output_ids: this server is too old")
    return meta, token_ids or []


def _count(meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name, 0)
    if type(value) is not int or value < 0:
        raise RemoteError(f"/generate answered with {name}={value!r}")
    return value


def _end_of(meta: Mapping[str, Any]) -> tuple[FinishReason | None, str | int | None]:
    found = meta.get("finish_reason")
    if found is None:
        return None, None
    if not isinstance(found, dict) or found.get("type") not in _REASONS:
        why = found.get("message") if isinstance(found, dict) else found
        raise RemoteError(f"SGLang ended the request: {why!r}")
    matched = found.get("matched")
    return _REASONS[found["type"]], matched if isinstance(matched, (str, int)) else None


def _pairs(entries: Any) -> list[tuple[int, float]]:
    """Token ids and log-probabilities; one that is not known is NaN."""
    if not isinstance(entries, list):
        raise RemoteError("/generate answered without log-probabilities")
    try:
        return [
            (int(entry[1]), float("nan") if entry[0] is None else float(entry[0]))
            for entry in entries
        ]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise RemoteError("/generate answered with malformed log-probabilities") from error


def _tops(entries: Any, count: int, num_top: int) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens in the last `count` places."""
    if not num_top:
        return ((),) * count
    if not isinstance(entries, list) or len(entries) < count:
        raise RemoteError("/generate answered without the likeliest tokens")
    return tuple(tuple(_pairs(entry or [])[:num_top]) for entry in entries[len(entries) - count :])


def _logprobs(meta: Mapping[str, Any], num_new: int, num_top: int | None) -> Sequence[TokenLogprob]:
    """Those of the last `num_new` tokens."""
    if num_top is None or num_new <= 0:
        return ()
    pairs = _pairs(meta.get("output_token_logprobs"))[-num_new:]
    tops = _tops(meta.get("output_top_logprobs"), len(pairs), num_top)
    return [TokenLogprob(*pair, top) for pair, top in zip(pairs, tops, strict=True)]
