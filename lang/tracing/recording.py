"""What a run remembers of itself while it goes on, for `State.trace()`.

A record holds texts, counts and times, and no branch or state, so that what the program lets go of
is freed. Token ids are kept once: a branch has those behind where its parent was at the fork, and a
request says how many of them were its prompt. Guarded by the run's lock, but for what one coroutine
alone writes: a reader finds it as it was a moment ago.
"""

from __future__ import annotations

import math
import reprlib
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from palmette.errors import ProgramCancelled, ProgramTimeout

if TYPE_CHECKING:
    from palmette.lang.operations import Operation
    from palmette.protocol import (
        Constraint,
        PromptStretch,
        SamplingParams,
        TokenEvent,
        TokenLogprob,
        Usage,
    )

# Beyond these the primitives of a run are counted and no longer kept: some 100 MB.
MAX_EVENTS = 100_000

# How many likeliest tokens a run with trace=True records for each generated one.
NUM_TOP = 5

_MAX_ERROR_CHARS = 2000
_NO_TOKEN = -1


class Status(str, Enum):
    """How far a run, a branch or a primitive came."""

    WAITING = "waiting"  # in the queue
    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    NOT_DONE = "not_done"  # dropped, because its branch ended before


def status_of(error: BaseException) -> Status:
    """What became of what ended with `error`."""
    if isinstance(error, ProgramTimeout):
        return Status.TIMED_OUT
    return Status.CANCELLED if isinstance(error, ProgramCancelled) else Status.FAILED


def message_of(error: BaseException) -> str:
    """What the error says, cut to a length that can be kept."""
    return (str(error) or type(error).__name__)[:_MAX_ERROR_CHARS]


class EventRecord:
    """One primitive: what it is, when it was asked for, begun and over, and what it added."""

    __slots__ = (
        "asked",
        "children",
        "chunks",
        "end",
        "error",
        "is_kept",
        "kind",
        "mode",
        "name",
        "start",
        "status",
        "variable",
        "where",
        "winners",
    )

    def __init__(self, kind: str, name: str, where: str, variable: str = "") -> None:
        self.kind = kind
        self.name = name
        self.where = where
        self.variable = variable
        self.asked = time.monotonic()
        self.start: float | None = None
        self.end: float | None = None
        self.status = Status.WAITING
        self.error = ""
        self.chunks: list[str] = []
        self.children: Sequence[BranchRecord] = ()
        self.winners: Sequence[BranchRecord] = ()
        self.mode = ""
        self.is_kept = True

    def begin(self) -> None:
        """It is carried out from now on."""
        self.start = time.monotonic()
        self.status = Status.RUNNING

    def finish(self, error: BaseException | None = None) -> None:
        """It is over, well or with `error`."""
        self.end = time.monotonic()
        self.status = Status.OK if error is None else status_of(error)
        self.error = "" if error is None else message_of(error)

    def drop(self) -> None:
        """It will never be carried out."""
        self.status = Status.NOT_DONE


@contextmanager
def finishing(record: EventRecord) -> Iterator[None]:
    """It is over when the block is, well or with what the block raises."""
    try:
        yield
    except BaseException as error:
        record.finish(error)
        raise
    if record.status is not Status.FAILED:
        record.finish()


