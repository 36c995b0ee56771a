"""The threads that programs share."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import time

import pytest

import palmette as pm
from palmette.lang.executor import LoopThread, ThreadPool, ThreadPools
from palmette.lang.signals import Signal

place = contextvars.ContextVar("place", default="")


def test_a_pool_has_no_more_threads_than_its_size_and_loses_no_work() -> None:
    pool = ThreadPool(3, "test-pool")
    names: set[str] = set()

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        time.sleep(0.0005)
        return number

    futures = [pool.submit(lambda number=number: work(number)) for number in range(50)]
    assert [future.result() for future in futures] == list(range(50))
    assert 1 <= len(names) <= 3
    pool.close()


def test_an_idle_thread_is_used_again() -> None:
    pool = ThreadPool(8, "test-idle")
    for _ in range(20):
        name = pool.submit(lambda: threading.current_thread().name).result()
        while not pool._num_idle:
            time.sleep(0.0005)
        assert name == "test-idle-1"
    pool.close()


def test_a_closed_pool_ends_its_threads_after_what_was_submitted() -> None:
    pool = ThreadPool(2, "test-close")
    futures = [pool.submit(lambda: time.sleep(0.002)) for _ in range(5)]
    pool.close()
    for future in futures:
        future.result()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("test-close") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_work_runs_in_the_context_of_who_submits_it_and_raises_there() -> None:
    pool = ThreadPool(1, "test-context")
    place.set("here")
    assert pool.submit(place.get).result() == "here"
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    assert pool.submit(lambda: 1).result() == 1
    pool.close()


def test_a_loop_thread_starts_when_it_is_needed() -> None:
    loop = LoopThread("test-loop")
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}

    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, loop.is_current()

    assert loop.spawn(where()).result() == ("test-loop", True)
    assert not loop.is_current()


def test_a_signal_wakes_threads_and_loops() -> None:
    lock = threading.Lock()
    signal = Signal(lock)
    box: list[int] = []

    def check() -> int | None:
        return box[0] if box else None

    pool = ThreadPool(2, "test-signal")
    in_thread = pool.submit(lambda: signal.wait(check))
    in_loop = pool.submit(lambda: asyncio.run(signal.wait_async(check)))
    time.sleep(0.01)
    assert signal.poll(check) is None
    with lock:
        signal.notify()  # nothing to see yet
    with lock:
        box.append(7)
        signal.notify()
    assert in_thread.result(10) == in_loop.result(10) == signal.poll(check) == 7
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_runs_programs_of_its_own() -> None:
    program = """
import os, sys
import palmette as pm

@pm.function
def program(s):
    s += "a" + pm.gen("x")

def both(answer):
    backend = pm.ScriptedBackend(answer)
    return program.run(backend=backend)["x"] + program.stream(backend=backend)["x"]

print(both("1"), flush=True)
child = os.fork()
os.write(1, (both("2") + "\\n").encode())
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["11", "22", "22"]
    assert done.returncode == 0


def test_work_that_waits_for_work_of_its_own_does_not_keep_it_from_beginning() -> None:
    pools = ThreadPools(2, "test-pools")
    all_wait = threading.Barrier(2)

    def leaf() -> str:
        return threading.current_thread().name

    def branch() -> str:
        all_wait.wait(20)
        return pools.submit(leaf).result(20)

    def tree() -> str:
        all_wait.wait(20)
        return pools.submit(branch).result(20)

    names = [future.result(60) for future in [pools.submit(tree) for _ in range(4)]]
    assert set(names) <= {"test-pools-2-1", "test-pools-2-2"}


def test_streams_that_begin_streams_and_wait_for_them_end() -> None:
    size = 130  # more than there are threads for streams
    backend = pm.ScriptedBackend("ok")
    all_run = threading.Semaphore(0)

    @pm.function
    def inner(s: pm.State) -> None:
        s += "in" + pm.gen("x")

    @pm.function
    def outer(s: pm.State) -> None:
        all_run.acquire(timeout=20)
        s += inner.stream(backend=backend).text() + pm.gen("y")

    states = [outer.stream(backend=backend) for _ in range(size)]
    all_run.release(size)
    assert [state["y"] for state in states] == ["ok"] * size


def test_rules_that_run_long_programs_with_rules_do_not_wait_for_each_other() -> None:
    backend = pm.ScriptedBackend("ok")
    all_decide = threading.Barrier(8)

    def first(choices: list[str], **_: object) -> str:
        return choices[0]

    @pm.function
    def judge(s: pm.State) -> None:
        s += "word " * 5000 + pm.select("x", ["yes", "no"], choices_method=first)

    def rule(choices: list[str], **_: object) -> str:
        all_decide.wait(20)
        judge.run(backend=backend)
        return choices[0]

    @pm.function
    def program(s: pm.State, number: int) -> None:
        s += f"{number}" + pm.select("x", ["a", "b"], choices_method=rule)

    states = program.run_batch(list(range(8)), backend=backend)
    assert [state["x"] for state in states] == ["a"] * 8


def test_a_long_row_of_programs_that_begin_the_next_one_leaves_no_threads() -> None:
    backend = pm.ScriptedBackend("ok")
    is_over = threading.Event()

    @pm.function
    def link(s: pm.State, number: int) -> None:
        s += "in" + pm.gen("x")
        if number:
            link.stream(number - 1, backend=backend)
        else:
            is_over.set()

    before = threading.active_count()
    link.stream(200, backend=backend)
    assert is_over.wait(30)
    deadline = time.monotonic() + 20
    while threading.active_count() > before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
