"""However many requests are given up, whenever and however: everything comes back, nobody else
notices, and at most one more step is computed for who is gone.

Each test runs some hundreds of cancellations; marked slow, together 10,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import cast

import httpx
import pytest

import palmette as pm
from palmette.errors import RequestAborted
from palmette.protocol import Constraint, FinishReason, SamplingParams, TokenEvent
from palmette.runtime.config import EngineOptions
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.sequence import GenerationSequence, Status
from palmette.runtime.testing import history_engine
from tests.end_to_end.load import (
    Alone,
    Answer,
    Case,
    Steps,
    WatchedEngine,
    cases,
    check_idle,
    check_ledger,
    make_engine,
)
from tests.runtime.server.harness import COMPLETIONS, events_of, live, wait_for

# How many of the 10,000 cancellations each way of making them gets; the normal suite runs a few.
ROUTES = {"engine": 4000, "clients": 3000, "programs": 1500, "server": 1500}
NUM_QUICK = {"engine": 1000, "clients": 200, "programs": 100, "server": 60}

# Room for two of the longest, and for three more in the tier: 100 pages of 4 tokens of 8 bytes.
WITH_HOST_TIER = EngineOptions(num_pages=64, host_memory=100 * 4 * 8)


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """So that what can come between two lines of another thread does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


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


ENGINES: dict[str, tuple[str, EngineOptions]] = {
    "history": ("history", {}),
    "tiny": ("tiny", {}),
    "host tier": ("history", {"host_memory": 100 * 4 * 8}),
    "longest prefix": ("tiny", {"policy": "lpm", "host_memory": 100 * 4 * 256}),
    "no cache": ("history", {"policy": "fcfs", "prefix_cache": False}),
}


@numbers("engine")
@pytest.mark.parametrize("which", ENGINES)
def test_requests_aborted_between_steps_leave_nothing_and_change_nothing(
    which: str, count: int
) -> None:
    share = count // len(ENGINES)
    kind, options = ENGINES[which]
    started = time.monotonic()
    rng = random.Random(count)
    alone, engine = Alone(kind), make_engine(kind, **{"num_pages": 32, **options})
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
    report(f"engine: {which}", len(aborted), found, started)
    expected = {"waiting", "decoding", "scoring", "finished"}
    if share > 500:  # enough for what is rare
        expected |= {"prefilling"} if which == "no cache" else set(STAGES)
    assert expected <= set(+found)


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


# -- Programs ------------------------------------------------------------------------------------


@pm.function
def story(s: pm.State, stem: str, patience: float | None = None) -> None:
    """A program of ten requests. With `patience`, it fails after so many seconds."""
    s += stem + pm.gen("start", max_tokens=6)
    branches = s.fork(3)
    branches += lambda index: f" way {index}" + pm.gen("way", max_tokens=10)
    for branch in branches[:2]:
        twigs = branch.fork(2)
        twigs += lambda index: f", then {index}" + pm.gen("then", max_tokens=8)
    if patience is not None:
        if patience < 0.005:
            branches[2].text()  # one has come to its end, others are half way
        time.sleep(patience)
        raise ChangedMind
    branches.join()
    s += "; so" + pm.select("choice", ["left", "right", "straight on"])
    s += "." + pm.gen("end", max_tokens=6)


class ChangedMind(Exception):
    pass


STEMS = ["once there was", "once there was a town", "it rains", "the river rose and then"]


def told(state: pm.State) -> tuple[object, ...]:
    """All that a story says."""
    return state.text(), state["way"], state["choice"], state["end"]