class AskRecord(EventRecord):
    """A primitive that asks the model."""

    __slots__ = (
        "constraint",
        "finish_reason",
        "forced",
        "logprobs",
        "main_usage",
        "num_output",
        "num_prompt",
        "options",
        "output_ids",
        "prompt",
        "sample",
        "samples",
        "sampling",
        "stop_reason",
        "top_ids",
        "top_logprobs",
        "usage",
    )

    def __init__(self, kind: str, name: str, where: str, variable: str = "") -> None:
        super().__init__(kind, name, where, variable)
        self.sampling: SamplingParams | None = None
        self.constraint: Constraint | None = None
        self.num_prompt: int | None = None
        self.num_output = 0
        self.output_ids: array[int] | None = None  # of what is no part of the branch
        self.usage: Usage | None = None  # of all its requests
        self.main_usage: Usage | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.prompt: tuple[PromptStretch, ...] = ()
        self.forced: bytearray | None = None  # for each token
        self.logprobs: array[float] | None = None
        self.top_ids: array[int] | None = None  # NUM_TOP for each token
        self.top_logprobs: array[float] | None = None
        self.options: Mapping[str, Any] | None = None  # the meta data of a select
        self.sample: int | None = None
        self.samples: list[AskRecord] = []  # the further texts of a gen with n above 1

    def add_usage(self, usage: Usage) -> None:
        """Count what one of its requests used."""
        self.usage = usage if self.usage is None else self.usage.plus(usage)

    def new_sample(self, index: int) -> AskRecord:
        """That of the `index`-th text, which begins now."""
        sample = AskRecord(self.kind, self.name, self.where, self.variable)
        sample.sampling, sample.constraint = self.sampling, self.constraint
        sample.asked, sample.sample, sample.is_kept = self.asked, index, self.is_kept
        sample.num_prompt = self.num_prompt
        sample.output_ids = array("i")
        self.samples.append(sample)
        sample.begin()
        return sample

    def take(self, event: TokenEvent) -> None:
        """What the backend tells of the tokens it brings; before they are counted."""
        if event.forced:
            if self.forced is None:
                self.forced = bytearray(self.num_output)
            self.forced.extend(event.forced)
        elif self.forced is not None:
            self.forced.extend(bytes(len(event.token_ids)))
        if event.logprobs:
            self._take_logprobs(event.logprobs)

    def _take_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            self.logprobs, self.top_ids, self.top_logprobs = array("d"), array("i"), array("d")
        for each in logprobs:
            top = each.top[:NUM_TOP]
            if len(top) < NUM_TOP:
                top += ((_NO_TOKEN, math.nan),) * (NUM_TOP - len(top))
            ids, values = zip(*top, strict=True)
            self.logprobs.append(each.logprob)
            self.top_ids.extend(ids)
            self.top_logprobs.extend(values)

    def top_at(self, index: int) -> list[tuple[int, float]]:
        """The likeliest tokens at the place of a token of the output, as far as recorded."""
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        places = range(index * NUM_TOP, (index + 1) * NUM_TOP)
        found = [(self.top_ids[place], self.top_logprobs[place]) for place in places]
        return [pair for pair in found if pair[0] != _NO_TOKEN]


class BranchRecord:
    """One branch: its primitives in the program's order, and the ids of its requests."""

    __slots__ = (
        "_places",
        "_run",
        "base",
        "born",
        "error",
        "events",
        "forked_by",
        "ids",
        "parent",
        "path",
        "status",
    )

    def __init__(
        self,
        run: RunRecord,
        path: tuple[int, ...],
        parent: BranchRecord | None,
    ) -> None:
        self._run = run
        self.path = path
        self.parent = parent
        self.forked_by: EventRecord | None = None
        self.base = 0  # how many of the parent's ids come before its own
        self.ids: array[int] = array("i")
        self.events: list[EventRecord] = []
        self._places: dict[EventRecord, int] = {}
        self.born: float | None = time.monotonic() if parent is None else None
        self.status: Status | None = None  # if it ended with an error
        self.error = ""

    @property
    def num_ids(self) -> int:
        """Those of the parent before its own included."""
        return self.base + len(self.ids)

    def all_ids(self, end: int) -> array[int]:
        """The first `end` ids."""
        parts = []
        branch: BranchRecord | None = self
        while branch is not None and end > 0:
            if end > branch.base:
                parts.append(branch.ids[: end - branch.base])
            end, branch = min(end, branch.base), branch.parent
        whole: array[int] = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole

    def ask(self, operation: Operation) -> EventRecord:
        """The record of an operation that was appended. Lock held."""
        kind = AskRecord if operation.kind in ("gen", "select") else EventRecord
        slot = operation.slot
        record = kind(
            operation.kind, operation.name, operation.where, "" if slot is None else slot.name
        )
        self._keep(record)
        return record

    def begin(
        self,
        kind: str,
        name: str,
        where: str,
        *,
        children: Sequence[BranchRecord] = (),
        mode: str = "",
    ) -> EventRecord:
        """The record of something that the program itself waits for from now on. Lock held."""
        record = EventRecord(kind, name, where)
        record.children, record.mode = children, mode
        self._keep(record)
        record.begin()
        return record

    def be_born(self) -> None:
        """It begins where its parent is now."""
        assert self.parent is not None
        self.base = self.parent.num_ids
        self.born = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """It ended with `error`. Lock held."""
        if self.status is None:
            self.status, self.error = status_of(error), message_of(error)

    def prompt_of(self, record: AskRecord, token_ids: Sequence[int]) -> None:
        """The branch asks with a prompt that begins with all that it has."""
        if record.is_kept:
            record.num_prompt = len(token_ids)
            self.ids.extend(token_ids[self.num_ids :])

    def output_of(self, record: AskRecord, token_ids: Sequence[int]) -> None:
        """More ids of the answer."""
        if record.is_kept:
            (self.ids if record.output_ids is None else record.output_ids).extend(token_ids)
            record.num_output += len(token_ids)

    def output_ids(self, record: AskRecord) -> array[int]:
        """Those of the answer so far."""
        if record.output_ids is not None:
            return record.output_ids[: record.num_output]
        if record.num_prompt is None:
            return array("i")
        start = record.num_prompt - self.base
        return self.ids[start : start + record.num_output]

    def shown_parts(self) -> list[tuple[str, bool]]:
        """The texts that make up the branch from the root on, and whether each was generated."""
        parts: list[list[tuple[str, bool]]] = []
        branch: BranchRecord | None = self
        before: EventRecord | None = None
        while branch is not None:
            end = len(branch.events)
            if before is not None:
                end = branch.place_of(before) if before.is_kept else end
            parts.append(
                [
                    ("".join(event.chunks), event.kind in ("gen", "select"))
                    for event in branch.events[:end]
                    if event.kind != "scope_end"
                ]
            )
            before, branch = branch.forked_by, branch.parent
        return [part for each in reversed(parts) for part in each if part[0]]

    def place_of(self, record: EventRecord) -> int:
        """Where in the events a fork stands."""
        return self._places[record]

    def _keep(self, record: EventRecord) -> None:
        record.is_kept = self._run.makes_room()
        if record.is_kept:
            if record.kind == "fork":
                self._places[record] = len(self.events)
            self.events.append(record)


