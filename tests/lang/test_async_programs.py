"""`async def` programs, and plain ones run from an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed, ProgramError, RequestAborted, VariableNotSet
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.protocol import Request


@pm.function
async def echo(s: pm.State, word: str) -> str:
    s += word + pm.gen("x")
    s += ", " + await s.value("x") + pm.gen("y")
    await s.ready()
    return s.text()


def test_run_drives_an_async_program() -> None:
    state = echo.run("a", backend=ScriptedBackend("1"))
    assert state.ret_value == state.text() == "a1, 11"


async def test_run_async_drives_it_on_the_callers_loop() -> None:
    seen: list[object] = []

    @pm.function
    async def program(s: pm.State) -> None:
        seen.append(asyncio.get_running_loop())
        s += "a" + pm.gen("x")

    state = await program.run_async(backend=ScriptedBackend("1"))
    assert seen == [asyncio.get_running_loop()]
    assert state["x"] == "1"


async def test_run_async_runs_a_plain_program_on_a_thread() -> None:
    @pm.function
    def program(s: pm.State) -> str:
        s += "a" + pm.gen("x")
        return f"{s['x']} {threading.current_thread().name}"

    state = await program.run_async(backend=ScriptedBackend("1", delay=0.005))
    assert state.ret_value.startswith("1 palmette-program")


def test_run_works_where_an_event_loop_runs_already() -> None:
    # As in a notebook, whose cells run inside of a loop.
    @pm.function
    def plain(s: pm.State) -> str:
        s += "a" + pm.gen("x")
        return str(s["x"])

    async def cell() -> list[object]:
        backend = ScriptedBackend("1", delay=0.002)
        return [
            plain.run(backend=backend).ret_value,
            echo.run("a", backend=backend).ret_value,
            plain.run_batch([(), ()], backend=backend)[1]["x"],
            plain.stream(backend=backend)["x"],
        ]

    assert asyncio.run(cell()) == ["1", "a1, 11", "1", "1"]


async def test_an_async_program_may_not_block_its_loop() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        for read, instead in (
            (lambda: s["x"], r"await state\.value\('x'\)"),
            (s.text, r"await state\.ready\(\)"),
            (s.token_ids, r"await state\.ready\(\)"),
            (lambda: next(s.text_iter("x")), "text_async_iter"),
            (s.fork(2).join, r"await branches\.join_async\(\)"),
        ):
            with pytest.raises(ProgramError, match=instead):
                read()
        goes_on.set()
        await s.ready()
        assert s["x"] == "1"
        assert s.text() == "a1"

    goes_on = threading.Event()

    async def answer(prompt: str, request: Request) -> str:
        while not goes_on.is_set():
            await asyncio.sleep(0.001)
        return "1"

    await program.run_async(backend=ScriptedBackend(answer))


async def test_async_programs_fork_and_join() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "a"
        branches = s.fork(3)
        branches += lambda i: str(i) + pm.gen("x")
        await branches.join_async()
        assert s["x"] == ["-", "-", "-"]
        assert await branches[1].value("x") == "-"
        with pytest.raises(VariableNotSet):
            await s.value("y")

    await program.run_async(backend=ScriptedBackend("-", delay=0.002))


async def test_a_failure_is_raised_where_it_is_awaited() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        with pytest.raises(PrimitiveFailed, match=r"gen\('x'\).*no"):
            await s.value("x")
        with pytest.raises(PrimitiveFailed, match=r"gen\('x'\).*no"):
            await s.ready()

    await program.run_async(backend=ScriptedBackend(Reply(error=RuntimeError("no"))))


@pytest.mark.parametrize("is_async", [True, False])
async def test_cancelling_the_task_aborts_the_run(is_async: bool) -> None:
    def plain(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        s["x"]

    async def native(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        await s.value("x")

    backend = ScriptedBackend(Reply(text="never", delay=60))
    program = pm.function(native if is_async else plain)
    task = asyncio.create_task(program.run_async(backend=backend))
    while not backend.num_running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while backend.num_running:
        await asyncio.sleep(0.001)
    assert len(backend.aborted) == 1


def test_an_async_program_awaits_other_async_programs() -> None:
    @pm.function
    async def outer(s: pm.State) -> None:
        s += "(" + (await echo.run_async("b", backend=backend)).text() + ")"
        with pytest.raises(ProgramError, match="awaits its run_async"):
            echo.run("c", backend=backend)

    backend = ScriptedBackend("1")
    assert outer.run(backend=backend).text() == "(b1, 11)"


def test_a_plain_function_that_returns_a_coroutine_is_refused() -> None:
    async def body() -> None: ...

    @pm.function
    def program(s: pm.State) -> object:
        return body()

    with pytest.raises(TypeError, match="async def"):
        program.run(backend=ScriptedBackend())


async def test_a_cancelled_stream_tells_its_readers() -> None:
    state = echo.stream_async("a", backend=ScriptedBackend(Reply(text="never", delay=60)))
    await asyncio.sleep(0.005)
    state.cancel()
    with pytest.raises(RequestAborted):
        await state.ready()
    with pytest.raises(RequestAborted):
        await state.value("later")