@numbers("programs")
def test_programs_that_are_given_up_leave_nothing_and_change_nothing(count: int) -> None:
    started = time.monotonic()
    rng = random.Random(count)
    found: Counter[str] = Counter()
    with WatchedEngine.watching(lambda: make_engine("history", **WITH_HOST_TIER)) as engine:
        run = functools.partial(story.run, backend=engine, temperature=0)
        stream = functools.partial(story.stream, backend=engine, temperature=0)
        expected = {stem: told(run(stem)) for stem in STEMS}
        for round_ in itertools.count():
            if len(engine.given_up) >= count:
                break
            bystanders = {stem: stream(stem) for stem in rng.sample(STEMS, 2)}
            way = WAYS_OF_PROGRAMS[round_ % len(WAYS_OF_PROGRAMS)]
            before = len(engine.given_up)
            WAYS[way](engine, rng)
            for stem, state in bystanders.items():
                assert told(state) == expected[stem]
                found["finished"] += 1
            wait_for(lambda: engine.is_idle)
            found[way] += len(engine.given_up) - before
        found["one step late"] = engine.check_given_up()
        check_idle(engine.engine)
        report("programs", len(engine.given_up), found, started)
        assert min(found[way] for way in (*WAYS_OF_PROGRAMS, "finished")) > 0


def cancel_states(engine: WatchedEngine, rng: random.Random) -> None:
    states = [story.stream(rng.choice(STEMS), backend=engine, temperature=0) for _ in range(3)]
    for state in states:
        time.sleep(rng.random() * 0.01)
        state.cancel()
    for state in states:
        error = state.error()
        assert error is None or isinstance(error, RequestAborted)


def fail_in_the_body(engine: WatchedEngine, rng: random.Random) -> None:
    with pytest.raises(ChangedMind):
        story.run(rng.choice(STEMS), rng.random() * 0.02, backend=engine, temperature=0)


def drop_a_batch(engine: WatchedEngine, rng: random.Random) -> None:
    results = story.run_batch_iter(
        [{"stem": rng.choice(STEMS)} for _ in range(8)],
        backend=engine,
        num_threads=4,
        temperature=0,
    )
    for _ in range(rng.randrange(1, 4)):
        next(results)
    if rng.random() < 0.5:
        results.close()  # type: ignore[attr-defined]


def fail_in_a_batch(engine: WatchedEngine, rng: random.Random) -> None:
    kwargs: list[dict[str, object]] = [{"stem": rng.choice(STEMS)} for _ in range(5)]
    kwargs[2]["patience"] = rng.random() * 0.02
    with pytest.raises(ChangedMind):
        story.run_batch(kwargs, backend=engine, temperature=0)


def cancel_tasks(engine: WatchedEngine, rng: random.Random) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(story.run_async(rng.choice(STEMS), backend=engine, temperature=0))
            for _ in range(3)
        ]
        for task in tasks:
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


WAYS: dict[str, Callable[[WatchedEngine, random.Random], None]] = {
    "of cancelled states": cancel_states,
    "of bodies that failed": fail_in_the_body,
    "of dropped batches": drop_a_batch,
    "of batches with a failure": fail_in_a_batch,
    "of cancelled tasks": cancel_tasks,
}
WAYS_OF_PROGRAMS = list(WAYS)


# -- Connections to a server ---------------------------------------------------------------------


@numbers("server")
def test_connections_that_break_leave_nothing_and_change_nothing(count: int) -> None:
    started = time.monotonic()
    found: Counter[str] = Counter()
    alone = Alone("history")
    with WatchedEngine.watching(lambda: make_engine("history", **WITH_HOST_TIER)) as engine:
        with live(engine) as url:
            connections = Connections(url, alone, random.Random(count), found)
            for wanted in range(30, count + 30, 30):
                kill_a_client(url)
                found["of a killed process"] += NUM_OF_A_PROCESS
                asyncio.run(connections.serve(lambda n=wanted: len(engine.given_up) >= n))
                wait_for(lambda: engine.is_idle)
        # The server is gone, and with it whatever it had not read yet.
        wait_for(lambda: engine.is_idle)
        found["one step late"] = engine.check_given_up()
        check_idle(engine.engine)
        report("server", len(engine.given_up), found, started)
        assert min(found[way] for way in (*Connections.WAYS, "finished")) > 0


