"""The engine on its own thread: streams, aborts, refusals, faults and the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading

import pytest

from palmette.errors import (
    EngineError,
    EngineStopped,
    InvalidConstraint,
    InvalidRequest,
    PromptTooLong,
)
from palmette.grammar import CompiledGrammar, GrammarCompiler
from palmette.grammar.patience import current_patience
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenBackend,
    TokenEvent,
)
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.engine import Engine
from palmette.runtime.testing import Logits, history_engine, script


def async_engine(logits_of: Logits, **options: int) -> AsyncEngine:
    def make() -> Engine:
        return history_engine(logits_of, **options)[0]  # type: ignore[arg-type]

    return AsyncEngine.over(make)


def request(name: str, *, max_tokens: int = 16, constraint: Constraint | None = None) -> Request:
    return Request(
        request_id=name,
        token_ids=tuple(b"q\n"),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        constraint=constraint,
    )


async def text_of(engine: AsyncEngine, asked: Request) -> str:
    return "".join([event.text async for event in engine.generate(asked)])


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(500):
        if not engine.stats().num_running + engine.stats().num_waiting:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are still running")


def test_it_is_a_token_backend() -> None:
    with async_engine(script("x")) as engine:
        assert isinstance(engine, TokenBackend)
        assert repr(engine) == "AsyncEngine('history', dtype=float32)"


async def test_many_requests_of_one_loop_are_served_together() -> None:
    with async_engine(script("hello")) as engine:
        texts = await asyncio.gather(*(text_of(engine, request(str(i))) for i in range(40)))
        assert set(texts) == {"hello"}
        assert engine.stats().requests_finished == 40


def test_requests_of_several_loops_do_not_mix() -> None:
    with async_engine(script("hello")) as engine:
        texts: list[str] = []

        def client(name: str) -> None:
            texts.append(asyncio.run(text_of(engine, request(name))))

        threads = [threading.Thread(target=client, args=(str(i),)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == ["hello"] * 6


async def test_closing_the_iterator_aborts_the_request() -> None:
    with async_engine(script("x" * 4000, then=None)) as engine:
        events = engine.generate(request("a", max_tokens=3000))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        await until_idle(engine)
        stats = engine.stats()
        assert stats.requests_aborted == 1
        assert stats.decoded_tokens < 3000
        assert stats.num_available_pages == stats.num_pages
        assert await text_of(engine, request("b", max_tokens=2)) == "xx"


async def test_cancelling_the_reader_aborts_the_request() -> None:
    with async_engine(script("x" * 4000, then=None)) as engine:
        task = asyncio.create_task(text_of(engine, request("a", max_tokens=3000)))
        while not engine.stats().decoded_tokens:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert engine.stats().requests_aborted == 1


async def test_refusals_are_raised_from_the_first_step_and_others_go_on() -> None:
    with async_engine(script("fine"), max_context=64) as engine:
        good = asyncio.create_task(text_of(engine, request("good")))
        with pytest.raises(PromptTooLong):
            await text_of(engine, Request(request_id="long", token_ids=(1,) * 100))
        with pytest.raises(InvalidConstraint):
            await text_of(engine, request("bad", constraint=Constraint.regex("(")))
        assert await good == "fine"


async def test_a_request_id_in_use_is_refused_and_the_first_request_unharmed() -> None:
    with async_engine(script("x" * 3000, then=None)) as engine:
        first = asyncio.create_task(text_of(engine, request("a", max_tokens=3000)))
        while not engine.stats().requests_started:
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidRequest, match="in use"):
            await text_of(engine, request("a"))
        assert await first == "x" * 3000


async def test_giving_up_a_refused_request_leaves_the_one_whose_id_it_took_alone() -> None:
    step_begun, go_on = threading.Event(), threading.Event()

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        if len(history) == 5:
            step_begun.set()
            assert go_on.wait(20)
        return {120: 1.0}

    with async_engine(logits_of) as engine:
        first = asyncio.create_task(text_of(engine, request("a", max_tokens=9)))
        await asyncio.to_thread(step_begun.wait, 20)
        second = asyncio.create_task(text_of(engine, request("a")))
        await asyncio.sleep(0)  # it is asked for, and will be refused after the step
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        go_on.set()
        assert await first == "x" * 9


def test_a_loop_that_is_closed_during_a_step_costs_no_further_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tasks of a loop that was closed under them complain when they are collected.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    step_begun, go_on = threading.Event(), threading.Event()

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        if len(history) == 5:
            step_begun.set()
            assert go_on.wait(20)
        return {120: 1.0}

    async def read() -> None:
        # What may become a stop string is held back: for long there is no event to deliver.
        sampling = SamplingParams(temperature=0, max_tokens=90, stop=("x" * 80,))
        asked = Request(request_id="a", token_ids=(1, 2, 3), sampling=sampling)
        async for _ in engine.generate(asked):
            pass

    with async_engine(logits_of) as engine:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)
        task = loop.create_task(read())
        loop.run_until_complete(asyncio.to_thread(step_begun.wait, 20))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        go_on.set()
        asyncio.run(until_idle(engine))
        assert engine.stats().computed_tokens == 5
        assert engine.stats().requests_aborted == 1
    del task
    gc.collect()


async def test_scores() -> None:
    with async_engine(lambda history: {65: 1.0}) as engine:
        result = await engine.score(
            ScoreRequest(request_id="s", token_ids=(1, 2), continuations=((65,), (66,)))
        )
        assert result.logprobs[0][0] == pytest.approx(result.logprobs[1][0] + 1.0, abs=1e-6)


async def test_a_fault_of_ours_ends_what_runs_with_an_error_and_no_more() -> None:
    broken = True

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        if broken:
            raise KeyError("a bug")
        return {65: 1.0}

    with async_engine(logits_of) as engine:
        events = [event async for event in engine.generate(request("a"))]
        assert events[-1].finish_reason is FinishReason.ERROR
        assert isinstance(events[-1].error, EngineError)
        assert "a bug" in str(events[-1].error)
        with pytest.raises(EngineError, match="a bug"):
            await engine.score(ScoreRequest(request_id="s", token_ids=(1,), continuations=((65,),)))
        broken = False
        assert await text_of(engine, request("b", max_tokens=3)) == "AAA"
        engine.flush_cache()
        assert engine.stats().num_free_pages == engine.stats().num_pages


async def test_close_ends_what_runs_with_engine_stopped() -> None:
    engine = async_engine(script("x" * 4000, then=None))
    last: list[TokenEvent] = []

    async def read() -> None:
        async for event in engine.generate(request("a", max_tokens=3000)):
            last[:] = [event]

    task = asyncio.create_task(read())
    while not engine.stats().decoded_tokens:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.close)
    await task
    assert last[0].finish_reason is FinishReason.ERROR
    assert isinstance(last[0].error, EngineStopped)
    engine.close()
    with pytest.raises(EngineStopped):
        await text_of(engine, request("b"))
    with pytest.raises(EngineStopped):
        engine.stats()


def test_a_failure_to_load_is_raised_where_the_engine_was_made() -> None:
    def make() -> Engine:
        raise EngineError("no such thing")

    with pytest.raises(EngineError, match="no such thing"):
        AsyncEngine.over(make)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown engine option pages; known: .*page_size"):
        AsyncEngine("smollm2-135m", pages=3)  # type: ignore[call-arg]


async def test_a_compile_ends_when_nobody_waits_for_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()
    compile_regex = GrammarCompiler.compile_regex

    def endless(compiler: GrammarCompiler, pattern: str) -> CompiledGrammar:
        if pattern != "endless":
            return compile_regex(compiler, pattern)
        begun.set()
        try:
            while True:
                patience = current_patience()
                assert patience is not None
                patience.look()
        finally:
            ended.set()

    monkeypatch.setattr(GrammarCompiler, "compile_regex", endless)
    with async_engine(script("fine")) as engine:
        asked = request("hostile", constraint=Constraint.regex("endless"))
        task = asyncio.create_task(text_of(engine, asked))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert await text_of(engine, request("other")) == "fine"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        # There is one thread that compiles.
        after = request("after", constraint=Constraint.regex("fine"))
        assert await text_of(engine, after) == "fine"
        assert ended.is_set()


_INTERRUPTED = """
import os, signal, threading, time
from palmette.runtime.async_engine import AsyncEngine
signal.signal(signal.SIGINT, signal.default_int_handler)
def load():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(0.5)
    print("loaded", flush=True)
    raise OSError("enough of a model")
try:
    AsyncEngine.over(load)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_process_that_is_interrupted_as_it_loads_ends_only_when_the_loading_has() -> None:
    """Or else the interpreter takes the thread away in the midst of a kernel, and aborts."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\nloaded\n"), done.stderr
