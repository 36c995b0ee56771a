"""Engines under load: requests that share beginnings, what each says alone, who gave up when."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import pytest

from palmette.protocol import (
    Constraint,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
)
from palmette.radix_cache.invariants import check
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineOptions
from palmette.runtime.engine import Engine, Event, ScoreEvent
from palmette.runtime.scheduler import PlannedWork
from palmette.runtime.testing import history_engine, tiny_engine

END_OF_TURN = 258
SHORT_OF_PAGES = EngineOptions(num_pages=48, page_size=4, max_batch_tokens=24, max_running=12)


def hashed(history: tuple[int, ...]) -> dict[int, float]:
    """Logits that depend on every token before: two letters are likely, seldom the end."""
    digest = zlib.crc32(array("H", history).tobytes())
    logits = {97 + digest % 26: 9.0, 97 + (digest >> 8) % 26: 8.0}
    if digest % 61 == 0:
        logits[END_OF_TURN] = 12.0
    return logits


def make_engine(kind: str, **options: object) -> Engine:
    """A `history` engine, which notices every wrong page, or a `tiny` one, which computes."""
    given = cast(EngineOptions, {**SHORT_OF_PAGES, **options})
    return history_engine(hashed, **given)[0] if kind == "history" else tiny_engine(**given)


@dataclass(frozen=True)
class Case:
    """A request without an id: a generation, or scores if it has continuations."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    continuations: tuple[tuple[int, ...], ...] = ()

    @property
    def is_score(self) -> bool:
        return bool(self.continuations)

    def request(self, request_id: str) -> Request:
        return Request(
            request_id=request_id,
            token_ids=self.token_ids,
            sampling=self.sampling,
            constraint=self.constraint,
        )

    def score_request(self, request_id: str) -> ScoreRequest:
        return ScoreRequest(
            request_id=request_id, token_ids=self.token_ids, continuations=self.continuations
        )

    def submit(self, engine: Engine, request_id: str) -> None:
        engine.submit(self.score_request(request_id) if self.is_score else self.request(request_id))


@lru_cache
def cases(seed: int, count: int = 60) -> list[Case]:
    """Prompts of 1 to 70 tokens from a small tree; greedy, sampled, constrained and scored."""
    rng = random.Random(seed)

    def letters(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(97, 123), k=rng.randint(low, high)))

    stems = [letters(1, 30) for _ in range(4)]
    stems += [stem + letters(1, 30) for stem in stems]
    made = []
    for index in range(count):
        prompt = rng.choice(stems) + letters(0, 10)
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=index,
            max_tokens=rng.choice([1, 4, 24, 50]),
            stop=rng.choice([(), (), ("qq",)]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )
        constraint = None
        continuations: tuple[tuple[int, ...], ...] = ()
        if index % 6 == 1:
            continuations = tuple({letters(1, 6) for _ in range(rng.randint(1, 4))})
        elif index % 6 == 2:
            sampling = SamplingParams(temperature=sampling.temperature, seed=index, max_tokens=40)
            constraint = rng.choice(
                [
                    Constraint.regex("[a-f]{3,9}( and [g-z]{2,4}){0,2}"),
                    Constraint.choices(["north by north-west", "north", "south"]),
                    Constraint.json_schema({"enum": ["left", "right", 12, None]}),
                ]
            )
        made.append(Case(prompt, sampling, constraint, continuations))
    return made


