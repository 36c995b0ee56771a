"""One schema put through one engine: what it answers, and how long that takes."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.grammar.engines import Engine, Session

Outcome = str
COMPILED, REFUSED, TIMED_OUT, CRASHED = "compiled", "refused", "timed out", "crashed"

RIGHT = "right"
WRONGLY_ACCEPTED, WRONGLY_REJECTED = "wrongly accepted", "wrongly rejected"
FAILED = "failed"  # an error on the way through the instance


@dataclass(frozen=True, slots=True)
class Task:
    """A schema and its instances as tokens, with whether each is valid."""

    schema: str
    instances: tuple[tuple[tuple[int, ...], bool], ...]
    stop_token_ids: tuple[int, ...]
    with_times: bool = True  # a second use, and what is forced, are left out if not


@dataclass(slots=True)
class Result:
    """What came of a task. Times are in seconds; `masks` are an accepted token and the mask after
    it, over the valid instances, and `again` the same when the schema is used a second time.
    """

    outcome: Outcome
    message: str = ""
    first_mask: float = 0.0  # from the schema's text to the first mask
    compiled_again: float = 0.0
    masks: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)  # one for each instance
    num_tokens: int = 0  # of the valid instances that were accepted
    num_forced: dict[str, int] = field(default_factory=dict)  # of these, by way of finding them
    shares: dict[str, list[float]] = field(default_factory=dict)  # the same for each instance
    peak_bytes: int = 0  # the most memory that the process has had

    @property
    def is_right(self) -> bool:
        """The schema was compiled, and every instance judged as it should be."""
        return self.outcome == COMPILED and all(verdict == RIGHT for verdict in self.verdicts)


def measure(engine: Engine, task: Task) -> Result:
    """Put the task through the engine; whatever the library raises is part of the result."""
    gc.collect()
    clock = time.perf_counter
    start = clock()
    try:
        compiled = engine.compile(task.schema)
        session = engine.start(compiled)
        session.fill()
        seconds = clock() - start
        session.allows(0)  # some only tell of an error when they are asked
    except Exception as error:
        return Result(REFUSED, _told(error), peak_bytes=peak_bytes())
    result = Result(COMPILED, first_mask=seconds)
    for token_ids, is_valid in task.instances:
        verdict = _verdict(engine, compiled, token_ids, is_valid, task, result)
        result.verdicts.append(verdict)
    if task.with_times:
        _use_again(engine, task, result)
    result.peak_bytes = peak_bytes()
    return result


def _verdict(
    engine: Engine,
    compiled: object,
    token_ids: Sequence[int],
    is_valid: bool,
    task: Task,
    result: Result,
) -> str:
    try:
        session = engine.start(compiled)
        masks = result.masks if is_valid else []
        accepted = walk(session, token_ids, task.stop_token_ids, masks)
    except Exception as error:
        result.message = result.message or _told(error)
        return FAILED
    if accepted == is_valid:
        return RIGHT
    return WRONGLY_ACCEPTED if accepted else WRONGLY_REJECTED


def walk(
    session: Session,
    token_ids: Sequence[int],
    stop_token_ids: Sequence[int],
    seconds: list[float],
) -> bool:
    """Whether masks let the tokens and a stop token after them pass; the time for each token."""
    clock = time.perf_counter
    accept, fill, allows = session.accept, session.fill, session.allows
    fill()
    for token_id in token_ids:
        if not allows(token_id):
            return False
        start = clock()
        accepted = accept(token_id)
        fill()
        seconds.append(clock() - start)
        if not accepted:
            return False
    return any(allows(token_id) for token_id in stop_token_ids)


def _use_again(engine: Engine, task: Task, result: Result) -> None:
    start = time.perf_counter()
    compiled = engine.compile(task.schema)
    result.compiled_again = time.perf_counter() - start
    accepted = [
        token_ids
        for (token_ids, is_valid), verdict in zip(task.instances, result.verdicts, strict=True)
        if is_valid and verdict == RIGHT
    ]
    for token_ids in accepted:
        walk(engine.start(compiled), token_ids, task.stop_token_ids, result.again)
    result.num_tokens = sum(len(token_ids) for token_ids in accepted)
    for way in engine.ways:
        counts = [engine.num_forced(compiled, way, token_ids) for token_ids in accepted]
        result.num_forced[way] = sum(counts)
        result.shares[way] = [
            count / len(token_ids)
            for count, token_ids in zip(counts, accepted, strict=True)
            if token_ids
        ]


def peak_bytes() -> int:
    """The most memory that this process has held at once; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
