"""However many requests are given up, whenever and however: everything comes back, nobody else
notices, and at most one more step is computed for who is gone.

Each test runs some hundreds of cancellations; marked slow, together 10,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

import palmette as pm
from palmette.errors import PalmetteError, RequestAborted
from palmette.protocol import Constraint, FinishReason, SamplingParams, TokenEvent
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.sequence import GenerationSequence, Status
from tests.end_to_end.load import (
    Alone,
    Answer,
    Case,
    WatchedEngine,
    cases,
    check_idle,
    check_ledger,
    check_scores,
    make_engine,
    Steps,
)
from tests.runtime.server.harness import COMPLETIONS, live, wait_for

# How many of the 10,000 cancellations each way of making them gets; the normal suite runs a few.
ROUTES = {"engine": 4000, "clients": 3000, "programs": 1500, "server": 1500}
NUM_QUICK = {"engine": 400, "clients": 200, "programs": 100, "server": 60}


def numbers(route: str) -> pytest.MarkDecorator:
    many = pytest.param(ROUTES[route], marks=pytest.mark.slow)
    return pytest.mark.parametrize("count", [NUM_QUICK[route], many])


def report(route: str, count: int, found: Counter[str], started: float) -> None:
    """Shown by ``pytest -s``."""
    told = ", ".join(f"{number} {name}" for name, number in sorted(found.items()))
    print(f"\n{route}: {count} given up in {time.monotonic() - started:.1f} s; {told}")


def test_the_slow_tests_give_up_ten_thousand_requests() -> None:
    assert sum(ROUTES.values()) == 10_000


# -- Between the steps of an engine --------------------------------------------------------------


@numbers("engine")
@pytest.mark.parametrize("kind", ["history", "tiny"])
def test_requests_aborted_between_steps_leave_nothing_and_change_nothing(
    kind: str, count: int
) -> None:
    share = count // 2  # half for each kind
    started = time.monotonic()
    rng = random.Random(count)
    alone, engine = Alone(kind), make_engine(kind, num_pages=32)
    steps = Steps(engine)
    answers: dict[str, Answer] = {}
    asked: dict[str, Case] = {}
    aborted: dict[str, int] = {}
    found: Counter[str] = Counter()
    names = map(str, itertools.count())

    def submit(case: Case) -> None:
        name = next(names)
        asked[name], answers[name] = case, Answer()
        case.submit(engine, name)

    def abort(name: str) -> None:
        assert engine.abort(name)
        assert not engine.abort(name), "it was live twice"
        aborted[name] = steps.num_begun

    while len(aborted) < share:
        live = [name for name, answer in answers.items() if answer.last is None]
        while len(live) < 30:
            # Equal prompts often, so that some wait for others.
            for case in [rng.choice(cases(1))] * rng.choice([1, 1, 3]):
                submit(case)
                live.append(next(reversed(asked)))
        for _ in range(min(rng.choice([0, 1, 1, 2, 5]), share - len(aborted))):
            by_stage = defaultdict(list)
            for name in live:
                if name not in aborted:
                    by_stage[_stage(engine, name)].append(name)
            stage = rng.choice(list(by_stage))
            name = rng.choice(by_stage[stage])
            found[stage] += 1
            abort(name)
            if rng.random() < 0.3:
                submit(asked[name])  # and the client tries again at once
        if rng.random() < 0.01:
            engine.flush_cache()
        for event in engine.step():
            answers[event.request_id].add(event)
        check_ledger(engine)
    while engine.has_work:
        for event in engine.step():
            answers[event.request_id].add(event)

    for name, case in asked.items():
        _check_answer(case, answers[name], name in aborted, alone)
    for name, since in aborted.items():
        assert steps.num_with(name, since) == 0
    found["finished"] = len(asked) - len(aborted)
    assert engine.stats().requests_aborted == len(aborted)
    check_idle(engine)
    report(f"engine over {kind}", len(aborted), found, started)
    assert min(found[stage] for stage in STAGES) > 0, found


STAGES = ("waiting", "deferred", "leading", "prefilling", "decoding", "preempted", "scoring")


def _stage(engine: Engine, name: str) -> str:
    """Where a request stands that is about to be aborted."""
    sequence = engine._live[name]
    if not isinstance(sequence, GenerationSequence):
        return "scoring"
    if sequence.status is Status.WAITING:
        if sequence.tally.num_preemptions:
            return "preempted"
        return "waiting" if sequence.leader is None else "deferred"
    if any(other.leader is sequence for other in engine._scheduler.waiting):
        return "leading"
    is_prefilling = sequence.num_computed_tokens < sequence.num_prompt_tokens
    return "prefilling" if is_prefilling else "decoding"


def _check_answer(case: Case, answer: Answer, was_aborted: bool, alone: Alone) -> None:
    last = answer.last
    if not was_aborted:
        answer.check_equals(alone.answer(case))
    elif isinstance(last, ScoreEvent):
        assert isinstance(last.error, RequestAborted)
    else:
        assert isinstance(last, TokenEvent)
        assert last.finish_reason is FinishReason.ABORT
        answer.check_begins(alone.answer(case))


# -- Clients of an async engine ------------------------------------------------------------------


@numbers("clients")
def test_clients_that_go_away_leave_nothing_and_change_nothing(count: int) -> None:
    started = time.monotonic()
    found: Counter[str] = Counter()
    alone = Alone("history")
    with WatchedEngine.watching(lambda: make_engine("history")) as engine:
        for round_ in range(2):
            clients = Clients(engine, alone, random.Random(round_), found, name=f"round {round_}")
            asyncio.run(clients.serve(num_to_lose=count // 2))
        wait_for(lambda: engine.is_idle)
        found["one step late"] = engine.check_given_up()
        check_idle(engine.engine)
        report("clients", sum(found[way] for way in Clients.WAYS), found, started)
        assert min(found[way] for way in (*Clients.WAYS, "finished")) > 0


class Clients:
    """Clients on one event loop, some tens at a time, of which most go away."""

    WAYS = (
        "closed",
        "cancelled",
        "timed out",
        "dropped",
        "dropped in a cycle",
        "cancelled at once",
        "cancelled while compiling",
        "cancelled while scored",
    )

    def __init__(
        self,
        engine: WatchedEngine,
        alone: Alone,
        rng: random.Random,
        found: Counter[str],
        name: str,
    ) -> None:
        self._name = name
        self._engine = engine
        self._alone = alone
        self._rng = rng
        self._found = found
        self._num_left = 0
        self._numbers = itertools.count()

    async def serve(self, num_to_lose: int) -> None:
        self._num_left = num_to_lose
        await asyncio.gather(*(self._one_after_the_other() for _ in range(32)))
        gc.collect()  # what was dropped in a cycle goes now, if it has not gone before

    async def _one_after_the_other(self) -> None:
        while self._num_left > 0:
            way = self._rng.choice((*self.WAYS, "finished", "finished"))
            self._num_left -= way != "finished"
            case, answer = self._case(way), Answer()
            if way == "finished":
                await self._read(case, answer)
            elif way in ("closed", "dropped", "dropped in a cycle"):
                await self._read_some(case, answer, way)
            else:
                await self._be_cancelled(case, answer, way)
            if answer.last is None:
                answer.check_begins(self._alone.answer(case))
            else:
                answer.check_equals(self._alone.answer(case))
                self._num_left += way != "finished"  # it was too late
                way = "finished"
            self._found[way] += 1

    def _case(self, way: str) -> Case:
        case = self._rng.choice([case for case in cases(1) if not case.is_score])
        if way == "cancelled while scored" or (way == "finished" and self._rng.random() < 0.1):
            case = self._rng.choice([case for case in cases(1) if case.is_score])
        elif way == "cancelled while compiling":
            pattern = f"([a-z]{{3}} ){{2,4}}number {next(self._numbers)}"
            case = replace(
                case,
                sampling=SamplingParams(temperature=0, max_tokens=40),
                constraint=Constraint.regex(pattern),
            )
        return case

    async def _read(self, case: Case, answer: Answer) -> None:
        """All of an answer, if nothing comes between."""
        name = f"{self._name}: {next(self._numbers)}"
        if case.is_score:
            result = await self._engine.score(case.score_request(name))
            answer.add(ScoreEvent(request_id=name, result=result))
            return
        async for event in self._engine.generate(case.request(name)):
            answer.add(event)

    async def _read_some(self, case: Case, answer: Answer, way: str) -> None:
        """The beginning of an answer; then the iterator is closed, or just not kept."""
        events = self._engine.generate(case.request(f"{self._name}: {next(self._numbers)}"))
        async for event in events:
            answer.add(event)
            if self._rng.random() < 0.3:
                break
        if way == "closed":
            await cast(AsyncGenerator[TokenEvent, None], events).aclose()
        elif way == "dropped in a cycle":
            cycle: list[object] = [events]
            cycle.append(cycle)

    async def _be_cancelled(self, case: Case, answer: Answer, way: str) -> None:
        """From outside, while the answer is read."""
        task = asyncio.create_task(self._read(case, answer))
        if way in ("cancelled at once", "cancelled while compiling"):
            for _ in range(self._rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        elif way == "timed out":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(task, self._rng.random() * 0.02)
        else:
            await asyncio.sleep(self._rng.random() * 0.02)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_event_loops_that_die_in_the_middle_leave_nothing_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tasks of a loop that was closed under them complain when they are collected.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    alone = Alone("history")
    case = next(case for case in cases(1) if case.sampling.max_tokens == 24)
    long = replace(case, sampling=SamplingParams(temperature=0, max_tokens=90))
    expected, expected_long = alone.answer(case), alone.answer(long)
    dead: list[object] = []
    with WatchedEngine.watching(lambda: make_engine("history")) as engine:

        def die(number: int) -> None:
            """Be a client whose loop stops for good while its requests run or wait."""
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(lambda *_: None)
            answers = [Answer() for _ in range(10)]

            async def read(index: int) -> None:
                name = f"{number}.{index}"
                async for event in WatchedEngine.generate(engine, long.request(name)):
                    answers[index].add(event)
                    loop.stop()

            dead.append([loop.create_task(read(index)) for index in range(10)])
            loop.run_forever()
            loop.close()
            for index, answer in enumerate(answers):
                if answer.last is None:
                    engine.given_up[f"{number}.{index}"] = engine.steps.num_begun
                    answer.check_begins(expected_long)

        async def live_on() -> None:
            for number in range(6):
                dying = asyncio.create_task(asyncio.to_thread(die, number))
                answer = Answer()
                async for event in engine.generate(case.request(f"lives {number}")):
                    answer.add(event)
                answer.check_equals(expected)
                await dying

        asyncio.run(live_on())
        wait_for(lambda: engine.is_idle)
        assert len(engine.given_up) > 30
        engine.check_given_up()
        check_idle(engine.engine)
    dead.clear()
    gc.collect()
