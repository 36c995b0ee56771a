"""From the fields of a request to sampling parameters and a constraint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from palmette.errors import InvalidRequest
from palmette.protocol import Constraint, GrammarSyntax, SamplingParams, WhitespaceName
from palmette.runtime.server.limits import ServerLimits
from palmette.runtime.server.schemas import (
    ChatRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuralTagFormat,
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
    "jump_forward",
)


def sampling_params(
    fields: SamplingFields, service: Service, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The model's defaults, changed where the request says something. Raises InvalidRequest."""
    check_counts(fields, service.limits)
    service.check_token_ids(fields.stop_token_ids, "stop_token_ids")
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


# What the fields of a request constrain by, and those of its structured_outputs.
_NAMES = ("regex", "choices", "json_schema", "grammar", "ebnf", "structural_tag")
_FIELDS = {name: name for name in _NAMES} | {
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_json": "json_schema",
    "guided_grammar": "grammar",
}
_STRUCTURED = {
    "regex": "regex",
    "choice": "choices",
    "json_": "json_schema",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
# Other servers take a grammar in either notation under these names.
_MAY_BE_LARK = ("guided_grammar", "structured_outputs")

# An option of constraints, and the kinds that have it.
_OPTIONS = {
    "regex_syntax": ("regex",),
    "grammar_syntax": ("grammar",),
    "whitespace": ("json_schema", "structural_tag"),
    "property_order": ("json_schema", "structural_tag"),
    "undeclared_properties": ("json_schema", "structural_tag"),
    "grammar_backend": _NAMES,
    "jump_forward": _NAMES,
}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A constraint as a request has it: the field, what it constrains by, and what that says."""

    field: str
    kind: str  # a kind of constraint, or ebnf, which is a grammar in GBNF
    source: Any


def constraint(fields: SamplingFields) -> Constraint | None:
    """What the text must match. Raises InvalidRequest if several fields say so, or if there is an
    option of another kind of constraint.
    """
    wanted = _wanted(fields)
    if len(wanted) > 1:
        names = [each.field for each in wanted]
        raise InvalidRequest(
            f"{' and '.join(names)} cannot be combined: a text has one constraint", param=names[1]
        )
    _check_options(fields, wanted[0] if wanted else None)
    return _made(fields, wanted[0]) if wanted else None


def constraint_fields(fields: SamplingFields) -> dict[str, str]:
    """How the request calls the constraint that an engine complains of."""
    wanted = _wanted(fields)
    if not wanted:
        return {}
    kinds = ("constraint", "regex", "json_schema", "choices", "grammar", "structural_tag")
    named = dict.fromkeys(kinds, wanted[0].field)
    return named | {
        "order": "property_order",
        "undeclared": "undeclared_properties",
        "backend": "grammar_backend",
    }


def _made(fields: SamplingFields, wanted: _Wanted) -> Constraint:
    source, backend = wanted.source, fields.grammar_backend or "palmette"
    if wanted.kind == "regex":
        return Constraint.regex(source, syntax=fields.regex_syntax or "ecma", backend=backend)
    if wanted.kind == "choices":
        return Constraint.choices(source, backend=backend)
    if wanted.kind in ("grammar", "ebnf"):
        syntax: GrammarSyntax = fields.grammar_syntax or "gbnf"
        is_unsaid = fields.grammar_syntax is None and wanted.field in _MAY_BE_LARK
        if is_unsaid and "::=" not in source:
            syntax = "lark"
        return Constraint.grammar(source, syntax=syntax, backend=backend)
    whitespace: WhitespaceName = fields.whitespace or "compact"
    structured = fields.structured_outputs
    if structured is not None and structured.disable_any_whitespace is not None:
        whitespace = "compact" if structured.disable_any_whitespace else "flexible"
    make = Constraint.json_schema if wanted.kind == "json_schema" else Constraint.structural_tag
    return make(
        source,
        whitespace=whitespace,
        order=fields.property_order or "declared",
        undeclared=fields.undeclared_properties or "allowed",
        backend=backend,
    )


def _check_options(fields: SamplingFields, wanted: _Wanted | None) -> None:
    """Raise InvalidRequest for an option without the constraint that has it."""
    for name, kinds in _OPTIONS.items():
        if getattr(fields, name) is not None and (wanted is None or wanted.kind not in kinds):
            raise InvalidRequest(
                f"{name} needs a constraint that has it: {', '.join(kinds)}", param=name
            )
    structured = fields.structured_outputs
    if structured is None or structured.disable_any_whitespace is None:
        return
    if fields.whitespace is not None:
        raise InvalidRequest(
            "whitespace and disable_any_whitespace cannot be combined: they are one option",
            param="whitespace",
        )
    kinds = _OPTIONS["whitespace"]
    if wanted is None or wanted.field != "structured_outputs" or wanted.kind not in kinds:
        raise InvalidRequest(
            "disable_any_whitespace needs a constraint beside it that has it: json, json_object, "
            "structural_tag",
            param="structured_outputs",
        )


def _wanted(fields: SamplingFields) -> list[_Wanted]:
    """Every constraint in the request."""
    wanted = [
        _Wanted(name, kind, source)
        for name, kind in _FIELDS.items()
        if (source := getattr(fields, name)) is not None
    ]
    structured = fields.structured_outputs
    if structured is not None:
        wanted += [
            _Wanted("structured_outputs", kind, source)
            for name, kind in _STRUCTURED.items()
            if (source := getattr(structured, name)) is not None
        ]
        if structured.json_object:
            wanted.append(_Wanted("structured_outputs", "json_schema", _ANY_OBJECT))
    answer = fields.response_format if isinstance(fields, ChatRequest) else None
    if isinstance(answer, JsonSchemaFormat):
        wanted.append(_Wanted("response_format", "json_schema", answer.json_schema.schema_))
    elif isinstance(answer, JsonObjectFormat):
        wanted.append(_Wanted("response_format", "json_schema", _ANY_OBJECT))
    elif isinstance(answer, StructuralTagFormat):
        wanted.append(_Wanted("response_format", "structural_tag", answer.model_dump()))
    return wanted


_ANY_OBJECT = {"type": "object"}


def num_choices(fields: SamplingFields, service: Service, num_prompts: int = 1) -> int:
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


def check_counts(fields: SamplingFields | SamplingParams, limits: ServerLimits) -> None:
    """Raises InvalidRequest for more stop strings, stop tokens or biases than are taken."""
    for name, values, most in (
        ("stop", fields.stop, limits.max_stop_strings),
        ("stop_token_ids", fields.stop_token_ids, limits.max_stop_strings),
        ("logit_bias", fields.logit_bias, limits.max_logit_bias),
    ):
        if len(values) > most:
            raise InvalidRequest(
                f"{name} has {len(values)} entries, at most {most} are taken", param=name
            )
    num_characters = sum(map(len, fields.stop))
    if num_characters > limits.max_stop_characters:
        raise InvalidRequest(
            f"stop has {num_characters} characters in all, at most "
            f"{limits.max_stop_characters} are taken",
            param="stop",
        )
