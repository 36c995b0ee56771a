"""What a trace is made of. Plain data; the fields are those of the JSON, see `docs/tracing.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from palmette.lang.tracing.codec import (
    boolean,
    coded,
    integer,
    mapping,
    member,
    nullable,
    number,
    one_of,
    pair,
    record,
    sequence,
    text,
)
from palmette.lang.tracing.recording import Status

MAX_TEXT = 20_000  # characters of a text that are kept in a trace
MAX_NODES = 20_000  # of the prefix tree
MAX_NODE_TEXT = 200

_SHORT = text(10_000)
_LONG = text(MAX_TEXT)
_COUNT = integer()
_SECONDS = number(0, 1e9)
_INDEX = integer(0, 10_000_000)
_INDICES = sequence(_INDEX)
_TOKEN_ID = integer(0, 2**31 - 1)
_LOGPROB = number(-1e9, 1e-6)
_SCALAR = one_of(boolean(), integer(-(2**53)), number(), text(10_000))
_VALUE = one_of(sequence(one_of(_SCALAR, sequence(_SCALAR)), 1000), _SCALAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens: prompt = cached + prefilled, completion = decoded + forced + shared."""

    prompt_tokens: int = coded(_COUNT)
    cached_tokens: int = coded(_COUNT)
    prefilled_tokens: int = coded(_COUNT)
    completion_tokens: int = coded(_COUNT)
    decoded_tokens: int = coded(_COUNT)
    forced_tokens: int = coded(_COUNT)
    shared_tokens: int = coded(_COUNT, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens [start, end) of a prompt, cached or computed for a reason."""

    start: int = coded(_COUNT)
    end: int = coded(_COUNT)
    reason: str = coded(_SHORT)
    detail: str = coded(_SHORT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """How long a prompt was. What of it was cached is known once the request has ended well."""

    tokens: int = coded(_COUNT)
    cached: int | None = coded(_COUNT, default=None)
    prefilled: int | None = coded(_COUNT, default=None)
    stretches: tuple[Stretch, ...] = coded(sequence(record(Stretch), 1 << 20), default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Columns of one length. `forced` are places of tokens that a constraint forced; `top` are the
    likeliest tokens at each place with their log-probabilities.
    """

    ids: tuple[int, ...] = coded(sequence(_TOKEN_ID))
    texts: tuple[str, ...] = coded(sequence(_LONG))
    logprobs: tuple[float | None, ...] | None = coded(sequence(nullable(_LOGPROB)), default=None)
    forced: tuple[int, ...] = coded(_INDICES, default=())
    top: tuple[tuple[tuple[int, float], ...] | None, ...] | None = coded(
        sequence(nullable(sequence(pair(_TOKEN_ID, _LOGPROB), 100))), default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One of the options of a select; minus infinity is None, and what a chat API does not tell."""

    text: str = coded(_LONG)
    probability: float | None = coded(nullable(number(0, 1.000001)))
    log_likelihood: float | None = coded(nullable(number()))
    score: float | None = coded(nullable(number()))
    tokens: Tokens | None = coded(record(Tokens), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One primitive. `start` is None if it was never begun, `end` as long as it is not over."""

    kind: str = coded(_SHORT)
    name: str = coded(_SHORT)
    where: str = coded(_SHORT)
    asked: float = coded(_SECONDS)
    start: float | None = coded(nullable(_SECONDS))
    end: float | None = coded(nullable(_SECONDS))
    status: Status = coded(member(Status))
    variable: str = coded(_SHORT, default="")
    error: str = coded(_SHORT, default="")
    text: str = coded(_LONG, default="")
    num_chars: int | None = coded(_COUNT, default=None)
    usage: Counts | None = coded(record(Counts), default=None)
    prompt: Prompt | None = coded(record(Prompt), default=None)
    queued: float | None = coded(_SECONDS, default=None)
    prefill: float | None = coded(_SECONDS, default=None)
    decode: float | None = coded(_SECONDS, default=None)
    sampling: Mapping[str, object] | None = coded(mapping(_VALUE, 100), default=None)
    constraint: Mapping[str, object] | None = coded(
        mapping(one_of(_COUNT, _LONG), 20), default=None
    )
    finish_reason: str | None = coded(_SHORT, default=None)
    stop_reason: str | int | None = coded(one_of(_COUNT, _SHORT), default=None)
    sample: int | None = coded(_INDEX, default=None)
    tokens: Tokens | None = coded(record(Tokens), default=None)
    method: str | None = coded(_SHORT, default=None)
    chosen: int | None = coded(_INDEX, default=None)
    options: tuple[Option, ...] = coded(sequence(record(Option), 1 << 20), default=())
    mode: str = coded(_SHORT, default="")
    children: tuple[int, ...] = coded(_INDICES, default=())
    winners: tuple[int, ...] = coded(_INDICES, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTrace:
    """One branch; `parent` and `forked_by` are indices of a branch and of one of its events."""

    path: tuple[int, ...] = coded(_INDICES)
    start: float | None = coded(nullable(_SECONDS))
    end: float | None = coded(nullable(_SECONDS))
    status: Status = coded(member(Status))
    events: tuple[Event, ...] = coded(sequence(record(Event)))
    parent: int | None = coded(_INDEX, default=None)
    forked_by: int | None = coded(_INDEX, default=None)
    error: str = coded(_SHORT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """One run of a program; its first branch is the root."""

    run_id: str = coded(_SHORT)
    program: str = coded(_SHORT)
    backend: int = coded(_INDEX)
    arguments: Mapping[str, str] = coded(mapping(_SHORT, 10_000))
    detailed: bool = coded(boolean())
    status: Status = coded(member(Status))
    start: float = coded(_SECONDS)
    end: float | None = coded(nullable(_SECONDS))
    usage: Counts = coded(record(Counts))
    branches: tuple[BranchTrace, ...] = coded(sequence(record(BranchTrace)))
    error: str = coded(_SHORT, default="")
    omitted_events: int = coded(_COUNT, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What ran it."""

    kind: str = coded(_SHORT)
    model_name: str = coded(_SHORT)
    max_context: int = coded(_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """Tokens [start, start + num_tokens) that some prompts share.

    `uses` requests have all of it in their prompt, of `ends` it is the end. `computed` of its
    tokens were prefilled, over all requests. `first` is the run, branch and event that came first.
    """

    start: int = coded(_COUNT)
    num_tokens: int = coded(_COUNT)
    text: str = coded(text(MAX_NODE_TEXT))
    uses: int = coded(_COUNT)
    ends: int = coded(_COUNT)
    computed: int = coded(_COUNT)
    first: tuple[int, ...] = coded(sequence(_INDEX, 3))
    parent: int | None = coded(_INDEX, default=None)
    backend: int | None = coded(_INDEX, default=None)
    cut: bool = coded(boolean(), default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """The prefix tree of all prompts; a parent stands before its children."""

    nodes: tuple[PrefixNode, ...] = coded(sequence(record(PrefixNode), MAX_NODES))
    omitted_nodes: int = coded(_COUNT, default=0)
    omitted_prompts: int = coded(_COUNT, default=0)


VOCABULARY = sequence(mapping(_LONG), 1000)
