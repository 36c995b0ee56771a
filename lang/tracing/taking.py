"""From what runs have recorded to a trace, as they are now."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

from palmette.lang.tracing.model import (
    MAX_TEXT,
    BackendInfo,
    BranchTrace,
    Counts,
    Event,
    Option,
    Prompt,
    RunTrace,
    Stretch,
    Tokens,
)
from palmette.lang.tracing.prefixes import AskedPrompt, prefix_tree
from palmette.lang.tracing.recording import AskRecord, BranchRecord, EventRecord, Status
from palmette.lang.tracing.trace import Trace
from palmette.lang.wrapping import innermost
from palmette.protocol import SamplingParams, Usage

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from palmette.lang.tracing.recording import RunRecord
    from palmette.protocol import Constraint, TokenBackend, Tokenizer

_LEAST_LOGPROB = -9999.0  # stands for anything less likely, as in an engine
_NEUTRAL = SamplingParams()
_BUSY = (Status.WAITING, Status.RUNNING)


class Traceable(Protocol):
    """What was recorded of a run; `lock` guards it."""

    @property
    def run_id(self) -> str: ...
    @property
    def backend(self) -> TokenBackend: ...
    @property
    def record(self) -> RunRecord: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def lock(self) -> AbstractContextManager[object]: ...


def trace_of(runs: Iterable[Traceable]) -> Trace:
    """The runs, each once, on one time axis that begins with the first of them."""
    distinct = list(dict.fromkeys(runs))
    now = time.monotonic()
    origin = min((run.record.start for run in distinct), default=now)
    taking = _Taking(origin)
    told = tuple(taking.run(run) for run in distinct)
    latest = [run.end for run in told]
    duration = max((end for end in latest if end is not None), default=0.0)
    if any(end is None for end in latest):
        duration = max(duration, taking.at(now))
    began = min((run.record.began_at for run in distinct), default=time.time_ns())
    return Trace(
        palmette=_version(),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        began=began // 1000,
        duration=duration,
        backends=tuple(backend.info for backend in taking.backends.values()),
        runs=told,
        prefixes=prefix_tree(
            [backend.asked for backend in taking.backends.values()],
            [backend.tokenizer.decode for backend in taking.backends.values()],
        ),
        vocabulary=tuple(backend.vocabulary for backend in taking.backends.values()),
    )


def _version() -> str:
    from importlib.metadata import version  # takes long to load

    return version("palmette")


@dataclass(slots=True)
class _Backend:
    """What ran some of the runs; the texts of its tokens as far as they were needed."""

    index: int
    info: BackendInfo
    tokenizer: Tokenizer
    asked: list[AskedPrompt] = field(default_factory=list)
    vocabulary: dict[str, str] = field(default_factory=dict)

    def name(self, token_id: int) -> None:
        """Put the token's text into the vocabulary."""
        key = str(token_id)
        if key not in self.vocabulary:
            self.vocabulary[key] = self.tokenizer.decode([token_id])[:MAX_TEXT]

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text that each token completes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = []
        for token_id in token_ids:
            spelled = self.tokenizer.token_bytes(token_id)
            if spelled:
                texts.append(decoder.decode(spelled))
            else:  # a control token
                texts.append(decoder.decode(b"", final=True) + self.tokenizer.decode([token_id]))
                decoder.reset()
        rest = decoder.decode(b"", final=True)
        if rest:
            texts[-1] += rest
        return tuple(each[:MAX_TEXT] for each in texts)


