"""A trace as spans of OpenTelemetry: a run, its branches below it, their primitives below those.

A branch lies below the one it was forked from. Attributes have the names of the semantic
conventions for generative AI where these have one, and begin with ``palmette.`` otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palmette.errors import UnsupportedFeature
from palmette.lang.tracing.model import BranchTrace, Counts, Event, RunTrace
from palmette.lang.tracing.recording import Status

if TYPE_CHECKING:
    from palmette.lang.tracing.trace import Trace

Attribute = str | bool | int | float | tuple[str, ...]

_REQUEST = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
}
_BAD = (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED)
_INTERNAL, _CLIENT = 1, 3  # kinds of spans in the wire format


@dataclass(slots=True, eq=False)
class Span:
    """One span; times in nanoseconds since 1970, `key` what its id is made of."""

    run_id: str
    key: str
    name: str
    parent: Span | None
    start: int
    end: int
    asks: bool = False  # the model
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str | None = None

    @property
    def trace_id(self) -> str:
        """32 hex digits, for all spans of the run."""
        return hashlib.blake2b(self.run_id.encode("utf-8", "replace"), digest_size=16).hexdigest()

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        name = f"{self.run_id}/{self.key}".encode("utf-8", "replace")
        return hashlib.blake2b(name, digest_size=8).hexdigest()


def spans_of(trace: Trace, *, contents: bool) -> Iterator[Span]:
    """Parents before their children. What was never begun has none; what goes on ends now.

    `contents`: what was appended and generated is told, too.
    """
    for run in trace.runs:
        yield from _spans_of_run(trace, run, contents)


def _spans_of_run(trace: Trace, run: RunTrace, contents: bool) -> Iterator[Span]:
    backend = trace.backends[run.backend]

    def at(seconds: float | None) -> int:
        moment = trace.duration if seconds is None else seconds
        return trace.began * 1000 + round(moment * 1e6) * 1000

    top = Span(run.run_id, "run", f"run {run.program}", None, at(run.start), at(run.end))
    top.attributes = {
        "palmette.run_id": run.run_id,
        "palmette.program": run.program,
        "palmette.status": run.status.value,
        **_usage(run.usage),
    }
    if contents:
        for name, value in run.arguments.items():
            top.attributes[f"palmette.argument.{name}"] = value
    top.error = _error(run)
    yield top
    spans: list[Span | None] = []
    for index, branch in enumerate(run.branches):
        parent = None if branch.parent is None else spans[branch.parent]
        if branch.start is None:
            spans.append(None)
            continue
        path = ".".join(map(str, branch.path))
        span = Span(
            run.run_id,
            f"branch/{index}",
            f"branch {path}" if path else "root branch",
            parent or top,
            at(branch.start),
            at(branch.end),
        )
        span.attributes = {"palmette.path": path, "palmette.status": branch.status.value}
        span.error = _error(branch)
        spans.append(span)
        yield span
        for place, event in enumerate(branch.events):
            if event.start is not None:
                key = f"branch/{index}/{place}"
                name = event.name if event.kind not in ("gen", "select") else event.kind
                own = Span(run.run_id, key, name, span, at(event.start), at(event.end))
                own.attributes = _attributes(event, contents)
                own.error = _error(event)
                if event.kind in ("gen", "select", "score"):
                    own.asks = True
                    own.name = f"{event.kind} {backend.model_name}"
                    own.attributes |= {
                        "gen_ai.operation.name": "text_completion",
                        "gen_ai.provider.name": "palmette",
                        "gen_ai.request.model": backend.model_name,
                    }
                yield own


def _error(told: RunTrace | BranchTrace | Event) -> str | None:
    return told.error if told.status in _BAD else None


def _attributes(event: Event, contents: bool) -> dict[str, Attribute]:
    told: dict[str, Attribute] = {
        "palmette.primitive": event.name,
        "palmette.kind": event.kind,
        "palmette.status": event.status.value,
    }
    file, _, line = event.where.rpartition(":")
    if line.isdigit():
        told |= {"code.file.path": file, "code.line.number": int(line)}
    if event.variable:
        told["palmette.variable"] = event.variable
    if event.status in _BAD:
        told["error.type"] = event.status.value
    if event.usage is not None:
        told |= _usage(event.usage)
    if event.finish_reason is not None:
        told["gen_ai.response.finish_reasons"] = (event.finish_reason,)
    for name, value in (event.sampling or {}).items():
        if name in _REQUEST:
            told[_REQUEST[name]] = _attribute(value)
    if event.constraint is not None:
        told["palmette.constraint"] = str(event.constraint["kind"])
    for name in ("queued", "prefill", "decode"):
        seconds = getattr(event, name)
        if seconds is not None:
            told[f"palmette.{name}_seconds"] = seconds
    if event.method is not None:
        told["palmette.select.method"] = event.method
    if event.prompt is not None and event.prompt.stretches:
        told["palmette.prompt.stretches"] = tuple(
            f"{each.start}-{each.end} {each.reason}" for each in event.prompt.stretches
        )
    if contents and event.text:
        told["palmette.text"] = event.text
    return told


def _usage(usage: Counts) -> dict[str, Attribute]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "palmette.usage.prefilled_tokens": usage.prefilled_tokens,
        "palmette.usage.decoded_tokens": usage.decoded_tokens,
        "palmette.usage.forced_tokens": usage.forced_tokens,
        "palmette.usage.shared_tokens": usage.shared_tokens,
    }


def _attribute(value: object) -> Attribute:
    if isinstance(value, tuple | list):
        return tuple(map(str, value))
    return value if isinstance(value, str | bool | int | float) else str(value)


def otlp(trace: Trace, *, contents: bool) -> dict[str, Any]:
    """The body of a request to export traces, in the JSON encoding of OTLP."""
    spans = [_wire_span(span) for span in spans_of(trace, contents=contents)]
    resource = {"service.name": "palmette", "service.version": trace.palmette}
    scope = {"name": "palmette", "version": trace.palmette}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _wire_attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
        ]
    }


def _wire_span(span: Span) -> dict[str, Any]:
    told: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": _utf8(span.name),
        "kind": _CLIENT if span.asks else _INTERNAL,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _wire_attributes(span.attributes),
        "status": {} if span.error is None else {"code": 2, "message": _utf8(span.error)},
    }
    if span.parent is not None:
        told["parentSpanId"] = span.parent.span_id
    return told


def _wire_attributes(attributes: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [{"key": _utf8(key), "value": _wire(value)} for key, value in attributes.items()]


def _wire(value: Attribute) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, tuple):
        return {"arrayValue": {"values": [_wire(each) for each in value]}}
    return {"stringValue": _utf8(value)}


def _utf8(text: str) -> str:
    """Without halves of characters, which the wire does not carry."""
    return text.encode("utf-8", "replace").decode()


def emit(trace: Trace, tracer_provider: Any, *, contents: bool) -> int:
    """Hand all spans to the API of OpenTelemetry; how many there are.

    Raises UnsupportedFeature if it is not installed.
    """
    try:
        from opentelemetry import trace as api
    except ImportError as error:
        raise UnsupportedFeature(
            "export_otel", "install it with: pip install 'palmette[otel]'"
        ) from error
    provider = tracer_provider or api.get_tracer_provider()
    tracer = provider.get_tracer("palmette", trace.palmette)
    contexts: dict[Span, Any] = {}
    begun: list[tuple[Any, int]] = []
    for span in spans_of(trace, contents=contents):
        made = tracer.start_span(
            _utf8(span.name),
            context=None if span.parent is None else contexts[span.parent],
            kind=api.SpanKind.CLIENT if span.asks else api.SpanKind.INTERNAL,
            attributes={_utf8(key): _api(value) for key, value in span.attributes.items()},
            start_time=span.start,
        )
        if span.error is not None:
            made.set_status(api.Status(api.StatusCode.ERROR, _utf8(span.error)))
        contexts[span] = api.set_span_in_context(made)
        begun.append((made, span.end))
    for made, end in reversed(begun):  # children before their parents
        made.end(end_time=end)
    return len(begun)


def _api(value: Attribute) -> str | bool | int | float | Sequence[str]:
    if isinstance(value, str):
        return _utf8(value)
    return tuple(map(_utf8, value)) if isinstance(value, tuple) else value
