"""Whole programs on an engine: what they computed is held until they ask again, and no longer."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import palmette as pm
from palmette.protocol import Outlook, Request, SamplingParams, TokenEvent, Usage
from palmette.radix_cache import invariants
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineOptions
from palmette.runtime.engine import Engine, Event
from palmette.runtime.recording import Recording
from palmette.runtime.testing import tiny_engine


def engine_of(**options: object) -> AsyncEngine:
    chosen: EngineOptions = {"num_pages": 256, **options}  # type: ignore[typeddict-item]
    return AsyncEngine.over(lambda: tiny_engine(**chosen))


@pm.function
def chat(s: pm.State, name: str, num_turns: int) -> None:
    s += f"{name} is here. "
    for turn in range(num_turns):
        s += f"Question {turn} of {name}: " + pm.gen("answers", max_tokens=8, append=True)


@pytest.mark.parametrize("num_pages", [24, 40, 256])
def test_chats_compute_each_token_once_even_where_few_fit(num_pages: int) -> None:
    """24 pages hold two chats of about 190 tokens."""
    with engine_of(num_pages=num_pages) as engine:
        backend = Recording(engine, known=8)
        before = engine.stats()
        chat.run_batch(
            [{"name": f"{index}{'abcdefgh'[index]}", "num_turns": 5} for index in range(8)],
            backend=backend,
            num_threads=8,
            temperature=0,
            ignore_eos=True,
        )
        did = engine.stats().since(before)
        assert did.computed_tokens == backend.num_tokens_to_compute()
        assert did.preemptions == 0
        assert engine.stats().num_held_pages == 0


def test_the_ids_are_those_of_a_pool_with_room_for_all() -> None:
    arguments = [{"name": f"{index}{'abcdefgh'[index]}", "num_turns": 4} for index in range(8)]
    texts = []
    for options in ({"num_pages": 24}, {"num_pages": 999}, {"policy": "fcfs", "num_pages": 24}):
        with engine_of(**options) as engine:
            states = chat.run_batch(arguments, backend=engine, temperature=1, seed=3)
            texts.append([state.text() for state in states])
    assert texts[0] == texts[1] == texts[2]


def test_a_program_that_waits_for_its_user_holds_up_nobody() -> None:
    """It holds most of the pool while it waits; others wait for it no longer than `max_think`."""
    answer = threading.Event()

    @pm.function
    def slow(s: pm.State) -> None:
        s += "x" * 280 + pm.gen("a", max_tokens=2)
        s.sync()
        assert answer.wait(timeout=60)
        s += "y" + pm.gen("b", max_tokens=2)

    with engine_of(num_pages=20, max_think=0.2) as engine:
        state = slow.run(backend=engine, stream=True, temperature=0, ignore_eos=True)
        next(state.text_iter("a"))
        while engine.stats().num_running:
            time.sleep(0.01)
        assert engine.stats().num_held_pages >= 17
        assert engine.stats().num_programs == 1
        other = chat.run(name="z" * 20, num_turns=2, backend=engine, ignore_eos=True)
        assert len(other["answers"]) == 2
        answer.set()
        assert state["b"] is not None
        assert state.error() is None
        assert engine.stats().num_held_pages == 0
        assert engine.stats().num_programs == 0


def test_waiting_for_a_program_that_thinks_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    step = Engine.step

    def counted(engine: Engine) -> list[Event]:
        nonlocal num_steps
        num_steps += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    with engine_of(num_pages=20, max_think=1.0) as engine:

        async def ask(request: Request) -> list[TokenEvent]:
            return [event async for event in engine.generate(request)]

        outlook = Outlook(program_id="p", constant_tokens=10, generated_tokens=10)
        first = Request(
            request_id="1",
            token_ids=tuple(range(250)),
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
            outlook=outlook,
            goes_on=True,
        )
        asyncio.run(ask(first))
        num_before = num_steps
        other = Outlook(program_id="q", constant_tokens=10, generated_tokens=10)
        second = Request(
            request_id="2",
            token_ids=tuple(range(100, 256)),
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
            outlook=other,
        )
        events = asyncio.run(ask(second))
        usage = events[-1].usage
        assert usage is not None
        assert usage.queued_seconds >= 0.9
        assert num_steps - num_before <= 6  # it slept, and did not step over and over


def test_a_program_may_be_waited_for_without_end() -> None:
    with engine_of(num_pages=20, max_think=float("inf")) as engine:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)

        async def ask(name: str, first: int) -> list[TokenEvent]:
            request = Request(
                request_id=name,
                token_ids=tuple(range(first, 250)),
                sampling=sampling,
                outlook=Outlook(program_id=name, constant_tokens=10, generated_tokens=10),
                goes_on=True,
            )
            return [event async for event in engine.generate(request)]

        async def both() -> list[TokenEvent]:
            await ask("thinks", 0)
            other = asyncio.create_task(ask("waits", 100))
            while not engine.stats().num_waiting:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert not other.done()
            engine.end_program("thinks")
            return await other

        assert asyncio.run(both())[-1].error is None


def test_flush_cache_drops_what_programs_that_think_hold() -> None:
    engine = tiny_engine(num_pages=64)
    run_one(engine, "a", tuple(range(100)), goes_on=True)
    assert engine.stats().num_pages - engine.stats().num_available_pages == 7
    engine.flush_cache()
    assert engine.stats().num_free_pages == 64
    usage = run_one(engine, "b", tuple(range(120)), goes_on=False)
    assert usage.cached_tokens == 0


def test_without_a_prefix_cache_or_under_another_policy_nothing_is_held() -> None:
    for options in ({"prefix_cache": False}, {"policy": "lpm"}, {"policy": "fcfs"}):
        engine = tiny_engine(num_pages=64, **options)
        run_one(engine, "a", tuple(range(100)), goes_on=True)
        stats = engine.stats()
        assert stats.num_available_pages == 64
        engine.announce(Outlook(program_id="p"), ended=[()])
        engine.end_program("p")


def test_a_request_that_fails_or_is_aborted_leaves_no_handle() -> None:
    engine = tiny_engine(num_pages=64)
    request = asked("a", tuple(range(100)), goes_on=True, max_tokens=20)
    engine.submit(request)
    engine.step()
    engine.abort("a")
    engine.step()
    assert engine.stats().num_available_pages == 64


def test_an_end_that_comes_before_the_last_answer_leaves_nothing_held() -> None:
    engine = tiny_engine(num_pages=64)
    engine.submit(asked("a", tuple(range(100)), goes_on=True, max_tokens=5))
    engine.step()
    engine.end_program("p")
    while engine.has_work:
        engine.step()
    assert engine.stats().num_available_pages == 64
    invariants.check(engine._kv.cache, owned=[])


def test_a_program_whose_requests_have_different_salts_shares_nothing_between_them() -> None:
    engine = tiny_engine(num_pages=64)
    engine.submit(asked("a", tuple(range(100)), goes_on=True, max_tokens=0, salt="one"))
    while engine.has_work:
        engine.step()
    longer = tuple(range(110))
    assert run_one(engine, "b", longer, goes_on=True, salt="two").cached_tokens == 0
    assert run_one(engine, "c", longer, goes_on=True, salt="one").cached_tokens == 100


def asked(
    name: str, token_ids: tuple[int, ...], *, goes_on: bool, max_tokens: int = 2, salt: str = ""
) -> Request:
    return Request(
        request_id=name,
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        outlook=Outlook(program_id="p"),
        goes_on=goes_on,
        salt=salt,
    )


def run_one(
    engine: Engine, name: str, token_ids: tuple[int, ...], *, goes_on: bool, salt: str = ""
) -> Usage:
    engine.submit(asked(name, token_ids, goes_on=goes_on, salt=salt))
    events = []
    while engine.has_work:
        events += engine.step()
    assert isinstance(events[-1], TokenEvent)
    assert events[-1].usage is not None
    return events[-1].usage


def test_a_max_tokens_beyond_all_measure_says_nothing_of_other_generations() -> None:
    @pm.function
    def program(s: pm.State, max_tokens: int) -> None:
        s += "abc" + pm.gen("x", max_tokens=2)
        s.sync()
        s += "d" + pm.gen("y", max_tokens=2) + pm.gen("z", max_tokens=max_tokens)

    with engine_of(num_pages=20) as engine:
        programs = engine._engine._scheduler.programs
        for max_tokens in (10**18, 10**400):
            program.run(max_tokens, backend=engine, ignore_eos=True)
            # They filled the context as they were asked to.
            assert programs.num_expected(100) == 100


def test_a_select_that_asks_twice_waits_for_nobody() -> None:
    """The second question is the program's own: what it holds is not waited for."""

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * 250 + pm.gen("a", max_tokens=2)
        s += pm.select(
            "b",
            ["abcdefghijklmnopqrstuvwxyz" * 3, "abc" * 20, "bcdefghi" * 10],
            choices_method="unconditional_likelihood_normalized",
        )

    with engine_of(num_pages=22, max_think=float("inf")) as engine:
        state = program.run(backend=engine, ignore_eos=True)
        assert state["b"].startswith(("abc", "bcd"))
        assert engine.stats().num_held_pages == 0


def test_a_prefix_that_is_computed_at_once_waits_for_no_program_that_thinks() -> None:
    engine = tiny_engine(num_pages=20, max_think=float("inf"))
    run_one(engine, "a", tuple(range(250)), goes_on=True)
    assert engine.stats().num_held_pages >= 15
    prefix = engine.copy_prefix(tuple(range(5, 200)))
    assert len(prefix.token_ids) == 195
