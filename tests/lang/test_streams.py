"""Text as it comes: nothing lost, nothing twice, however late one looks."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, RequestAborted, VariableNotSet
from palmette.lang.backends.scripted import Reply, ScriptedBackend


@pm.function
def two(s: pm.State) -> None:
    s += "A" + pm.gen("x", max_tokens=8) + "B" + pm.gen("y", max_tokens=8)


@pm.function
async def two_async(s: pm.State) -> None:
    s += "A" + pm.gen("x", max_tokens=8)
    await s.ready()
    s += "B" + pm.gen("y", max_tokens=8)


def slow() -> ScriptedBackend:
    return ScriptedBackend(["12345678", "abcd"], delay=0.003)


BOTH = pytest.mark.parametrize("program", [two, two_async])


@BOTH
def test_the_joined_chunks_are_the_text(program: pm.Function) -> None:
    state = program.stream(backend=slow())
    chunks = list(state.text_iter())
    assert chunks == ["A", *"12345678", "B", *"abcd"]
    assert state.text() == "A12345678Babcd"
    assert list(state.text_iter()) == chunks
    assert list(state) == chunks


@BOTH
def test_any_number_of_iterators_can_be_open_and_each_gives_everything(
    program: pm.Function,
) -> None:
    state = program.stream(backend=slow())
    first, second, of_variable = state.text_iter(), state.text_iter(), state.text_iter("x")
    begun = [next(first), next(first)]
    assert "".join(second) == "A12345678Babcd"
    assert "".join(of_variable) == "12345678"
    assert "".join([*begun, *first]) == "A12345678Babcd"


@BOTH
def test_the_joined_chunks_of_a_variable_are_its_value(program: pm.Function) -> None:
    state = program.stream(backend=slow())
    assert list(state.text_iter("y")) == list("abcd")
    assert state["y"] == "abcd"
    assert list(state.text_iter("x")) == list("12345678")


@BOTH
async def test_async_readers_get_the_same_and_do_not_block_the_loop(program: pm.Function) -> None:
    backend = ScriptedBackend(["12345678", "abcd"], delay=0.02)
    state = program.stream_async(backend=backend)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())

    async def read(name: str | None = None) -> list[str]:
        return [chunk async for chunk in state.text_async_iter(name)]

    whole, x, y, again = await asyncio.gather(read(), read("x"), read("y"), read())
    ticking.cancel()
    assert "".join(whole) == "A12345678Babcd" == state.text()
    assert whole == again == await read()
    assert "".join(x) == state["x"]
    assert "".join(y) == state["y"]
    assert ticks > 5


async def test_a_stream_can_be_iterated_itself() -> None:
    chunks = [chunk async for chunk in two.stream_async(backend=slow())]
    assert "".join(chunks) == "A12345678Babcd"


def test_an_iterator_opened_after_the_end_yields_everything_and_ends() -> None:
    state = two.run(backend=slow())
    assert "".join(state.text_iter()) == "A12345678Babcd"
    assert "".join(state.text_iter("y")) == "abcd"


def test_a_chunk_is_there_before_the_generation_has_ended() -> None:
    backend = ScriptedBackend(Reply(text="ab", token_delay=0.01))
    state = two.stream(backend=backend)
    chunks = state.text_iter("x")
    assert next(chunks) == "a"
    assert backend.num_running == 1
    assert list(chunks) == ["b"]


def test_run_with_stream_returns_at_once() -> None:
    backend = ScriptedBackend(Reply(text="never", delay=60))
    state = two.run(stream=True, backend=backend)
    state.cancel()
    with pytest.raises(RequestAborted):
        state["x"]


def test_inside_a_program_iterating_ends_with_what_was_appended_so_far() -> None:
    seen = []

    @pm.function
    def program(s: pm.State) -> None:
        s += "A" + pm.gen("x")
        seen.append(list(s.text_iter()))
        branch = s.fork()[0]
        branch += "B" + pm.gen("y")
        seen.append(list(branch.text_iter("y")))
        seen.append(list(branch.text_iter()))
        s += "C"

    program.run(backend=ScriptedBackend("12"))
    assert seen == [["A", "1", "2"], ["1", "2"], ["A12", "B", "1", "2"]]


def test_an_iterator_ends_however_late_the_last_operation_is_over() -> None:
    # The last operation adds no text, so that only its end can wake the reader.
    @pm.function
    def program(s: pm.State) -> list[str]:
        s += "A" + pm.gen("x")
        s += ""
        s += pm.user("") + "" + ""
        return list(s.text_iter())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            chunks = program.run(backend=ScriptedBackend("1", delay=0.001)).ret_value
            assert chunks[:2] == ["A", "1"]
    finally:
        sys.setswitchinterval(interval)


def test_a_variable_that_never_comes_is_reported_when_the_program_has_ended() -> None:
    state = two.stream(backend=slow())
    with pytest.raises(VariableNotSet, match="'z'"):
        state["z"]
    with pytest.raises(VariableNotSet, match="'z'"):
        list(state.text_iter("z"))


def test_readers_get_what_there_is_and_then_the_error() -> None:
    backend = ScriptedBackend(["12", Reply(text="ab", fails_after=1, error=RuntimeError("gone"))])
    state = two.stream(backend=backend)
    iterator = state.text_iter()
    chunks = [next(iterator) for _ in range(5)]
    with pytest.raises(PrimitiveFailed, match=r"gen\('y'\).*gone"):
        next(iterator)
    assert chunks == ["A", "1", "2", "B", "a"]
    assert state["x"] == "12"
    with pytest.raises(PrimitiveFailed, match="gone"):
        list(state.text_iter("y"))


def test_an_exception_of_the_program_reaches_the_reader() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "A" + pm.gen("x")
        raise RuntimeError("after all")

    state = program.stream(backend=ScriptedBackend("1"))
    with pytest.raises(RuntimeError, match="after all"):
        state.text()
    with pytest.raises(RuntimeError, match="after all"):
        state["later"]
    assert isinstance(state.error(), RuntimeError)


def test_leaving_a_with_block_aborts_what_still_runs() -> None:
    backend = ScriptedBackend(Reply(text="x" * 100, token_delay=0.01))
    with two.stream(backend=backend) as state:
        assert next(state.text_iter("x")) == "x"
    with pytest.raises(RequestAborted):
        state.text()
    deadline = time.monotonic() + 5
    while backend.num_running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(backend.aborted) == 1


@BOTH
async def test_meta_data_come_with_the_text_of_a_variable(program: pm.Function) -> None:
    state = program.stream_async(backend=ScriptedBackend("ab"))
    pairs = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == "ab"
    await state.ready()
    assert all(meta in ({}, state.meta("x")) for _, meta in pairs)
    assert pairs[-1] == ("", state.meta("x"))
    assert pairs[-1][1]["token_ids"] == tuple(b"ab")
    late = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
    assert late == [(text, state.meta("x")) for text in ("a", "b", "")]
    failing = Reply(text="ab", error=RuntimeError("boom"), fails_after=1)
    state = program.stream_async(backend=ScriptedBackend(failing))
    reader = state.text_async_iter("x", return_meta_data=True)
    assert await anext(reader) == ("a", {})  # it is never set
    with pytest.raises(PrimitiveFailed, match="boom"):
        await anext(reader)
    with pytest.raises(InvalidRequest, match="return_meta_data needs var_name"):
        state.text_async_iter(return_meta_data=True)


async def test_a_list_variable_streams_its_items_one_after_the_other() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("xs", append=True) + pm.gen("xs", append=True)

    state = await program.run_async(backend=ScriptedBackend(["12", "34"]))
    assert list(state.text_iter("xs")) == ["1", "2", "3", "4"]
