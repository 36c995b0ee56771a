"""The trace of runs: what a person looks at, saves, and exports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from palmette.errors import InvalidRequest
from palmette.lang.tracing.codec import (
    coded,
    integer,
    number,
    read_record,
    record,
    sequence,
    text,
    write_record,
)
from palmette.lang.tracing.model import (
    VOCABULARY,
    BackendInfo,
    BranchTrace,
    Event,
    Prefixes,
    RunTrace,
)

if TYPE_CHECKING:
    from palmette.lang.state import State

FORMAT = "palmette.trace"
VERSION = 1

_MAX_BYTES = 1 << 29  # of a file that is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What some runs did, primitive by primitive, on one time axis.

    Times are in seconds from its beginning; `began` is that in microseconds since 1970. The parts
    are described in `palmette.lang.tracing.model`. A trace is taken once and changes no more.
    """

    palmette: str = coded(text(100))
    created: str = coded(text(100))
    began: int = coded(integer())
    duration: float = coded(number(0, 1e9))
    backends: tuple[BackendInfo, ...] = coded(sequence(record(BackendInfo), 1000))
    runs: tuple[RunTrace, ...] = coded(sequence(record(RunTrace)))
    prefixes: Prefixes = coded(record(Prefixes))
    vocabulary: tuple[Mapping[str, str], ...] = coded(VOCABULARY)

    @classmethod
    def of(cls, states: State | Iterable[State]) -> Trace:
        """That of the runs which the states are of, such as `run_batch` returns.

        Exceptions among them, as `run_batch` has with ``on_error="return"``, have no run to tell
        of, and are passed over. Raises TypeError for anything else.
        """
        from palmette.lang.state import State
        from palmette.lang.tracing.taking import trace_of

        given = [states] if isinstance(states, State) else list(states)
        for each in given:
            if not isinstance(each, State | BaseException):
                raise TypeError(f"a trace is taken of states, got {type(each).__name__}")
        return trace_of(each._branch.run for each in given if isinstance(each, State))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in a file that `save` wrote.

        Raises InvalidRequest if it is none, with the place at fault, and OSError if it cannot be
        read.
        """
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InvalidRequest(f"trace: {path} has more than {_MAX_BYTES} bytes")
        return cls.from_json(data)

    @classmethod
    def from_json(cls, data: str | bytes) -> Trace:
        """The trace that `to_json` gave. Raises InvalidRequest if it is none."""
        try:
            value = json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"trace: this is no JSON: {str(error)[:200]}") from None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise InvalidRequest(f'trace: this is no trace, it has no "format": "{FORMAT}"')
        version = value.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            raise InvalidRequest(f"trace: only version {VERSION} of the format can be read")
        trace = read_record(cls, value, "")
        _check_indices(trace)
        return trace

    def to_json(self) -> str:
        """As text of ASCII characters; see `docs/tracing.md` for what is in it."""
        told = {"format": FORMAT, "version": VERSION, **write_record(self)}
        return json.dumps(told, allow_nan=False, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write it to a file as JSON."""
        Path(path).write_text(self.to_json(), encoding="ascii")

    def to_otlp(self, *, contents: bool = False) -> dict[str, Any]:
        """As spans in the JSON encoding of OTLP: the body of a request to ``/v1/traces``.

        The same trace has the same ids. With `contents`, texts and arguments are in it, too.
        """
        from palmette.lang.tracing.otel import otlp

        return otlp(self, contents=contents)

    def export_otel(self, tracer_provider: Any = None, *, contents: bool = False) -> int:
        """Hand spans with the true times to OpenTelemetry; how many.

        To `tracer_provider`, or the one that is set for the process. Raises UnsupportedFeature if
        opentelemetry-api is not installed.
        """
        from palmette.lang.tracing.otel import emit

        return emit(self, tracer_provider, contents=contents)

    def html(self) -> str:
        """A page that shows it: one file that needs no other, and no network."""
        from palmette.lang.tracing.page import page_html

        return page_html(self.to_json())

    def print(self, file: IO[str] | None = None, *, all_events: bool = False) -> None:
        """The primitives as a tree on `file`, by default standard output; constants only with
        `all_events`.
        """
        from palmette.lang.tracing.listing import print_trace

        print_trace(self, file, all_events=all_events)

    def events(self) -> Iterator[Event]:
        """All primitives of all runs, branch by branch."""
        for run in self.runs:
            for branch in run.branches:
                yield from branch.events

    def summary(self) -> str:
        """In a few words: how much of what, and how it ended."""
        counts = Counter(run.status.value for run in self.runs)
        ended = ", ".join(f"{count} {status}" for status, count in counts.items())
        num_branches = sum(len(run.branches) for run in self.runs)
        used = [run.usage for run in self.runs]
        num_shared = sum(each.shared_tokens for each in used)
        shared = f", {num_shared} shared" if num_shared else ""
        return (
            f"{_many(len(self.runs), 'run')} ({ended or 'none'}), "
            f"{_many(num_branches, 'branch')}, "
            f"{_many(sum(1 for _ in self.events()), 'primitive')}, {self.duration:.3f} s; tokens: "
            f"{sum(each.prefilled_tokens for each in used)} prefilled, "
            f"{sum(each.cached_tokens for each in used)} cached, "
            f"{sum(each.forced_tokens for each in used)} forced, "
            f"{sum(each.decoded_tokens for each in used)} decoded{shared}"
        )

    def __repr__(self) -> str:
        return f"<Trace: {self.summary()}>"

    def _repr_html_(self) -> str:
        from palmette.lang.tracing.notebook import trace_html

        return trace_html(self)