class _Taking:
    """Makes the parts of a trace whose time begins at `origin`."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._run_index = -1
        self.backends: dict[int, _Backend] = {}

    def at(self, moment: float) -> float:
        """On the trace's clock, in seconds."""
        return round(max(0.0, moment - self._origin), 6)

    def _maybe_at(self, moment: float | None) -> float | None:
        return None if moment is None else self.at(moment)

    def run(self, run: Traceable) -> RunTrace:
        """All of a run, as it is now."""
        self._run_index += 1
        backend = self._backend(innermost(run.backend))
        with run.lock:
            record = run.record
            indices = {branch: index for index, branch in enumerate(record.branches)}
            return RunTrace(
                run_id=run.run_id,
                program=record.program[:1000],
                backend=backend.index,
                arguments=dict(record.arguments),
                detailed=record.is_detailed,
                status=record.status,
                start=self.at(record.start),
                end=self._maybe_at(record.end),
                usage=_counts(run.usage),
                branches=tuple(
                    self._branch(branch, index, indices, backend)
                    for index, branch in enumerate(record.branches)
                ),
                error=record.error,
                omitted_events=record.num_omitted,
            )

    def _backend(self, backend: TokenBackend) -> _Backend:
        known = self.backends.get(id(backend))
        if known is None:
            known = self.backends[id(backend)] = _Backend(
                len(self.backends),
                BackendInfo(
                    kind=_kind_of(backend),
                    model_name=backend.model_name,
                    max_context=backend.max_context,
                ),
                backend.tokenizer,
            )
        return known

    def _branch(
        self,
        branch: BranchRecord,
        index: int,
        indices: Mapping[BranchRecord, int],
        backend: _Backend,
    ) -> BranchTrace:
        records = _in_order(branch.events)
        events = []
        for place, record in enumerate(records):
            events.append(self._event(branch, record, indices, backend))
            if isinstance(record, AskRecord) and record.num_prompt is not None:
                usage = record.main_usage
                backend.asked.append(
                    AskedPrompt(
                        branch.all_ids(record.num_prompt),
                        None if usage is None else _num_cached(record, usage),
                        record.start or record.asked,
                        (self._run_index, index, place),
                    )
                )
        status = branch.status
        if status is None:
            is_busy = any(event.status in _BUSY for event in events)
            status = Status.RUNNING if is_busy or branch.born is None else Status.OK
        ends = [event.end for event in events if event.end is not None]
        start = self._maybe_at(branch.born)
        return BranchTrace(
            path=branch.path,
            start=start,
            end=None if status is Status.RUNNING else max(ends, default=start),
            status=status,
            events=tuple(events),
            parent=None if branch.parent is None else indices.get(branch.parent),
            forked_by=_place_of(branch.forked_by, branch.parent),
            error=branch.error,
        )

    def _event(
        self,
        branch: BranchRecord,
        record: EventRecord,
        indices: Mapping[BranchRecord, int],
        backend: _Backend,
    ) -> Event:
        whole = "".join(record.chunks)
        common: dict[str, Any] = {
            "kind": record.kind,
            "name": record.name[:1000],
            "where": record.where[:1000],
            "variable": record.variable[:1000],
            "asked": self.at(record.asked),
            "start": self._maybe_at(record.start),
            "end": self._maybe_at(record.end),
            "status": record.status,
            "error": record.error,
            "text": whole[:MAX_TEXT],
            "num_chars": len(whole) if len(whole) > MAX_TEXT else None,
            "mode": record.mode,
            "children": _indices(record.children, indices),
            "winners": _indices(record.winners, indices),
        }
        if not isinstance(record, AskRecord):
            return Event(**common)
        return Event(
            **common,
            **_asked(record),
            tokens=_tokens(branch, record, backend) if record.kind == "gen" else None,
            **_choice(record, whole, backend),
        )


def _in_order(records: Sequence[EventRecord]) -> list[EventRecord]:
    """With the further texts of a gen behind the first."""
    listed: list[EventRecord] = []
    for record in records:
        listed.append(record)
        if isinstance(record, AskRecord):
            listed += record.samples
    return listed


def _indices(
    branches: Sequence[BranchRecord], indices: Mapping[BranchRecord, int]
) -> tuple[int, ...]:
    return tuple(indices[branch] for branch in branches if branch in indices)


def _place_of(fork: EventRecord | None, parent: BranchRecord | None) -> int | None:
    if fork is None or parent is None or not fork.is_kept:
        return None
    place = parent.place_of(fork)
    num_before = sum(
        len(record.samples) for record in parent.events[:place] if isinstance(record, AskRecord)
    )
    return place + num_before


def _counts(usage: Usage) -> Counts:
    return Counts(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        completion_tokens=usage.completion_tokens,
        decoded_tokens=usage.decoded_tokens,
        forced_tokens=usage.forced_tokens,
        shared_tokens=usage.shared_tokens,
    )


def _num_cached(record: AskRecord, usage: Usage) -> int:
    """Of the prompt alone: what a select used is of its options, too."""
    assert record.num_prompt is not None
    if record.prompt:
        return sum(s.end - s.start for s in record.prompt if s.reason == "cached")
    if record.kind == "gen" and usage.prompt_tokens != record.num_prompt:
        return record.num_prompt - min(record.num_prompt, usage.prefilled_tokens)
    return min(record.num_prompt, usage.cached_tokens)


