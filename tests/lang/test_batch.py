"""Many runs of one program: order, delivery, bounds, errors, and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.protocol import Request


async def reversed_order(prompt: str, request: Request) -> str:
    """The answer takes the longer, the smaller the number the prompt ends in."""
    number = int(prompt.split()[-1])
    await asyncio.sleep((32 - number) * 0.0005)
    return f"<{number}>"


@pm.function
def plain(s: pm.State, i: int) -> None:
    s += f"number {i}"
    s += pm.gen("x")
    s["twice"] = s["x"] * 2


@pm.function
async def native(s: pm.State, i: int) -> None:
    s += f"number {i}"
    s += pm.gen("x")
    s["twice"] = await s.value("x") * 2


BOTH = pytest.mark.parametrize("program", [plain, native], ids=["plain", "async"])
ITEMS = [{"i": i} for i in range(32)]
EXPECTED = [f"<{i}>" * 2 for i in range(32)]


@BOTH
@pytest.mark.parametrize("num_threads", [1, 4, 64])
def test_results_come_in_the_order_of_the_arguments(program: pm.Function, num_threads: int) -> None:
    backend = ScriptedBackend(reversed_order)
    states = program.run_batch(ITEMS, num_threads=num_threads, backend=backend)
    assert [state["twice"] for state in states] == EXPECTED
    assert backend.max_running <= num_threads


@BOTH
@pytest.mark.parametrize("num_threads", [1, 4, 64])
def test_the_iterator_yields_each_as_it_ends(program: pm.Function, num_threads: int) -> None:
    backend = ScriptedBackend(reversed_order)
    found = dict(program.run_batch_iter(ITEMS, num_threads=num_threads, backend=backend))
    assert {index: state["twice"] for index, state in found.items()} == dict(enumerate(EXPECTED))


@BOTH
def test_the_iterator_holds_no_more_programs_than_num_threads(program: pm.Function) -> None:
    started: list[int] = []

    def answer(prompt: str, request: Request) -> str:
        started.append(1)
        return "ok"

    alive: weakref.WeakSet[pm.State] = weakref.WeakSet()
    backend = ScriptedBackend(answer)
    for count, (_, state) in enumerate(
        program.run_batch_iter(ITEMS, num_threads=4, backend=backend), start=1
    ):
        alive.add(state)
        del state
        assert len(started) <= count + 3
        if count in (8, 20, 32):
            gc.collect()
            assert len(alive) <= 4


@BOTH
def test_the_first_result_is_delivered_before_the_last_one_is_done(program: pm.Function) -> None:
    backend = ScriptedBackend(lambda prompt, request: Reply(text="x", delay=60 * ("31" in prompt)))
    results = program.run_batch_iter(ITEMS, num_threads=4, backend=backend)
    assert next(results)[1]["x"] == "x"
    results.close()  # type: ignore[attr-defined]


def test_generator_style_yields_states_in_order() -> None:
    backend = ScriptedBackend(reversed_order)
    states = plain.run_batch(ITEMS, generator_style=True, num_threads=4, backend=backend)
    assert [state["twice"] for state in states] == EXPECTED
    assert backend.max_running <= 4


@BOTH
async def test_async_batches_give_the_same(program: pm.Function) -> None:
    backend = ScriptedBackend(reversed_order)
    states = await program.run_batch_async(ITEMS, num_threads=4, backend=backend)
    assert [state["twice"] for state in states] == EXPECTED
    assert backend.max_running <= 4
    results = program.run_batch_iter_async(ITEMS, num_threads=4, backend=backend)
    found = {index: state["twice"] async for index, state in results}
    assert found == dict(enumerate(EXPECTED))


@pytest.mark.parametrize("items", [{"word": "a"}, "abc", b"abc"])
def test_one_item_is_not_taken_for_a_list_of_them(items: Any) -> None:
    @pm.function
    def program(s: pm.State, word: str) -> None:
        s += word + pm.gen("x")

    backend = pm.ScriptedBackend("ok")
    for call in (program.run_batch, program.run_batch_iter, program.plan):
        with pytest.raises(TypeError, match="a batch is a list of items, got one"):
            call(items, backend=backend)
    assert not backend.requests


def test_items_are_dicts_or_positional_or_the_one_argument() -> None:
    @pm.function
    def program(s: pm.State, a: str, b: str = "-") -> None:
        s += a + b

    backend = ScriptedBackend()
    items = [{"a": "1", "b": "2"}, ["3", "4"], ("5",), "6"]
    assert [s.text() for s in program.run_batch(items, backend=backend)] == ["12", "34", "5-", "6-"]
    assert program.run_batch([], backend=backend) == []


@BOTH
def test_an_error_is_raised_and_cancels_the_others(program: pm.Function) -> None:
    def answer(prompt: str, request: Request) -> Reply:
        bad = prompt == "number 3"
        return Reply(text="x", delay=0 if bad else 60, error=RuntimeError("three") if bad else None)

    backend = ScriptedBackend(answer)
    with pytest.raises(PrimitiveFailed, match="three"):
        program.run_batch(ITEMS, backend=backend)


@BOTH
async def test_an_async_batch_whose_task_is_cancelled_keeps_nothing(program: pm.Function) -> None:
    backend = ScriptedBackend(Reply(text="x", delay=60))
    task = asyncio.create_task(program.run_batch_async(ITEMS, num_threads=2, backend=backend))
    while not backend.num_running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while backend.num_running:
        await asyncio.sleep(0.001)


@BOTH
async def test_an_error_of_an_async_batch_cancels_the_others(program: pm.Function) -> None:
    def answer(prompt: str, request: Request) -> Reply:
        bad = prompt == "number 3"
        return Reply(text="x", delay=0 if bad else 60, error=RuntimeError("three") if bad else None)

    backend = ScriptedBackend(answer)
    with pytest.raises(PrimitiveFailed, match="three"):
        await program.run_batch_async(ITEMS, backend=backend)
    while backend.num_running:
        await asyncio.sleep(0.001)
    assert len(backend.aborted) == len(backend.requests) - 1


@BOTH
def test_an_error_can_stand_in_its_place(program: pm.Function) -> None:
    def answer(prompt: str, request: Request) -> Reply:
        return Reply(text="x", error=RuntimeError("odd") if int(prompt[-1]) % 2 else None)

    results = program.run_batch(ITEMS, on_error="return", backend=ScriptedBackend(answer))
    assert [isinstance(result, PrimitiveFailed) for result in results] == [False, True] * 16
    with pytest.raises(ValueError, match="on_error"):
        program.run_batch(ITEMS, on_error="ignore", backend=ScriptedBackend())
    with pytest.raises(ValueError, match="num_threads"):
        program.run_batch(ITEMS, num_threads=0, backend=ScriptedBackend())


def test_options_and_shared_arguments_apply_to_every_item() -> None:
    @pm.function
    def program(s: pm.State, a: str, b: str) -> None:
        s += a + b + pm.gen("x")

    backend = ScriptedBackend("0123456789")
    states = program.run_batch([{"a": "1"}, {"a": "2"}], b="b", max_tokens=3, backend=backend)
    assert [state.text() for state in states] == ["1b012", "2b012"]


def test_progress_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    plain.run_batch(ITEMS, progress=True, backend=ScriptedBackend())
    captured = capsys.readouterr()
    assert re.search(r"32/32 [0-9]+\.[0-9]/s 0:00:0[0-9]", captured.err)
    assert captured.out == ""
    plain.run_batch(ITEMS, backend=ScriptedBackend())
    assert capsys.readouterr().err == ""


def test_five_hundred_programs_run_on_a_bounded_number_of_threads() -> None:
    most = 0

    def answer(prompt: str, request: Request) -> str:
        nonlocal most
        most = max(most, threading.active_count())
        return "x"

    before = threading.active_count()
    items = list(range(500))
    states = plain.run_batch(items, backend=ScriptedBackend(answer, delay=0.002))
    assert [state["twice"] for state in states] == ["xx"] * 500
    assert most <= before + 96 + 1


def interrupted(how: str) -> subprocess.CompletedProcess[str]:
    """A process that gets a SIGINT while it waits for `how`; what it prints."""
    program = """
        import os, signal, threading, time
        import palmette as pm

        never = pm.Reply(text="never", delay=600)
        backend = pm.ScriptedBackend(never)

        @pm.function
        def plain(s, i):
            s += str(i) + pm.gen("x")
            s["x"]

        @pm.function
        async def native(s, i):
            s += str(i) + pm.gen("x")
            await s.value("x")

        def interrupt():
            while len(backend.requests) < wanted:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        def run(start, count):
            global wanted
            wanted = count
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                start()
            except KeyboardInterrupt:
                print("interrupted")
            while backend.num_running:
                time.sleep(0.001)
            print("aborted", len(backend.aborted))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(how)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("program", ["plain", "native"])
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_ctrl_c_keeps_what_a_batch_has_done(program: str, on_error: str) -> None:
    done = interrupted(f"""
        backend = pm.ScriptedBackend(lambda prompt, _: "ok" if int(prompt) % 2 else never)
        options = {{"backend": backend, "num_threads": 6, "on_error": "{on_error}"}}

        def batch():
            try:
                show({program}.run_batch(list(range(20)), **options))
            except pm.BatchInterrupted as error:
                show(error.results)
                print(error)
                raise

        def show(results):
            for index, result in enumerate(results):
                print(index, result["x"] if isinstance(result, pm.State) else repr(result))

        run(batch, 11)
    """)
    assert done.stderr == ""
    *rows, last = done.stdout.splitlines()
    assert last == "aborted 6"
    if on_error == "raise":
        assert rows[20:] == ["interrupted when 5 of 20 programs were done", "interrupted"]
    for index, shown in enumerate(rows[:20]):
        if index in (1, 3, 5, 7, 9):
            assert shown == f"{index} ok"
        else:
            assert shown.startswith(f"{index} ProgramCancelled(")
            assert "the batch was stopped" in shown
            assert (" before gen(" in shown) == (index <= 10)


def test_a_second_ctrl_c_does_not_wait_for_what_was_aborted() -> None:
    done = interrupted("""
        import asyncio

        class Stubborn(pm.ScriptedBackend):
            async def generate(self, request):
                try:
                    async for event in super().generate(request):
                        yield event
                finally:
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                    await asyncio.sleep(600)

        backend = Stubborn(never)
        run(lambda: plain.run_batch(["0"], backend=backend, on_error="return"), 1)
    """)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "interrupted"


@pytest.mark.parametrize("program", ["plain", "native"])
@pytest.mark.parametrize(
    ("call", "count"),
    [("run('0', backend=backend)", 1), ("run_batch(list(range(20)), backend=backend)", 20)],
)
def test_ctrl_c_aborts_what_runs_and_is_raised(program: str, call: str, count: int) -> None:
    done = interrupted(f"run(lambda: {program}.{call}, {count})")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["interrupted", f"aborted {count}"]
    assert done.returncode == 0