def test_a_connection_that_closes_during_a_step_costs_no_further_step() -> None:
    step_begun, go_on = threading.Event(), threading.Event()

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        if len(history) == 8:
            step_begun.set()
            assert go_on.wait(20)
        return {97: 9.0}

    case = Case((1, 2, 3), SamplingParams(temperature=0, max_tokens=1000))
    with (
        WatchedEngine.watching(lambda: history_engine(logits_of)[0]) as engine,
        live(engine) as url,
    ):
        with socket.create_connection(address_of(url)) as connection:
            connection.sendall(http_post(COMPLETIONS, body_of(case, stream=True)))
            assert step_begun.wait(20)
        wait_for(lambda: bool(engine.given_up))
        go_on.set()
        wait_for(lambda: engine.is_idle)
        assert engine.stats().computed_tokens == 8
        assert engine.check_given_up() == 0
        check_idle(engine.engine)


class Connections:
    """Connections from one event loop, some at a time, of which most break."""

    WAYS = ("closed", "reset", "closed unread", "closed half sent", "closed while scored")

    def __init__(self, url: str, alone: Alone, rng: random.Random, found: Counter[str]) -> None:
        self._url = url
        self._alone = alone
        self._rng = rng
        self._found = found

    async def serve(self, until: Callable[[], bool]) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as http:
            await asyncio.gather(*(self._one_after_the_other(http, until) for _ in range(12)))

    async def _one_after_the_other(
        self, http: httpx.AsyncClient, until: Callable[[], bool]
    ) -> None:
        while not until():
            way = self._rng.choice((*self.WAYS, "finished", "finished"))
            case = self._rng.choice([case for case in cases(1) if not case.is_score])
            max_tokens = self._rng.choice([4, 30])
            case = Case(case.token_ids, SamplingParams(temperature=0, max_tokens=max_tokens))
            if way == "finished":
                await self._finish(http, case)
            else:
                await self._break(case, way)
            self._found[way] += 1

    async def _finish(self, http: httpx.AsyncClient, case: Case) -> None:
        is_stream = self._rng.random() < 0.5
        response = await http.post(COMPLETIONS, json=body_of(case, stream=is_stream))
        assert response.status_code == 200, response.text
        answers = events_of(response.text) if is_stream else [response.json()]
        text = "".join(choice["text"] for answer in answers for choice in answer["choices"])
        assert text == bytes(self._alone.answer(case).token_ids).decode()

    async def _break(self, case: Case, way: str) -> None:
        options: dict[str, object] = {"stream": True, "n": self._rng.choice([1, 1, 3])}
        if way == "closed unread":
            options["stream"] = self._rng.random() < 0.5
        elif way == "closed while scored":
            options = {"echo": True, "logprobs": 0}
        reader, writer = await asyncio.open_connection(*address_of(self._url))
        data = http_post(COMPLETIONS, body_of(case, **options))
        if way == "closed half sent":
            data = data[: self._rng.randrange(len(data))]
        writer.write(data)
        if way in ("closed", "reset"):
            while b"data: " not in await reader.read(1000):
                pass
        await asyncio.sleep(self._rng.random() * 0.01)
        if way == "reset":
            linger = struct.pack("ii", 1, 0)  # close() sends a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def body_of(case: Case, **options: object) -> dict[str, object]:
    sampling = case.sampling
    return {
        "prompt": list(case.token_ids),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        **options,
    }


def http_post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


NUM_OF_A_PROCESS = 8
CLIENT = """
import socket, sys
host, port, count, request = sys.argv[1:]
connections = [socket.create_connection((host, int(port))) for _ in range(int(count))]
for connection in connections:
    connection.sendall(request.encode())
for connection in connections[::2]:
    connection.recv(1)
print("half of them have begun", flush=True)
sys.stdin.read()
"""


def kill_a_client(url: str) -> None:
    """A process with some streams open, killed while they run."""
    case = Case(tuple(b"a client that dies "), SamplingParams(temperature=0, max_tokens=60))
    request = http_post(COMPLETIONS, body_of(case, stream=True)).decode()
    host, port = address_of(url)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CLIENT, host, str(port), str(NUM_OF_A_PROCESS), request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
