"""From the fields of a request to sampling parameters and a constraint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from palmette.errors import InvalidRequest
from palmette.protocol import Constraint, SamplingParams
from palmette.runtime.server.schemas import (
    ChatRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    TextFormat,
)
from palmette.runtime.server.service import Service

_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(
    fields: GenerationFields, service: Service, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The model's defaults, changed where the request says something. Raises InvalidRequest."""
    _check_stop(fields, service)
    service.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    if len(fields.logit_bias) > service.limits.max_logit_bias:
        raise InvalidRequest(
            f"logit_bias has {len(fields.logit_bias)} entries, at most "
            f"{service.limits.max_logit_bias} are taken",
            param="logit_bias",
        )
    service.check_token_ids([token_id for token_id, _ in fields.logit_bias], "logit_bias")
    said: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(fields, name)) is not None
    }
    for name in ("stop", "stop_token_ids", "logit_bias"):
        if getattr(fields, name):
            said[name] = getattr(fields, name)
    # A minimum of the model's own may not stand in the way of a small maximum.
    said.setdefault("min_tokens", min(service.backend.default_sampling.min_tokens, max_tokens))
    return replace(
        service.backend.default_sampling, **said, max_tokens=max_tokens, logprobs=logprobs
    )


def constraint(fields: GenerationFields) -> Constraint | None:
    """What the text must match. Raises InvalidRequest if several fields say so."""
    names = _constraint_names(fields)
    if len(names) > 1:
        raise InvalidRequest(
            f"{' and '.join(names)} cannot be combined: a text has one constraint", param=names[1]
        )
    if fields.regex is not None:
        return Constraint.regex(fields.regex)
    if fields.choices is not None:
        return Constraint.choices(fields.choices)
    if fields.json_schema is not None:
        return Constraint.json_schema(fields.json_schema)
    wanted = fields.response_format if isinstance(fields, ChatRequest) else None
    if isinstance(wanted, JsonSchemaFormat):
        return Constraint.json_schema(wanted.json_schema.schema_)
    if isinstance(wanted, JsonObjectFormat):
        return Constraint.json_schema({"type": "object"})
    return None


def constraint_fields(fields: GenerationFields) -> dict[str, str]:
    """How the request calls the constraint that an engine complains of."""
    names = _constraint_names(fields)
    return (
        dict.fromkeys(("constraint", "regex", "json_schema", "choices"), names[0]) if names else {}
    )


def _constraint_names(fields: GenerationFields) -> list[str]:
    names = [n for n in ("regex", "choices", "json_schema") if getattr(fields, n) is not None]
    wanted = fields.response_format if isinstance(fields, ChatRequest) else None
    if wanted is not None and not isinstance(wanted, TextFormat):
        names.append("response_format")
    return names


def num_choices(fields: GenerationFields, service: Service, num_prompts: int = 1) -> int:
    """How many choices each prompt gets. Raises InvalidRequest."""
    wanted = 1 if fields.n is None else fields.n
    if wanted < 1:
        raise InvalidRequest(f"n must be at least 1, got {wanted}", param="n")
    if wanted * num_prompts > service.limits.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={wanted} make {wanted * num_prompts} choices, "
            f"at most {service.limits.max_choices} are taken"
            if num_prompts > 1
            else f"n must be at most {service.limits.max_choices}, got {wanted}",
            param="n" if wanted > 1 else "prompt",
        )
    return wanted


def wants_stream(fields: GenerationFields) -> bool:
    """Whether the answer is a stream. Raises InvalidRequest for stream options without one."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    return bool(fields.stream)


def wants_usage(fields: GenerationFields) -> bool:
    """Whether a stream ends with the token counts."""
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _check_stop(fields: GenerationFields, service: Service) -> None:
    limits = service.limits
    for name, values in (("stop", fields.stop), ("stop_token_ids", fields.stop_token_ids)):
        if len(values) > limits.max_stop_strings:
            raise InvalidRequest(
                f"{name} has {len(values)} entries, at most {limits.max_stop_strings} are taken",
                param=name,
            )
    num_characters = sum(map(len, fields.stop))
    if num_characters > limits.max_stop_characters:
        raise InvalidRequest(
            f"stop has {num_characters} characters in all, at most "
            f"{limits.max_stop_characters} are taken",
            param="stop",
        )