class Answer:
    """What has come of one request so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: tuple[tuple[float, ...], ...] | None = None
        self.last: Event | None = None

    def add(self, event: Event) -> None:
        assert self.last is None, f"{event} came after {self.last}"
        if isinstance(event, ScoreEvent):
            self.last = event
            self.logprobs = event.result.logprobs if event.result else None
            return
        self.token_ids += event.token_ids
        if event.finish_reason is not None:
            self.last = event

    def check_equals(self, alone: Answer) -> None:
        assert self.token_ids == alone.token_ids
        check_scores(self.logprobs, alone.logprobs)

    def check_begins(self, alone: Answer) -> None:
        """It was given up, but what came until then was right."""
        assert self.token_ids == alone.token_ids[: len(self.token_ids)]


Scores = tuple[tuple[float, ...], ...] | None


def check_scores(found: Scores, expected: Scores) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


class Alone:
    """What a case brings on an engine where nothing else runs or ran."""

    def __init__(self, kind: str) -> None:
        self._engine = make_engine(kind)
        self._answers: dict[Case, Answer] = {}

    def answer(self, case: Case) -> Answer:
        if case not in self._answers:
            self._engine.flush_cache()
            case.submit(self._engine, "alone")
            answer = self._answers[case] = Answer()
            while self._engine.has_work:
                for event in self._engine.step():
                    answer.add(event)
        return self._answers[case]


class Steps:
    """Which steps of an engine have computed tokens of which request."""

    def __init__(self, engine: Engine) -> None:
        self.num_begun = 0
        self._of: defaultdict[str, list[int]] = defaultdict(list)
        run = engine._worker.run

        def watched(work: SequenceOf[PlannedWork], *rest: Any) -> Any:
            # A score request is several sequences: id/0, id/1, ...
            for name in {item.sequence.request_id.partition("/")[0] for item in work}:
                self._of[name].append(self.num_begun)
            self.num_begun += 1
            return run(work, *rest)

        engine._worker.run = watched  # type: ignore[method-assign]

    def num_with(self, request_id: str, since: int) -> int:
        """How many steps for the request have begun after the first `since` of the engine."""
        steps = self._of.get(request_id, [])
        return len(steps) - bisect_left(steps, since)


class WatchedEngine(AsyncEngine):
    """Notes for each request that a client gave up early how many steps had begun by then."""

    engine: Engine
    steps: Steps
    given_up: dict[str, int]

    @classmethod
    def watching(cls, make: Callable[[], Engine]) -> WatchedEngine:
        made: list[Engine] = []

        def make_and_keep() -> Engine:
            made.append(make())
            return made[0]

        watched = cls.over(make_and_keep)
        assert isinstance(watched, WatchedEngine)
        watched.engine, watched.given_up = made[0], {}
        watched.steps = Steps(made[0])
        return watched

    def __enter__(self) -> WatchedEngine:
        return self

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        events = cast(AsyncGenerator[TokenEvent, None], super().generate(request))
        finished = False
        try:
            async for event in events:
                finished = event.finish_reason is not None
                yield event
            finished = True
        finally:
            await events.aclose()
            if not finished:
                self.given_up.setdefault(request.request_id, self.steps.num_begun)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        try:
            return await super().score(request)
        except asyncio.CancelledError:
            self.given_up.setdefault(request.request_id, self.steps.num_begun)
            raise

    @property
    def is_idle(self) -> bool:
        stats = self.stats()
        knows_programs = bool(self.engine._scheduler.programs._by_id)
        return not stats.num_running + stats.num_waiting and not knows_programs

    def check_given_up(self) -> int:
        """At most one step for a request may begin after its client gave it up: the one for which
        the engine had read its commands already. Returns for how many requests one did.
        """
        assert any(self.steps.num_with(name, 0) for name in self.given_up), "none ever ran"
        late = [self.steps.num_with(name, since) for name, since in self.given_up.items()]
        assert max(late, default=0) <= 1
        return sum(late)


def check_ledger(engine: Engine) -> None:
    """Every page is free, in the tree, or owned by exactly one running sequence."""
    page_size = engine.config.cache.page_size
    owned: list[int] = []
    for sequence in engine._scheduler.running:
        held = 0 if sequence.lease is None else sequence.lease.num_tokens // page_size
        owned += sequence.page_ids[held:]
    check(engine._kv.cache, owned=owned)


def check_idle(engine: Engine) -> None:
    """Nothing is live, queued or held but what is cached, and that goes when told to."""
    assert not engine.has_work
    assert not engine._live
    assert not engine._groups
    assert not engine._scheduler.programs._by_id
    cache = engine._kv.cache
    check(cache, owned=[])
    assert cache.tree.num_holds == 0
    assert cache.tier is None or not cache.tier.promised_slots()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_available_pages == stats.num_pages
    assert stats.requests_failed == 0
    assert stats.requests_started == stats.requests_finished + stats.requests_aborted
    engine.flush_cache()
    assert engine.stats().num_free_pages == stats.num_pages
    check(cache, owned=[])