class RunRecord:
    """One run. `is_detailed`: it was asked to record what costs something, too."""

    def __init__(self, *, is_detailed: bool) -> None:
        self.is_detailed = is_detailed
        self.program = ""
        self.arguments: dict[str, str] = {}
        self.began_at = time.time_ns()  # by the clock on the wall
        self.start = time.monotonic()
        self.end: float | None = None
        self.status = Status.RUNNING
        self.error = ""
        self.branches: list[BranchRecord] = []
        self.num_omitted = 0
        self._num_events = 0

    def new_branch(
        self, path: tuple[int, ...] = (), parent: BranchRecord | None = None
    ) -> BranchRecord:
        """That of a branch which begins, or waits for its parent to get to the fork. Lock held."""
        branch = BranchRecord(self, path, parent)
        if not self.is_full:
            self.branches.append(branch)
        return branch

    def of_call(self, program: str, arguments: Mapping[str, Any]) -> None:
        """What runs."""
        self.program = program
        self.arguments = {name: short_text(value) for name, value in arguments.items()}

    def begin(self) -> None:
        """The program is called now."""
        self.began_at = time.time_ns()
        self.start = time.monotonic()

    def finish(self, error: BaseException | None) -> None:
        """The program has ended, well or with `error`. Lock held."""
        self.end = time.monotonic()
        self.status = Status.OK if error is None else status_of(error)
        self.error = "" if error is None else message_of(error)

    @property
    def is_full(self) -> bool:
        """Whether nothing more is kept."""
        return self._num_events >= MAX_EVENTS

    def makes_room(self) -> bool:
        """Whether one more primitive is kept. Lock held."""
        if self.is_full:
            self.num_omitted += 1
            return False
        self._num_events += 1
        return True


class _Short(reprlib.Repr):
    """Short texts of plain values in bounded time; of any other only its type is told."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 120
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxother = 4
        self.maxlevel = 3

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, PurePath):
            x = str(x)
        known = (str, int, float, bool, complex, list, tuple, dict, set, frozenset, type(None))
        if type(x) in known:
            if isinstance(x, int) and x.bit_length() > 1000:
                return f"<int of {x.bit_length()} bits>"
            if isinstance(x, (dict, set, frozenset)) and len(x) > 100:  # it would be sorted
                return f"<{type(x).__name__} of {len(x)}>"
            if type(x) in (float, bool, complex, type(None)):
                return repr(x)
            return super().repr1(x, level)
        return f"<{type(x).__name__}>"


_SHORT = _Short()


def short_text(value: object) -> str:
    """The value of an argument, cut; in bounded time, whatever it is."""
    return _SHORT.repr(value)