def _asked(record: AskRecord) -> dict[str, Any]:
    """What is told of a gen as of a select."""
    told: dict[str, Any] = {
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "sample": record.sample,
    }
    if isinstance(record.stop_reason, str):
        told["stop_reason"] = record.stop_reason[:1000]
    if record.usage is not None:
        told["usage"] = _counts(record.usage)
    usage = record.main_usage
    if record.num_prompt is not None:
        num_cached = None if usage is None else _num_cached(record, usage)
        told["prompt"] = Prompt(
            tokens=record.num_prompt,
            cached=num_cached,
            prefilled=None if num_cached is None else record.num_prompt - num_cached,
            stretches=tuple(
                Stretch(start=s.start, end=s.end, reason=s.reason, detail=s.detail)
                for s in record.prompt
            ),
        )
    if usage is not None and record.kind == "gen":
        told["queued"] = _seconds(usage.queued_seconds)
        told["prefill"] = _seconds(usage.first_token_seconds - usage.queued_seconds)
        told["decode"] = _seconds(usage.total_seconds - usage.first_token_seconds)
    if record.sampling is not None:
        told["sampling"] = _changed(record.sampling)
    if record.constraint is not None:
        told["constraint"] = _constraint(record.constraint)
    return told


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    """`max_tokens`, and what is not as it is where nobody says."""
    changed: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(sampling, name)
        if value != getattr(_NEUTRAL, name):
            changed[name] = _cut_value(value)
    return changed


def _cut_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut_value(each) for each in value[:1000])
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, int) and abs(value) >= 2**53:  # a seed, which JavaScript cannot hold
        return str(value)
    return value


def _constraint(constraint: Constraint) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": constraint.kind, "source": constraint.source[:MAX_TEXT]}
    if len(constraint.source) > MAX_TEXT:
        told["num_chars"] = len(constraint.source)
    if constraint.syntax is not None:
        told["syntax"] = constraint.syntax
    for name, usual in (
        ("whitespace", "compact"),
        ("order", "declared"),
        ("undeclared", "allowed"),
        ("backend", "palmette"),
    ):
        if getattr(constraint, name) != usual:
            told[name] = getattr(constraint, name)
    return told


def _tokens(branch: BranchRecord, record: AskRecord, backend: _Backend) -> Tokens:
    ids = tuple(branch.output_ids(record))
    count = len(ids)
    logprobs = top = None
    if record.logprobs is not None:
        logprobs = tuple(_finite(value) for value in record.logprobs[:count])
        top = tuple(
            tuple(
                (token_id, max(value, _LEAST_LOGPROB)) for token_id, value in record.top_at(place)
            )
            or None
            for place in range(count)
        )
        for likeliest in top:
            for token_id, _ in likeliest or ():
                backend.name(token_id)
    forced = record.forced or b""
    return Tokens(
        ids=ids,
        texts=backend.texts(ids),
        logprobs=logprobs,
        forced=tuple(place for place, is_forced in enumerate(forced[:count]) if is_forced),
        top=top,
    )


def _finite(value: float) -> float | None:
    """None where it is not known."""
    return None if math.isnan(value) else max(value, _LEAST_LOGPROB)


def _choice(record: AskRecord, text: str, backend: _Backend) -> dict[str, Any]:
    """What is told of a select that was decided."""
    meta = record.options
    if meta is None:
        return {}
    options = []
    probabilities = meta["probabilities"] or {}  # a chat API may tell none, and nothing of tokens
    for option, ids in meta["token_ids"].items():
        tokens = None
        logprobs = meta.get("token_logprobs", {}).get(option)
        if ids and logprobs is not None:
            tokens = Tokens(
                ids=tuple(ids),
                texts=backend.texts(ids),
                logprobs=tuple(_finite(value) for value in logprobs),
            )
        options.append(
            Option(
                text=option[:MAX_TEXT],
                probability=probabilities.get(option),
                log_likelihood=_number(meta.get("log_likelihoods", {}).get(option)),
                score=_number(meta.get("scores", {}).get(option)),
                tokens=tokens,
            )
        )
    return {
        "method": meta["method"],
        "options": tuple(options),
        "chosen": list(meta["token_ids"]).index(text),
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _kind_of(backend: TokenBackend) -> str:
    name = type(backend).__name__
    return "Engine" if name == "AsyncEngine" else name