def _many(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_indices(trace: Trace) -> None:
    """Raises InvalidRequest where an index points at nothing, or columns differ in length."""
    _check(len(trace.vocabulary) == len(trace.backends), "vocabulary has one part per backend")
    for number_, run in enumerate(trace.runs):
        place = f"runs[{number_}]"
        _check(run.backend < len(trace.backends), f"{place}.backend points at a backend")
        _check(bool(run.branches) or run.omitted_events > 0, f"{place} has a branch")
        for index, branch in enumerate(run.branches):
            _check_branch(run, branch, index, f"{place}.branches[{index}]")
    nodes = trace.prefixes.nodes
    for index, node in enumerate(nodes):
        place = f"prefixes.nodes[{index}]"
        is_known = node.backend is not None and node.backend < len(trace.backends)
        if node.parent is None:
            _check(is_known, f"{place}.backend points at a backend")
        else:
            _check(node.parent < index, f"{place}.parent stands before it")
            _check(node.backend is None, f"{place} is no root and has no backend")
            above = nodes[node.parent]
            _check(
                node.start == above.start + above.num_tokens, f"{place}.start is its parent's end"
            )
        _check(len(node.first) == 3 and _is_event(trace, node.first), f"{place}.first is an event")
        _check(node.ends <= node.uses, f"{place}.ends is at most its uses")
        _check(node.computed <= node.uses * node.num_tokens, f"{place}.computed is possible")


def _check_branch(run: RunTrace, branch: BranchTrace, index: int, place: str) -> None:
    num_branches = len(run.branches)
    if branch.parent is not None:
        _check(branch.parent < index, f"{place}.parent stands before it")
    if branch.forked_by is not None:
        is_there = branch.parent is not None and branch.forked_by < len(
            run.branches[branch.parent].events
        )
        _check(is_there, f"{place}.forked_by is an event of its parent")
    for number_, event in enumerate(branch.events):
        where = f"{place}.events[{number_}]"
        for child in (*event.children, *event.winners):
            _check(child < num_branches, f"{where} names branches that are there")
        if event.chosen is not None:
            _check(event.chosen < len(event.options), f"{where}.chosen is one of its options")
        for tokens in (event.tokens, *(option.tokens for option in event.options)):
            if tokens is None:
                continue
            count = len(tokens.ids)
            columns = (tokens.texts, tokens.logprobs, tokens.top)
            _check(
                all(column is None or len(column) == count for column in columns),
                f"{where}: columns of tokens are of one length",
            )
            _check(all(each < count for each in tokens.forced), f"{where}: forced are places")


def _is_event(trace: Trace, place: tuple[int, ...]) -> bool:
    run, branch, event = place
    return (
        run < len(trace.runs)
        and branch < len(trace.runs[run].branches)
        and event < len(trace.runs[run].branches[branch].events)
    )


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise InvalidRequest(f"trace: it does not hold that {what}")
